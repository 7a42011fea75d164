use super::Source;
use retape_core::{Result, Role, Tape, Var, scope};

const WIDTH: usize = 64;
/// Heads of keys and values, heads of queries that share each, and the size of a head.
const KV_HEADS: usize = 2;
const SHARED: usize = 2;
const SIZE: usize = 16;

/// A decoder with RMS norms before the layers, grouped heads of keys and values, a gated feed-forward network and no
/// biases.
pub fn loss(tape: &Tape) -> Result<Var> {
    let from = Source::new(tape);
    let (batch, time, words) = (2, 64, 80);
    let ids = from.ids(&[batch, time], words)?;
    let table = from.weight(&[words as usize, WIDTH])?;
    let mut x = tape.within(scope("model.embed_tokens").role(Role::Embedding), || table.embedding(ids))?;
    for i in 0..4 {
        x = x.within(scope(format!("model.layers.{i}")).role(Role::Block), |x| layer(&from, x))?;
    }
    let x = norm(&from, x, "model.norm")?;
    let logits =
        x.within(scope("lm_head").role(Role::Head), |x| x.linear(from.weight(&[WIDTH, words as usize])?, None))?;
    logits.cross_entropy(from.ids(&[batch, time], words)?, -1)
}

fn layer(from: &Source<'_>, x: Var) -> Result<Var> {
    let y = norm(from, x.clone(), "input_layernorm")?;
    let x = (x + y.within(scope("self_attn").role(Role::Attention), |y| attention(from, y))?)?;
    let y = norm(from, x.clone(), "post_attention_layernorm")?;
    x + y.within(scope("mlp").role(Role::FeedForward), |y| {
        let gate = y.clone().linear(from.weight(&[WIDTH, 160])?, None)?.silu()?;
        (gate * y.linear(from.weight(&[WIDTH, 160])?, None)?)?.linear(from.weight(&[160, WIDTH])?, None)
    })?
}

fn norm(from: &Source<'_>, x: Var, name: &str) -> Result<Var> {
    x.within(scope(name).role(Role::Norm), |x| x.rms_norm(&[WIDTH], Some(from.weight(&[WIDTH])?), Some(1e-6)))
}

/// Scores have five dimensions: batch, heads of keys, queries that share one, and times.
fn attention(from: &Source<'_>, x: Var) -> Result<Var> {
    let (batch, time) = (x.shape()[0], x.shape()[1]);
    let project = |x: Var, shared: usize| {
        let y = x.linear(from.weight(&[WIDTH, KV_HEADS * shared * SIZE])?, None)?;
        y.reshape(&[batch, time, KV_HEADS, shared, SIZE])?.permute(&[0, 2, 3, 1, 4])
    };
    let (q, k, v) = (project(x.clone(), SHARED)?, project(x.clone(), 1)?, project(x, 1)?);
    let scores = (q.matmul(k.transpose(-2, -1)?)? * 0.25)?;
    let context = scores.causal_mask()?.softmax()?.matmul(v)?;
    let joined = context.permute(&[0, 3, 1, 2, 4])?.reshape(&[batch, time, WIDTH])?;
    joined.linear(from.weight(&[WIDTH, WIDTH])?, None)
}
