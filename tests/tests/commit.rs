//! State that layers change: collected on the tape, applied by `commit`, and left alone by dry runs and measuring.

use retape_core::{
    DType, Device, Error, Mark, MemoryKind, Policy, RuleInfo, Site, StateId, Tape, TapeOptions, Tensor, Trace, Var,
    meta,
};
use retape_nn::{Parameter, Result, State};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

fn numbers(device: &Device, shape: &[usize], first: f32) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| first + (i % 7) as f32 * 0.25).collect();
    Tensor::from_slice(device, shape, &values).unwrap()
}

/// Batch norm over the first dimension, with running statistics.
struct BatchNorm {
    weight: Parameter,
    mean: State,
    variance: State,
    training: Cell<bool>,
}

const MOMENTUM: f64 = 0.1;

impl BatchNorm {
    fn new(device: &Device, channels: usize) -> BatchNorm {
        let full = |value| Tensor::full(device, &[channels], DType::F32, value).unwrap();
        BatchNorm {
            weight: Parameter::new("bn.weight", full(1.0)).unwrap(),
            mean: State::new("bn.running_mean", full(0.0)).unwrap(),
            variance: State::new("bn.running_var", full(1.0)).unwrap(),
            training: Cell::new(true),
        }
    }

    fn forward(&self, tape: &Tape, x: Var) -> Result<Var> {
        let _scope = tape.scope("bn");
        let (centred, variance) = if self.training.get() {
            let mean = x.clone().mean_dims(&[0], false)?;
            let centred = (x - &mean)?;
            let variance = centred.clone().square()?.mean_dims(&[0], false)?;
            tape.no_grad(|| -> Result<()> {
                for (state, now) in [(&self.mean, &mean), (&self.variance, &variance)] {
                    let kept = (state.get(tape)? * (1.0 - MOMENTUM))?;
                    state.set_later(tape, (kept + (now * MOMENTUM)?)?)?;
                }
                Ok(())
            })?;
            (centred, variance)
        } else {
            ((x - self.mean.get(tape)?)?, self.variance.get(tape)?)
        };
        Ok(((centred / (variance + 1e-5)?.sqrt()?)? * self.weight.var(tape)?)?)
    }
}

/// Attention of new positions to all that came before, whose keys are cached.
struct Cached {
    keys: State,
    position: Rc<Cell<usize>>,
}

impl Cached {
    fn new(device: &Device, channels: usize) -> Cached {
        let none = Tensor::full(device, &[0, channels], DType::F32, 0.0).unwrap();
        Cached { keys: State::growing("keys", none).unwrap(), position: Rc::default() }
    }

    fn forward(&self, tape: &Tape, x: Var) -> Result<Var> {
        let _scope = tape.scope("attn");
        let end = self.position.get() + x.shape()[0];
        let keys = self.keys.get(tape)?.cat([x.clone()], 0)?;
        self.keys.set_later(tape, &keys)?;
        let position = self.position.clone();
        tape.on_commit(move || position.set(end))?;
        let weights = x.matmul(keys.clone().transpose(0, 1)?)?.softmax()?;
        Ok(weights.matmul(keys)?)
    }
}

struct Model {
    bn: BatchNorm,
    cached: Cached,
}

impl Model {
    fn new(device: &Device) -> Model {
        Model { bn: BatchNorm::new(device, 8), cached: Cached::new(device, 8) }
    }

    fn loss(&self, tape: &Tape, x: &Tensor) -> Result<Var> {
        let h = self.bn.forward(tape, tape.constant(x)?)?.gelu()?;
        Ok(self.cached.forward(tape, h)?.square()?.sum()?)
    }

    /// All state, and the storages that it lies in.
    fn state(&self) -> (Vec<Vec<f32>>, Vec<usize>) {
        let states = [&self.bn.mean, &self.bn.variance, &self.cached.keys].map(State::tensor);
        let mut places: Vec<usize> = states.iter().map(|t| t.storage().address()).collect();
        places.push(self.cached.position.get());
        (states.iter().map(|t| t.to_vec().unwrap()).collect(), places)
    }
}

/// Gives every value one mark.
#[derive(Debug)]
struct All(Mark);

impl Policy for All {
    fn rules(&self) -> &[RuleInfo] {
        &[]
    }

    fn mark(&self, _: &Site<'_>) -> Option<retape_core::Decision> {
        Some(retape_core::Decision { mark: self.0, rule: 0 })
    }
}

