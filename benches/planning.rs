//! How long does planning take, by the number of layers: exploring, and the plan for a budget half-way? The planner
//! has one thread; its CPU time is measured, so that other work on the machine shows less.

#![allow(missing_docs)] // criterion's macros make public items

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BatchSize, BenchmarkId, Criterion, SamplingMode, criterion_group, criterion_main};
use retape_core::{DType, Int8Spec, Mark, Tensor, Trace, meta};
use retape_nn::{Gpt, GptConfig};
use retape_policy::{LossyUse, Planner, PlannerOptions};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// CPU time of this thread.
struct ThreadTime;

impl Measurement for ThreadTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }
    fn end(&self, start: Duration) -> Duration {
        self.start() - start
    }
    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }
    fn zero(&self) -> Duration {
        Duration::ZERO
    }
    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }
    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

fn trace(config: &GptConfig) -> Trace {
    let device = meta();
    let model = Gpt::new(&device, config, 1).unwrap();
    let ids = || Tensor::full(&device, &[config.batch, config.seq], DType::I64, 0.0).unwrap();
    let (tokens, targets) = (ids(), ids());
    Trace::record(&device, None, |tape| model.loss(tape, &tokens, &targets)).unwrap()
}

fn plan(trace: Trace, int8: bool) {
    let lossy = int8.then(|| LossyUse::from_iter([Mark::Int8(Int8Spec::default())]));
    let planner = Planner::new(trace, PlannerOptions { lossy, ..PlannerOptions::default() }).unwrap();
    planner.plan(planner.smallest().midpoint(planner.largest())).unwrap();
}

fn bench(c: &mut Criterion<ThreadTime>) {
    let small = GptConfig::named("gpt2-small").unwrap();
    let of_layers = [2, 4, 8, 12, 24, 48, 96].map(|layers| (format!("{layers} layers"), layers, small.clone()));
    let named = ["gpt2-xl", "gpt3-175b"].map(|name| {
        let config = GptConfig::named(name).unwrap();
        (name.to_owned(), config.layers, config)
    });
    for int8 in [false, true] {
        let mut group = c.benchmark_group(if int8 { "with int8" } else { "exact" });
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        for (name, layers, config) in of_layers.iter().chain(&named) {
            let config = GptConfig { layers: *layers, ..config.clone() };
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter_batched(|| trace(&config), |trace| plan(trace, int8), BatchSize::PerIteration)
            });
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = Criterion::default().with_measurement(ThreadTime); targets = bench }
criterion_main!(benches);
