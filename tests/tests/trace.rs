//! A recorded forward pass that is run again takes the memory of the model itself, to the byte and in the same order.

use retape_core::{
    BackwardOptions, DType, Device, Error, Mark, MemoryKind, ParameterId, Policy, Result, Tape, TapeOptions, Tensor,
    Trace, Var,
};
use retape_core::{meta, scope};
use retape_nn::data::ByteText;
use retape_nn::{AttentionForm, Gpt, GptConfig};
use retape_policy::{ModelShape, PRESETS, presets::preset};
use retape_tests::programs::RandomMarks;
use std::rc::Rc;

/// Peak, saved bytes, fingerprint and replayed FLOPs.
type Figures = (u64, u64, u64, u64);

fn run(device: &Device, policy: Option<Rc<dyn Policy>>, forward: &dyn Fn(&Tape) -> Result<Var>) -> Figures {
    device.meter().reset_peak();
    let tape = Tape::with(device, TapeOptions { policy, ..TapeOptions::default() });
    let loss = forward(&tape).unwrap();
    let saved = tape.saved_bytes();
    let gradients = tape.backward(&loss).unwrap();
    let fingerprint = device.meter().fingerprint();
    drop(gradients);
    (device.meter().step_peak(), saved, fingerprint, tape.stats().replayed_flops)
}

fn check(name: &str, device: &Device, trace: &Trace, policy: Rc<dyn Policy>, forward: &dyn Fn(&Tape) -> Result<Var>) {
    let own = run(device, Some(policy.clone()), forward);
    let again = trace.run(Some(policy)).unwrap();
    assert_eq!((again.peak_bytes, again.saved_bytes, again.fingerprint, again.replayed_flops), own, "{name}");
    let listed: u64 = again.replays.iter().map(|&(node, count)| trace.nodes()[node].flops * count).sum();
    assert_eq!(listed, again.replayed_flops, "{name}");
}

#[test]
fn a_model_under_every_preset() {
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        for tied in [false, true] {
            let config = GptConfig { attention, tied, dropout: 0.1, ..GptConfig::named("tiny").unwrap() };
            let device = meta();
            let model = Gpt::new(&device, &config, 1).unwrap();
            let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
            let (tokens, targets) = batch.tensors(&device).unwrap();
            let forward = |tape: &Tape| Ok(model.loss(tape, &tokens, &targets).unwrap());
            let trace = Trace::record(&device, None, forward).unwrap();
            let base = device.meter().live();
            for p in PRESETS {
                let policy = Rc::new(preset(p.name, &ModelShape { blocks: config.layers }).unwrap());
                check(p.name, &device, &trace, policy, &forward);
                assert_eq!(device.meter().live(), base, "{}: a run leaves nothing", p.name);
            }
        }
    }
}

/// Every call of a tape: scopes with marks, segments, checkpoints, marks by value, constants that only the tape
/// holds, detached values, values without a gradient, parameters that are used again after their handle went, handles
/// that outlive their scope.
fn all_kinds(tape: &Tape, x: &Tensor, w: &Tensor) -> Result<Var> {
    let id = ParameterId::unique();
    let mut h = tape.leaf(x)?.matmul(&tape.parameter(id, w, true)?)?;
    {
        let _scope = tape.scope(scope("a").mark(Mark::Recompute));
        h = h.gelu()?.square()?;
    }
    {
        let _scope = tape.scope(scope("b").segment());
        let bias = tape.constant(&Tensor::full(x.device(), &[64], DType::F32, 1.0)?)?;
        h = h.add(&bias)?.softmax()?;
        let frozen = tape.no_grad(|| h.clone().exp()?.scale(2.0))?;
        h = h.mul(&frozen)?;
    }
    let kept = h.clone().detach()?;
    h = tape.within(scope("c").mark(Mark::Recompute), || h.matmul(&tape.parameter(id, w, true)?)?.gelu())?;
    h = h.tanh()?.recompute()?;
    let parts = h.split(-1, &[16, 48])?;
    h = parts[1].clone().cat([parts[0].clone()], -1)?;
    drop(parts);
    h.mul(&kept)?.sum()
}

#[test]
fn every_call_of_a_tape() {
    let device = meta();
    let x = Tensor::full(&device, &[64, 64], DType::F32, 0.0).unwrap();
    let w = Tensor::full(&device, &[64, 64], DType::F32, 0.0).unwrap();
    let forward = |tape: &Tape| all_kinds(tape, &x, &w);
    let trace = Trace::record(&device, None, forward).unwrap();
    for seed in 0..300 {
        check("random marks", &device, &trace, Rc::new(RandomMarks::new(seed, true)), &forward);
    }
    let given: Vec<_> = trace.values().iter().filter_map(|v| Some((v.op, v.given?))).collect();
    assert_eq!(given, [("gelu", Mark::Recompute), ("matmul", Mark::Recompute), ("tanh", Mark::Recompute)]);
}

