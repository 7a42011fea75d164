//! How a value settles: the flaws of a first wording of the rule, each as a test, and what the marks promise.

use retape_core::ops::{Op, reduce};
use retape_core::{
    BackwardOptions, DType, Decision, Device, Error, Int8Spec, Mark, MemoryKind, Origin, Policy, Result, Rounding,
    RuleInfo, Site, Tape, TapeOptions, Tensor, Var, Verify, meta, scope,
};
use retape_tests::programs::SinCos;
use retape_tests::wrapped::{self, Watch};
use retape_tests::{gradient_bytes, random};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const INT8: Mark = Mark::Int8(Int8Spec { group: 64, rounding: retape_core::Rounding::Nearest });

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

fn leaf(tape: &Tape, shape: &[usize], seed: u64) -> Var {
    tape.leaf(&random(&tape.device(), shape, seed, DType::F32)).unwrap()
}

/// A policy from a function of the path.
struct ByPath<F>(F, Vec<RuleInfo>);

impl<F> std::fmt::Debug for ByPath<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ByPath")
    }
}

impl<F: Fn(&str) -> Option<Mark>> Policy for ByPath<F> {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        (self.0)(site.path).map(|mark| Decision { mark, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        &self.1
    }
}

fn by_path(f: impl Fn(&str) -> Option<Mark> + 'static) -> Option<Rc<dyn Policy>> {
    Some(Rc::new(ByPath(f, vec![RuleInfo { name: "test".into(), origin: Origin::Preset }])))
}

fn with_policy(device: &Device, f: impl Fn(&str) -> Option<Mark> + 'static) -> Tape {
    Tape::with(device, TapeOptions { policy: by_path(f), ..TapeOptions::default() })
}

/// The gradient's bytes of one leaf.
fn backward(tape: &Tape, loss: &Var, leaf: &Var) -> Vec<u8> {
    tape.backward(loss).unwrap().of(leaf).unwrap().to_bytes().unwrap()
}

/// n blocks of width 32 on 16 rows, each `x + W2 gelu(W1 x)` in a scope of its own.
fn blocks(tape: &Tape, x: Var, n: usize, mark: Option<Mark>, segment: usize) -> Result<Var> {
    let device = tape.device();
    let mut x = x;
    let mut outer = None;
    for i in 0..n {
        if segment > 0 && i % segment == 0 {
            drop(outer.take());
            outer = Some(tape.scope(scope(format!("segments.{}", i / segment)).segment().mark(Mark::Recompute)));
        }
        let scope = scope(format!("blocks.{i}"));
        let scope = if segment > 0 { scope.segment() } else { scope };
        let _scope = tape.scope(match mark {
            Some(mark) => scope.mark(mark),
            None => scope,
        });
        let weight = |shape: &[usize], seed| {
            let w = random(&device, shape, seed, DType::F32);
            w.storage().set_kind(MemoryKind::Parameter);
            tape.leaf(&w)
        };
        let (w1, w2) = (weight(&[32, 128], 2 * i as u64)?, weight(&[128, 32], 2 * i as u64 + 1)?);
        let h = x.clone().matmul(&w1)?;
        let a = h.clone().gelu()?;
        drop(h);
        let y = a.clone().matmul(&w2)?.scale(0.01)?;
        drop(a);
        x = x.add(&y)?;
    }
    drop(outer);
    x.square()?.sum()
}

struct Step {
    saved: u64,
    peak: u64,
    gradient: Vec<u8>,
    replays: u64,
    most: u64,
    paths: Vec<String>,
}

fn step(device: &Device, n: usize, mark: Option<Mark>, segment: usize) -> Step {
    let x0 = random(device, &[16, 32], 99, DType::F32);
    device.meter().reset_peak();
    let before = device.meter().step_live();
    let tape = Tape::new(device);
    let x = tape.leaf(&x0).unwrap();
    // Through an op: the blocks' input is a value, not a leaf.
    let loss = blocks(&tape, x.clone().scale(1.0).unwrap(), n, mark, segment).unwrap();
    let saved = tape.saved_bytes();
    let gradients = tape.backward(&loss).unwrap();
    let gradient = if device.computes() { gradients.of(&x).unwrap().to_bytes().unwrap() } else { vec![] };
    let stats = tape.stats();
    Step {
        saved,
        peak: device.meter().step_peak() - before,
        gradient,
        replays: stats.replays,
        most: stats.most_replays_of_a_node,
        paths: stats.replayed_paths.keys().cloned().collect(),
    }
}

const BOUNDARY: u64 = 16 * 32 * 4;
const HIDDEN: u64 = 16 * 128 * 4;

#[test]
fn marking_each_block_holds_n_inputs_and_replays_one_block_at_a_time() {
    let device = cpu();
    let none = step(&device, 4, None, 0);
    let full = step(&device, 4, Some(Mark::Recompute), 0);
    // Per block x (for w1's gradient), h (for gelu's) and a (for w2's); and the last x, for the square.
    assert_eq!(none.saved, 4 * (2 * HIDDEN + BOUNDARY) + BOUNDARY);
    // The inputs of all blocks, the first one included, and the last one's output.
    assert_eq!(full.saved, 5 * BOUNDARY);
    assert_eq!(full.gradient, none.gradient);
    // Two of the five ops of a block: not the last product, its scale and the residual, which nobody reads.
    assert_eq!(full.replays, 4 * 2);
    assert!(full.paths.iter().all(|p| p.ends_with("matmul") || p.ends_with("gelu")), "{:?}", full.paths);
    // Each further block adds its input to the peak, and no more.
    let peaks: Vec<u64> = [4, 8, 16].map(|n| step(&meta(), n, Some(Mark::Recompute), 0).peak).to_vec();
    assert_eq!(peaks[1] - peaks[0], 4 * BOUNDARY);
    assert_eq!(peaks[2] - peaks[1], 8 * BOUNDARY);
}

/// Flaw 1: replayed values of several blocks must not pile up in a segment.
#[test]
fn segments_hold_boundaries_only() {
    let device = cpu();
    let none = step(&device, 8, None, 0);
    for k in [1, 2, 4] {
        let segments = step(&device, 8, Some(Mark::Recompute), k);
        assert_eq!(segments.gradient, none.gradient, "k = {k}");
        assert!(segments.most <= 2, "k = {k}: a node was replayed {} times", segments.most);
    }
    // 32 blocks in segments of 4: 8 boundaries and within a segment 4 block inputs; one block's inside at a time.
    let full = step(&meta(), 32, Some(Mark::Recompute), 0).peak;
    let segmented = step(&meta(), 32, Some(Mark::Recompute), 4).peak;
    assert!(segmented < full - 15 * BOUNDARY, "segments {segmented}, full {full}");
}

/// Flaw 2: a node takes its recipe when it is recorded.
#[test]
fn a_recipe_is_taken_when_recorded() {
    let device = cpu();
    let run = |mark: Option<Mark>| {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 4], 1);
        let mask = leaf(&tape, &[4, 4], 2).scale(2.0).unwrap();
        let y = x.clone().add(&mask).unwrap();
        drop(mask);
        let g = y.clone().gelu().unwrap();
        if let Some(mark) = mark {
            y.set_mark(mark).unwrap();
        }
        drop(y);
        let loss = g.clone().sum().unwrap();
        drop(g);
        backward(&tape, &loss, &x)
    };
    assert_eq!(run(Some(Mark::Recompute)), run(None));
}

