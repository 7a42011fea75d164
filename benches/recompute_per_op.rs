//! What does a recomputed, and an int8, input of one op cost over a kept one, forward and backward together?
//! The input is the output of another op (a GELU), so that there is something to drop.

#![allow(missing_docs)] // criterion's macros make public items

use criterion::{Criterion, criterion_group, criterion_main};
use retape_benches::normal;
use retape_core::{Mark, Result, Tape, Var};

type Build = fn(Var, &Var) -> Result<Var>;

const OPS: &[(&str, Build)] = &[
    ("linear", |x, w| x.linear(w, None)),
    ("gelu_tanh", |x, _| x.gelu_tanh()),
    ("softmax", |x, _| x.softmax()),
    ("layer_norm", |x, _| x.layer_norm(None, None, 1e-5)),
    ("mul", |x, _| x.clone().mul(x)),
];

fn step(tape: &Tape, x: &Var, w: &Var, op: Build, mark: Mark) -> Result<()> {
    let h = x.clone().gelu_tanh()?;
    h.set_mark(mark)?;
    let loss = op(h, w)?.sum()?;
    tape.backward(&loss)?;
    Ok(())
}

fn bench(c: &mut Criterion) {
    let device = retape_cpu::device();
    let (x0, w0) = (normal(&device, &[1024, 384], 1).unwrap(), normal(&device, &[384, 384], 2).unwrap());
    for (name, op) in OPS {
        let mut group = c.benchmark_group(*name);
        for mark in [Mark::Keep, Mark::Recompute, Mark::Int8(Default::default())] {
            group.bench_function(mark.name(), |b| {
                b.iter(|| {
                    let tape = Tape::new(&device);
                    let (x, w) = (tape.leaf(&x0).unwrap(), tape.leaf(&w0).unwrap());
                    step(&tape, &x, &w, *op, mark).unwrap()
                })
            });
        }
        group.finish();
    }
}

criterion_group! { name = benches; config = Criterion::default().sample_size(20); targets = bench }
criterion_main!(benches);
