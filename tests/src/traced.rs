//! Random forward passes that leave things behind: handles and tensors that outlive forward, tensors of values as
//! constants, tensors made on the way, parameters that are asked for again. A trace of one takes the memory of the
//! model itself.

use crate::programs::{Dice, RandomMarks};
use crate::random;
use retape_core::kernel::RandomStream;
use retape_core::ops::dropout::Dropout;
use retape_core::{
    DType, Device, Error, Mark, ParameterId, Policy, Result, ScopeGuard, Tape, TapeOptions, Tensor, Trace, Var, meta,
    scope,
};
use std::rc::Rc;

/// What a forward is given.
#[derive(Debug)]
struct Given {
    inputs: Vec<Tensor>,
    parameters: Vec<(ParameterId, Tensor)>,
}

impl Given {
    fn new(device: &Device) -> Given {
        let tensors =
            |from: u64, n: u64| (from..from + n).map(|i| random(device, &[8, 8], i, DType::F64)).collect::<Vec<_>>();
        let parameters = tensors(11, 2).into_iter().map(|t| (ParameterId::unique(), t)).collect();
        Given { inputs: tensors(1, 3), parameters }
    }
}

/// What a forward leaves behind.
#[derive(Debug, Default)]
struct Left {
    handles: Vec<Var>,
    tensors: Vec<Tensor>,
}

/// A random forward pass on 8 x 8 matrices.
fn forward(tape: &Tape, seed: u64, given: &Given, left: &mut Left) -> Result<Var> {
    let device = tape.device();
    let mut dice = Dice::new(seed ^ 0x7ace);
    let parameter = |i: usize| {
        let (id, tensor) = &given.parameters[i];
        tape.parameter(*id, tensor, true)
    };
    let mut handles: Vec<Var> = given.inputs.iter().map(|t| tape.leaf(t)).collect::<Result<_>>()?;
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut made: Option<Tensor> = None;
    let mut scopes: Vec<ScopeGuard> = Vec::new();
    for action in 0..10 + dice.throw(40) {
        // Now and then the last handle of a value is given to the op.
        let at = dice.throw(handles.len());
        let a = if handles.len() > 3 && dice.throw(4) == 0 { handles.swap_remove(at) } else { handles[at].clone() };
        let b = handles[dice.throw(handles.len())].clone();
        let new = match dice.throw(32) {
            0 => a.scale(0.7)?,
            1 => a.gelu()?,
            2 => a.softmax()?,
            3 => a.add(&b)?.scale(0.5)?,
            4 => a.mul(&b)?.tanh()?,
            5 => a.matmul(&b)?.tanh()?,
            6 => a.transpose(0, 1)?,
            7 => a.layer_norm(None, None, 1e-5)?.recompute()?,
            8 => {
                let parts = a.split(0, &[3, 5])?;
                parts[1].clone().cat([parts[0].clone()], 0)?
            }
            9 => {
                let stream = RandomStream { seed, counter: action as u64 };
                a.apply(Dropout { p: 0.2, stream }, [])?
            }
            10 | 11 => a.matmul(&parameter(dice.throw(2))?)?.tanh()?,
            12 => a.add(&parameter(dice.throw(2))?)?,
            13 => tape.leaf(&given.inputs[dice.throw(3)])?,
            // The tensors of values, as constants and leaves.
            14 => tape.constant(&a.tensor()?)?,
            15 => tape.leaf(&a.tensor()?.transpose(0, 1)?)?,
            16 => tape.constant(&a.tensor()?.narrow(0, 2, 3)?)?.pad(&[0, 0, 0, 5], 0.5)?,
            17 => a.detach()?,
            18 => tape.no_grad(|| a.gelu()?.scale(0.5))?,
            // Tensors held for a while, or beyond.
            19 => {
                tensors.push(a.tensor()?);
                continue;
            }
            20 if !tensors.is_empty() => {
                tensors.swap_remove(dice.throw(tensors.len()));
                continue;
            }
            21 if !tensors.is_empty() => tape.constant(&tensors[dice.throw(tensors.len())])?,
            22 => {
                left.tensors.push(a.tensor()?);
                continue;
            }
            23 => {
                left.handles.push(a);
                continue;
            }
            // Tensors made on the way, which get onto the tape later.
            24 if made.is_none() => {
                made = Some(Tensor::full(&device, &[8, 8], DType::F64, 0.25)?);
                continue;
            }
            25 if made.is_some() => {
                let tensor = made.take().expect("the guard has looked");
                let leaf = tape.leaf(&tensor)?;
                if dice.throw(2) == 0 {
                    tensors.push(tensor);
                }
                leaf
            }
            26 if scopes.len() < 3 => {
                let scope = scope(format!("s{action}"));
                scopes.push(tape.scope(match dice.throw(4) {
                    0 => scope.segment(),
                    1 => scope.mark(Mark::Recompute),
                    _ => scope,
                }));
                continue;
            }
            27 => {
                drop(scopes.pop());
                continue;
            }
            28 | 29 => {
                // A mark on what a scope returns, when the scope has closed.
                let inside = if dice.throw(2) == 0 { Mark::Keep } else { Mark::Recompute };
                a.within(scope(format!("w{action}")).mark(inside), |a| a.tanh()?.softmax())?.recompute()?
            }
            _ if handles.len() > 2 => {
                handles.swap_remove(dice.throw(handles.len()));
                continue;
            }
            _ => continue,
        };
        handles.push(new);
    }
    if let Some(tensor) = made {
        handles.push(tape.constant(&tensor)?);
    }
    while scopes.pop().is_some() {}
    let mut sum = parameter(0)?.mul(&parameter(1)?)?;
    for h in handles {
        sum = sum.add(&h)?;
    }
    sum.square()?.sum()
}

