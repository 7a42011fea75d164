//! Running folds along a dimension.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// Running folds along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ScanFn {
    /// The sum of all up to here.
    Sum,
    /// The sum of all from here to the end.
    SumToEnd,
    /// The product of all up to here.
    Prod,
}

/// out = running fold of x along `dim`.
#[derive(Debug, Clone, Copy)]
pub struct Scan<'a> {
    /// The fold.
    pub f: ScanFn,
    /// May be `out`.
    pub x: &'a Tensor,
    /// The dimension.
    pub dim: usize,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Scan<'a> {
    fn name(&self) -> &'static str {
        "scan"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: ReadInPlace Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.dim(self.x, self.dim)?;
        check.alike()
    }
}

/// Gradient of [`ScanFn::Prod`]: out_i = sum over k >= i of g_k times the product of all x up to k but x_i (no
/// division: exact with zeros).
#[derive(Debug, Clone, Copy)]
pub struct CumprodGrad<'a> {
    /// What was folded.
    pub x: &'a Tensor,
    /// Gradient by the running product.
    pub g: &'a Tensor,
    /// The dimension.
    pub dim: usize,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for CumprodGrad<'a> {
    fn name(&self) -> &'static str {
        "cumprod_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, g: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.dim(self.x, self.dim)?;
        check.alike()
    }
}