/// Flaw 3: unmarked isn't Keep. What is only replayed through is dropped too; an explicit Keep makes it a boundary.
#[test]
fn unmarked_values_are_replayed_through() {
    let device = cpu();
    let run = |keep_middle: bool| {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[8, 8], 1);
        let scaled = x.clone().scale(0.5).unwrap();
        if keep_middle {
            scaled.set_mark(Mark::Keep).unwrap();
        }
        let soft = scaled.clone().softmax().unwrap().recompute().unwrap();
        drop(scaled);
        let loss = soft.clone().mul(&x).unwrap().sum().unwrap();
        drop(soft);
        let saved = tape.saved_bytes();
        tape.backward(&loss).unwrap();
        (saved, tape.stats().replays)
    };
    assert_eq!(run(false), (0, 2));
    assert_eq!(run(true), (8 * 8 * 4, 1));
}

/// Flaw 4: a view's handles, reads and marks are its root's.
#[test]
fn views_count_for_their_root() {
    let device = cpu();
    let tape = Tape::new(&device);
    let (x, w) = (leaf(&tape, &[6, 8], 1), leaf(&tape, &[8, 8], 2));
    let q = x.matmul(&w).unwrap().reshape(&[6, 2, 4]).unwrap().permute(&[1, 0, 2]).unwrap();
    let k = q.clone().transpose(-1, -2).unwrap();
    let loss = q.clone().matmul(&k).unwrap().sum().unwrap();
    drop((q, k));
    assert_eq!(tape.saved_bytes(), 6 * 8 * 4, "the root once");
    tape.backward(&loss).unwrap();
    assert_eq!(tape.stats().replays, 0);

    // A mark on a view marks the root.
    let tape = Tape::new(&device);
    let (x, w) = (leaf(&tape, &[6, 8], 1), leaf(&tape, &[8, 8], 2));
    let y = x.matmul(&w).unwrap().transpose(0, 1).unwrap().recompute().unwrap();
    let loss = y.clone().gelu().unwrap().sum().unwrap();
    drop(y);
    assert_eq!(tape.saved_bytes(), 0);
    tape.backward(&loss).unwrap();
    assert_eq!(tape.stats().replays, 1);
}

/// Flaw 5: readers that can never run let go of what they read.
#[test]
fn a_thousand_forwards_without_backward_are_flat() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[4, 4], 1);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..1000 {
        let h = x.clone().gelu().unwrap();
        drop(h.clone().mul(&h).unwrap().sum().unwrap());
        drop(h);
        seen.insert((device.meter().live(), tape.node_count(), tape.saved_bytes()));
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
}

/// Flaw 6: gradients never depend on a held handle, also behind an int8 value.
#[test]
fn a_held_handle_doesn_t_change_the_bits() {
    let device = cpu();
    let run = |hold: bool| {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 64], 1);
        let a = x.clone().scale(3.0).unwrap().int8().unwrap();
        let h = a.clone().scale(0.5).unwrap().recompute().unwrap();
        let g = h.clone().gelu().unwrap();
        let held = hold.then(|| (a.clone(), h.clone()));
        drop((a, h));
        let loss = g.sum().unwrap();
        let gradient = backward(&tape, &loss, &x);
        drop(held);
        gradient
    };
    assert_eq!(run(true), run(false));
}

/// Flaw 7: a pass settles nothing, so recording goes on after a pass that keeps the tape.
#[test]
fn recording_goes_on_after_a_retained_pass() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[3, 4], 1);
    let h = x.clone().scale(2.0).unwrap().recompute().unwrap();
    let l1 = h.clone().sum().unwrap();
    let first = tape.backward_with(&l1, BackwardOptions::RETAIN).unwrap();
    let l2 = h.clone().mul(&h).unwrap().sum().unwrap();
    drop(h);
    let second = tape.backward_with(&l2, BackwardOptions::RETAIN).unwrap();
    let again = tape.backward_with(&l1, BackwardOptions::RETAIN).unwrap();
    assert_eq!(first.of(&x).unwrap().to_bytes().unwrap(), again.of(&x).unwrap().to_bytes().unwrap());
    let expected: Vec<f32> = x.tensor().unwrap().to_vec::<f32>().unwrap().iter().map(|x| 8.0 * x).collect();
    assert_eq!(second.of(&x).unwrap().to_vec::<f32>().unwrap(), expected);
    assert!(matches!(l2.set_mark(Mark::Recompute), Err(Error::MarkTooLate { .. })));
}

/// A pass fixes the marks of what was recorded before it: a scope that closes later doesn't change the bits of the
/// next.
#[test]
fn a_scope_closed_after_a_pass_keeps_the_marks() {
    let device = cpu();
    let tape = with_policy(&device, |path| (path == "s").then_some(INT8));
    let x = leaf(&tape, &[4, 64], 1);
    let scope = tape.scope("s");
    let y = x.clone().scale(3.0).unwrap();
    let loss = y.clone().gelu().unwrap().sum().unwrap();
    let gradient = || tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap().of(&x).unwrap().to_bytes().unwrap();
    let first = gradient();
    drop(scope);
    assert_eq!(gradient(), first);
    assert!(matches!(y.set_mark(INT8), Err(Error::MarkTooLate { .. })));
    // What is recorded after a pass may be marked.
    x.gelu().unwrap().recompute().unwrap();
}

