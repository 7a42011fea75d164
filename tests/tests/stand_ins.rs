//! Tensors of other devices on a tape of the meta device: a closure over a model on the CPU is run dry as it is.

use retape_core::{
    BackwardOptions, DType, Device, Error, Mark, MemoryKind, ParameterId, Policy, Result, Tape, TapeOptions, Tensor,
    Trace, Var, meta, scope,
};
use retape_cpu::device_with_threads;
use retape_nn::data::ByteText;
use retape_nn::{Gpt, GptConfig, Parameter};
use retape_policy::{ModelShape, presets::preset};
use std::rc::Rc;

fn cpu() -> Device {
    device_with_threads(1).unwrap()
}

fn full(device: &Device, shape: &[usize]) -> Tensor {
    Tensor::full(device, shape, DType::F32, 0.5).unwrap()
}

/// What a step took.
#[derive(Debug, PartialEq)]
struct Step {
    peak: u64,
    saved: u64,
    fingerprint: u64,
    /// Live between forward and backward.
    between: u64,
    replayed_flops: u64,
    quantize_traffic: u64,
}

type Forward<'a> = &'a dyn Fn(&Tape) -> Result<Var>;

fn step(device: &Device, policy: Option<Rc<dyn Policy>>, forward: Forward<'_>) -> Step {
    device.meter().reset_peak();
    let tape = Tape::with(device, TapeOptions { policy, seed: Some(3), ..TapeOptions::default() });
    let loss = forward(&tape).unwrap();
    let (saved, between) = (tape.saved_bytes(), device.meter().live());
    let gradients = tape.backward(&loss).unwrap();
    let fingerprint = device.meter().fingerprint();
    drop(gradients);
    let (replayed_flops, quantize_traffic) = (tape.stats().replayed_flops, tape.stats().quantize_traffic);
    Step { peak: device.meter().step_peak(), saved, fingerprint, between, replayed_flops, quantize_traffic }
}

/// A trace of the closure on a meta device takes what the closure takes on the CPU; so does the closure itself, the
/// first time too, unless it makes tensors by itself.
fn check(
    name: &str,
    cpu: &Device,
    policy: Option<Rc<dyn Policy>>,
    makes_tensors: bool,
    forward: Forward<'_>,
) -> Device {
    let measured = step(cpu, policy.clone(), forward);
    let meta = meta();
    if !makes_tensors {
        for _ in 0..3 {
            assert_eq!(step(&meta, policy.clone(), forward), measured, "{name}");
        }
    }
    let live = meta.meter().live();
    for recorded in [None, policy.clone()] {
        let trace = Trace::record(&meta, recorded, forward).unwrap();
        for _ in 0..2 {
            let run = trace.run(policy.clone()).unwrap();
            let run = (run.peak_bytes, run.saved_bytes, run.fingerprint, run.replayed_flops, run.quantize_traffic);
            let Step { peak, saved, fingerprint, replayed_flops, quantize_traffic, .. } = measured;
            assert_eq!(run, (peak, saved, fingerprint, replayed_flops, quantize_traffic), "{name}");
        }
    }
    if !makes_tensors {
        assert_eq!(meta.meter().live(), live, "{name}: what stands for the model stays, and nothing else");
    }
    meta
}

#[test]
fn a_model_of_the_cpu() {
    for dtype in [DType::F32, DType::BF16] {
        let config = GptConfig { dtype, dropout: 0.1, ..GptConfig::named("tiny").unwrap() };
        let cpu = cpu();
        let model = Gpt::new(&cpu, &config, 1).unwrap();
        let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&cpu).unwrap();
        let forward = |tape: &Tape| Ok(model.loss(tape, &tokens, &targets).unwrap());
        let parameters = cpu.meter().live_of(MemoryKind::Parameter);
        let mut meta = None;
        for name in ["none", "full_per_layer", "int8_all"] {
            let policy = preset(name, &ModelShape { blocks: config.layers }).unwrap();
            let device = check(&format!("{dtype} {name}"), &cpu, Some(Rc::new(policy)), false, &forward);
            assert_eq!(device.meter().live_of(MemoryKind::Parameter), parameters);
            assert_eq!(device.meter().live_of(MemoryKind::Input), cpu.meter().live_of(MemoryKind::Input));
            meta = Some(device);
        }
        drop((model, tokens, targets));
        assert_eq!(meta.unwrap().meter().live(), 0, "what stands for a tensor goes with it");
    }
}

