//! Fill and copy, for every dtype and pair of dtypes.

use crate::exec::{Baseline, Exec};
use crate::halves::Cell;
use crate::view::{BLOCK, Nest, Span, lanes};
use half::{bf16, f16};
use retape_core::{DType, Tensor, kernel};

/// Conversion as core's cast defines it: through the smallest of i64, f32 and f64 that holds every value of the source
/// exactly, so one rounding is made.
trait Cast: Cell + Send + Sync {
    /// What it is converted through.
    type Wide: Wide;
    fn wide(self) -> Self::Wide;
    fn of_f64(value: f64) -> Self;
    fn of_f32(value: f32) -> Self;
    fn of_i64(value: i64) -> Self;
}

/// i64, f32 or f64.
trait Wide: Copy {
    fn cast<D: Cast>(self) -> D;
}

impl Wide for f64 {
    #[inline(always)]
    fn cast<D: Cast>(self) -> D {
        D::of_f64(self)
    }
}

impl Wide for f32 {
    #[inline(always)]
    fn cast<D: Cast>(self) -> D {
        D::of_f32(self)
    }
}

impl Wide for i64 {
    #[inline(always)]
    fn cast<D: Cast>(self) -> D {
        D::of_i64(self)
    }
}

macro_rules! cast_by {
    ($t:ty, $through:ty, $wide:expr, $of_f64:expr, $of_f32:expr, $of_i64:expr) => {
        impl Cast for $t {
            type Wide = $through;
            #[inline(always)]
            fn wide(self) -> $through {
                $wide(self)
            }
            #[inline(always)]
            fn of_f64(value: f64) -> $t {
                $of_f64(value)
            }
            #[inline(always)]
            fn of_f32(value: f32) -> $t {
                $of_f32(value)
            }
            #[inline(always)]
            fn of_i64(value: i64) -> $t {
                $of_i64(value)
            }
        }
    };
}
cast_by!(i64, i64, |v| v, |v| v as i64, |v| v as i64, |v| v);
cast_by!(i32, i64, i64::from, |v| v as i32, |v| v as i32, |v| v as i32);
cast_by!(u8, i64, i64::from, |v| v as u8, |v| v as u8, |v| v as u8);
cast_by!(f64, f64, |v| v, |v| v, f64::from, |v| v as f64);
cast_by!(f32, f32, |v| v, |v| v as f32, |v| v, |v| v as f32);
cast_by!(bf16, f32, bf16::to_f32, |v| bf16::from_f32(to_odd(v)), bf16::from_f32, |v| bf16::from_f32(whole_to_odd(v)));
cast_by!(f16, f32, f16::to_f32, |v| f16::from_f32(to_odd(v)), f16::from_f32, |v| f16::from_f32(whole_to_odd(v)));
cast_by!(Flag, i64, |v: Flag| i64::from(v.0), |v| Flag::of(v != 0.0), |v| Flag::of(v != 0.0), |v| Flag::of(v != 0));

/// A byte that is 0 or 1.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Flag(u8);

impl Cell for Flag {}

impl Flag {
    #[inline(always)]
    fn of(truth: bool) -> Flag {
        Flag(truth as u8)
    }
}

/// i64 to f32 such that a second rounding, to fewer bits, is right: of large ones the bits that f64 has no room for are
/// cut off, and the last that stays is set if they weren't all 0.
#[inline(always)]
fn whole_to_odd(value: i64) -> f32 {
    const CUT: i64 = (1 << 11) - 1;
    let large = value.unsigned_abs() >> 53 != 0;
    let odd = (value & !CUT) | ((value & CUT != 0) as i64) << 11;
    to_odd((if large { odd } else { value }) as f64)
}

/// f64 to f32 such that a second rounding, to fewer bits, is right: inexact results get an odd last bit.
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let error = value - near as f64;
    if error == 0.0 || !near.is_finite() {
        return near;
    }
    let away = near != 0.0 && (near > 0.0) != (error > 0.0); // rounded away from zero: take the last bit back first
    f32::from_bits((near.to_bits() - away as u32) | 1)
}

/// Runs the body with `$t` bound to the element type of any dtype.
macro_rules! for_any {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $t = f64;
                $body
            }
            DType::F32 => {
                type $t = f32;
                $body
            }
            DType::BF16 => {
                type $t = bf16;
                $body
            }
            DType::F16 => {
                type $t = f16;
                $body
            }
            DType::I64 => {
                type $t = i64;
                $body
            }
            DType::I32 => {
                type $t = i32;
                $body
            }
            DType::U8 => {
                type $t = u8;
                $body
            }
            DType::Bool => {
                type $t = Flag;
                $body
            }
        }
    };
}

/// out = value.
pub(crate) fn fill(exec: &Exec, k: &kernel::Fill<'_>) {
    for_any!(k.out.dtype(), T => fill_of::<T>(exec, k))
}