/// Further recording doesn't change how a value behind an int8 one is read: equal bits for the same loss.
#[test]
fn recording_after_a_pass_keeps_the_bits() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[4, 64], 1);
    let a = x.clone().scale(3.0).unwrap().int8().unwrap();
    // Unmarked and not read yet: replayed through, from the dequantized `a`.
    let h = a.clone().scale(0.5).unwrap();
    let k = h.clone().scale(2.0).unwrap().recompute().unwrap();
    let loss = k.clone().square().unwrap().sum().unwrap();
    drop((a, k));
    let gradient = || tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap().of(&x).unwrap().to_bytes().unwrap();
    let first = gradient();
    let other = h.clone().square().unwrap().sum().unwrap();
    assert_eq!(gradient(), first);
    drop(h);
    assert_eq!(gradient(), first);
    tape.backward_with(&other, BackwardOptions::RETAIN).unwrap();

    // A value that a pass has read as int8 can't be read exactly afterwards.
    let tape = with_policy(&device, |path| (path == "scale").then_some(INT8));
    let q = leaf(&tape, &[1, 4, 1, 8], 1).scale(2.0).unwrap();
    let loss = q.clone().square().unwrap().sum().unwrap();
    tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
    let error = q.clone().attention(&q, &q, 1.0, true, 0.0).unwrap_err();
    assert!(matches!(&error, Error::MarkNotAllowed { path, .. } if path == "scale"), "{error}");
}

/// Flaw 8: shadowing doesn't drop. The dry run sees it, the ledger says who holds what, the lint says it.
#[test]
fn a_held_handle_is_in_the_ledger_and_the_lint() {
    for device in [cpu(), meta()] {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 4], 1);
        let h = x.scale(2.0).unwrap().recompute().unwrap();
        let _loss = h.clone().gelu().unwrap().sum().unwrap();
        let ledger = tape.ledger().unwrap();
        assert!(ledger.get("scale").unwrap().held_by_handle);
        assert!(ledger.lint.iter().any(|l| l.code == "held-by-handle" && l.subject == "scale"), "{ledger}");
        drop(h);
        let ledger = tape.ledger().unwrap();
        assert!(!ledger.get("scale").unwrap().held_by_handle);
        assert!(!ledger.lint.iter().any(|l| l.code == "held-by-handle"));
    }
}

/// Flaw 9: from Keep to Recompute the inputs must still be there; the error names the one that is gone.
#[test]
fn a_late_recompute_names_the_input_that_is_gone() {
    let device = cpu();
    let tape = with_policy(&device, |path| (path == "add").then_some(Mark::Keep));
    let x = leaf(&tape, &[4], 1);
    let y = {
        let a = x.clone().scale(2.0).unwrap();
        a.clone().add(&x).unwrap()
    };
    let error = y.set_mark(Mark::Recompute).unwrap_err();
    assert!(matches!(error, Error::MarkTooLate { .. }));
    assert!(error.to_string().contains("`scale`"), "{error}");
    // In the same statement it is in time, because ops borrow their inputs.
    let tape = with_policy(&device, |path| (path == "add").then_some(Mark::Keep));
    let x = leaf(&tape, &[4], 1);
    x.clone().scale(2.0).unwrap().add(&x).unwrap().recompute().unwrap();
}

/// Flaw 10: arena order isn't recording order.
#[test]
fn nodes_are_visited_in_recording_order() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2, 2], 1);
    // Removed nodes leave holes that later ones fill.
    let holes: Vec<Var> = (0..20).map(|_| x.clone().scale(2.0).unwrap()).collect();
    let kept = x.clone().gelu().unwrap();
    drop(holes);
    let mut y = kept;
    for _ in 0..20 {
        y = y.tanh().unwrap();
    }
    let loss = y.sum().unwrap();
    let plain = backward(&tape, &loss, &x);
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2, 2], 1);
    let mut y = x.clone().gelu().unwrap();
    for _ in 0..20 {
        y = y.tanh().unwrap();
    }
    let loss = y.sum().unwrap();
    assert_eq!(backward(&tape, &loss, &x), plain);
}

/// Flaw 11: settling in Drop can't fail; the error is returned by the next call, and the value stays full.
#[test]
fn an_error_in_drop_is_parked() {
    let device = cpu();
    let tape = Tape::new(&device);
    let values = [1.0f32, f32::INFINITY, 2.0, 3.0];
    let x = tape.leaf(&Tensor::from_slice(&device, &[4], &values).unwrap()).unwrap();
    let h = x.scale(1.0).unwrap().int8().unwrap();
    let loss = h.clone().square().unwrap().sum().unwrap();
    drop(h);
    let error = tape.backward(&loss).unwrap_err();
    assert!(matches!(&error, Error::NonFinite { path, op: "scale", format: "int8" } if path == "scale"), "{error}");
    // Reported once; then the value is read in full.
    assert!(tape.backward(&loss).is_ok());

    // Of several errors the first is returned.
    let tape = Tape::new(&device);
    let x = tape.leaf(&Tensor::from_slice(&device, &[4], &values).unwrap()).unwrap();
    let (a, b) = (x.clone().scale(1.0).unwrap().int8().unwrap(), x.shift(1.0).unwrap().int8().unwrap());
    let _loss = a.clone().square().unwrap().add(b.clone().square().unwrap()).unwrap();
    drop(a);
    drop(b);
    assert!(matches!(tape.ledger().unwrap_err(), Error::NonFinite { op: "scale", .. }));
    assert!(tape.ledger().is_ok());
}

/// A scope or policy may ask for int8 in groups of nothing; the value stays full.
#[test]
fn an_empty_int8_group_is_an_error() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2, 4], 1);
    let _scope = tape.scope(scope("s").mark(Mark::Int8(Int8Spec { group: 0, ..Int8Spec::default() })));
    let y = x.scale(2.0).unwrap();
    let loss = y.clone().square().unwrap().sum().unwrap();
    let refuses = |error: Error, value: &str| {
        assert!(matches!(&error, Error::MarkNotAllowed { path, .. } if path == value), "{error}");
    };
    refuses(tape.ledger().unwrap_err(), "s.square");
    assert!(tape.ledger().is_ok());
    drop(y);
    refuses(tape.backward(&loss).unwrap_err(), "s.scale");
    assert!(tape.backward(&loss).is_ok());
}

