//! Steps of optimizers.

use super::check::{Operands, Primitive, operands};
use crate::Tensor;

/// One AdamW step in place on p, m, v (Loshchilov and Hutter 2019), decoupled decay:
/// p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
/// All have one shape. The arithmetic is in the dtype that they are computed in, and what p, m and v hold is rounded to
/// their own.
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// The parameter, updated.
    pub p: &'a Tensor,
    /// Its gradient, of any strides.
    pub g: &'a Tensor,
    /// The first moment, updated.
    pub m: &'a Tensor,
    /// The second moment, updated.
    pub v: &'a Tensor,
    /// t: 1 for the first step.
    pub step: u64,
    /// Settings.
    pub config: AdamWConfig,
    /// What g is multiplied by first (gradient clipping).
    pub grad_scale: f64,
}

impl<'a> Primitive<'a> for AdamW<'a> {
    fn name(&self) -> &'static str {
        "adamw"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => p: Write Float, g: Read Float, m: Write Float, v: Write Float]
    }
}

/// Settings of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct AdamWConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// PyTorch's.
    fn default() -> AdamWConfig {
        AdamWConfig { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}
