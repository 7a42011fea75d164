//! Random numbers by Philox, 16 counter blocks (64 words) at a time; and dropout. A number depends on (seed, counter,
//! index) alone.

use crate::exec::{Exec, Target};
use crate::math::Float;
use crate::view::{BLOCK, Nest, Span, for_float, lanes};
use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Result};

/// Numbers of one task; a multiple of the block.
const TASK: usize = 16 * 1024;

/// Words 0..4 of each of 16 counter blocks from `first`: core's `philox4x32`, lane by lane so that it vectorises.
#[inline(always)]
fn sixteen_blocks(stream: RandomStream, first: u64) -> [[u32; BLOCK / 4]; 4] {
    const LANES: usize = BLOCK / 4;
    let (low, high) = (stream.counter as u32, (stream.counter >> 32) as u32);
    let mut c = [[0; LANES], [0; LANES], [low; LANES], [high; LANES]];
    let [index_low, index_high, ..] = &mut c;
    for (index, (low, high)) in (first..).zip(index_low.iter_mut().zip(index_high)) {
        (*low, *high) = (index as u32, (index >> 32) as u32);
    }
    let mut key = [stream.seed as u32, (stream.seed >> 32) as u32];
    for _ in 0..10 {
        let [c0, c1, c2, c3] = &mut c;
        for (((c0, c1), c2), c3) in c0.iter_mut().zip(c1).zip(c2).zip(c3) {
            let (p0, p1) = (*c0 as u64 * 0xD251_1F53, *c2 as u64 * 0xCD9E_8D57);
            *c0 = (p1 >> 32) as u32 ^ *c1 ^ key[0];
            *c2 = (p0 >> 32) as u32 ^ *c3 ^ key[1];
            (*c1, *c3) = (p1 as u32, p0 as u32);
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// The words of elements `start .. start + 64`.
#[inline(always)]
pub(crate) fn words(stream: RandomStream, start: u64) -> [u32; BLOCK] {
    let first = start / 4;
    let lanes = sixteen_blocks(stream, first);
    let shift = (start % 4) as usize;
    if shift == 0 {
        return lanes!(i => lanes[i % 4][i / 4]);
    }
    let last = stream.block(first + BLOCK as u64 / 4);
    lanes!(i => {
        let i = i + shift;
        if i < BLOCK { lanes[i % 4][i / 4] } else { last[i - BLOCK] }
    })
}

/// Calls `body` with the start and number of elements of each block of a contiguous tensor.
#[inline(always)]
fn for_each_block<T: Target>(exec: &Exec, len: usize, cost: usize, body: impl Fn(usize, usize) + Sync) {
    exec.run::<T>(
        len.div_ceil(TASK),
        len * cost,
        #[inline(always)]
        |task| {
            let end = len.min((task + 1) * TASK);
            for i in (task * TASK..end).step_by(BLOCK) {
                body(i, end - i);
            }
        },
    );
}

/// Uniform numbers in [0, 1): the word's upper 24 bits for f32, all 32 for f64, 11 and 8 for f16 and bf16: all that
/// the dtype holds, so that none is rounded up to 1.
pub(crate) fn uniform(exec: &Exec, k: &kernel::Uniform<'_>) -> Result<()> {
    for_float!("uniform", k.out.dtype(), T => uniform_of::<T>(exec, k))
}

fn uniform_of<T: Float>(exec: &Exec, k: &kernel::Uniform<'_>) {
    let kernel::Uniform { stream, out } = *k;
    let outs = Span::<T>::of(out);
    let drop = match out.dtype() {
        DType::F64 => 0,
        DType::F16 => 32 - 11,
        DType::BF16 => 32 - 8,
        _ => 8,
    };
    let unit = T::of(2f64.powi(drop - 32));
    for_each_block::<T>(
        exec,
        outs.len(),
        8,
        #[inline(always)]
        |i, _| {
            let words = words(stream, i as u64);
            outs.store(i, lanes!(j => T::of_word(words[j] >> drop) * unit));
        },
    );
}

/// Normal numbers of standard deviation `std`: element i is sqrt(-2 ln u) cos(2 pi v) with u, v in (0, 1) from words
/// 2i and 2i+1 (Box and Muller 1958), in f64.
pub(crate) fn normal(exec: &Exec, k: &kernel::Normal<'_>) -> Result<()> {
    for_float!("normal", k.out.dtype(), T => normal_of::<T>(exec, k))
}

fn normal_of<T: Float>(exec: &Exec, k: &kernel::Normal<'_>) {
    let kernel::Normal { stream, std, out } = *k;
    let outs = Span::<T>::of(out);
    for_each_block::<T>(exec, outs.len(), 60, |i, len| {
        for half in 0..2 {
            let words = words(stream, (2 * i + half * BLOCK) as u64);
            for j in 0..(BLOCK / 2).min(len.saturating_sub(half * BLOCK / 2)) {
                let unit = |w: u32| (w as f64 + 0.5) / 4_294_967_296.0;
                let (u, v) = (unit(words[2 * j]), unit(words[2 * j + 1]));
                let value = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
                outs.set(i + half * BLOCK / 2 + j, T::of(std * value));
            }
        }
    });
}

/// out = 0 where the element's word is below the threshold of p, else x / (1 - p).
pub(crate) fn dropout(exec: &Exec, k: &kernel::Dropout<'_>) -> Result<()> {
    for_float!("dropout", k.x.dtype(), T => dropout_of::<T>(exec, k))
}

fn dropout_of<T: Float>(exec: &Exec, k: &kernel::Dropout<'_>) {
    let kernel::Dropout { x, p, stream, out } = *k;
    let threshold = RandomStream::threshold(p);

    let (xs, outs) = (Span::<T>::of(x), Span::<T>::of(out));
    let keep = T::of(1.0 / (1.0 - p));
    Nest::new([out, x]).for_each_run::<T>(
        exec,
        8,
        #[inline(always)]
        |run| {
            let (o, x, first) = (run.of(0, outs), run.of(1, xs), run.start(0));
            for i in (0..run.len).step_by(BLOCK) {
                let (words, x) = (words(stream, (first + i) as u64), x.load::<BLOCK>(i, T::ZERO));
                o.store(
                    i,
                    lanes!(j => {
                        if (words[j] as u64) < threshold { T::ZERO } else { x[j] * keep }
                    }),
                );
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_stream() {
        let stream = RandomStream { seed: 0x1234_5678_9abc_def0, counter: 7 };
        for start in [0, 1, 2, 3, 4, 65, (1 << 34) + 3] {
            let got = words(stream, start);
            for (j, &word) in got.iter().enumerate() {
                assert_eq!(word, stream.word(start + j as u64), "element {start} + {j}");
            }
        }
    }
}
