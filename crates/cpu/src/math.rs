//! The numbers kernels compute in. f32 functions are branch-free polynomials that LLVM vectorises; f64 ones are those
//! of std and libm, accurate to about an ulp (gradient checks rely on it).
//!
//! `mul_add` is fused on every machine: hardware with FMA makes it one instruction, other hardware calls a (slow)
//! library function, and both give the same bits.

use crate::exec::{Scratch, Target};
use crate::halves::Cell;
use crate::view::BLOCK;
use retape_core::Element;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// f32 or f64.
pub(crate) trait Float:
    Element
    + Cell
    + Scratch
    + Target
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + faer::traits::ComplexField
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    /// Beyond +- this, sigmoid is 0 or 1 and its derivative 0 to the last bit.
    const SATURATED: Self;
    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn magnitude(self) -> Self;
    fn root(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tanh(self) -> Self;
    fn ln_1p(self) -> Self;
    fn exp_m1(self) -> Self;
    fn power(self, exponent: Self) -> Self;
    fn erf(self) -> Self;
    /// The normal distribution function Phi(x) = erfc(-x / sqrt 2) / 2.
    fn normal_cdf(self) -> Self;

    /// The nearest integer (ties to even) of a small number, as an i8's bits.
    fn to_byte(self) -> u8;
    /// The number of a word.
    fn of_word(word: u32) -> Self;
    /// The number of an i8's bits.
    fn of_byte(byte: u8) -> Self;

    /// 1/(1+e^-x).
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + Float::exp(-self))
    }

    /// The larger; NaN if either is NaN.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn larger(self, other: Self) -> Self {
        if self > other || self != self { self } else { other }
    }

    /// The smaller; NaN if either is NaN.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn smaller(self, other: Self) -> Self {
        if self < other || self != self { self } else { other }
    }

    /// Limited to [low, high]; NaN stays.
    #[inline(always)]
    fn limit(self, low: Self, high: Self) -> Self {
        let x = if self < low { low } else { self };
        if x > high { high } else { x }
    }
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const INFINITY: f32 = f32::INFINITY;
    const SATURATED: f32 = 100.0;

    #[inline(always)]
    fn to_byte(self) -> u8 {
        (self + 12_582_912.0).to_bits() as u8 // 1.5 * 2^23: the sum rounds to an integer, which lies in its low bits
    }
    #[inline(always)]
    fn of_word(word: u32) -> f32 {
        word as f32
    }
    #[inline(always)]
    fn of_byte(byte: u8) -> f32 {
        byte as i8 as f32
    }
    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self as f64
    }
    #[inline(always)]
    fn mul_add(self, a: f32, b: f32) -> f32 {
        f32::mul_add(self, a, b)
    }
    #[inline(always)]
    fn magnitude(self) -> f32 {
        f32::abs(self)
    }
    #[inline(always)]
    fn root(self) -> f32 {
        f32::sqrt(self)
    }

    /// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2)/2, and Cephes' polynomial for e^r: within 2 ulp.
    /// Results below 2^-125.5 flush to 0.
    #[inline(always)]
    fn exp(self) -> f32 {
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
        let x = self.limit(-87.5, 89.0);
        let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
        let n = shifted - MAGIC;
        let r = n.mul_add(-0.693_359_4, x);
        let r = n.mul_add(2.121_944_4e-4, r);
        let p = 1.987_569_1e-4f32;
        let p = p.mul_add(r, 1.398_199_9e-3);
        let p = p.mul_add(r, 8.333_452e-3);
        let p = p.mul_add(r, 4.166_579_6e-2);
        let p = p.mul_add(r, 1.666_666_5e-1);
        let p = p.mul_add(r, 0.5);
        let p = p.mul_add(r * r, r) + 1.0;
        // 2^(n-1), twice: 2^128 itself is no f32. n = -126 gives exponent bits 0, the number 0.
        let scale = f32::from_bits(shifted.to_bits().wrapping_add(126) << 23);
        if self > 88.722_84 { f32::INFINITY } else { p * 2.0 * scale }
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }
    #[inline(always)]
    fn ln_1p(self) -> f32 {
        f32::ln_1p(self)
    }
    #[inline(always)]
    fn exp_m1(self) -> f32 {
        f32::exp_m1(self)
    }
    #[inline(always)]
    fn power(self, exponent: f32) -> f32 {
        f32::powf(self, exponent)
    }
    #[inline(always)]
    fn erf(self) -> f32 {
        libm::erff(self)
    }
    #[inline(always)]
    fn sin(self) -> f32 {
        f32::sin(self)
    }
    #[inline(always)]
    fn cos(self) -> f32 {
        f32::cos(self)
    }

    /// Cephes' odd polynomial near 0, else 1 - 2/(e^2|x| + 1) with the sign of x.
    #[inline(always)]
    fn tanh(self) -> f32 {
        let z = self * self;
        let p = (-5.704_988_7e-3f32).mul_add(z, 2.063_909e-2);
        let p = p.mul_add(z, -5.373_971_6e-2);
        let p = p.mul_add(z, 1.333_144_2e-1);
        let p = p.mul_add(z, -3.333_328e-1);
        let near = (p * z).mul_add(self, self);
        let far = 1.0 - 2.0 / (Float::exp(2.0 * self.abs()) + 1.0);
        (if self.abs() < 0.625 { near } else { far }).copysign(self)
    }

    /// With z = x / sqrt 2. Near 0 (|z| < 1): 1/2 + erf(z)/2 with Cephes' odd polynomial. Else erfc(|z|)/2 or its
    /// complement, erfc(a) = e^(-a^2) t P(t) with t = 1/(1 + a/2) and P fitted to 2e-8 on a in [1, 11].
    #[inline(always)]
    fn normal_cdf(self) -> f32 {
        let z = self * std::f32::consts::FRAC_1_SQRT_2;
        let s = z * z;
        let p = 7.853_861e-5f32;
        let p = p.mul_add(s, -8.010_194e-4);
        let p = p.mul_add(s, 5.188_328e-3);
        let p = p.mul_add(s, -2.685_381e-2);
        let p = p.mul_add(s, 1.128_358_5e-1);
        let p = p.mul_add(s, -3.761_262_6e-1);
        let p = p.mul_add(s, std::f32::consts::FRAC_2_SQRT_PI);
        let near = (0.5 * p).mul_add(z, 0.5);

        let a = z.abs().limit(0.0, 11.0);
        let t = 1.0 / a.mul_add(0.5, 1.0);
        let c = 0.095_135_756f32;
        let c = c.mul_add(t, -0.231_158_08);
        let c = c.mul_add(t, 0.088_524_98);
        let c = c.mul_add(t, 0.056_960_717);
        let c = c.mul_add(t, 0.180_342_2);
        let c = c.mul_add(t, 0.246_615_07);
        let c = c.mul_add(t, 0.282_081_16);
        let c = c.mul_add(t, 0.282_096_36);
        // e^(-z^2) = e^(-x^2/2), with the rounding error of x^2 taken back: it is large where x is.
        let x = self.limit(-15.0, 15.0);
        let square = x * x;
        let error = x.mul_add(x, -square);
        let tail = 0.5 * t * c * (Float::exp(-0.5 * square) * (-0.5f32).mul_add(error, 1.0));
        let far = if z > 0.0 { 1.0 - tail } else { tail };
        if z.abs() < 1.0 { near } else { far }
    }
}

