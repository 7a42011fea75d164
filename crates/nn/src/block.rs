//! A pre-norm transformer block.

use crate::{CausalSelfAttention, GptConfig, Initializer, LayerNorm, Mlp, Parameter, Result};
use retape_core::Var;

/// x + attn(ln_1(x)), then that + mlp(ln_2(that)), on `[B, T, D]`.
#[derive(Debug, Clone)]
pub struct Block {
    scope: String,
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
    /// Block `index` of a model with a valid configuration: parameters `transformer.h.{index}.*`.
    pub fn new(init: &mut Initializer, index: usize, config: &GptConfig) -> Result<Block> {
        let name = format!("transformer.h.{index}");
        Ok(Block {
            scope: format!("blocks.{index}"),
            ln_1: LayerNorm::new(init, &format!("{name}.ln_1"), config.dim)?,
            attn: CausalSelfAttention::new(init, &format!("{name}.attn"), config)?,
            ln_2: LayerNorm::new(init, &format!("{name}.ln_2"), config.dim)?,
            mlp: Mlp::new(init, &format!("{name}.mlp"), config)?,
        })
    }

    /// `[B, T, D] -> [B, T, D]` in scope `blocks.{index}`, with scopes `ln_1`, `attn`, `ln_2` and `mlp` inside and the
    /// first residual sum at `add`. The result bears the block's own path. Takes the residual stream by value: a handle
    /// that lived on outside would keep the block's input in full, whatever its mark.
    pub fn forward(&self, mut x: Var, dropout: f64) -> Result<Var> {
        let tape = x.tape().clone();
        let _block = tape.scope(&self.scope);
        let h = {
            let _scope = tape.scope("ln_1");
            self.ln_1.forward(&x)?
        };
        let h = {
            let _scope = tape.scope("attn");
            self.attn.forward(h, dropout)?
        };
        x = x.add(&h)?;
        drop(h);
        let h = {
            let _scope = tape.scope("ln_2");
            self.ln_2.forward(&x)?
        };
        let h = {
            let _scope = tape.scope("mlp");
            self.mlp.forward(h, dropout)?
        };
        x = x.add(&h)?;
        drop(h);
        Ok(x)
    }

    /// Those of `ln_1`, `attn`, `ln_2` and `mlp`, in this order.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        let first = self.ln_1.parameters().chain(self.attn.parameters());
        first.chain(self.ln_2.parameters()).chain(self.mlp.parameters())
    }
}
