//! Layer norm with weight and bias.

use crate::{Initializer, Parameter, Result};
use retape_core::Var;

/// (x - mean) / sqrt(var + eps) weight + bias over the last dimension of n elements; weight and bias are `[n]`.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    /// `[n]`, ones at first.
    pub weight: Parameter,
    /// `[n]`, zeros at first.
    pub bias: Parameter,
    /// Added to the (biased) variance: GPT-2's 1e-5.
    pub eps: f64,
}

impl LayerNorm {
    /// Parameters `{name}.weight` and `{name}.bias`.
    pub fn new(init: &mut Initializer, name: &str, n: usize) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: init.constant(format!("{name}.weight"), &[n], 1.0)?,
            bias: init.constant(format!("{name}.bias"), &[n], 0.0)?,
            eps: 1e-5,
        })
    }

    /// `[.., n] -> [.., n]`, as op `layer_norm` in x's dtype. Borrows x: a residual stream needs it again.
    pub fn forward(&self, x: &Var) -> Result<Var> {
        let (tape, dtype) = (x.tape(), x.dtype());
        let (weight, bias) = (self.weight.weight_as(tape, dtype)?, self.bias.var_as(tape, dtype)?);
        Ok(x.clone().layer_norm(Some(weight.clone()), Some(bias.clone()), self.eps)?)
    }

    /// Weight, then bias.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        [&self.weight, &self.bias].into_iter()
    }
}
