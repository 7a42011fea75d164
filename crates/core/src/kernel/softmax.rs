//! Softmax, its logarithm, their gradients, and triangles.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// Softmax over the last dimension. A row of only -inf gives zeros; NaN and +inf pass as NaN.
#[derive(Debug, Clone, Copy)]
pub struct Softmax<'a> {
    /// `[.., n]`.
    pub x: &'a Tensor,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Softmax<'a> {
    fn name(&self) -> &'static str {
        "softmax"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float]
    }
}

/// out = y (g - sum(g y)) over the last dimension.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxGrad<'a> {
    /// The softmax.
    pub y: &'a Tensor,
    /// Gradient by y. May be `out`.
    pub g: &'a Tensor,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for SoftmaxGrad<'a> {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => y: Read Float, g: ReadInPlace Float, out: Write Float]
    }
}

/// Logarithm of the softmax over the last dimension: x - ln sum e^x. A row of only -inf stays so; NaN and +inf pass as
/// NaN.
#[derive(Debug, Clone, Copy)]
pub struct LogSoftmax<'a> {
    /// `[.., n]`.
    pub x: &'a Tensor,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for LogSoftmax<'a> {
    fn name(&self) -> &'static str {
        "log_softmax"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float]
    }
}

/// out = g - e^y sum(g) over the last dimension; 0 in a row of only -inf.
#[derive(Debug, Clone, Copy)]
pub struct LogSoftmaxGrad<'a> {
    /// The softmax's logarithm.
    pub y: &'a Tensor,
    /// Gradient by y. May be `out`.
    pub g: &'a Tensor,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for LogSoftmaxGrad<'a> {
    fn name(&self) -> &'static str {
        "log_softmax_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => y: Read Float, g: ReadInPlace Float, out: Write Float]
    }
}

/// out = x where j - i <= diagonal (>= with `upper`), else value.
#[derive(Debug, Clone, Copy)]
pub struct Triangle<'a> {
    /// `[.., rows, columns]`. May be `out`.
    pub x: &'a Tensor,
    /// Keeps the upper triangle, else the lower.
    pub upper: bool,
    /// Which diagonal bounds the triangle: that of the elements with j - i of this number.
    pub diagonal: isize,
    /// What stands outside.
    pub value: f64,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Triangle<'a> {
    fn name(&self) -> &'static str {
        "triangle"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: ReadInPlace Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let x = self.x;
        check.must(x.rank() >= 2, || format!("needs matrices [.., rows, columns], got {:?}", x.shape()))?;
        check.alike()
    }
}