#[test]
fn views_share_what_stands_for_their_storage() {
    let (cpu, meta) = (cpu(), meta());
    let x = full(&cpu, &[4, 6]);
    let views = [
        x.clone(),
        x.transpose(0, 1).unwrap(),
        x.narrow(1, 2, 3).unwrap(),
        x.slice(0, 0, 2, 2).unwrap(),
        x.narrow(0, 1, 1).unwrap().expand(&[5, 6]).unwrap(),
        x.narrow(0, 4, 0).unwrap(),
    ];
    let tapes = [Tape::new(&meta), Tape::new(&meta)];
    let mut seen: Option<Tensor> = None;
    for tape in &tapes {
        for view in &views {
            for var in [tape.leaf(view).unwrap(), tape.constant(view).unwrap()] {
                let tensor = var.tensor().unwrap();
                assert_eq!((tensor.layout(), tensor.dtype()), (view.layout(), view.dtype()));
                assert_eq!((tensor.storage_bytes(), tensor.storage().kind()), (96, MemoryKind::Input));
                assert!(*tensor.device() == meta && seen.as_ref().is_none_or(|seen| seen.shares_storage(&tensor)));
                seen = Some(tensor);
            }
        }
    }
    assert_eq!(meta.meter().live(), 96);
    // A view alone takes the whole storage, as it does on its own device.
    let other = retape_core::meta();
    let _part = Tape::new(&other).constant(&views[2]).unwrap();
    assert_eq!(other.meter().live_of(MemoryKind::Input), 96);
}

#[test]
fn it_lives_as_long_as_its_original_or_the_tape_stores_it() {
    let (cpu, meta) = (cpu(), meta());
    let live = || meta.meter().live();
    let x = full(&cpu, &[8]);
    drop(Tape::new(&meta).leaf(&x).unwrap());
    assert_eq!(live(), 32, "the original is there");
    let view = x.narrow(0, 0, 1).unwrap();
    drop(x);
    assert_eq!(live(), 32, "a view of it is there");
    drop(view);
    assert_eq!(live(), 0);

    let x = full(&cpu, &[8]);
    let tape = Tape::new(&meta);
    let y = tape.leaf(&x).unwrap().gelu().unwrap().sum().unwrap();
    assert_eq!(tape.node_count(), 3);
    drop(x);
    assert_eq!(cpu.meter().live(), 0, "the tape holds nothing of the original");
    assert!(live() >= 32, "the tape stores it");
    tape.backward(&y).unwrap();
    drop((y, tape));
    assert_eq!(live(), 0);

    // Counted as the original is, also later.
    let x = full(&cpu, &[8]);
    let tape = Tape::new(&meta);
    let leaf = tape.constant(&x).unwrap();
    assert_eq!(meta.meter().live_of(MemoryKind::Input), 32);
    x.storage().set_kind(MemoryKind::Parameter);
    assert_eq!((meta.meter().live_of(MemoryKind::Input), meta.meter().live_of(MemoryKind::Parameter)), (0, 32));
    let activation = x.copy(MemoryKind::Activation).unwrap();
    let _activation = tape.constant(&activation).unwrap();
    assert_eq!(meta.meter().live_of(MemoryKind::Activation), 32);
    drop(leaf);
}