/// Flaw 12: a fallback to full precision is counted.
#[test]
fn a_fallback_to_full_precision_is_counted() {
    let device = cpu();
    let options = TapeOptions { non_finite: retape_core::NonFinite::KeepFull, ..TapeOptions::default() };
    // Whether a handle is held through backward or not.
    for hold in [false, true] {
        let tape = Tape::with(&device, options.clone());
        let x = tape.leaf(&Tensor::from_slice(&device, &[2], &[1.0f32, f32::NAN]).unwrap()).unwrap();
        let h = x.scale(1.0).unwrap().int8().unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        let held = hold.then(|| h.clone());
        drop(h);
        tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        drop(held);
        tape.backward(&loss).unwrap();
        assert_eq!(tape.stats().full_precision_fallbacks, 1);
    }
}

/// A value that only its own node would read goes with its node: it isn't quantized on the way out.
#[test]
fn a_dead_value_is_not_stored_first() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&Tensor::from_slice(&device, &[2], &[1000.0f32, 1.0]).unwrap()).unwrap();
    // exp reads its output, which holds an infinity.
    drop(x.clone().exp().unwrap().int8().unwrap());
    assert_eq!((tape.node_count(), tape.stats().quantized), (1, 0));
    assert!(tape.ledger().is_ok(), "nothing was parked");
}

/// Flaw 13: one replay fills all outputs that are still read, and never a stored one.
#[test]
fn outputs_of_one_node_may_have_different_marks() {
    let device = cpu();
    let run = |marks: [Mark; 2]| {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 4], 1);
        let mut outputs = x.clone().apply_all(Op::Custom(Rc::new(SinCos)), []).unwrap();
        for (output, mark) in outputs.iter().zip(marks) {
            output.set_mark(mark).unwrap();
        }
        let (c, s) = (outputs.pop().unwrap(), outputs.pop().unwrap());
        let loss = s.clone().mul(&c).unwrap().sum().unwrap();
        drop((s, c));
        let saved = tape.saved_bytes();
        let gradient = backward(&tape, &loss, &x);
        (saved, tape.stats().replays, gradient)
    };
    let (saved, replays, plain) = run([Mark::Keep, Mark::Keep]);
    assert_eq!((saved, replays), (128, 0));
    for marks in [[Mark::Recompute, Mark::Keep], [Mark::Keep, Mark::Recompute]] {
        let (saved, replays, gradient) = run(marks);
        assert_eq!((saved, replays), (64, 1), "{marks:?}");
        assert_eq!(gradient, plain, "{marks:?}");
    }
    let (saved, replays, gradient) = run([Mark::Recompute, Mark::Recompute]);
    assert_eq!((saved, replays), (0, 1));
    assert_eq!(gradient, plain);
}

/// Flaw 14: no recursion: 200,000 ops in a row settle, replay and go.
#[test]
fn deep_graphs_need_no_stack() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2], 1);
    let mut y = x.clone().scale(1.0).unwrap();
    for _ in 0..200_000 {
        y = y.scale(1.0).unwrap();
    }
    let loss = y.clone().square().unwrap().sum().unwrap();
    y.set_mark(Mark::Recompute).unwrap();
    drop(y);
    let ledger = tape.ledger().unwrap();
    assert_eq!(ledger.values.last().unwrap().depth, 200_001);
    tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
    assert_eq!(tape.stats().replays, 200_001);
    drop(loss);
    assert_eq!(tape.node_count(), 1);
}

/// Flaw 15: readers that never ask. What is only reachable from another loss isn't counted.
#[test]
fn readers_outside_the_pass_are_not_waited_for() {
    let device = cpu();
    let base = device.meter().live();
    {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 4], 1);
        let h = x.gelu().unwrap().recompute().unwrap();
        let used = h.clone().square().unwrap().sum().unwrap();
        let unused = h.clone().tanh().unwrap().sum().unwrap();
        drop(h);
        let gradients = tape.backward(&used).unwrap();
        drop((gradients, unused, used));
        assert_eq!(tape.saved_bytes(), 0);
    }
    assert_eq!(device.meter().live(), base);
}

/// Flaw 16: leaves can't be dropped; a parameter may be updated while a tape is alive, without changing its gradients.
#[test]
fn leaves_are_kept_and_may_be_replaced_outside() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[4], 1);
    for mark in [Mark::Recompute, INT8] {
        let error = x.set_mark(mark).unwrap_err();
        assert!(matches!(error, Error::MarkNotAllowed { .. }), "{error}");
    }
    assert!(x.set_mark(Mark::Keep).is_ok());

    // One leaf per parameter and tape; an updated tensor makes a second leaf, and the gradients add up.
    let id = retape_core::ParameterId::unique();
    let old = random(&device, &[4], 1, DType::F32);
    let new = random(&device, &[4], 2, DType::F32);
    let tape = Tape::new(&device);
    let a = tape.parameter(id, &old, true).unwrap().square().unwrap().sum().unwrap();
    let b = tape.parameter(id, &old, true).unwrap().square().unwrap().sum().unwrap();
    assert_eq!(tape.node_count(), 1 + 2 * 2);
    let c = tape.parameter(id, &new, true).unwrap().square().unwrap().sum().unwrap();
    let loss = a.add(&b).unwrap().add(&c).unwrap();
    let gradient = tape.backward(&loss).unwrap().parameter(id).unwrap().to_vec::<f32>().unwrap();
    let (old, new) = (old.to_vec::<f32>().unwrap(), new.to_vec::<f32>().unwrap());
    for (i, g) in gradient.iter().enumerate() {
        approx::assert_relative_eq!(*g, 4.0 * old[i] + 2.0 * new[i], epsilon = 1e-6);
    }
}

