//! Layer norm with weight and bias.

use crate::{Builder, Init, Parameter, Result};
use retape_core::{Role, Scope, Var};

/// (x - mean) / sqrt(var + eps) weight + bias over the last dimension of n elements; weight and bias are `[n]`.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    scope: Scope,
    /// `[n]`, ones at first.
    pub weight: Parameter,
    /// `[n]`, zeros at first.
    pub bias: Parameter,
    /// Added to the (biased) variance: GPT-2's 1e-5.
    pub eps: f64,
}

impl LayerNorm {
    /// Parameters `weight` and `bias`.
    pub fn new(builder: &Builder, n: usize) -> Result<LayerNorm> {
        Ok(LayerNorm {
            scope: builder.scope().role(Role::Norm),
            weight: builder.parameter("weight", &[n], Init::ONES)?,
            bias: builder.parameter("bias", &[n], Init::ZEROS)?,
            eps: 1e-5,
        })
    }

    /// `[.., n] -> [.., n]`, as op `layer_norm` in x's dtype.
    pub fn forward(&self, x: Var) -> Result<Var> {
        x.within(&self.scope, |x| {
            let (tape, dtype) = (x.tape(), x.dtype());
            let (weight, bias) = (self.weight.weight_as(tape, dtype)?, self.bias.var_as(tape, dtype)?);
            Ok(x.layer_norm(Some(weight), Some(bias), self.eps)?)
        })
    }
}