impl Float for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const INFINITY: f64 = f64::INFINITY;
    const SATURATED: f64 = 800.0;

    #[inline(always)]
    fn to_byte(self) -> u8 {
        // 1.5 * 2^52: the sum rounds to an integer, which lies in its low bits
        (self + 6_755_399_441_055_744.0).to_bits() as u8
    }
    #[inline(always)]
    fn of_word(word: u32) -> f64 {
        word as f64
    }
    #[inline(always)]
    fn of_byte(byte: u8) -> f64 {
        byte as i8 as f64
    }
    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn mul_add(self, a: f64, b: f64) -> f64 {
        f64::mul_add(self, a, b)
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        f64::abs(self)
    }
    #[inline(always)]
    fn root(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    #[inline(always)]
    fn ln_1p(self) -> f64 {
        f64::ln_1p(self)
    }
    #[inline(always)]
    fn exp_m1(self) -> f64 {
        f64::exp_m1(self)
    }
    #[inline(always)]
    fn power(self, exponent: f64) -> f64 {
        f64::powf(self, exponent)
    }
    #[inline(always)]
    fn erf(self) -> f64 {
        libm::erf(self)
    }
    #[inline(always)]
    fn sin(self) -> f64 {
        f64::sin(self)
    }
    #[inline(always)]
    fn cos(self) -> f64 {
        f64::cos(self)
    }
    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    #[inline(always)]
    fn normal_cdf(self) -> f64 {
        0.5 * libm::erfc(-self * std::f64::consts::FRAC_1_SQRT_2)
    }
}

/// Folds the lanes of a block in a fixed tree.
#[inline(always)]
pub(crate) fn fold_lanes<T: Copy>(mut lanes: [T; BLOCK], join: impl Fn(T, T) -> T) -> T {
    let mut width = BLOCK;
    while width > 1 {
        width /= 2;
        for j in 0..width {
            lanes[j] = join(lanes[j], lanes[j + width]);
        }
    }
    lanes[0]
}

