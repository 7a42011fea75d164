//! Random sessions on one tape: ops, marks, scopes, dropped and cloned handles, and passes between them, in any order.

use crate::choices::{Bytes, Choices};
use crate::programs::{Dice, RandomMarks, SinCos};
use crate::{gradient_bytes, lossy_marks, random};
use retape_core::kernel::RandomStream;
use retape_core::ops::{Op, dropout};
use retape_core::{
    BackwardOptions, DType, Device, Error, Mark, MemoryKind, Policy, Result, ScopeGuard, Tape, TapeOptions, Tensor,
    Var, Verify, scope,
};
use std::rc::Rc;

/// Which marks a session may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marks {
    /// None: everything that is read is kept.
    None,
    /// Keep and recompute.
    Lossless,
    /// Lossy ones too.
    All,
}

/// What a session gave.
#[derive(Debug, Default, PartialEq)]
pub struct Session {
    /// Gradients' bytes of every pass, with the number of its loss.
    pub passes: Vec<(usize, Vec<Vec<u8>>)>,
    /// The meter's hash of all events.
    pub fingerprint: u64,
    /// The meter's highest step bytes.
    pub peak: u64,
    /// Live bytes at the end.
    pub left: u64,
}

/// Runs a session of `actions` random actions. The same seed gives the same actions with any marks.
pub fn session(device: &Device, seed: u64, actions: usize, marks: Marks) -> Result<Session> {
    perform(device, &mut Dice::new(seed), Dice::new(seed ^ 0x1a7e), seed, actions, marks)
}

/// Runs the session that these bytes describe, at most `actions` actions: the actions from their start, the marks from
/// their end. The same bytes give the same actions with any marks.
pub fn session_of(device: &Device, bytes: &[u8], actions: usize, marks: Marks) -> Result<Session> {
    let seed = bytes.first().copied().unwrap_or(0) as u64;
    perform(device, &mut Bytes::new(bytes), Bytes::from_the_end(bytes), seed, actions, marks)
}

fn perform(
    device: &Device,
    dice: &mut impl Choices,
    mut late: impl Choices,
    seed: u64,
    actions: usize,
    marks: Marks,
) -> Result<Session> {
    let leaves: Vec<Tensor> = (0..3).map(|i| random(device, &[8, 8], i + 1, DType::F64)).collect();
    let one = Tensor::full(device, &[], DType::F64, 1.0)?;
    let base = device.meter().live();
    device.meter().reset_peak();
    let mut out = Session::default();
    let policy: Option<Rc<dyn Policy>> =
        (marks != Marks::None).then(|| Rc::new(RandomMarks::new(seed, marks == Marks::All)) as Rc<dyn Policy>);
    let tape = Tape::with(device, TapeOptions { policy, verify: Verify::Bits, ..TapeOptions::default() });
    let lossy = lossy_marks();
    let mut mark = move || match late.throw(3) {
        _ if marks == Marks::None => None,
        0 => Some(Mark::Keep),
        1 if marks == Marks::All => Some(late.pick(&lossy)),
        _ => Some(Mark::Recompute),
    };
    {
        let leaves: Vec<Var> = leaves.iter().map(|t| tape.leaf(t)).collect::<Result<_>>()?;
        let mut handles: Vec<Var> = leaves.clone();
        let mut scopes: Vec<ScopeGuard> = Vec::new();
        let mut losses: Vec<(usize, Var)> = Vec::new();
        for action in 0..actions {
            if dice.is_over() {
                break;
            }
            // Now and then the last handle of a value is given to the op.
            let at = dice.throw(handles.len());
            let a = if handles.len() > 4 && dice.throw(4) == 0 { handles.swap_remove(at) } else { handles[at].clone() };
            let b = handles[dice.throw(handles.len())].clone();
            match dice.throw(24) {
                0 => handles.push(a.scale(0.7)?),
                1 => handles.push(a.gelu()?),
                2 => handles.push(a.sigmoid()?),
                3 => handles.push(a.softmax()?),
                4 => handles.push(a.add(&b)?.scale(0.5)?),
                5 => handles.push(a.mul(&b)?.tanh()?),
                6 => handles.push(a.matmul(&b)?.tanh()?),
                7 => handles.push(a.transpose(0, 1)?),
                8 => handles.push(a.reshape(&[4, 16])?.gelu()?.reshape(&[8, 8])?),
                9 => handles.push(a.layer_norm(None, None, 1e-5)?),
                10 => handles.extend(a.apply_all(Op::Custom(Rc::new(SinCos)), [])?),
                11 => {
                    let parts = a.split(0, &[3, 5])?;
                    handles.push(parts[1].clone().cat([parts[0].clone()], 0)?);
                }
                12 => {
                    let stream = RandomStream { seed, counter: action as u64 };
                    handles.push(a.apply(dropout::Dropout { p: 0.2, stream }, [])?);
                }
                13..=15 if handles.len() > 4 => {
                    let i = 3 + dice.throw(handles.len() - 3);
                    handles.swap_remove(i);
                }
                16 => handles.push(a.clone()),
                17 | 18 => match mark().map_or(Ok(()), |m| a.set_mark(m)) {
                    Err(Error::MarkTooLate { .. } | Error::MarkNotAllowed { .. }) | Ok(()) => {}
                    Err(error) => return Err(error),
                },
                19 if scopes.len() < 3 => {
                    let mut scope = scope(format!("s{action}"));
                    if dice.throw(2) == 0 {
                        scope = scope.segment();
                    }
                    let marked = dice.throw(2) == 0;
                    if let Some(mark) = mark().filter(|_| marked) {
                        scope = scope.mark(mark);
                    }
                    scopes.push(tape.scope(scope));
                }
                20 => drop(scopes.pop()),
                21 => losses.push((action, a.clone().mul(&b)?.sum()?)),
                22 if losses.len() > 3 => {
                    losses.swap_remove(dice.throw(losses.len()));
                }
                _ if !losses.is_empty() => {
                    let (number, loss) = &losses[dice.throw(losses.len())];
                    let gradients = tape.backward_from(&[(loss, &one)], BackwardOptions::RETAIN)?;
                    if device.computes() {
                        out.passes.push((*number, gradient_bytes(&gradients, &leaves)?));
                    }
                }
                _ => {}
            }
            drop(b);
            let meter = device.meter();
            let metered = meter.live_of(MemoryKind::Saved) + meter.live_of(MemoryKind::Quantized);
            assert_eq!(tape.saved_bytes(), metered, "seed {seed}, after action {action}");
        }
        let (number, loss) = (usize::MAX, leaves[0].clone().add(&handles[handles.len() - 1])?.square()?.sum()?);
        drop(handles);
        let gradients = tape.backward_from(&[(&loss, &one)], BackwardOptions::default())?;
        if device.computes() {
            out.passes.push((number, gradient_bytes(&gradients, &leaves)?));
        }
    }
    out.fingerprint = device.meter().fingerprint();
    out.peak = device.meter().step_peak();
    drop(tape);
    out.left = device.meter().live() - base;
    Ok(out)
}
