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

/// What spans may hold. Conversions are functions of single numbers, never inlined: a block whose address went to one
/// would no longer be a register's, and the loops of f32 would not be vectorised.
pub(crate) trait Cell: Copy + Default {
    /// True for f32 alone, whose elements may lie as 16 bits.
    const WIDENS: bool = false;

    /// The number of these bits.
    fn widen(_bits: u16, _half: Half) -> Self {
        unreachable!("only f32 widens")
    }

    /// The bits of the nearest number, of two the even one.
    fn narrow(self, _half: Half) -> u16 {
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
    fn widen(bits: u16, half: Half) -> f32 {
        match half {
            Half::BF16 => bf16::from_bits(bits).to_f32(),
            Half::F16 => f16::from_bits(bits).to_f32(),
        }
    }

    #[inline(never)]
    fn narrow(self, half: Half) -> u16 {
        match half {
            Half::BF16 => bf16::from_f32(self).to_bits(),
            Half::F16 => f16::from_f32(self).to_bits(),
        }
    }
}

/// Calls `body`, which writes all of a row and may read back what it wrote, with `out` itself or, where that would
/// round, with scratch in its place.
#[inline(always)]
pub(crate) fn unrounded<T: Float>(exec: &Exec, out: Span<T>, body: impl FnOnce(Span<T>)) {
    let mut scratch = exec.scratch::<T>(if out.rounds() { out.len() } else { 0 });
    let wide = if out.rounds() { Span::over(scratch.memory()) } else { out };
    body(wide);
    if out.rounds() {
        out.copy_from(wide);
    }
}
