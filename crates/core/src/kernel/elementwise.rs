//! Elementwise kernels: all operands have one shape (broadcasting is done by stride-0 views).

use super::check::{Operands, Primitive, operands};
use super::{BinaryFn, TernaryFn, UnaryFn};
use crate::Tensor;

/// out = f(x).
#[derive(Debug, Clone, Copy)]
pub struct Unary<'a> {
    /// The function.
    pub f: UnaryFn,
    /// May be `out`.
    pub x: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Unary<'a> {
    fn name(&self) -> &'static str {
        "unary"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: ReadInPlace Float, out: Write Float]
    }
}

/// out = g f'(.).
#[derive(Debug, Clone, Copy)]
pub struct UnaryGrad<'a> {
    /// The function.
    pub f: UnaryFn,
    /// y = f(x) where [`UnaryFn::grad_reads_output`], else x. An affine function ([`UnaryFn::is_affine`]) doesn't read
    /// it. May be `out`.
    pub saved: &'a Tensor,
    /// Gradient by y. May be `out`.
    pub g: &'a Tensor,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for UnaryGrad<'a> {
    fn name(&self) -> &'static str {
        "unary_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => saved: ReadInPlace Float, g: ReadInPlace Float, out: Write Float]
    }
}

/// out = f(a, b).
#[derive(Debug, Clone, Copy)]
pub struct Binary<'a> {
    /// The function.
    pub f: BinaryFn,
    /// The first argument. May be `out`.
    pub a: &'a Tensor,
    /// The second. May be `out`.
    pub b: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Binary<'a> {
    fn name(&self) -> &'static str {
        "binary"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => a: ReadInPlace Float, b: ReadInPlace Float, out: Write Float]
    }
}

/// Gradient of [`BinaryFn::Maximum`] or [`BinaryFn::Minimum`] by the first argument: out = g where a wins or either is
/// NaN, g/2 on a tie, else 0.
#[derive(Debug, Clone, Copy)]
pub struct ExtremumGrad<'a> {
    /// Which of the two; another is an Unsupported error.
    pub f: BinaryFn,
    /// The argument that the gradient is taken by.
    pub a: &'a Tensor,
    /// The other.
    pub b: &'a Tensor,
    /// Gradient by the extremum. May be `out`.
    pub g: &'a Tensor,
    /// Written: the gradient by a.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for ExtremumGrad<'a> {
    fn name(&self) -> &'static str {
        "extremum_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => a: Read Float, b: Read Float, g: ReadInPlace Float, out: Write Float]
    }
}

/// out = f(a, b, c).
#[derive(Debug, Clone, Copy)]
pub struct Ternary<'a> {
    /// The function.
    pub f: TernaryFn,
    /// The first argument. May be `out`.
    pub a: &'a Tensor,
    /// The second. May be `out`.
    pub b: &'a Tensor,
    /// The third. May be `out`.
    pub c: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Ternary<'a> {
    fn name(&self) -> &'static str {
        "ternary"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => a: ReadInPlace Float, b: ReadInPlace Float, c: ReadInPlace Float, out: Write Float]
    }
}

/// An input of a clamp with tensors as bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs)]
pub enum ClampInput {
    X,
    Low,
    High,
}

/// Gradient of min(max(x, low), high) by one of its inputs: out = g where the condition holds, else 0. X: neither
/// x < low nor x > high (so too for NaN); Low: x < low (and low < high); High: x > high or high < low.
#[derive(Debug, Clone, Copy)]
pub struct ClampGrad<'a> {
    /// The input that the gradient is taken by.
    pub by: ClampInput,
    /// What was limited.
    pub x: &'a Tensor,
    /// The lower bound, if there is one.
    pub low: Option<&'a Tensor>,
    /// The upper bound, if there is one.
    pub high: Option<&'a Tensor>,
    /// Gradient by the result. May be `out`.
    pub g: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for ClampGrad<'a> {
    fn name(&self) -> &'static str {
        "clamp_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, low: Read Float, high: Read Float, g: ReadInPlace Float, out: Write Float]
    }
}

/// out = a where cond, else b; any dtype.
#[derive(Debug, Clone, Copy)]
pub struct Select<'a> {
    /// Which of the two, bool.
    pub cond: &'a Tensor,
    /// Taken where true. May be `out`.
    pub a: &'a Tensor,
    /// Taken where false. May be `out`.
    pub b: &'a Tensor,
    /// Written; of a's and b's dtype.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Select<'a> {
    fn name(&self) -> &'static str {
        "select"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => cond: Read Exactly(DType::Bool), a: ReadInPlace AsOut, b: ReadInPlace AsOut, out: Write Any]
    }
}