/// Another view of a parameter, or the same one frozen, is another leaf.
#[test]
fn a_parameter_asked_for_otherwise_is_another_leaf() {
    let device = cpu();
    let tape = Tape::new(&device);
    let (id, t) = (retape_core::ParameterId::unique(), random(&device, &[2, 3], 1, DType::F32));
    let frozen = tape.parameter(id, &t, false).unwrap();
    let trained = tape.parameter(id, &t, true).unwrap();
    assert_eq!((frozen.requires_grad(), trained.requires_grad()), (false, true));
    let turned = random(&device, &[3, 2], 1, DType::F32).transpose(0, 1).unwrap();
    let turned = tape.parameter(id, &turned, true).unwrap();
    assert_eq!((turned.shape(), trained.shape()), ([2, 3][..].into(), [2, 3][..].into()));
    assert_eq!(tape.node_count(), 3);
    // One of another shape or dtype is another parameter: also where the tape holds nothing of the leaf any more.
    for forgotten in [false, true] {
        let tape = with_policy(&device, |_| Some(Mark::Keep));
        let leaf = tape.parameter(id, &t, true).unwrap();
        let _sum = (!forgotten).then(|| leaf.clone().sum().unwrap());
        drop(leaf);
        for other in [random(&device, &[4], 2, DType::F32), random(&device, &[2, 3], 2, DType::F64)] {
            let error = tape.parameter(id, &other, true).unwrap_err();
            assert!(matches!(error, Error::InvalidTensor { .. }), "{error}");
            let other = format!("{}{:?}", other.dtype(), other.shape());
            assert!(error.to_string().contains("f32[2, 3]") && error.to_string().contains(&other), "{error}");
        }
        assert_eq!(tape.parameter(id, &t, true).unwrap().shape()[..], [2, 3]);
    }
    let elsewhere = random(&cpu(), &[2, 3], 1, DType::F32);
    assert!(matches!(tape.parameter(id, &elsewhere, true), Err(Error::DeviceMismatch { .. })));
}

/// Flaw 17: a view may hold much more than it shows; the lint says so.
#[test]
fn a_small_view_of_a_large_value_is_lint() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[64, 64], 1);
    let row = x.scale(2.0).unwrap().narrow(0, 3, 1).unwrap();
    let _loss = row.clone().gelu().unwrap().sum().unwrap();
    drop(row);
    let ledger = tape.ledger().unwrap();
    assert!(ledger.lint.iter().any(|l| l.code == "view-holds-more"), "{ledger}");
}

#[test]
fn keep_everywhere_is_no_policy_to_the_byte() {
    let run = |keep: bool| {
        let device = meta();
        let tape = with_policy(&device, move |_| keep.then_some(Mark::Keep));
        device.meter().reset_peak();
        let x = leaf(&tape, &[16, 32], 1);
        let loss = blocks(&tape, x.scale(1.0).unwrap(), 3, None, 0).unwrap();
        let saved = tape.saved_bytes();
        let forward = device.meter().step_peak();
        tape.backward(&loss).unwrap();
        (saved, forward, device.meter().step_peak())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn marks_by_strength_value_scope_policy() {
    let device = cpu();
    let tape = with_policy(&device, |_| Some(INT8));
    let x = leaf(&tape, &[4, 64], 1);
    let mut out = Vec::new();
    {
        let _scope = tape.scope(scope("s").mark(Mark::Recompute));
        for own in [None, Some(Mark::Keep)] {
            let h = x.clone().scale(2.0).unwrap();
            if let Some(mark) = own {
                h.set_mark(mark).unwrap();
            }
            out.push(h.gelu().unwrap().sum().unwrap());
        }
    }
    let h = x.scale(2.0).unwrap();
    out.push(h.clone().gelu().unwrap().sum().unwrap());
    drop(h);
    let ledger = tape.ledger().unwrap();
    let of = |path: &str| ledger.get(path).map(|v| (v.mark.name(), v.rule.to_string()));
    assert_eq!(of("s.scale"), Some(("recompute", "scope".into())));
    assert_eq!(of("s.scale_1"), Some(("keep", "value".into())));
    assert_eq!(of("scale"), Some(("int8", "test".into())));
    assert_eq!(ledger.get("scale").unwrap().stored_bytes, 4 * 64 + 4 * 4);
    // Outputs of the scope belong outside, by path and by mark.
    assert!(out[0].path().starts_with('s') && !out[0].path().contains('.'), "{}", out[0].path());
}

/// A value in a scope that outlives it gets the mark that the policy gives outside.
#[test]
fn a_scope_s_output_is_marked_outside() {
    let device = cpu();
    let tape = with_policy(&device, |path| match path {
        "block.scale" => Some(Mark::Keep),
        "block" => Some(Mark::Recompute),
        _ => None,
    });
    let x = leaf(&tape, &[4], 1);
    let y = {
        let _scope = tape.scope("block");
        x.clone().scale(2.0).unwrap()
    };
    assert_eq!(y.path(), "block");
    let loss = y.clone().gelu().unwrap().sum().unwrap();
    drop(y);
    assert_eq!(tape.saved_bytes(), 0);
    let plain = {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4], 1);
        let loss = x.clone().scale(2.0).unwrap().gelu().unwrap().sum().unwrap();
        backward(&tape, &loss, &x)
    };
    assert_eq!(backward(&tape, &loss, &x), plain);
}

#[test]
fn scopes_dropped_out_of_order_close_once() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[2], 1);
    let (outer, inner) = (tape.scope("outer"), tape.scope("inner"));
    drop(outer);
    let _others = (tape.scope("a"), tape.scope("b"));
    // `inner` closed with `outer`: this isn't the scope at its depth any more.
    drop(inner);
    assert_eq!(x.scale(2.0).unwrap().path(), "a.b.scale");
}

#[test]
fn checkpoint_is_a_scope_that_recomputes() {
    let device = cpu();
    let run = |marked: bool| {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 4], 1);
        let inside = || x.clone().gelu()?.tanh()?.exp();
        let y = if marked { tape.within(scope("cp").mark(Mark::Recompute), inside) } else { inside() }.unwrap();
        let loss = y.clone().sum().unwrap();
        drop(y);
        let saved = tape.saved_bytes();
        (saved, backward(&tape, &loss, &x))
    };
    let ((plain, g0), (marked, g1)) = (run(false), run(true));
    // tanh's and exp's outputs without; with, exp's output alone, which belongs outside.
    assert_eq!((plain, marked), (2 * 64, 64));
    assert_eq!(g0, g1);
}