/// Joins what `block(i)` gives for i = 0, 64, 128 .. below `len`, lane by lane, then the lanes: one fixed order.
#[inline(always)]
pub(crate) fn reduce_blocks<T: Copy>(
    len: usize,
    start: T,
    mut block: impl FnMut(usize) -> [T; BLOCK],
    join: impl Fn(T, T) -> T + Copy,
) -> T {
    let mut lanes = [start; BLOCK];
    for i in (0..len).step_by(BLOCK) {
        let values = block(i);
        for j in 0..BLOCK {
            lanes[j] = join(lanes[j], values[j]);
        }
    }
    fold_lanes(lanes, join)
}

/// Blocks that a lane adds up in the tensor's dtype; such sums are added in f64. So the error doesn't grow with the
/// length.
pub(crate) const DEPTH: usize = 16;

/// The sum of what `block(i)` gives for i = 0, 64, 128 .. below `len`.
#[inline(always)]
pub(crate) fn sum_blocks<T: Float>(len: usize, mut block: impl FnMut(usize) -> [T; BLOCK]) -> T {
    let [sum] = sums_of_blocks(
        len,
        #[inline(always)]
        |i| [block(i)],
    );
    sum
}

/// The same for several sums at a time.
#[inline(always)]
pub(crate) fn sums_of_blocks<T: Float, const N: usize>(
    len: usize,
    mut blocks: impl FnMut(usize) -> [[T; BLOCK]; N],
) -> [T; N] {
    let mut lanes = [[T::ZERO; BLOCK]; N];
    let mut wide = [[0f64; BLOCK]; N];
    let mut first = 0;
    loop {
        let end = len.min(first + DEPTH * BLOCK);
        for i in (first..end).step_by(BLOCK) {
            let values = blocks(i);
            for k in 0..N {
                for j in 0..BLOCK {
                    lanes[k][j] += values[k][j];
                }
            }
        }
        if end == len {
            break;
        }
        add_wide(&mut wide, &mut lanes);
        first = end;
    }
    let mut sums = [T::ZERO; N];
    if first > 0 {
        add_wide(&mut wide, &mut lanes);
    }
    for k in 0..N {
        sums[k] = if first > 0 {
            T::of(fold_lanes(
                wide[k],
                #[inline(always)]
                |a, b| a + b,
            ))
        } else {
            fold_lanes(
                lanes[k],
                #[inline(always)]
                |a, b| a + b,
            )
        };
    }
    sums
}

/// Moves what the lanes hold to wide ones.
#[inline(always)]
fn add_wide<T: Float, const N: usize>(wide: &mut [[f64; BLOCK]; N], lanes: &mut [[T; BLOCK]; N]) {
    for k in 0..N {
        for j in 0..BLOCK {
            wide[k][j] += lanes[k][j].wide();
        }
        lanes[k] = [T::ZERO; BLOCK];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(range: std::ops::Range<f64>, f: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64) -> f64 {
        let steps = 200_000;
        (0..steps)
            .map(|i| (range.start + (range.end - range.start) * i as f64 / steps as f64) as f32)
            .map(|x| (f(x) as f64 - reference(x as f64)).abs() / reference(x as f64).abs().max(1e-37))
            .fold(0.0, f64::max)
    }

    #[test]
    fn f32_functions_are_accurate() {
        assert!(worst(-86.9..88.7, Float::exp, f64::exp) < 1.6e-7);
        assert!(worst(-1e-3..1e-3, Float::tanh, f64::tanh) < 1.2e-7);
        assert!(worst(-20.0..20.0, Float::tanh, f64::tanh) < 2e-7);
        assert!(worst(-80.0..80.0, Float::sigmoid, |x| 1.0 / (1.0 + (-x).exp())) < 3e-7);
        let cdf = |x: f64| 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
        assert!(worst(-1.2..10.0, Float::normal_cdf, cdf) < 7e-7, "{}", worst(-1.2..10.0, Float::normal_cdf, cdf));
        assert!(worst(-12.0..-1.2, Float::normal_cdf, cdf) < 2e-6, "{}", worst(-12.0..-1.2, Float::normal_cdf, cdf));
    }

    #[test]
    fn f32_functions_at_the_ends() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        assert_eq!((Float::exp(inf), Float::exp(-inf), Float::exp(0.0f32)), (inf, 0.0, 1.0));
        assert_eq!((Float::exp(89.0f32), Float::exp(-1e30f32)), (inf, 0.0));
        assert!(Float::exp(nan).is_nan() && Float::tanh(nan).is_nan() && nan.normal_cdf().is_nan());
        assert_eq!(
            (Float::tanh(inf), Float::tanh(-inf), Float::tanh(-0.0f32).to_bits()),
            (1.0, -1.0, (-0.0f32).to_bits())
        );
        assert_eq!((inf.normal_cdf(), (-inf).normal_cdf(), 0f32.normal_cdf()), (1.0, 0.0, 0.5));
        assert_eq!((inf.sigmoid(), (-inf).sigmoid(), 100f32.sigmoid(), (-100f32).sigmoid()), (1.0, 0.0, 1.0, 0.0));
    }
}