fn fill_of<T: Cast>(exec: &Exec, k: &kernel::Fill<'_>) {
    let (outs, value) = (Span::<T>::of(k.out), T::of_f64(k.value));
    Nest::new([k.out]).for_each_run::<Baseline>(
        exec,
        1,
        #[inline(always)]
        |run| {
            let o = run.of(0, outs);
            for i in (0..run.len).step_by(BLOCK) {
                o.store::<BLOCK>(i, [value; BLOCK]);
            }
        },
    );
}

/// out = x, converted.
pub(crate) fn copy(exec: &Exec, k: &kernel::Copy<'_>) {
    let kernel::Copy { x, out } = *k;
    if x.dtype() == out.dtype() {
        return match x.dtype().size() {
            1 => convert::<u8, u8>(
                exec,
                x,
                out,
                #[inline(always)]
                |v| v,
            ),
            2 => convert::<u16, u16>(
                exec,
                x,
                out,
                #[inline(always)]
                |v| v,
            ),
            4 => convert::<u32, u32>(
                exec,
                x,
                out,
                #[inline(always)]
                |v| v,
            ),
            _ => convert::<u64, u64>(
                exec,
                x,
                out,
                #[inline(always)]
                |v| v,
            ),
        };
    }

    for_any!(x.dtype(), S => for_any!(out.dtype(), D => cast::<S, D>(exec, x, out)))
}

fn cast<S: Cast, D: Cast>(exec: &Exec, x: &Tensor, out: &Tensor) {
    convert(
        exec,
        x,
        out,
        #[inline(always)]
        |v: S| -> D { v.wide().cast() },
    )
}

#[inline(always)]
fn convert<S, D>(exec: &Exec, x: &Tensor, out: &Tensor, f: impl Fn(S) -> D + Sync)
where
    S: Cell + Send + Sync,
    D: Cell + Send + Sync,
{
    let (xs, outs) = (Span::<S>::of(x), Span::<D>::of(out));
    Nest::new([out, x]).for_each_run::<Baseline>(
        exec,
        1,
        #[inline(always)]
        |run| {
            let (o, x) = (run.of(0, outs), run.of(1, xs));
            for i in (0..run.len).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, S::default());
                o.store(i, lanes!(j => f(v[j])));
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rounding_only() {
        // 1 + 2^-11 + 2^-40 lies above the midpoint of two f16 numbers; through f32 it would fall onto it.
        let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(<f16 as Cast>::of_f64(above).to_f32(), 1.0 + 2f32.powi(-10));
        assert_eq!(<f16 as Cast>::of_f64(-above).to_f32(), -1.0 - 2f32.powi(-10));
        let below = 1.0 + 3.0 * 2f64.powi(-11) - 2f64.powi(-40);
        assert_eq!(<f16 as Cast>::of_f64(below).to_f32(), 1.0 + 2f32.powi(-10));
        let above = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(<bf16 as Cast>::of_f64(above).to_f32(), 1.0 + 2f32.powi(-7));
        assert!(<f16 as Cast>::of_f64(f64::NAN).is_nan());
        assert_eq!(<f16 as Cast>::of_f64(1e300), f16::INFINITY);
    }

    /// f64 numbers that f32 rounds to zero, to its smallest number, and zeros.
    #[test]
    fn what_is_nearly_zero_becomes_zero_of_its_sign() {
        for value in [0.0, 1e-50, 7e-46, 7.1e-46, 1e-45, f64::MIN_POSITIVE, 5e-324] {
            assert_eq!(<f16 as Cast>::of_f64(value).to_bits(), 0, "{value:e}");
            assert_eq!(<f16 as Cast>::of_f64(-value).to_bits(), 1 << 15, "{value:e}");
            assert_eq!(<bf16 as Cast>::of_f64(value).to_bits(), 0, "{value:e}");
            assert_eq!(<bf16 as Cast>::of_f64(-value).to_bits(), 1 << 15, "{value:e}");
        }
        // Half of the smallest number is even's, which is zero; what is above it isn't.
        for (value, expected) in [(2f64.powi(-134), 0), (2f64.powi(-134) * (1.0 + 2f64.powi(-50)), 1)] {
            assert_eq!(<bf16 as Cast>::of_f64(value).to_bits(), expected);
            assert_eq!(<bf16 as Cast>::of_f64(-value).to_bits(), expected | 1 << 15);
        }
        for (value, expected) in [(2f64.powi(-25), 0), (2f64.powi(-25) * (1.0 + 2f64.powi(-50)), 1)] {
            assert_eq!(<f16 as Cast>::of_f64(value).to_bits(), expected);
            assert_eq!(<f16 as Cast>::of_f64(-value).to_bits(), expected | 1 << 15);
        }
    }
}
