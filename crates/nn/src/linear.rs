//! The affine map y = x W + c, with W lying as in GPT-2's `Conv1D`.

use crate::{Initializer, Parameter, Result};
use retape_core::Var;

/// y = x W + c over the last dimension: `[.., in] -> [.., out]`, W `[in, out]`, c `[out]` if present.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[in, out]`.
    pub weight: Parameter,
    /// `[out]`.
    pub bias: Option<Parameter>,
}

impl Linear {
    /// Parameters `{name}.weight`, normal with standard deviation `std`, and `{name}.bias`, zeros.
    pub fn new(
        init: &mut Initializer,
        name: &str,
        inputs: usize,
        outputs: usize,
        bias: bool,
        std: f64,
    ) -> Result<Linear> {
        let weight = init.normal(format!("{name}.weight"), &[inputs, outputs], std)?;
        let bias = bias.then(|| init.constant(format!("{name}.bias"), &[outputs], 0.0)).transpose()?;
        Ok(Linear { weight, bias })
    }

    /// `[.., in] -> [.., out]`, as op `linear` in x's dtype. Takes x, so that it settles as soon as y is there. Errors
    /// where x's last dimension isn't `in`.
    pub fn forward(&self, x: Var) -> Result<Var> {
        let (tape, dtype) = (x.tape(), x.dtype());
        let weight = self.weight.weight_as(tape, dtype)?;
        let bias = self.bias.as_ref().map(|b| b.var_as(tape, dtype)).transpose()?;
        Ok(x.linear(&weight, bias.clone())?)
    }

    /// Weight, then bias.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        std::iter::once(&self.weight).chain(&self.bias)
    }
}
