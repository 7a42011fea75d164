use super::{Source, split_heads};
use retape_core::{Result, Role, Tape, Tensor, Var, scope};

const HEADS: usize = 4;

/// An encoder with norms after the sums and explicit attention in both directions; a padding mask hides the last
/// tokens.
pub fn loss(tape: &Tape) -> Result<Var> {
    let from = Source::new(tape);
    let (batch, time, width) = (2, 48, 32);
    let ids = from.ids(&[batch, time], 50)?;
    let mut x = tape.within(scope("embeddings").role(Role::Embedding), || {
        from.weight(&[50, width])?.embedding(ids)? + from.weight(&[time, width])?
    })?;
    let hidden: Vec<bool> = (0..time).map(|i| i >= time - 3).collect();
    let hidden = tape.constant(&Tensor::from_slice(&tape.device(), &[time], &hidden)?)?;
    for i in 0..3 {
        x = x.within(scope(format!("encoder.layer.{i}")).role(Role::Block), |x| layer(&from, x, &hidden))?;
    }
    let logits = x.within(scope("classifier").role(Role::Head), |x| from.linear(x.mean_dims(&[1], false)?, 3))?;
    logits.cross_entropy(from.ids(&[batch], 3)?, -1)
}

fn layer(from: &Source<'_>, x: Var, hidden: &Var) -> Result<Var> {
    let attention = |x| attention(from, x, hidden);
    let y = x.clone().within(scope("attention").role(Role::Attention), attention)?;
    let x = from.layer_norm((x + y)?, "attention_norm")?;
    let y = x.clone().within(scope("ffn").role(Role::FeedForward), |x| {
        from.linear(from.linear(x, 128)?.gelu()?.dropout(0.1)?, 32)?.dropout(0.1)
    })?;
    from.layer_norm((x + y)?, "output_norm")
}

fn attention(from: &Source<'_>, x: Var, hidden: &Var) -> Result<Var> {
    let shape = x.shape();
    let q = split_heads(from.linear(x.clone(), 32)?, HEADS)?;
    let k = split_heads(from.linear(x.clone(), 32)?, HEADS)?;
    let v = split_heads(from.linear(x, 32)?, HEADS)?;
    let scores = (q.matmul(k.transpose(-2, -1)?)? * 8f64.sqrt().recip())?;
    let weights = scores.masked_fill(hidden, f64::NEG_INFINITY)?.softmax()?.dropout(0.1)?;
    from.linear(weights.matmul(v)?.transpose(1, 2)?.reshape(&shape)?, 32)?.dropout(0.1)
}