#[test]
fn one_flipped_bit_in_a_replay_is_named() {
    let watch = Arc::new(Watch::default());
    let device = wrapped::device(watch.clone());
    let run = || {
        watch.kernels.lock().unwrap().clear();
        let tape = Tape::with(&device, TapeOptions { verify: Verify::Bits, ..TapeOptions::default() });
        let x = leaf(&tape, &[4, 4], 1);
        let _scope = tape.scope("ffn");
        let h = x.gelu().unwrap().recompute().unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        drop(h);
        tape.backward(&loss).map(|_| ())
    };
    assert_eq!(run(), Ok(()));
    // gelu and square ran forward; the third unary kernel is the replay.
    watch.flip_unary.store(3, Ordering::Relaxed);
    let error = run().unwrap_err();
    assert_eq!(error, Error::ReplayDiffers { path: "ffn.gelu".into(), op: "gelu", index: 5 });
}

/// Behind an int8 value passes are compared with each other, also where the handle went after the first.
#[test]
fn a_replay_behind_int8_is_compared_with_the_first_one() {
    let device = cpu();
    let tape = Tape::with(&device, TapeOptions { verify: Verify::Bits, ..TapeOptions::default() });
    let x = leaf(&tape, &[4, 64], 1);
    let h = x.scale(3.0).unwrap().int8().unwrap().tanh().unwrap().recompute().unwrap();
    let loss = h.clone().sum().unwrap();
    tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
    drop(h);
    tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
}

/// What is rounded up depends on the tape's seed and the value alone: not on when it is stored, nor on the pass.
#[test]
fn stochastic_rounding_does_not_depend_on_handles() {
    let device = cpu();
    let x = random(&device, &[7, 50], 1, DType::F32);
    let spec = Int8Spec { group: 13, rounding: Rounding::Stochastic };
    // Where the handle goes: after both passes, between them, or before.
    let run = |seed: u64, spec: Int8Spec, held: [bool; 2]| {
        let tape = Tape::with(&device, TapeOptions { seed: Some(seed), ..TapeOptions::default() });
        let leaf = tape.leaf(&x).unwrap();
        let value = |factor: f64| {
            let v = leaf.clone().scale(factor).unwrap();
            v.set_mark(Mark::Int8(spec)).unwrap();
            Some(v)
        };
        let (mut a, mut b) = (value(1.0).clone(), value(1.0));
        let loss = |v: &Option<Var>| v.as_ref().unwrap().clone().square().unwrap().sum().unwrap();
        let losses = [loss(&a), loss(&b)];
        let both = losses[0].clone().add(&losses[1]).unwrap();
        let mut passes = vec![];
        for held in held {
            if !held {
                (a, b) = (None, None);
            }
            let of = |loss: &Var| {
                tape.backward_with(loss, BackwardOptions::RETAIN).unwrap().of(&leaf).unwrap().to_f64_vec().unwrap()
            };
            passes.push([of(&losses[0]), of(&losses[1]), of(&both)]);
        }
        drop((a, b));
        assert_eq!(passes[0], passes[1], "two passes, other bits");
        passes.swap_remove(0)
    };
    let stored = run(3, spec, [false, false]);
    assert_eq!(run(3, spec, [true, true]), stored);
    assert_eq!(run(3, spec, [true, false]), stored);
    assert_ne!(run(4, spec, [false, false])[0], stored[0], "another seed, the same bits");
    assert_ne!(stored[0], stored[1], "two values of one tape are rounded alike");
    let nearest = Int8Spec { rounding: Rounding::Nearest, ..spec };
    assert_eq!(run(3, nearest, [true, true]), run(4, nearest, [false, false]));
    // Within a step of the exact gradient.
    for (g, x) in stored[0].iter().zip(x.to_f64_vec().unwrap()) {
        assert!((g / 2.0 - x).abs() <= 1.0 / 127.0 * x.abs().max(4.0), "{g} for {x}");
    }
}

#[test]
fn everything_is_freed_when_a_kernel_fails() {
    let watch = Arc::new(Watch::default());
    let device = wrapped::device(watch.clone());
    let x0 = random(&device, &[16, 32], 1, DType::F32);
    let base = device.meter().live();
    let run = || {
        watch.kernels.lock().unwrap().clear();
        let tape = Tape::new(&device);
        let x = tape.leaf(&x0)?;
        let loss = blocks(&tape, x.scale(1.0)?, 2, Some(Mark::Recompute), 0)?;
        tape.backward(&loss).map(|_| ())
    };
    run().unwrap();
    let kernels = watch.kernels.lock().unwrap().len();
    assert!(kernels > 30);
    for n in 1..=kernels {
        watch.fail_kernel.store(n, Ordering::Relaxed);
        assert!(run().is_err(), "kernel {n} failed without an error");
        assert_eq!(device.meter().live(), base, "kernel {n} failed, and something stayed");
    }
}

#[test]
fn a_memory_limit_is_an_error_and_frees_everything() {
    for device in [cpu(), meta()] {
        let x0 = random(&device, &[512, 32], 1, DType::F32);
        let base = device.meter().live();
        let run = |mark| {
            let tape = Tape::new(&device);
            let x = tape.leaf(&x0)?;
            let loss = blocks(&tape, x.scale(1.0)?, 4, mark, 0)?;
            tape.backward(&loss).map(|_| ())
        };
        device.meter().reset_peak();
        run(Some(Mark::Recompute)).unwrap();
        let needed = device.meter().peak();
        device.meter().set_limit(Some(needed));
        assert_eq!(run(Some(Mark::Recompute)), Ok(()));
        let error = run(None).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { limit, .. } if limit == needed), "{error}");
        assert_eq!(device.meter().live(), base);
        device.meter().set_limit(Some(needed - 1));
        assert!(matches!(run(Some(Mark::Recompute)), Err(Error::OutOfMemory { .. })));
        assert_eq!(device.meter().live(), base);
        device.meter().set_limit(None);
    }
}