#[test]
fn devices_and_their_storages_are_apart() {
    let (one, other) = (cpu(), cpu());
    let (x, y) = (full(&one, &[4, 4]), full(&other, &[4, 4]));
    let of_meta = full(&meta(), &[4, 4]);
    let meta = meta();
    let own = full(&meta, &[4, 4]);
    let tape = Tape::new(&meta);
    let vars = [&x, &y, &of_meta, &own].map(|t| tape.leaf(t).unwrap());
    assert_eq!(meta.meter().live(), 4 * 64);
    let [x_leaf, ..] = &vars;
    let mut sum = x_leaf.clone();
    for var in &vars[1..] {
        sum = sum.matmul(var).unwrap().add(var).unwrap();
    }
    let loss = sum.sum().unwrap();
    let gradients = tape.backward(&loss).unwrap();
    for var in &vars {
        let gradient = gradients.of(var).unwrap();
        assert!(*gradient.device() == meta && gradient.shape() == [4, 4]);
    }
    // A tape of a device that computes takes its own tensors only.
    let tape = Tape::new(&one);
    for tensor in [&y, &own] {
        for result in [tape.leaf(tensor), tape.constant(tensor), tape.parameter(ParameterId::unique(), tensor, true)] {
            assert!(matches!(result, Err(Error::DeviceMismatch { .. })), "{result:?}");
        }
        let leaf = tape.leaf(&x).unwrap();
        let from = tape.backward_from(&[(&leaf, tensor)], BackwardOptions::RETAIN);
        assert!(matches!(from, Err(Error::DeviceMismatch { .. })), "{from:?}");
    }
}

/// An optimizer replaces parameters between recordings; a frozen one stays without a gradient; the same one on two
/// tapes.
#[test]
fn parameters() {
    let (cpu, meta) = (cpu(), meta());
    let w = Parameter::new("w", full(&cpu, &[8, 8])).unwrap();
    let frozen = Parameter::new("frozen", full(&cpu, &[8, 8])).unwrap();
    frozen.set_requires_grad(false);
    let empty = Parameter::new("empty", full(&cpu, &[0, 8])).unwrap();
    let x = full(&cpu, &[4, 8]);
    let forward = |tape: &Tape| {
        let h = tape.constant(&x)?.matmul(w.var(tape).unwrap())?.gelu()?;
        let h = h.matmul(frozen.var(tape).unwrap())?.matmul(w.var(tape).unwrap())?;
        h.cat([empty.var(tape).unwrap()], 0)?.square()?.sum()
    };
    for _ in 0..3 {
        check("parameters", &cpu, None, false, &forward);
        let tapes = [Tape::new(&meta), Tape::new(&meta)];
        let losses = tapes.each_ref().map(|tape| forward(tape).unwrap());
        assert_eq!(meta.meter().live_of(MemoryKind::Parameter), 2 * 256, "each once, on two tapes");
        for (tape, loss) in tapes.iter().zip(&losses) {
            let gradients = tape.backward(loss).unwrap();
            assert_eq!(gradients.parameter(w.id()).unwrap().shape(), [8, 8]);
            assert_eq!(gradients.parameter(empty.id()).unwrap().shape(), [0, 8]);
            assert!(gradients.parameter(frozen.id()).is_none() && gradients.len() == 2);
        }
        drop((losses, tapes));
        w.set(full(&cpu, &[8, 8])).unwrap();
        assert_eq!(meta.meter().live_of(MemoryKind::Parameter), 256, "the replaced tensor's is gone");
    }
    // Of another shape it is another parameter, as on its own device.
    let (tape, id) = (Tape::new(&meta), ParameterId::unique());
    let _leaf = tape.parameter(id, &x, true).unwrap();
    let error = tape.parameter(id, &full(&cpu, &[2]), true).unwrap_err().to_string();
    assert!(error.contains("f32[4, 8]") && error.contains("f32[2]"), "{error}");
}

/// A trace outlives the tensors that it was recorded with, and a device what stood there.
#[test]
fn a_trace_keeps_what_stands_for_its_inputs() {
    let (cpu, meta) = (cpu(), meta());
    let x = full(&cpu, &[32, 32]);
    let forward = |tape: &Tape, x: &Tensor| tape.leaf(x)?.gelu()?.square()?.sum();
    let measured = step(&cpu, None, &|tape| forward(tape, &x));
    let trace = Trace::record(&meta, None, |tape| forward(tape, &x)).unwrap();
    drop(x);
    assert_eq!(trace.run(None).unwrap().peak_bytes, measured.peak);
    // Something else on the device is no part of it.
    let other = full(&cpu, &[64, 64]);
    let _other = Tape::new(&meta).constant(&other).unwrap();
    assert_eq!(trace.run(None).unwrap().peak_bytes, measured.peak);
    drop((trace, other, _other));
    assert_eq!(meta.meter().live(), 0);
}