/// Peak, saved bytes, FLOPs replayed and the meter's fingerprint.
type Figures = (u64, u64, u64, u64);

fn run(device: &Device, seed: u64, given: &Given, policy: Option<Rc<dyn Policy>>) -> Result<Figures> {
    let before = device.meter().live();
    device.meter().reset_peak();
    let mut left = Left::default();
    let tape = Tape::with(device, TapeOptions { policy, ..TapeOptions::default() });
    let loss = forward(&tape, seed, given, &mut left)?;
    let saved = tape.saved_bytes();
    let gradients = tape.backward(&loss)?;
    let fingerprint = device.meter().fingerprint();
    let figures = (device.meter().step_peak(), saved, tape.stats().replayed_flops, fingerprint);
    drop((gradients, loss, left, tape));
    assert_eq!(device.meter().live(), before, "seed {seed}");
    Ok(figures)
}

/// Random forwards, each traced once and run under marks: the trace takes the memory that the model takes.
pub fn traces_are_exact(device: &Device, cases: u64) {
    let (given, dry) = (Given::new(device), meta());
    let of_trace = Given::new(&dry);
    for seed in 1..=cases {
        let mut left = Left::default();
        let trace = Trace::record(&dry, None, |tape| forward(tape, seed, &of_trace, &mut left))
            .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        for marks in 0..3 {
            if marks == 2 {
                left = Left::default(); // as it was while they were held
            }
            let policy = || (marks > 0).then(|| Rc::new(RandomMarks::new(seed + marks, marks == 2)) as Rc<dyn Policy>);
            let own = run(device, seed, &given, policy()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            let traced = trace.run(policy()).unwrap_or_else(|e: Error| panic!("seed {seed}: {e}"));
            let traced = (traced.peak_bytes, traced.saved_bytes, traced.replayed_flops, traced.fingerprint);
            assert_eq!(traced, own, "seed {seed}, marks {marks}");
        }
        drop((left, trace));
        assert_eq!(dry.meter().live(), 5 * 512, "seed {seed}: a trace leaves nothing");
    }
}