#[test]
fn the_ledger_is_the_meter_and_the_dry_run() {
    let run = |device: &Device| {
        let tape = with_policy(device, |path| {
            (path.ends_with("gelu")).then_some(Mark::Recompute).or((path.ends_with("matmul")).then_some(INT8))
        });
        let x = leaf(&tape, &[16, 32], 1);
        let _loss = blocks(&tape, x.scale(1.0).unwrap(), 3, None, 0).unwrap();
        let ledger = tape.ledger().unwrap();
        let meter = device.meter();
        assert_eq!(
            ledger.totals().stored_bytes,
            meter.live_of(MemoryKind::Saved) + meter.live_of(MemoryKind::Quantized)
        );
        assert_eq!(ledger.totals().stored_bytes, tape.saved_bytes());
        ledger
    };
    let (real, dry) = (run(&cpu()), run(&meta()));
    assert_eq!(real, dry);
    assert!(real.values.iter().any(|v| v.mark.name() == "recompute" && v.recompute_flops > 0 && v.depth == 1));
    assert!(real.values.iter().any(|v| v.mark.name() == "int8" && v.stored_bytes < v.bytes));
}

#[test]
fn measuring_the_quantization_takes_the_same_memory_dry() {
    let run = |device: &Device| {
        device.meter().reset_peak();
        let tape = Tape::with(device, TapeOptions { measure_quantization: true, ..TapeOptions::default() });
        let h = leaf(&tape, &[64, 64], 1).scale(2.0).unwrap().int8().unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        drop(h);
        let measured = tape.ledger().unwrap().values[0].quantization_error;
        tape.backward(&loss).unwrap();
        (measured, device.meter().peak(), device.meter().fingerprint())
    };
    let ((measured, peak, events), dry) = (run(&cpu()), run(&meta()));
    assert!(measured.is_some_and(|e| e > 0.0 && e < 0.02), "{measured:?}");
    assert_eq!(dry, (None, peak, events));
}

#[test]
fn a_value_keeps_its_id_in_every_ledger() {
    let tape = Tape::new(&meta());
    let x = leaf(&tape, &[4], 1);
    let (a, b) = (x.clone().exp().unwrap(), x.tanh().unwrap());
    let id = || tape.ledger().unwrap().get("tanh").unwrap().id;
    let first = id();
    drop(a);
    assert_eq!(id(), first);
    drop(b);
}

/// Sizes near the end of 64 bits, and tensors of nothing whose offset lies past the end of their storage.
#[test]
fn extreme_shapes() {
    let device = cpu();
    let zero = |shape: &[usize]| Tensor::full(&device, shape, DType::F32, 0.0);
    assert!(matches!(zero(&[0, 1 << 40, 1 << 40]), Err(Error::InvalidTensor { .. })));
    assert!(matches!(zero(&[1 << 40, 1 << 40]), Err(Error::InvalidTensor { .. })));
    let corner = zero(&[3, 4]).unwrap().narrow(1, 4, 0).unwrap().narrow(0, 3, 0).unwrap();
    assert!(corner.to_vec::<f32>().unwrap().is_empty());
    let tape = Tape::new(&device);
    let x = tape.leaf(&corner).unwrap();
    let loss = x.clone().gelu().unwrap().matmul(x.clone().transpose(0, 1).unwrap()).unwrap().sum().unwrap();
    let gradient = tape.backward(&loss).unwrap().of(&x).unwrap().to_vec::<f32>().unwrap();
    assert!(gradient.is_empty());
    let dry = meta();
    let half = || Tensor::uninit(&dry, &[1 << 60], DType::F64, MemoryKind::Input);
    let _first = half().unwrap();
    assert!(matches!(half(), Err(Error::OutOfMemory { limit: u64::MAX, .. })));
}

/// A gradient that the user gave stays theirs, also where it is a leaf's gradient unchanged.
#[test]
fn a_given_gradient_is_not_given_back() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[4], 1);
    let y = x.clone().reshape(&[2, 2]).unwrap();
    let given = random(&device, &[2, 2], 2, DType::F32);
    let gradients = tape.backward_from(&[(&y, &given), (&y, &given)], BackwardOptions::RETAIN).unwrap();
    let twice: Vec<f32> = given.to_vec::<f32>().unwrap().iter().map(|g| 2.0 * g).collect();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f32>().unwrap(), twice);
    let gradients = tape.backward_from(&[(&y, &given)], BackwardOptions::RETAIN).unwrap();
    assert!(!gradients.of(&x).unwrap().shares_storage(&given));
    assert_eq!(
        (given.storage().kind(), gradients.of(&x).unwrap().storage().kind()),
        (MemoryKind::Input, MemoryKind::Gradient)
    );
}

/// A part of a large gradient that goes to a leaf doesn't take the whole out of the step's bytes.
#[test]
fn the_step_s_bytes_count_a_gradient_that_is_only_partly_a_leaf_s() {
    let device = cpu();
    let tape = Tape::new(&device);
    let (x, row) = (leaf(&tape, &[1000, 4], 1), leaf(&tape, &[1, 4], 2));
    let loss = row.cat([x.scale(1.0).unwrap().clone()], 0).unwrap().exp().unwrap().sum().unwrap();
    device.meter().reset_peak();
    let before = device.meter().step_live();
    tape.backward(&loss).unwrap();
    // The gradient of the joined tensor beside exp's saved output, which it replaces; x's own is no step byte.
    assert_eq!(device.meter().step_peak() - before, 4 + 1001 * 4 * 4);
}

/// A leaf that only the tape holds any more is the tape's memory.
#[test]
fn a_leaf_given_away_is_in_the_ledger() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[4, 4], 1);
    let mask = tape.constant(&random(&device, &[4, 4], 2, DType::F32)).unwrap();
    let _loss = x.clone().mul(&mask).unwrap().sum().unwrap();
    drop(mask);
    let ledger = tape.ledger().unwrap();
    assert_eq!((ledger.values.len(), ledger.values[0].op, ledger.values[0].stored_bytes), (1, "leaf", 64), "{ledger}");
}