/// Tensors that forward makes on the CPU: used at once or later, for long or not, views of them, and inputs that it
/// gets to own and lets go of.
#[test]
fn what_forward_makes_on_the_cpu() {
    let cpu = cpu();
    let x = full(&cpu, &[64, 64]);
    let mask = |tape: &Tape| {
        let h = tape.leaf(&x)?.gelu()?;
        let mask = full(&cpu, &[64, 64]);
        let h = h.mul(tape.constant(&mask)?)?;
        drop(mask);
        h.tanh()?.square()?.sum()
    };
    let early = |tape: &Tape| {
        let early = full(&cpu, &[64, 128]);
        let h = tape.leaf(&x)?.exp()?.tanh()?;
        drop(tape.no_grad(|| h.clone().cat([h.clone()], -1)?.scale(2.0))?);
        let sum = tape.constant(&early)?.sum()?;
        let h = h.square()?.square()?;
        drop(early);
        h.sum()?.add(sum)
    };
    let in_scopes = |tape: &Tape| {
        let mut h = tape.leaf(&x)?;
        for _ in 0..3 {
            h = tape.within(scope("block").mark(Mark::Recompute), || {
                let positions = full(&cpu, &[64]);
                let turned = positions.expand(&[64, 64])?.transpose(0, 1)?;
                let h = h.clone().mul(tape.constant(&positions)?)?.gelu()?;
                h.add(tape.constant(&turned)?)?.tanh()
            })?;
        }
        h.sum()
    };
    check("a mask", &cpu, None, true, &mask);
    check("early", &cpu, None, true, &early);
    check("in scopes", &cpu, None, true, &in_scopes);

    let owned = |tape: &Tape, x: Tensor| {
        let h = tape.leaf(&x)?.square()?;
        drop(x);
        h.exp()?.tanh()?.sum()
    };
    let mut inputs = vec![full(&cpu, &[64, 64]), full(&cpu, &[64, 64])];
    let trace = Trace::record(&meta(), None, |tape| owned(tape, inputs.pop().unwrap())).unwrap();
    cpu.meter().reset_peak();
    let (others, tape) = (x.storage_bytes() as u64, Tape::new(&cpu));
    let loss = owned(&tape, inputs.pop().unwrap()).unwrap();
    drop(tape.backward(&loss).unwrap());
    assert_eq!(trace.run(None).unwrap().peak_bytes, cpu.meter().step_peak() - others);
}

#[test]
fn a_gradient_to_start_from() {
    let cpu = cpu();
    let (x, g) = (full(&cpu, &[16, 16]), full(&cpu, &[16, 16]));
    let meta = meta();
    let mut peaks = Vec::new();
    for device in [&cpu, &meta] {
        device.meter().reset_peak();
        let tape = Tape::new(device);
        let leaf = tape.leaf(&x).unwrap();
        let y = leaf.clone().gelu().unwrap();
        let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
        assert!(gradients.of(&leaf).unwrap().device() == device);
        peaks.push(device.meter().step_peak());
    }
    assert_eq!(peaks[0], peaks[1]);
}

/// A limit on the meta device counts them, and what was refused leaves nothing.
#[test]
fn a_limit_counts_them() {
    let (cpu, meta) = (cpu(), meta());
    let x = full(&cpu, &[16]);
    meta.meter().set_limit(Some(63));
    let refused = Tape::new(&meta).leaf(&x);
    assert!(matches!(refused, Err(Error::OutOfMemory { requested: 64, .. })), "{refused:?}");
    assert_eq!(meta.meter().live(), 0);
    meta.meter().set_limit(Some(64));
    let _leaf = Tape::new(&meta).leaf(&x).unwrap();
    assert_eq!(meta.meter().live(), 64);
}
