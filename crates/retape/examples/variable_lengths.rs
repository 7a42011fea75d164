//! Training on batches of very different lengths under one byte budget.
//!
//! Three ways: a plan for each length, from a cache; the plan for the longest length, for all; and the fixed
//! threshold of `length_adaptive`. Prints what each takes by length, from dry runs, then runs a step of each length
//! on the CPU.
//!
//! `cargo run --release --example variable_lengths [BUDGET_MIB] [LONGEST]`

use retape::Trace;
use retape::nn::{Gpt, GptConfig};
use retape::policy::{ModelShape, PlanCache, Planner, PlannerOptions, parse};
use retape::prelude::*;
use std::rc::Rc;
use std::time::{Duration, Instant};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A model whose attention stores its scores, so that length matters. It has one position more than the longest
/// batch, so that all batches record the same ops.
fn config(longest: usize) -> Result<GptConfig> {
    Ok(GptConfig { seq: longest + 1, attention: AttentionForm::Explicit, ..GptConfig::named("w2")? })
}

fn batch(device: &Device, length: usize) -> Result<Tensor> {
    Ok(Tensor::full(device, &[1, length], DType::I64, 1.0)?)
}

fn record(model: &Gpt, device: &Device, length: usize) -> Result<Trace> {
    let tokens = batch(device, length)?;
    Ok(Trace::record(device, None, |tape| model.loss(tape, &tokens, &tokens))?)
}

fn main() -> Result<()> {
    let argument = |n: usize, default: u64| std::env::args().nth(n).map_or(Ok(default), |text| text.parse());
    let (budget, longest) = (argument(1, 1024)? << 20, argument(2, 4096)? as usize);
    let config = config(longest)?;
    let lengths: Vec<usize> =
        (6..).map(|k| 1 << k).flat_map(|n| [n, n / 2 * 3]).take_while(|&n| n <= longest).collect();
    let meta = retape::meta();
    let on_meta = Gpt::new(&meta, &config, 0)?;

    let mut plans = PlanCache::new(budget, PlannerOptions::default());
    let for_longest = Planner::new(record(&on_meta, &meta, longest)?, PlannerOptions::default())?.plan(budget)?;
    let adaptive = Rc::new(parse("length_adaptive", &ModelShape { blocks: config.layers })?);
    println!("{:>6} | a plan for each | the longest's | length_adaptive  of {} MiB", "length", budget >> 20);
    let mut policies: Vec<[Rc<dyn Policy>; 3]> = Vec::new();
    for &length in &lengths {
        let trace = record(&on_meta, &meta, length)?;
        let own = plans.get(&length, |&length| record(&on_meta, &meta, length))?;
        let three: [Rc<dyn Policy>; 3] = [own.policy(), for_longest.policy(), adaptive.clone()];
        let columns = three.iter().map(|policy| {
            let run = trace.run(Some(policy.clone()))?;
            let over = if run.peak_bytes > budget { "!" } else { " " };
            Ok(format!("{:>6}{over} +{:>4.1}%", run.peak_bytes >> 20, run.overhead_percent()))
        });
        println!("{length:>6} | {}", columns.collect::<Result<Vec<_>>>()?.join(" | "));
        policies.push(three);
    }
    println!("MiB of the step's peak (!: over the budget) and replayed FLOPs");

    let device = retape::cpu();
    let model = Gpt::new(&device, &config, 0)?;
    let mut times = [Duration::ZERO; 3];
    for (&length, three) in lengths.iter().zip(&policies) {
        let tokens = batch(&device, length)?;
        for (policy, time) in three.iter().zip(&mut times) {
            device.meter().reset_peak();
            let start = Instant::now();
            let tape = Tape::with(&device, TapeOptions { policy: Some(policy.clone()), ..TapeOptions::default() });
            let loss = model.loss(&tape, &tokens, &tokens)?;
            tape.backward(&loss)?;
            *time += start.elapsed();
        }
    }
    let [own, one, adaptive] = times.map(|time| time.as_secs_f64());
    println!("a step of each length on the CPU: {own:.2} s, {one:.2} s, {adaptive:.2} s");
    Ok(())
}