/// Peak, and live bytes after forward, after backward, and when the tape has gone.
fn step(device: &Device, policy: Rc<dyn Policy>, model: &Model, x: &Tensor, commit: bool) -> [u64; 4] {
    let meter = device.meter();
    meter.reset_peak();
    let tape = Tape::with(device, TapeOptions { policy: Some(policy), ..TapeOptions::default() });
    let loss = model.loss(&tape, x).unwrap();
    let forward = meter.live();
    drop(tape.backward(&loss).unwrap());
    let (peak, backward) = (meter.step_peak(), meter.live());
    if commit {
        tape.commit().unwrap();
    }
    drop((loss, tape));
    [peak, forward, backward, meter.live()]
}

#[test]
fn measuring_and_dry_runs_leave_state_alone_and_a_commit_changes_it_once() {
    let device = cpu();
    let model = Model::new(&device);
    let x = numbers(&device, &[16, 8], -1.0);
    for round in 0..3 {
        let before = model.state();
        let meta = meta();
        for mark in Mark::all() {
            let policy: Rc<dyn Policy> = Rc::new(All(mark));
            let measured = step(&device, policy.clone(), &model, &x, false);
            for _ in 0..2 {
                let dry = step(&meta, policy.clone(), &model, &x, false);
                assert_eq!(dry, measured, "{mark:?}, round {round}");
            }
            let trace = Trace::record(&meta, None, |tape| model.loss(tape, &x)).unwrap();
            for _ in 0..2 {
                assert_eq!(trace.run(Some(policy.clone())).unwrap().peak_bytes, measured[0], "{mark:?}, round {round}");
            }
        }
        assert_eq!(model.state(), before, "nothing was committed");
        let parameters = device.meter().live_of(MemoryKind::Parameter);
        step(&device, Rc::new(All(Mark::Recompute)), &model, &x, true);
        let (after, places) = model.state();
        assert_eq!(places[3], 16 * (round + 1));
        assert_eq!(after[2].len(), 8 * 16 * (round + 1));
        assert_eq!(
            device.meter().live_of(MemoryKind::Parameter),
            parameters + 16 * 8 * 4,
            "the cache's are a parameter's"
        );
        assert_eq!(device.meter().step_live(), x.storage_bytes() as u64, "the input is all that is left of the step");
        for (channel, (&mean_now, &variance_now)) in after[0].iter().zip(&after[1]).enumerate() {
            let column: Vec<f32> = x.to_vec::<f32>().unwrap().into_iter().skip(channel).step_by(8).collect();
            let mean = column.iter().sum::<f32>() / 16.0;
            let variance = column.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 16.0;
            let expected = |before: f32, now: f32| 0.9 * before + 0.1 * now;
            assert!((mean_now - expected(before.0[0][channel], mean)).abs() < 1e-5);
            assert!((variance_now - expected(before.0[1][channel], variance)).abs() < 1e-5);
        }
    }
    // In evaluation the statistics are read, and nothing but the cache is collected.
    model.bn.training.set(false);
    let before = model.state();
    let [measured, dry] = [&device, &meta()].map(|d| step(d, Rc::new(All(Mark::Keep)), &model, &x, false));
    assert_eq!(measured, dry);
    step(&device, Rc::new(All(Mark::Keep)), &model, &x, true);
    let after = model.state();
    assert_eq!((&after.0[..2], &after.1[..2]), (&before.0[..2], &before.1[..2]));
}

#[test]
fn a_commit_applies_once_in_order_before_and_after_backward() {
    let device = cpu();
    let x = numbers(&device, &[4], 1.0);
    for after_backward in [false, true] {
        let state = State::new("s", numbers(&device, &[4], 0.0)).unwrap();
        let order = Rc::new(RefCell::new(Vec::new()));
        let tape = Tape::new(&device);
        let h = tape.leaf(&x).unwrap().scale(2.0).unwrap();
        for i in 0..3 {
            let order = order.clone();
            tape.on_commit(move || order.borrow_mut().push(i)).unwrap();
        }
        state.set_later(&tape, h.clone().shift(0.0).unwrap()).unwrap();
        state.set_later(&tape, &h).unwrap();
        let loss = h.square().unwrap().sum().unwrap();
        assert_eq!(state.tensor().to_vec::<f32>().unwrap()[0], 0.0);
        if after_backward {
            drop(tape.backward(&loss).unwrap());
        }
        tape.commit().unwrap();
        assert_eq!(*order.borrow(), [0, 1, 2]);
        assert_eq!(state.tensor().to_vec::<f32>().unwrap(), [2.0, 2.5, 3.0, 3.5]);
        state.set(numbers(&device, &[4], 5.0)).unwrap();
        tape.commit().unwrap();
        assert_eq!(order.borrow().len(), 3);
        assert_eq!(state.tensor().to_vec::<f32>().unwrap()[0], 5.0, "nothing is applied twice");
        if !after_backward {
            let gradients = tape.backward(&loss).unwrap();
            assert_eq!(gradients.len(), 1);
        }
        drop((loss, tape));
        assert_eq!(device.meter().live_of(MemoryKind::Parameter), 16);
        assert_eq!(device.meter().step_live(), 16);
    }
}

