//! What int8 does to the gradients, layer by layer: of a value that one gradient formula reads (a leaf), and of a
//! value that a block is replayed from (a boundary); rounded to nearest and stochastically; beside the gradients' own
//! noise, which is the distance between the gradients of two batches.
//!
//! `cargo run --release --example int8_error [MODEL] [TRAINING_STEPS]`

use retape::nn::data::ByteText;
use retape::nn::{AdamW, AdamWConfig, Gpt, GptConfig};
use retape::policy::{Rule, RuleSet};
use retape::prelude::*;
use std::rc::Rc;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn gradients(model: &Gpt, batch: &(Tensor, Tensor), rules: &str) -> Result<Gradients> {
    let rules = rules.split(' ').filter(|r| !r.is_empty()).map(str::parse::<Rule>).collect::<Result<Vec<_>, _>>()?;
    let policy: Rc<dyn Policy> = Rc::new(RuleSet::new(rules));
    // One seed for all: rounding is all that differs.
    let options = TapeOptions { policy: Some(policy), seed: Some(0), ..TapeOptions::default() };
    let tape = Tape::with(batch.0.device(), options);
    let loss = model.loss(&tape, &batch.0, &batch.1)?;
    Ok(tape.backward(&loss)?)
}

fn main() -> Result<()> {
    let name = std::env::args().nth(1).unwrap_or("tiny".into());
    let steps: u64 = std::env::args().nth(2).map_or(Ok(0), |n| n.parse())?;
    let config = GptConfig::named(&name)?;
    let device = retape::cpu();
    let model = Gpt::new(&device, &config, 0)?;
    let batches = ByteText::moby_dick().batches(config.seq, config.batch, 0)?;
    let config_of_adamw = AdamWConfig { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = AdamW::decay_matrices(model.parameters(), config_of_adamw)?;
    let mut random = Random::new(0);
    for step in 0..steps {
        let (tokens, targets) = batches.batch(step).tensors(&device)?;
        let tape = Tape::with(&device, TapeOptions { seed: Some(random.next_seed()), ..TapeOptions::default() });
        let loss = model.loss(&tape, &tokens, &targets)?;
        optimizer.step(&tape.backward(&loss)?, 1.0)?;
    }

    let batch = batches.batch(steps).tensors(&device)?;
    let exact = gradients(&model, &batch, "")?;
    let noise = gradients(&model, &batches.batch(steps + 1).tensors(&device)?, "")?.distance(&exact)?;
    println!("{name} after {steps} steps. Relative L2 error of all gradients, in percent of their norm:");
    println!("the noise between two batches: {:.1}", 100.0 * noise);
    println!("{:28} | leaf: near  stoch | boundary: near  stoch", "one value as int8");
    let error = |rules: String| {
        Ok::<f64, Box<dyn std::error::Error>>(100.0 * gradients(&model, &batch, &rules)?.distance(&exact)?)
    };
    let mut all = [0.0f64; 4];
    for block in 0..config.layers - 1 {
        for value in [format!("blocks.{block}"), format!("blocks.{block}.add"), format!("blocks.{block}.mlp.c_fc")] {
            // What follows in the block, or the next one, is replayed from it.
            let next = match value.rsplit('.').next() {
                Some("add") => format!(
                    "blocks.{block}.ln_2=recompute blocks.{block}.mlp.c_fc=recompute blocks.{block}.mlp.gelu=recompute"
                ),
                Some("c_fc") => format!("blocks.{block}.mlp.gelu=recompute"),
                _ => format!("blocks.{}.**=recompute", block + 1),
            };
            let mut row = Vec::new();
            for (after, rounding) in
                [("", "nearest"), ("", "stochastic"), (&next[..], "nearest"), (&next[..], "stochastic")]
            {
                row.push(error(format!("{value}=int8:group=64:rounding={rounding} {after}"))?);
            }
            row.iter().zip(&mut all).for_each(|(e, sum)| *sum += e * e);
            println!("{value:28} |     {:.4} {:.4} |         {:.4} {:.4}", row[0], row[1], row[2], row[3]);
        }
    }
    let [a, b, c, d] = all.map(f64::sqrt);
    println!("{:28} |     {a:.4} {b:.4} |         {c:.4} {d:.4}", "root of the sum of squares");
    for rounding in ["nearest", "stochastic"] {
        println!("everything as int8, {rounding}: {:.4}", error(format!("**=int8:group=64:rounding={rounding}"))?);
    }
    for group in [16, 32, 128, 256] {
        println!("everything as int8, groups of {group}: {:.4}", error(format!("**=int8:group={group}"))?);
    }
    Ok(())
}
