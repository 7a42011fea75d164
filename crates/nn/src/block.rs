//! A pre-norm transformer block.

use crate::{Builder, CausalSelfAttention, GptConfig, LayerNorm, Mlp, Result};
use retape_core::{Role, Scope, Var};

/// x + attn(ln_1(x)), then that + mlp(ln_2(that)), on `[B, T, D]`.
#[derive(Debug, Clone)]
pub struct Block {
    scope: Scope,
    /// Before attention.
    pub ln_1: LayerNorm,
    /// Attention.
    pub attn: CausalSelfAttention,
    /// Before the feed-forward part.
    pub ln_2: LayerNorm,
    /// The feed-forward part.
    pub mlp: Mlp,
}

impl Block {
    /// The layers `ln_1`, `attn`, `ln_2` and `mlp` for a valid configuration.
    pub fn new(builder: &Builder, config: &GptConfig) -> Result<Block> {
        Ok(Block {
            scope: builder.scope().role(Role::Block),
            ln_1: LayerNorm::new(&builder.pp("ln_1"), config.dim)?,
            attn: CausalSelfAttention::new(&builder.pp("attn"), config)?,
            ln_2: LayerNorm::new(&builder.pp("ln_2"), config.dim)?,
            mlp: Mlp::new(&builder.pp("mlp"), config)?,
        })
    }

    /// `[B, T, D] -> [B, T, D]`. The first residual sum is at `add` inside, the result bears the block's own path.
    pub fn forward(&self, x: Var, dropout: f64) -> Result<Var> {
        x.within(&self.scope, |x| {
            let y = self.attn.forward(self.ln_1.forward(x.clone())?, dropout)?;
            let x = x.add(y)?;
            let y = self.mlp.forward(self.ln_2.forward(x.clone())?, dropout)?;
            Ok(x.add(y)?)
        })
    }
}
