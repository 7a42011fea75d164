//! bf16 and f16: 16 bits in memory, f32 in every kernel. A [`Span`](crate::view::Span) of f32 over such a tensor widens
//! elements as they are read and rounds them, to nearest even, as they are written; so kernels are compiled once.
//!
//! What a kernel must see to: a value that it reads back must not have been rounded in between. It keeps such values in
//! registers, or in scratch of a row or a tile ([`unrounded`]), never of a tensor.

use crate::exec::Exec;
use crate::math::Float;
use crate::view::Span;
use half::{bf16, f16};
use retape_core::DType;

/// A format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    BF16,
    F16,
}

impl Half {
    pub fn of(dtype: DType) -> Option<Half> {
        match dtype {
            DType::BF16 => Some(Half::BF16),
            DType::F16 => Some(Half::F16),
            _ => None,
        }
    }
}

/// What spans may hold. Blocks go in and out by value: if one's address got out, LLVM would no longer know that writing to
/// it changes nothing else, and would not vectorise the loops around.
pub(crate) trait Cell: Copy + Default {
    /// True for f32 alone, whose elements may lie as 16 bits.
    const WIDENS: bool = false;

    /// `count` elements `stride` apart, widened; `fill` behind them.
    ///
    /// # Safety
    /// The elements must be readable there, and `count` at most `N`.
    unsafe fn read<const N: usize>(
        _from: *const u16,
        _half: Half,
        _stride: usize,
        _count: usize,
        _fill: Self,
    ) -> [Self; N] {
        unreachable!("only f32 widens")
    }

    /// Rounds the first `count` elements to places `stride` apart.
    ///
    /// # Safety
    /// The places must be writable, and `count` at most `N`.
    unsafe fn write<const N: usize>(_to: *mut u16, _half: Half, _stride: usize, _count: usize, _block: [Self; N]) {
        unreachable!("only f32 widens")
    }
}

macro_rules! as_they_are {
    ($($t:ty),*) => {$(impl Cell for $t {})*};
}
as_they_are!(f64, bf16, f16, i64, i32, u64, u32, u16, u8);

impl Cell for f32 {
    const WIDENS: bool = true;

    #[inline(never)]
    unsafe fn read<const N: usize>(from: *const u16, half: Half, stride: usize, count: usize, fill: f32) -> [f32; N] {
        // SAFETY: index i is below `count`, so the caller vouches for it.
        let bits = |i: usize| unsafe { *from.add(i * stride) };
        let mut block = [fill; N];
        match half {
            Half::BF16 => (0..count).for_each(|i| block[i] = bf16::from_bits(bits(i)).to_f32()),
            Half::F16 => (0..count).for_each(|i| block[i] = f16::from_bits(bits(i)).to_f32()),
        }
        block
    }

    #[inline(never)]
    unsafe fn write<const N: usize>(to: *mut u16, half: Half, stride: usize, count: usize, block: [f32; N]) {
        // SAFETY: index i is below `count`, so the caller vouches for it.
        let put = |i: usize, bits: u16| unsafe { *to.add(i * stride) = bits };
        match half {
            Half::BF16 => (0..count).for_each(|i| put(i, bf16::from_f32(block[i]).to_bits())),
            Half::F16 => (0..count).for_each(|i| put(i, f16::from_f32(block[i]).to_bits())),
        }
    }
}

/// Calls `body`, which writes all of a row and may read back what it wrote, with `out` itself or, where that would round,
/// with scratch in its place.
#[inline(always)]
pub(crate) fn unrounded<T: Float>(exec: &Exec, out: Span<T>, body: impl FnOnce(Span<T>)) {
    let mut scratch = exec.scratch::<T>(if out.rounds() { out.len() } else { 0 });
    let wide = if out.rounds() { Span::over(scratch.memory()) } else { out };
    body(wide);
    if out.rounds() {
        out.copy_from(wide);
    }
}
