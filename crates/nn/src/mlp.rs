//! The feed-forward part of a block.

use crate::{Builder, GptConfig, Init, Linear, Result};
use retape_core::{Role, Scope, Var};

/// Linear to 4 D, GELU (tanh form), linear back to D.
#[derive(Debug, Clone)]
pub struct Mlp {
    scope: Scope,
    /// `[D, 4 D]`.
    pub c_fc: Linear,
    /// `[4 D, D]`.
    pub c_proj: Linear,
}

impl Mlp {
    /// The layers `c_fc` and `c_proj` for a valid configuration.
    pub fn new(builder: &Builder, config: &GptConfig) -> Result<Mlp> {
        let (dim, bias) = (config.dim, config.linear_bias);
        let (inner, outer) = (Init::Normal { std: GptConfig::INIT_STD }, Init::Normal { std: config.projection_std() });
        Ok(Mlp {
            scope: builder.scope().role(Role::FeedForward),
            c_fc: Linear::new(&builder.pp("c_fc"), dim, 4 * dim, bias, inner)?,
            c_proj: Linear::new(&builder.pp("c_proj"), 4 * dim, dim, bias, outer)?,
        })
    }

    /// `[.., D] -> [.., D]`, with the result dropped with probability `dropout` (0 to evaluate). Paths inside: `c_fc`,
    /// `gelu`, `c_proj`, `dropout`.
    pub fn forward(&self, x: Var, dropout: f64) -> Result<Var> {
        x.within(&self.scope, |x| {
            let h = self.c_fc.forward(x)?;
            let h = h.within("gelu", |h| h.gelu_tanh())?;
            let y = self.c_proj.forward(h)?;
            if dropout > 0.0 { Ok(y.dropout(dropout)?) } else { Ok(y) }
        })
    }
}
