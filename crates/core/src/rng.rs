//! The counter-based generator behind every random op: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011). A number is a pure function of (seed, counter, index), so a replay draws
//! the same ones, on every device and with any number of threads.

use crate::kernel::RandomStream;

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds of Philox on one counter block.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let p0 = c[0] as u64 * MULTIPLIER[0] as u64;
        let p1 = c[2] as u64 * MULTIPLIER[1] as u64;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
    }
    c
}

impl RandomStream {
    /// Block `index` of this stream: the words of elements 4 index .. 4 index + 3.
    #[inline(always)]
    pub fn block(self, index: u64) -> [u32; 4] {
        let counter = [index as u32, (index >> 32) as u32, self.counter as u32, (self.counter >> 32) as u32];
        philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// The word of one element.
    #[inline(always)]
    pub fn word(self, element: u64) -> u32 {
        self.block(element / 4)[(element % 4) as usize]
    }

    /// A word is dropped where it is below this: probability `p` to the nearest 2^-32.
    pub fn threshold(p: f64) -> u64 {
        (p * 4_294_967_296.0).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the Random123 library (kat_vectors, philox 4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
