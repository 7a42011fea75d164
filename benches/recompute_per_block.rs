//! What does each preset cost on one transformer block of w1's size, forward and backward together?

#![allow(missing_docs)] // criterion's macros make public items

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use retape_core::{Policy, Tape, TapeOptions};
use retape_nn::data::ByteText;
use retape_nn::{AttentionForm, Gpt, GptConfig};
use retape_policy::{ModelShape, PRESETS, presets::preset};
use std::rc::Rc;

fn bench(c: &mut Criterion) {
    let device = retape_cpu::device();
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        let config = GptConfig { layers: 1, attention, ..GptConfig::named("w1").unwrap() };
        let model = Gpt::new(&device, &config, 1).unwrap();
        let batch = ByteText::moby_dick().batches(config.seq, config.batch, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let mut group = c.benchmark_group(format!("block, {attention:?} attention"));
        for known in PRESETS {
            let policy: Rc<dyn Policy> = Rc::new(preset(known.name, &ModelShape { blocks: 1 }).unwrap());
            group.bench_function(BenchmarkId::from_parameter(known.name), |b| {
                b.iter(|| {
                    let options = TapeOptions { policy: Some(policy.clone()), ..TapeOptions::default() };
                    let tape = Tape::with(&device, options);
                    let loss = model.loss(&tape, &tokens, &targets).unwrap();
                    tape.backward(&loss).unwrap()
                })
            });
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(10); targets = bench }
criterion_main!(benches);
