//! Reductions over dimensions, and the sum of squares.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// Reductions of n elements, each with its derivative by x_i.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum ReduceFn {
    /// The sum; 0 of nothing. Derivative 1.
    Sum,
    /// The largest; -inf of nothing, NaN if any is NaN. Derivative: 1 shared evenly among those equal to y;
    /// NaN where y is.
    Max,
    /// The smallest; inf of nothing, NaN if any is NaN. Derivative as Max.
    Min,
    /// The product; 1 of nothing. Derivative: the product of the others (no division: exact with zeros).
    Prod,
    /// ln sum e^x, without overflow; -inf of nothing. Derivative: the softmax e^(x_i - m) / sum e^(x - m) with m the
    /// largest; 0 in a group of only -inf.
    LogSumExp,
    /// sum (x - mean)^2 / max(n - correction, 0). Derivative 2 (x_i - mean) / (n - correction); with n <= correction
    /// NaN where x_i is the mean, else infinite.
    Var {
        /// 1 for the unbiased estimate, 0 for the population's variance.
        correction: f64,
    },
    /// The root of Var. Derivative (x_i - mean) / (y (n - correction)), 0 where y = 0.
    Std {
        /// As in Var.
        correction: f64,
    },
    /// (sum |x|^ord)^(1/ord); ord 0 counts what isn't 0, inf and -inf take the largest and smallest magnitude.
    /// Derivative sign(x_i) |x_i|^(ord-1) y^(1-ord), 0 where x_i or y is 0; for ord 0 nothing; for inf and -inf
    /// sign(x_i) shared evenly among those of magnitude y.
    Norm {
        /// Which norm.
        ord: f64,
    },
}

impl ReduceFn {
    /// The reduction whose result the gradient of this one reads. Of a logarithm of sums and of norms, whose own result
    /// may have lost what the gradient needs, or overflow, it is the number that they are taken relative to.
    pub const fn in_grad(self) -> ReduceFn {
        match self {
            ReduceFn::LogSumExp => ReduceFn::Max,
            ReduceFn::Norm { ord } if ord < 0.0 => ReduceFn::Norm { ord: f64::NEG_INFINITY },
            ReduceFn::Norm { .. } => ReduceFn::Norm { ord: f64::INFINITY },
            other => other,
        }
    }
}

/// out = f over the dimensions where `out` (of x's rank) has size 1 and x has not.
#[derive(Debug, Clone, Copy)]
pub struct Reduce<'a> {
    /// The reduction.
    pub f: ReduceFn,
    /// What is reduced.
    pub x: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Reduce<'a> {
    fn name(&self) -> &'static str {
        "reduce"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.reduced("out", self.out, self.x.shape())
    }
}

/// Gradient of a reduction f: out = g times the derivative.
#[derive(Debug, Clone, Copy)]
pub struct ReduceGrad<'a> {
    /// The reduction; none of Sum, whose gradient is g, repeated.
    pub f: ReduceFn,
    /// What was reduced.
    pub x: &'a Tensor,
    /// x reduced by [`ReduceFn::in_grad`]; it has size 1 in the reduced dimensions.
    pub y: &'a Tensor,
    /// Gradient by the result, of y's shape.
    pub g: &'a Tensor,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for ReduceGrad<'a> {
    fn name(&self) -> &'static str {
        "reduce_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, y: Read Float, g: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("out", self.out, self.x.shape())?;
        check.shape("g", self.g, self.y.shape())?;
        check.reduced("y", self.y, self.x.shape())
    }
}

/// out = sum of squares of x, accumulated in f64.
#[derive(Debug, Clone, Copy)]
pub struct SquaredNorm<'a> {
    /// Any shape.
    pub x: &'a Tensor,
    /// Written: `[]`, f64.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for SquaredNorm<'a> {
    fn name(&self) -> &'static str {
        "squared_norm"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Exactly(DType::F64)]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("out", self.out, &[])
    }
}