#[test]
fn marks_that_save_nothing_are_lint_and_unmatched_rules_an_error() {
    let device = meta();
    let policy = |origin| -> Option<Rc<dyn Policy>> {
        let rule = RuleInfo { name: "nothing".into(), origin };
        Some(Rc::new(ByPath(|_: &str| None, vec![rule])))
    };
    let tape = |origin| {
        let tape = Tape::with(&device, TapeOptions { policy: policy(origin), ..TapeOptions::default() });
        let x = leaf(&tape, &[4], 1);
        // Nobody reads what `add` made.
        let y = x.clone().add(&x).unwrap().recompute().unwrap();
        let loss = y.scale(2.0).unwrap().sum().unwrap();
        (tape, loss)
    };
    let (user, loss) = tape(Origin::User);
    let expected = Error::RuleMatchedNothing { rule: "nothing".into() };
    assert_eq!(user.ledger().unwrap_err(), expected);
    assert_eq!(user.backward(&loss).unwrap_err(), expected);
    let (preset, _loss) = tape(Origin::Preset);
    let lint = preset.ledger().unwrap().lint;
    assert!(lint.iter().any(|l| l.code == "rule-matched-nothing" && l.subject == "nothing"), "{lint:?}");
    assert!(lint.iter().any(|l| l.code == "mark-saves-nothing" && l.subject == "add"), "{lint:?}");
}

/// A policy whose decision points past its rules.
#[test]
fn a_decision_without_a_rule_is_named_by_its_number() {
    let device = meta();
    let policy: Rc<dyn Policy> = Rc::new(ByPath(|_: &str| Some(Mark::Recompute), vec![]));
    let tape = Tape::with(&device, TapeOptions { policy: Some(policy), ..TapeOptions::default() });
    let h = leaf(&tape, &[2, 2], 1).scale(2.0).unwrap();
    let _loss = h.layer_norm(None, None, 1e-5).unwrap();
    assert_eq!(tape.ledger().unwrap().get("scale").unwrap().rule.to_string(), "rule 0");
}

#[test]
fn what_needs_no_gradient_saves_nothing() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.constant(&random(&device, &[4, 4], 1, DType::F32)).unwrap();
    let h = x.gelu().unwrap();
    let frozen = tape.constant(&random(&device, &[4, 4], 2, DType::F32)).unwrap();
    let w = leaf(&tape, &[4, 4], 3);
    let y = h.clone().matmul(&w).unwrap();
    drop(h);
    let z = y.clone().matmul(&frozen).unwrap();
    drop(y);
    let loss = z.clone().sum().unwrap();
    drop(z);
    // gelu's input isn't saved (x is constant); gelu's output is, for w; y isn't, since the frozen matrix needs
    // nothing.
    assert_eq!(tape.saved_bytes(), 64);
    assert_eq!(tape.backward(&loss).unwrap().len(), 1);
}

#[test]
fn a_tape_has_one_thread_and_no_shared_state() {
    let run = || {
        let device = retape_cpu::device_with_threads(1).unwrap();
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[16, 32], 1);
        let loss = blocks(&tape, x.clone().scale(1.0).unwrap(), 3, Some(Mark::Recompute), 0).unwrap();
        gradient_bytes(&tape.backward(&loss).unwrap(), &[x]).unwrap()
    };
    let alone = run();
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(run)).collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), alone);
    }
}

#[test]
fn wrong_use_is_an_error_that_says_what_is_right() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = leaf(&tape, &[3, 4], 1);
    let says = |error: Error, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}");
    };
    let _scope = tape.scope("ffn");
    says(x.clone().matmul(&x).unwrap_err(), &["matmul", "ffn.matmul", "f32[3, 4]", "inner sizes"]);
    says(x.clone().reshape(&[5]).unwrap_err(), &["reshape", "12 elements"]);
    says(x.clone().sum_dims(&[2], false).unwrap_err(), &["sum", "dimension 2", "rank 2"]);
    says(x.clone().dropout(1.0).unwrap_err(), &["dropout", "[0, 1)"]);
    says(x.clone().add(x.clone().cast(DType::F64).unwrap()).unwrap_err(), &["add", "f32", "f64", "cast"]);
    let twice = reduce::ReduceOp { f: reduce::Reduction::Mean, dims: [0, 0].into_iter().collect(), keepdim: false };
    says(x.clone().apply(twice, []).unwrap_err(), &["mean", "without repeats", "[0, 0]"]);
    let q = x.clone().reshape(&[1, 3, 1, 4]).unwrap();
    for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        says(
            q.clone().attention(&q, &q, scale, true, 0.0).unwrap_err(),
            &["attention", "positive", &scale.to_string()],
        );
    }
    let column = x.clone().narrow(0, 0, 1).unwrap().sum().unwrap().expand(&[1usize << 40, 1]).unwrap();
    says(column.clone().matmul(column.transpose(0, 1).unwrap()).unwrap_err(), &["ffn.matmul", "elements"]);
    says(x.clone().split(0, &[usize::MAX, 4]).unwrap_err(), &["ffn.split", "add up"]);
    let ids = tape.constant(&Tensor::from_slice(&device, &[2], &[0i64, 3]).unwrap()).unwrap();
    says(x.clone().embedding(&ids).unwrap_err(), &["embedding", "3"]);
    says(tape.leaf(&Tensor::from_slice(&device, &[2], &[0i64, 3]).unwrap()).unwrap_err(), &["i64", "constant"]);
    says(tape.backward(&x).unwrap_err(), &["one number", "sum"]);
    let constant = tape.constant(&random(&device, &[1], 1, DType::F32)).unwrap();
    says(tape.backward(&constant).unwrap_err(), &["no leaf that requires a gradient"]);
    let other = Tape::new(&device);
    let theirs = leaf(&other, &[3, 4], 1);
    assert!(tape.backward_with(&x.clone().sum().unwrap(), BackwardOptions::RETAIN).unwrap().of(&theirs).is_none());
    says(theirs.add(&x).unwrap_err(), &["another tape"]);
    let elsewhere = random(&cpu(), &[3], 1, DType::F32);
    says(tape.leaf(&elsewhere).unwrap_err(), &["different devices"]);
    says(
        tape.backward_from(&[(&x, &random(&cpu(), &[3, 4], 1, DType::F32))], BackwardOptions::RETAIN).unwrap_err(),
        &["different devices"],
    );
    let loss = x.clone().sum().unwrap();
    tape.backward(&loss).unwrap();
    says(tape.backward(&loss).unwrap_err(), &["consumed", "backward_with"]);
    says(x.gelu().unwrap_err(), &["consumed"]);
}