/// Committed before the value settles, its tensor is the state's from then on; the tape may store it all the same.
#[test]
fn a_committed_tensor_is_counted_as_the_states() {
    let device = cpu();
    let x = numbers(&device, &[4], 1.0);
    let state = State::new("s", numbers(&device, &[4], 0.0)).unwrap();
    let tape = Tape::new(&device);
    let h = tape.leaf(&x).unwrap().exp().unwrap();
    state.set_later(&tape, &h).unwrap();
    tape.commit().unwrap();
    let loss = h.square().unwrap().sum().unwrap();
    assert_eq!(device.meter().live_of(MemoryKind::Saved), 0);
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 16);
    drop(tape.backward(&loss).unwrap());
    drop((loss, tape));
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 16);
    assert_eq!(state.tensor().storage().kind(), MemoryKind::Parameter);
}

/// A layer that is called twice on one tape goes on from its own change; another tape doesn't see it.
#[test]
fn a_tape_sees_its_own_changes() {
    let device = cpu();
    let x = numbers(&device, &[4, 2], 1.0);
    let bn = BatchNorm::new(&device, 2);
    let (tape, other) = (Tape::new(&device), Tape::new(&device));
    for _ in 0..2 {
        bn.forward(&tape, tape.constant(&x).unwrap()).unwrap();
    }
    assert_eq!(bn.mean.get(&other).unwrap().tensor().unwrap().to_vec::<f32>().unwrap(), [0.0; 2]);
    tape.commit().unwrap();
    let mean = x.to_vec::<f32>().unwrap().into_iter().step_by(2).sum::<f32>() / 4.0;
    let committed = bn.mean.tensor().to_vec::<f32>().unwrap()[0];
    assert!((committed - mean * (0.1 + 0.9 * 0.1)).abs() < 1e-6, "{committed}, mean {mean}");
}

/// What belongs to somebody else, or lies in a larger storage, is copied when it is collected.
#[test]
fn a_state_has_a_tensor_of_its_own() {
    let device = cpu();
    let x = numbers(&device, &[4], 1.0);
    let state = State::new("s", numbers(&device, &[4], 0.0)).unwrap();
    let other = State::new("o", numbers(&device, &[4], 7.0)).unwrap();
    let tape = Tape::new(&device);
    let wide = tape.leaf(&numbers(&device, &[4, 8], 0.0)).unwrap().scale(1.0).unwrap();
    let values = [
        tape.leaf(&x).unwrap(),
        other.get(&tape).unwrap(),
        wide.clone().narrow(1, 3, 1).unwrap().reshape(&[4]).unwrap(),
        wide.narrow(0, 1, 1).unwrap().narrow(1, 0, 4).unwrap().reshape(&[4]).unwrap(),
    ];
    for value in values {
        let tensor = value.tensor().unwrap();
        let kind = tensor.storage().kind();
        state.set_later(&tape, value).unwrap();
        tape.commit().unwrap();
        let own = state.tensor();
        assert_eq!(own.to_vec::<f32>().unwrap(), tensor.to_vec::<f32>().unwrap());
        assert!(!own.shares_storage(&tensor) && own.storage_bytes() == 16);
        assert_eq!((own.storage().kind(), tensor.storage().kind()), (MemoryKind::Parameter, kind));
    }
}