/// Tensors that forward makes: one that is two leaves, and a parameter that is asked for again after its handle went.
#[test]
fn what_forward_makes_itself() {
    let device = meta();
    let shared = |tape: &Tape| {
        let x = Tensor::full(&device, &[128, 128], DType::F32, 0.0)?;
        let (a, b) = (tape.leaf(&x)?, tape.constant(&x)?);
        drop(x);
        let h = a.clone().gelu()?.mul(&b)?;
        drop((a, b));
        h.tanh()?.square()?.sum()
    };
    let again = |tape: &Tape| {
        let w = Tensor::full(&device, &[64, 64], DType::F32, 0.0)?;
        let id = ParameterId::unique();
        let h = tape.parameter(id, &w, true)?.gelu()?;
        h.matmul(&tape.parameter(id, &w, true)?)?.sum()
    };
    let check = |forward: &dyn Fn(&Tape) -> Result<Var>| {
        let trace = Trace::record(&device, None, forward).unwrap();
        assert_eq!(device.meter().live(), 0, "a trace holds nothing that forward made");
        let own = run(&device, None, forward);
        let run = trace.run(None).unwrap();
        assert_eq!((run.peak_bytes, run.saved_bytes), (own.0, own.1));
    };
    check(&shared);
    check(&again);
    let x = Tensor::full(&device, &[4], DType::F32, 0.0).unwrap();
    let backward = Trace::record(&device, None, |tape| {
        let loss = tape.leaf(&x)?.gelu()?.sum()?;
        tape.backward_with(&loss, BackwardOptions::RETAIN)?;
        Ok::<_, Error>(loss)
    });
    assert!(matches!(backward, Err(Error::NoGradient { .. })), "{backward:?}");
}

#[test]
fn what_cannot_be_recorded_says_so() {
    let x = Tensor::full(&meta(), &[2], DType::F32, 0.0).unwrap();
    let constant = Trace::record(x.device(), None, |tape| tape.constant(&x)?.sum());
    assert!(matches!(constant, Err(Error::NoGradient { .. })), "{constant:?}");
    let cpu = Trace::record(&retape_cpu::device(), None, |tape| tape.leaf(&x)?.sum());
    assert!(matches!(cpu, Err(Error::DeviceMismatch { .. })), "{cpu:?}");
    let other = Tape::new(x.device()).leaf(&x).unwrap().sum().unwrap();
    let foreign = Trace::record(x.device(), None, |_| Ok::<_, Error>(other.clone()));
    assert!(matches!(foreign, Err(Error::OtherTape { .. })), "{foreign:?}");
    drop(other);
    let wrong = Trace::record(x.device(), None, |tape| tape.leaf(&x)?.gelu()?.reshape(&[3])?.sum());
    assert!(wrong.is_err());
    assert_eq!(x.device().meter().live_of(MemoryKind::Activation), 0);
}

fn peak_of(device: &Device, forward: impl FnOnce(&Tape) -> Result<Var>) -> u64 {
    device.meter().reset_peak();
    let tape = Tape::new(device);
    let loss = forward(&tape).unwrap();
    let _gradients = tape.backward(&loss).unwrap();
    device.meter().step_peak()
}

/// Logits that are still held when backward runs, by a handle or as a tensor, are held in the trace's runs too.
#[test]
fn what_forward_leaves_behind_is_held_through_backward() {
    let cpu = retape_cpu::device_with_threads(1).unwrap();
    for device in [meta(), cpu] {
        let x = Tensor::full(&device, &[64, 64], DType::F32, 0.5).unwrap();
        let logits = |tape: &Tape| tape.leaf(&x)?.gelu()?.scale(2.0);
        let handle = |tape: &Tape, kept: &mut Vec<Var>| {
            let logits = logits(tape)?;
            kept.push(logits.clone());
            logits.tanh()?.square()?.sum()
        };
        let tensor = |tape: &Tape, kept: &mut Vec<Tensor>| {
            let logits = logits(tape)?;
            kept.push(logits.tensor()?);
            logits.tanh()?.square()?.sum()
        };
        let (mut handles, mut tensors) = (Vec::new(), Vec::new());
        let none = peak_of(&device, |tape| logits(tape)?.tanh()?.square()?.sum());
        let own = peak_of(&device, |tape| handle(tape, &mut handles));
        handles.clear();
        assert!(own > none, "{own} bytes with logits held, {none} without");
        assert_eq!(peak_of(&device, |tape| tensor(tape, &mut tensors)), own);
        tensors.clear();
        if !device.computes() {
            let trace = Trace::record(&device, None, |tape| handle(tape, &mut handles)).unwrap();
            assert_eq!(trace.run(None).unwrap().peak_bytes, own);
            handles.clear();
            assert_eq!(trace.run(None).unwrap().peak_bytes, own);
            let trace = Trace::record(&device, None, |tape| tensor(tape, &mut tensors)).unwrap();
            assert_eq!(trace.run(None).unwrap().peak_bytes, own);
        }
    }
}

/// A value's tensor as a constant is no tensor more.
#[test]
fn the_tensor_of_a_value_as_a_constant_is_counted_once() {
    let device = meta();
    let x = Tensor::full(&device, &[64, 64], DType::F32, 0.5).unwrap();
    let forward = |tape: &Tape| {
        let h = tape.leaf(&x)?.gelu()?;
        let constant = tape.constant(&h.tensor()?)?;
        h.mul(&constant)?.sum()
    };
    let own = peak_of(&device, forward);
    assert_eq!(Trace::record(&device, None, forward).unwrap().run(None).unwrap().peak_bytes, own);
}

/// A tensor made in forward counts from there to when forward lets it go, not from when the tape gets it.
#[test]
fn a_tensor_made_in_forward_counts_while_it_is_held() {
    let device = meta();
    let x = Tensor::full(&device, &[64, 64], DType::F32, 0.5).unwrap();
    let forward = |tape: &Tape| {
        let early = Tensor::full(&device, &[64, 128], DType::F32, 0.0)?;
        let h = tape.leaf(&x)?.exp()?.tanh()?;
        let doubled = tape.no_grad(|| h.clone().cat([h.clone()], -1)?.scale(2.0))?;
        drop(doubled);
        let sum = tape.constant(&early)?.sum()?;
        let h = h.square()?.square()?;
        drop(early);
        h.sum()?.add(&sum)
    };
    let own = peak_of(&device, forward);
    assert_eq!(Trace::record(&device, None, forward).unwrap().run(None).unwrap().peak_bytes, own);
}
