//! Causal self-attention, tiled or op by op.
//!
//! `c_attn` packs q, k and v along the last dimension; they are split into views, never copied. The two forms compute
//! the same function and draw the same dropout bits; they differ in what backward reads. The explicit one reads the
//! weights `[B, H, T, T]`, the tiled one only q, k, v, its output and two numbers per row.

use crate::{AttentionForm, Builder, Error, GptConfig, Init, Linear, Result};
use retape_core::{Role, Scope, Var};

/// Multi-head causal self-attention on `[B, T, D]` with H query heads of size S = D / H, and KV heads for keys and
/// values, each serving H / KV query heads in a row.
#[derive(Debug, Clone)]
pub struct CausalSelfAttention {
    scope: Scope,
    /// `[D, D + 2 KV S]`: q, k and v side by side.
    pub c_attn: Linear,
    /// `[D, D]`.
    pub c_proj: Linear,
    /// H.
    pub heads: usize,
    /// KV.
    pub kv_heads: usize,
    /// How it is computed.
    pub form: AttentionForm,
}

impl CausalSelfAttention {
    /// The layers `c_attn` and `c_proj` for a valid configuration.
    pub fn new(builder: &Builder, config: &GptConfig) -> Result<CausalSelfAttention> {
        let (dim, bias) = (config.dim, config.linear_bias);
        let packed = dim + 2 * config.kv_dim();
        let (inner, outer) = (Init::Normal { std: GptConfig::INIT_STD }, Init::Normal { std: config.projection_std() });
        Ok(CausalSelfAttention {
            scope: builder.scope().role(Role::Attention),
            c_attn: Linear::new(&builder.pp("c_attn"), dim, packed, bias, inner)?,
            c_proj: Linear::new(&builder.pp("c_proj"), dim, dim, bias, outer)?,
            heads: config.heads,
            kv_heads: config.kv_heads,
            form: config.attention,
        })
    }

    /// `[B, T, D] -> [B, T, D]`, with weights and result dropped with probability `dropout` (0 to evaluate).
    ///
    /// Paths inside: `c_attn`; explicit: `scores`, `scale`, `causal_mask`, `softmax`, `dropout`, `context`, `merge`; tiled:
    /// `attention`; then `c_proj`, and `dropout` once more on the result. A form's ops without dropout are absent, not
    /// identities.
    pub fn forward(&self, x: Var, dropout: f64) -> Result<Var> {
        x.within(&self.scope, |x| {
            let &[batch, time, dim] = &x.shape()[..] else {
                let reason = format!("needs an input [batch, time, dim], got {:?}", x.shape());
                return Err(Error::Input { layer: "CausalSelfAttention", reason });
            };
            let size = dim / self.heads;
            let kv = self.kv_heads * size;

            let mut parts = self.c_attn.forward(x)?.split(-1, &[dim, kv, kv])?.into_iter();
            let mut part = |heads: usize| {
                let part = parts.next().expect("split gives a part for each size");
                part.reshape(&[batch, time, heads, size])
            };
            let (q, k, v) = (part(self.heads)?, part(self.kv_heads)?, part(self.kv_heads)?);

            let scale = 1.0 / (size as f64).sqrt();
            let mixed = match self.form {
                AttentionForm::Flash => q.attention(k, v, scale, true, dropout)?.reshape(&[batch, time, dim])?,
                AttentionForm::Explicit => self.explicit(q, k, v, scale, dropout)?,
            };
            let y = self.c_proj.forward(mixed)?;
            if dropout > 0.0 { Ok(y.dropout(dropout)?) } else { Ok(y) }
        })
    }

    /// q `[B, T, H, S]`, k and v `[B, T, KV, S]` -> `[B, T, D]`. Where KV < H, the query heads that a kv head serves are
    /// a dimension of their own, over which the products broadcast: `[B, KV, H/KV, T, S]`.
    fn explicit(&self, mut q: Var, mut k: Var, mut v: Var, scale: f64, dropout: f64) -> Result<Var> {
        let shape = q.shape();
        let (batch, time, size) = (shape[0], shape[1], shape[3]);
        let grouped = self.kv_heads != self.heads;
        if grouped {
            q = q.reshape(&[batch, time, self.kv_heads, self.heads / self.kv_heads, size])?;
            k = k.reshape(&[batch, time, self.kv_heads, 1, size])?;
            v = v.reshape(&[batch, time, self.kv_heads, 1, size])?;
        }
        let time_first: &[usize] = if grouped { &[0, 2, 3, 1, 4] } else { &[0, 2, 1, 3] };
        let (q, k, v) = (q.permute(time_first)?, k.permute(time_first)?, v.permute(time_first)?);

        let k = k.transpose(-2, -1)?;
        let scores = q.within("scores", |q| q.matmul(k))?;
        let mut weights = scores.scale(scale)?.causal_mask()?.softmax()?;
        if dropout > 0.0 {
            weights = weights.dropout(dropout)?;
        }
        let mixed = weights.within("context", |weights| weights.matmul(v))?;
        let heads_last: &[usize] = if grouped { &[0, 3, 1, 2, 4] } else { &[0, 2, 1, 3] };
        mixed.within("merge", |mixed| {
            let merged = mixed.permute(heads_last)?.contiguous()?;
            Ok(merged.reshape(&[batch, time, self.heads * size])?)
        })
    }
}
