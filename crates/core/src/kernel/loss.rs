//! Elementwise losses.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// Elementwise losses of a prediction x and a target t, with d = x - t; each derivative by t is -(that by x) unless
/// said.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub enum LossFn {
    /// d^2; by x: 2d.
    Squared,
    /// |d|; by x: sign(d), 0 at 0.
    Absolute,
    /// d^2 / (2 beta) where |d| < beta, else |d| - beta/2, for beta > 0; by x: d / beta limited to +-1. (Girshick
    /// 2015.)
    SmoothL1(f64),
    /// d^2 / 2 where |d| <= delta, else delta (|d| - delta/2); by x: d limited to +-delta. (Huber 1964.)
    Huber(f64),
    /// Of log-probabilities x and probabilities t: t (ln t - x), 0 where t = 0; by x: -t; by t: ln t + 1 - x.
    KlDivergence,
    /// Of log-probabilities x and t: e^t (t - x), 0 where e^t = 0; by x: -e^t; by t: e^t (t - x + 1).
    KlDivergenceLog,
    /// Binary cross-entropy of logits x: (1-t) max(x, 0) + w t max(-x, 0) + l ln(1 + e^-|x|) with l = 1 + (w-1) t. The
    /// third operand w weighs the positives (1 if absent). By x: (1-t) sigmoid(x) - w t sigmoid(-x); by t:
    /// -x + (w-1) softplus(-x); by w: t softplus(-x).
    BinaryLogits,
}

/// out = f(x, t), elementwise; all of one shape.
#[derive(Debug, Clone, Copy)]
pub struct Loss<'a> {
    /// The loss.
    pub f: LossFn,
    /// The prediction.
    pub x: &'a Tensor,
    /// The target.
    pub target: &'a Tensor,
    /// What the positives count, for [`LossFn::BinaryLogits`].
    pub weight: Option<&'a Tensor>,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Loss<'a> {
    fn name(&self) -> &'static str {
        "loss"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, target: Read Float, weight: Read Float, out: Write Float]
    }
}

/// out = g times the derivative of f by one of its operands; all of one shape.
#[derive(Debug, Clone, Copy)]
pub struct LossGrad<'a> {
    /// The loss.
    pub f: LossFn,
    /// The operand that the gradient is taken by: x (0), the target (1) or the weight (2).
    pub by: usize,
    /// The prediction.
    pub x: &'a Tensor,
    /// The target.
    pub target: &'a Tensor,
    /// As in [`Loss`].
    pub weight: Option<&'a Tensor>,
    /// Gradient by the loss. May be `out`.
    pub g: &'a Tensor,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for LossGrad<'a> {
    fn name(&self) -> &'static str {
        "loss_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, target: Read Float, weight: Read Float, g: ReadInPlace Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let by = self.by;
        check.must(by < 2 || by == 2 && self.weight.is_some(), || format!("there is no input {by} to derive by"))?;
        check.alike()
    }
}
