//! The feed-forward part of a block.

use crate::{GptConfig, Initializer, Linear, Parameter, Result};
use retape_core::Var;

/// Linear to 4 D, GELU (tanh form), linear back to D.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// `[D, 4 D]`.
    pub c_fc: Linear,
    /// `[4 D, D]`.
    pub c_proj: Linear,
}

impl Mlp {
    /// Parameters `{name}.c_fc.*` and `{name}.c_proj.*` for a valid configuration.
    pub fn new(init: &mut Initializer, name: &str, config: &GptConfig) -> Result<Mlp> {
        let (dim, bias) = (config.dim, config.linear_bias);
        Ok(Mlp {
            c_fc: Linear::new(init, &format!("{name}.c_fc"), dim, 4 * dim, bias, GptConfig::INIT_STD)?,
            c_proj: Linear::new(init, &format!("{name}.c_proj"), 4 * dim, dim, bias, config.projection_std())?,
        })
    }

    /// `[.., D] -> [.., D]`, with the result dropped with probability `dropout` (0 to evaluate). Paths: `c_fc`, `gelu`,
    /// `c_proj`, `dropout`.
    pub fn forward(&self, x: Var, dropout: f64) -> Result<Var> {
        let tape = x.tape().clone();
        let mut h = {
            let _scope = tape.scope("c_fc");
            self.c_fc.forward(x)?
        };
        {
            let _scope = tape.scope("gelu");
            h = h.gelu_tanh()?;
        }
        {
            let _scope = tape.scope("c_proj");
            h = self.c_proj.forward(h)?;
        }
        if dropout > 0.0 {
            h = h.dropout(dropout)?;
        }
        Ok(h)
    }

    /// Those of `c_fc`, then of `c_proj`.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.c_fc.parameters().chain(self.c_proj.parameters())
    }
}
