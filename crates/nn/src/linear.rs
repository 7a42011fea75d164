//! The affine map y = x W + c, with W lying as in GPT-2's `Conv1D`.

use crate::{Builder, Init, Parameter, Result};
use retape_core::{Scope, Var};

/// y = x W + c over the last dimension: `[.., in] -> [.., out]`, W `[in, out]`, c `[out]` if present.
#[derive(Debug, Clone)]
pub struct Linear {
    scope: Scope,
    /// `[in, out]`.
    pub weight: Parameter,
    /// `[out]`.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// Parameters `weight`, as `init` says, and `bias`, zeros at first.
    pub fn new(builder: &Builder, inputs: usize, outputs: usize, bias: bool, init: Init) -> Result<Linear> {
        let weight = builder.parameter("weight", &[inputs, outputs], init)?;
        let bias = bias.then(|| builder.parameter("bias", &[outputs], Init::ZEROS)).transpose()?;
        Ok(Linear { scope: builder.scope(), weight, bias })
    }

    /// `[.., in] -> [.., out]`, as op `linear` in x's dtype. Errors where x's last dimension isn't `in`.
    pub fn forward(&self, x: Var) -> Result<Var> {
        x.within(&self.scope, |x| {
            let (tape, dtype) = (x.tape(), x.dtype());
            let weight = self.weight.weight_as(tape, dtype)?;
            let bias = self.bias.as_ref().map(|b| b.var_as(tape, dtype)).transpose()?;
            Ok(x.linear(weight, bias)?)
        })
    }
}