#[test]
fn without_a_commit_what_was_collected_goes_with_the_tape() {
    let device = meta();
    let x = Tensor::full(&device, &[64], DType::F32, 0.0).unwrap();
    let state = State::new("s", Tensor::full(&device, &[64], DType::F32, 0.0).unwrap()).unwrap();
    let live = device.meter().live();
    let applied = Rc::new(Cell::new(false));
    let tape = Tape::new(&device);
    state.set_later(&tape, tape.leaf(&x).unwrap().exp().unwrap()).unwrap();
    let flag = applied.clone();
    tape.on_commit(move || flag.set(true)).unwrap();
    assert_eq!(device.meter().live(), live + 256, "it waits, and is counted");
    let error = tape.commit().unwrap_err();
    assert!(matches!(error, Error::DryRun { .. }), "{error}");
    assert!(error.to_string().contains("dry run") && error.to_string().contains("Commit the tape"), "{error}");
    drop(tape);
    assert_eq!(device.meter().live(), live);
    assert!(!applied.get() && Rc::strong_count(&applied) == 1);
    let traced = Trace::record(&device, None, |tape| {
        let loss = tape.leaf(&x)?.sum()?;
        tape.commit()?;
        Ok(loss)
    });
    assert!(matches!(traced, Err(Error::DryRun { .. })), "{traced:?}");
}

#[test]
fn what_a_state_cannot_become_says_so() {
    let device = cpu();
    let state = State::new("bn.mean", numbers(&device, &[4], 0.0)).unwrap();
    let tape = Tape::new(&device);
    let x = tape.leaf(&numbers(&device, &[1, 4], 0.0)).unwrap();
    let wrong = state.set_later(&tape, &x).unwrap_err().to_string();
    assert_eq!(wrong, "`bn.mean` is f32[4] on cpu, it can't become f32[1, 4] on cpu");
    let growing = State::growing("keys", numbers(&device, &[0, 4], 0.0)).unwrap();
    growing.set_later(&tape, &x).unwrap();
    assert!(growing.set_later(&tape, x.clone().cast(DType::F64).unwrap()).is_err());
    let elsewhere = State::new("s", numbers(&cpu(), &[1, 4], 0.0)).unwrap();
    assert!(elsewhere.set_later(&tape, &x).is_err() && elsewhere.get(&tape).is_err());
    let other = Tape::new(&device);
    let foreign = other.set_later(StateId::unique(), &x, |_| ()).unwrap_err();
    assert!(matches!(foreign, Error::OtherTape { .. }), "{foreign}");
    drop(tape.backward(&x.sum().unwrap()).unwrap());
    let consumed = tape.on_commit(|| ()).unwrap_err();
    assert!(matches!(consumed, Error::TapeConsumed { .. }), "{consumed}");
    tape.commit().unwrap();
    assert_eq!(growing.shape(), [1, 4]);
}

/// An error that the tape has kept comes first, and nothing is applied.
#[test]
fn a_kept_error_comes_first() {
    let device = cpu();
    let tape = Tape::new(&device);
    let state = State::new("s", numbers(&device, &[4], 0.0)).unwrap();
    let x = tape.leaf(&numbers(&device, &[4], 1.0)).unwrap();
    state.set_later(&tape, x.clone().scale(3.0).unwrap()).unwrap();
    let infinite = x.scale(f64::INFINITY).unwrap().int8().unwrap();
    let _square = infinite.clone().square().unwrap();
    drop(infinite);
    let error = tape.commit().unwrap_err();
    assert!(matches!(error, Error::NonFinite { .. }), "{error}");
    assert_eq!(state.tensor().to_vec::<f32>().unwrap()[0], 0.0);
}

#[test]
fn a_number_of_a_dry_run_is_an_error_that_says_what_to_do() {
    let x = numbers(&cpu(), &[4], 1.0);
    let dry = Trace::record(&meta(), None, |tape| {
        let h = tape.leaf(&x)?.square()?;
        let norm = {
            let _scope = tape.scope("norm");
            h.clone().sum()?.item()?
        };
        h.scale(norm)?.sum()
    });
    let error = dry.unwrap_err();
    assert!(matches!(error, Error::NoNumbers { .. }), "{error}");
    let error = error.to_string();
    for part in
        ["item of `norm.sum`", "meta", "dry run", "Branch on shapes", "outside the closure", "measure on a device"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
    let device = meta();
    let number = Tensor::full(&device, &[], DType::BF16, 1.0).unwrap();
    device.meter().reset_peak();
    for result in [number.item().map(|_| ()), number.to_f64_vec().map(|_| ()), number.to_bytes().map(|_| ())] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("bf16[]") && error.contains("Branch on shapes"), "{error}");
    }
    assert_eq!(device.meter().peak(), 2, "nothing was cast for it");
}
