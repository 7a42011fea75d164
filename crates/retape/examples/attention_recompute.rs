//! Two ways not to store attention's scores: a tiled kernel that computes them again inside (and stores two numbers per
//! row), and marks that replay the ops of explicit attention. Time and bytes of one causal attention by length.
//!
//! `cargo run --release --example attention_recompute [LONGEST]`

use retape::prelude::*;
use std::time::Instant;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const HEADS: usize = 2;
const SIZE: usize = 64;

/// softmax(q k^T / sqrt(S)) v on [1, H, T, S], op by op; `mark` on what is as large as the scores.
fn explicit(q: Var, k: Var, v: Var, mark: Mark) -> Result<Var> {
    q.within(scope("attn").mark(mark), |q| {
        let scores = q.matmul(k.transpose(-2, -1)?)?.scale(1.0 / (SIZE as f64).sqrt())?;
        Ok(scores.causal_mask()?.softmax()?.matmul(v)?)
    })
}

/// Seconds of the better of `rounds` steps, and the peak's MiB beyond q, k, v and their gradients.
fn run(device: &Device, time: usize, rounds: usize, form: &str) -> Result<(f64, f64)> {
    let input = |seed: u64| -> Result<Tensor> {
        let shape = if form == "tiled" { [1, time, HEADS, SIZE] } else { [1, HEADS, time, SIZE] };
        let values: Vec<f32> =
            (0..time * HEADS * SIZE).map(|i| ((i as u64 * 2_654_435_761 + seed) % 1000) as f32 / 500.0 - 1.0).collect();
        Ok(Tensor::from_slice(device, &shape, &values)?)
    };
    let (q, k, v) = (input(1)?, input(2)?, input(3)?);
    let mut best = f64::INFINITY;
    let mut peak = 0;
    for _ in 0..rounds {
        device.meter().reset_peak();
        let before = device.meter().step_live();
        let start = Instant::now();
        let tape = Tape::new(device);
        let (q, k, v) = (tape.leaf(&q)?, tape.leaf(&k)?, tape.leaf(&v)?);
        let out = match form {
            "tiled" => q.attention(k, v, 1.0 / (SIZE as f64).sqrt(), true, 0.0)?,
            "replayed" => explicit(q, k, v, Mark::Recompute)?,
            _ => explicit(q, k, v, Mark::Keep)?,
        };
        let loss = out.square()?.sum()?;
        tape.backward(&loss)?;
        best = best.min(start.elapsed().as_secs_f64());
        peak = device.meter().step_peak() - before;
    }
    Ok((best, peak as f64 / 1048576.0))
}

fn main() -> Result<()> {
    let longest: usize = std::env::args().nth(1).map_or(Ok(4096), |n| n.parse())?;
    let device = retape::cpu();
    println!("{HEADS} heads of {SIZE}, causal, batch 1, f32; forward and backward, best of some steps");
    println!("{:>6} | {:>18} | {:>18} | {:>18}", "length", "tiled", "explicit, replayed", "explicit, kept");
    for time in (9..).map(|k| 1 << k).take_while(|&t| t <= longest) {
        let rounds = (8192 / time).clamp(2, 8);
        let columns = ["tiled", "replayed", "kept"].map(|form| {
            run(&device, time, rounds, form).map(|(seconds, mib)| format!("{:>7.1} ms {mib:>4.0} MiB", 1e3 * seconds))
        });
        let [a, b, c] = columns;
        println!("{time:>6} | {:>18} | {:>18} | {:>18}", a?, b?, c?);
    }
    Ok(())
}
