//! Operands by value: a value ends with its last use, in time for memory and not too early for a mark.

use retape_core::kernel::{CrossEntropySpec, LossReduction, PoolDivisor};
use retape_core::ops::attention::AttentionOptions;
use retape_core::ops::conv::Conv;
use retape_core::ops::pool::Pool;
use retape_core::ops::{Op, Sample};
use retape_core::{
    BackwardOptions, DType, Decision, Device, Error, Int8Spec, Mark, Policy, Result, RuleInfo, Site, Tape, TapeOptions,
    Tensor, Trace, Var, scope,
};
use retape_tests::conformance::label;
use retape_tests::wrapped::{self, Watch};
use retape_tests::{gradient_bytes, random, sample_tensor};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const INT8: Mark = Mark::Int8(Int8Spec { group: 64, rounding: retape_core::Rounding::Nearest });

/// No mark, and every mark.
fn marks() -> impl Iterator<Item = Option<Mark>> {
    [None].into_iter().chain(Mark::all().map(Some))
}

/// Marks a value in the statement of its op, by the mark's own method.
fn marked(y: Var, mark: Option<Mark>) -> Result<Var> {
    match mark {
        None => Ok(y),
        Some(Mark::Keep) => y.keep(),
        Some(Mark::Recompute) => y.recompute(),
        Some(INT8) => y.int8(),
        Some(Mark::Bf16) => y.bf16(),
        Some(other) => y.set_mark(other).map(|()| y),
    }
}

/// Gives every value this mark.
#[derive(Debug)]
struct All(Mark);

impl Policy for All {
    fn mark(&self, _: &Site<'_>) -> Option<Decision> {
        Some(Decision { mark: self.0, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        &[]
    }
}

/// Where the values get their mark from, but for the one that is marked itself.
#[derive(Debug, Clone, Copy)]
enum Around {
    Nothing,
    Policy(Mark),
    Scope(Mark),
}

fn surroundings() -> Vec<Around> {
    let marks = || marks().flatten();
    [Around::Nothing].into_iter().chain(marks().map(Around::Policy)).chain(marks().map(Around::Scope)).collect()
}

fn tape_for(device: &Device, around: Around) -> Tape {
    let policy: Option<Rc<dyn Policy>> = match around {
        Around::Policy(mark) => Some(Rc::new(All(mark))),
        _ => None,
    };
    Tape::with(device, TapeOptions { policy, seed: Some(3), ..TapeOptions::default() })
}

/// The op's operands: constants, and results of an op on leaves, so that they settle.
fn operands(tape: &Tape, inputs: &[Tensor]) -> Result<(Vec<Var>, Vec<Var>)> {
    let is_float = |t: &Tensor| t.dtype().is_float();
    let leaf = |t: &Tensor| if is_float(t) { tape.leaf(t) } else { tape.constant(t) };
    let leaves = inputs.iter().map(leaf).collect::<Result<Vec<Var>>>()?;
    let inner = leaves.iter().map(|x| if x.dtype().is_float() { x.clone().shift(0.0) } else { Ok(x.clone()) });
    Ok((leaves.clone(), inner.collect::<Result<_>>()?))
}

/// What a run shows: or the error that it ended with.
type Shown = Result<(Vec<Vec<u8>>, u64, u64), String>;

/// Runs the op, marks its float outputs, squares them, runs backward. Operands go with their last use, or by `drop`
/// after the marks.
fn run(device: &Device, sample: &Sample, around: Around, mark: Option<Mark>, by_value: bool) -> Shown {
    let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(device, i, DType::F32)).collect();
    let before = device.meter().live();
    device.meter().reset_peak();
    let tape = tape_for(device, around);
    let text = |e: Error| e.to_string();
    let _scope = match around {
        Around::Scope(mark) => Some(tape.scope(scope("s").mark(mark))),
        _ => None,
    };
    let (leaves, mut inner) = operands(&tape, &inputs).map_err(text)?;
    let others = inner.split_off(1);
    let first = inner.remove(0);
    let (outputs, held) = if by_value {
        (first.apply_all(sample.op.clone(), others).map_err(text)?, None)
    } else {
        let outputs = first.clone().apply_all(sample.op.clone(), others.iter().cloned()).map_err(text)?;
        (outputs, Some((first, others)))
    };
    let outputs = outputs.into_iter().map(|y| {
        let mark = mark.filter(|_| y.dtype().is_float());
        marked(y, mark)
    });
    let outputs: Vec<Var> = outputs.collect::<Result<_>>().map_err(text)?;
    drop(held);
    let squares = outputs.into_iter().filter(|y| y.dtype().is_float()).map(|y| (&y * &y)?.add(y));
    let squares: Vec<Var> = squares.collect::<Result<_>>().map_err(text)?;
    let seeds: Vec<Tensor> = squares.iter().map(|y| random(device, &y.shape(), 9, DType::F32)).collect();
    let pairs: Vec<(&Var, &Tensor)> = squares.iter().zip(&seeds).collect();
    let gradients = tape.backward_from(&pairs, BackwardOptions::default()).map_err(text)?;
    let bytes = gradient_bytes(&gradients, &leaves).map_err(text)?;
    drop(pairs);
    drop((gradients, squares, leaves, _scope, tape));
    drop(seeds);
    let left = device.meter().live() - before;
    Ok((bytes, left, device.meter().step_peak()))
}

/// A mark in the statement of its op is in time, under every policy and in every scope; and the peak and the gradients'
/// bits are those of a program that drops each operand by hand.
#[test]
fn a_mark_in_the_statement_of_its_op_is_in_time() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    for sample in Op::all_samples() {
        // A view's mark is that of what it views, which may be marked already, or an exact value.
        for around in surroundings() {
            for mark in marks() {
                let what = format!("{}, {around:?}, {mark:?}", label(&sample));
                let (by_value, by_hand) =
                    (run(&device, &sample, around, mark, true), run(&device, &sample, around, mark, false));
                if let Err(error) = &by_value {
                    assert!(!error.contains("too late"), "{what}: {error}");
                }
                match (by_value, by_hand) {
                    (Ok(value), Ok(hand)) => {
                        assert_eq!(value.0, hand.0, "{what}: gradients");
                        assert_eq!((value.1, hand.1), (0, 0), "{what}: left");
                        assert!(value.2 <= hand.2, "{what}: peak {} > {}", value.2, hand.2);
                    }
                    (value, hand) => assert_eq!(value.err(), hand.err(), "{what}"),
                }
            }
        }
    }
}

/// What a tape shows of itself and of its device.
fn shown(tape: &Tape, device: &Device) -> (usize, u64, u64, u64) {
    (tape.node_count(), tape.saved_bytes(), tape.random_counter(), device.meter().live())
}

/// An op that fails, in `infer`, at any allocation or in any kernel, leaves the tape as if its operands had been
/// dropped; what was given as a clone stays usable, and the op can be tried again.
#[test]
fn an_op_that_fails_records_nothing() {
    let watch = Arc::new(Watch::default());
    let device = wrapped::device(watch.clone());
    let kernels = || watch.kernels.lock().unwrap().len();
    let allocations = || watch.allocations.load(Ordering::Relaxed);
    let mut failed = 0;
    for sample in Op::all_samples() {
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(&device, i, DType::F32)).collect();
        for around in
            [Around::Nothing, Around::Policy(INT8), Around::Policy(Mark::Bf16), Around::Policy(Mark::Recompute)]
        {
            let what = format!("{}, {around:?}", label(&sample));
            let prepare = || {
                let tape = tape_for(&device, around);
                let (leaves, operands) = operands(&tape, &inputs).unwrap();
                // Something before that draws, and something whose operand still waits to settle.
                let before = leaves[0]
                    .clone()
                    .shift(1.0)
                    .and_then(Var::neg)
                    .map(|y| if y.dtype().is_float() { y.dropout(0.5) } else { Ok(y) });
                tape.node_count(); // settles what waits, so that the kernels below are the op's own
                (tape, leaves, operands, before)
            };
            let apply = |mut operands: Vec<Var>| {
                let others = operands.split_off(1);
                operands.remove(0).apply_all(sample.op.clone(), others)
            };
            let expected = {
                let (tape, _leaves, operands, _before) = prepare();
                operands.into_iter().for_each(drop);
                shown(&tape, &device)
            };
            // How many allocations and kernels the op makes.
            let (_tape, _leaves, operands, _before) = prepare();
            let (a, k) = (allocations(), kernels());
            let outputs = apply(operands).unwrap();
            let (a, k) = (allocations() - a, kernels() - k);
            drop((outputs, _before, _leaves, _tape));

            let mut check = |fault: &str, arm: &dyn Fn(), wrong: bool| {
                let (tape, leaves, operands, before) = prepare();
                let kept = operands.clone();
                arm();
                let error = if wrong {
                    let too_many = [operands.clone(), operands.clone(), operands].concat();
                    apply(too_many).err()
                } else {
                    apply(operands).err()
                };
                watch.fail_allocation.store(0, Ordering::Relaxed);
                watch.fail_kernel.store(0, Ordering::Relaxed);
                assert!(error.is_some(), "{what}: {fault} did not fail");
                failed += 1;
                // The clones are as good as before: the op can be tried again.
                let outputs = apply(kept.clone()).unwrap_or_else(|e| panic!("{what}: again after {fault}: {e}"));
                drop(outputs);
                drop(kept);
                assert_eq!(shown(&tape, &device), expected, "{what}: {fault}");
                drop((before, leaves));
            };
            let takes_any_number = matches!(sample.op, Op::Cat(_));
            if !takes_any_number {
                check("infer", &|| {}, true);
            }
            for i in 1..=a {
                let arm = || watch.fail_allocation.store(allocations() + i, Ordering::Relaxed);
                check(&format!("allocation {i}"), &arm, false);
            }
            for i in 1..=k {
                let arm = || watch.fail_kernel.store(kernels() + i, Ordering::Relaxed);
                check(&format!("kernel {i}"), &arm, false);
            }
        }
    }
    assert!(failed > 2000, "{failed}");
}

/// A random op that fails takes no number, and a mark that fails releases what it was called on.
#[test]
fn failing_calls_release_and_draw_nothing() {
    let watch = Arc::new(Watch::default());
    let device = wrapped::device(watch.clone());
    let tape = Tape::with(&device, TapeOptions { seed: Some(1), ..TapeOptions::default() });
    let x = tape.leaf(&random(&device, &[8, 8], 1, DType::F32)).unwrap();
    let h = x.clone().exp().unwrap();
    let nodes = tape.node_count();
    watch.fail_kernel.store(watch.kernels.lock().unwrap().len() + 1, Ordering::Relaxed);
    h.clone().dropout(0.5).unwrap_err();
    watch.fail_kernel.store(0, Ordering::Relaxed);
    assert_eq!((tape.random_counter(), tape.node_count()), (0, nodes));
    assert!(h.clone().dropout(1.5).is_err() && h.clone().attention(&h, &h, 1.0, true, 0.5).is_err());
    assert_eq!((tape.random_counter(), tape.node_count()), (0, nodes));
    let live = device.meter().live();
    h.dropout(0.5).unwrap();
    // The result had no handle: it and what only it needed are gone.
    assert_eq!((tape.random_counter(), tape.node_count()), (1, 1));
    assert_eq!(device.meter().live(), live - 256);

    let y = x.clone().exp().unwrap();
    assert!(x.clone().int8().is_err() && x.clone().bf16().is_err(), "a leaf");
    y.set_mark(Mark::Keep).unwrap();
    assert_eq!(y.path(), "exp_1", "`set_mark` keeps the handle");
    let error = y.clone().reshape(&[7]).unwrap_err().to_string();
    assert!(error.contains("reshape"), "{error}");
    drop(y);
    assert_eq!(tape.node_count(), 1);
}

type Composite = (&'static str, Vec<Vec<usize>>, fn(Vec<Var>) -> Result<Var>);

/// Methods that record several ops.
fn composites() -> Vec<Composite> {
    fn take<const N: usize>(x: Vec<Var>) -> [Var; N] {
        x.try_into().expect("as many as the table's shapes")
    }
    fn places(x: &Var, places: &[i64]) -> Result<Var> {
        x.tape().constant(&Tensor::from_slice(&x.tape().device(), &[places.len()], places)?)
    }
    let s = |shapes: &[&[usize]]| shapes.iter().map(|s| s.to_vec()).collect::<Vec<_>>();
    const MEAN: LossReduction = LossReduction::Mean;
    vec![
        ("add_scaled", s(&[&[4], &[4]]), |x| take(x).map_two(|a, b| a.add_scaled(b, 0.5))),
        ("lerp_scalar", s(&[&[4], &[4]]), |x| take(x).map_two(|a, b| a.lerp_scalar(b, 0.5))),
        ("conv2d", s(&[&[2, 5, 5], &[3, 2, 3, 3]]), |x| take(x).map_two(|a, b| a.conv2d(b, None, Conv::default()))),
        ("conv1d", s(&[&[2, 8], &[3, 2, 3]]), |x| take(x).map_two(|a, b| a.conv1d(b, None, Conv::default()))),
        ("max_pool2d", s(&[&[2, 4, 4]]), |mut x| x.remove(0).max_pool2d(Pool::new([2, 2]))),
        ("avg_pool2d", s(&[&[2, 4, 4]]), |mut x| x.remove(0).avg_pool2d(Pool::new([2, 2]), PoolDivisor::Inside)),
        ("index_select", s(&[&[4, 3]]), |mut x| {
            let at = places(&x[0], &[2, 0])?;
            x.remove(0).index_select(0, at)
        }),
        ("take_along_dim", s(&[&[4, 3]]), |mut x| {
            let at = places(&x[0], &[2, 0])?;
            x.remove(0).take_along_dim(at, None)
        }),
        ("index_add", s(&[&[4, 3], &[2, 3]]), |x| {
            let at = places(&x[0], &[2, 0])?;
            take(x).map_two(|a, b| a.index_add(0, at, b, 2.0))
        }),
        ("roll", s(&[&[4, 3]]), |mut x| x.remove(0).roll(2)),
        ("stack", s(&[&[4], &[4]]), |x| Var::stack(x, 0)),
        ("concat", s(&[&[4], &[3]]), |x| Var::concat(x, 0)),
        ("layer_norm_over", s(&[&[2, 3, 4]]), |mut x| x.remove(0).layer_norm_over(&[3, 4], None, None, 1e-5)),
        ("rms_norm", s(&[&[2, 3, 4]]), |mut x| x.remove(0).rms_norm(&[3, 4], None, None)),
        ("mse_loss", s(&[&[4], &[4]]), |x| take(x).map_two(|a, b| a.mse_loss(b, MEAN))),
        ("huber_loss", s(&[&[4], &[4]]), |x| take(x).map_two(|a, b| a.huber_loss(b, 0.5, MEAN))),
        ("kl_div_batchmean", s(&[&[2, 4], &[2, 4]]), |x| take(x).map_two(|a, b| a.kl_div_batchmean(b, true))),
        ("binary_cross_entropy_with_logits", s(&[&[4], &[4], &[4]]), |x| {
            let [a, b, w] = take(x);
            a.binary_cross_entropy_with_logits(b, Some(w), None, MEAN)
        }),
        ("matrix and vector", s(&[&[3, 4], &[4]]), |x| take(x).map_two(|a, b| a.matmul(b))),
        ("vector and matrix", s(&[&[3], &[3, 4]]), |x| take(x).map_two(|a, b| a.matmul(b))),
        ("outer", s(&[&[3], &[4]]), |x| take(x).map_two(|a, b| a.outer(b))),
        ("dot", s(&[&[4], &[4]]), |x| take(x).map_two(|a, b| a.dot(b))),
        ("linear_transposed", s(&[&[3, 4], &[4]]), |x| take(x).map_two(|a, w| a.linear_transposed(w, None))),
        ("normalize", s(&[&[3, 4]]), |mut x| x.remove(0).normalize(2.0, 1, 1e-12)),
        ("cumsum of a scalar", s(&[&[]]), |mut x| x.remove(0).cumsum(0)),
        ("softmax_dim", s(&[&[3, 4]]), |mut x| x.remove(0).softmax_dim(0)),
        ("log_softmax", s(&[&[3, 4]]), |mut x| x.remove(0).log_softmax(0)),
        ("masked_fill", s(&[&[3, 4]]), |mut x| {
            let mask = Tensor::from_slice(&x[0].tape().device(), &[4], &[true, false, true, false])?;
            let mask = x[0].tape().constant(&mask)?;
            x.remove(0).masked_fill(mask, 2.0)
        }),
        ("reshape that copies", s(&[&[3, 4]]), |mut x| x.remove(0).transpose(0, 1)?.reshape(&[12])),
        ("flatten that copies", s(&[&[3, 4]]), |mut x| x.remove(0).transpose(0, 1)?.flatten(0, -1)),
        ("select", s(&[&[3, 4]]), |mut x| x.remove(0).exp()?.select(0, 1)),
        ("attention_ragged", s(&[&[5, 2, 4], &[5, 2, 4], &[5, 2, 4]]), |x| {
            let [q, k, v] = take(x);
            q.attention_ragged(k, v, &[2, 3], &[2, 3], AttentionOptions::default())
        }),
        ("scaled_dot_product_attention", s(&[&[2, 3, 4], &[2, 3, 4], &[2, 3, 4], &[3, 3]]), |x| {
            let [q, k, v, mask] = take(x);
            q.scaled_dot_product_attention(k, v, Some(mask), AttentionOptions::default())
        }),
        ("nll_loss", s(&[&[3, 4]]), |mut x| {
            let target = places(&x[0], &[2, 0, 1])?;
            x.remove(0).log_softmax(1)?.nll_loss(target, None, 1, CrossEntropySpec::default())
        }),
    ]
}

trait MapTwo {
    fn map_two(self, f: impl FnOnce(Var, Var) -> Result<Var>) -> Result<Var>;
}

impl MapTwo for [Var; 2] {
    fn map_two(self, f: impl FnOnce(Var, Var) -> Result<Var>) -> Result<Var> {
        let [a, b] = self;
        f(a, b)
    }
}

/// The same for methods that record several ops: however they end, in a view or not, the mark is in time. (Of several
/// results all must be held until then: to drop one is a use of the tape.)
#[test]
fn a_mark_on_the_result_of_several_ops_is_in_time() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    for (name, shapes, f) in composites() {
        let mut plain: Option<Vec<Vec<u8>>> = None;
        for around in surroundings() {
            for mark in marks() {
                let what = format!("{name}, {around:?}, {mark:?}");
                let tape = tape_for(&device, around);
                let _scope = match around {
                    Around::Scope(mark) => Some(tape.scope(scope("s").mark(mark))),
                    _ => None,
                };
                let tensors = shapes.iter().zip(1..).map(|(s, seed)| random(&device, s, seed, DType::F32));
                let (leaves, inner) = operands(&tape, &tensors.collect::<Vec<_>>()).unwrap();
                let y = f(inner).unwrap_or_else(|e| panic!("{what}: {e}"));
                let y = match marked(y, mark) {
                    Ok(y) => y,
                    Err(Error::MarkNotAllowed { .. }) if mark != Some(Mark::Keep) => continue,
                    Err(error) => panic!("{what}: {error}"),
                };
                let loss = y.square().unwrap().sum().unwrap();
                let bytes = gradient_bytes(&tape.backward(&loss).unwrap(), &leaves).unwrap();
                let around = match around {
                    Around::Nothing => None,
                    Around::Policy(mark) | Around::Scope(mark) => Some(mark),
                };
                if ![mark, around].into_iter().flatten().any(|mark| mark.is_lossy()) {
                    assert_eq!(bytes, *plain.get_or_insert(bytes.clone()), "{what}");
                }
            }
        }
    }
}

/// The same when the scope in which it was made has closed, and a dry run agrees to the byte.
#[test]
fn a_mark_on_what_a_scope_returns_is_in_time() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let x = random(&device, &[8, 8], 1, DType::F32);
    for around in surroundings() {
        for mark in marks() {
            let forward = |tape: &Tape| -> Result<Var> {
                let scopes = match around {
                    Around::Scope(mark) => scope("outer").mark(mark),
                    _ => scope("outer"),
                };
                let x = tape.leaf(&x)?.shift(0.0)?;
                let y = x.within(scopes, |x| x.within("inner", |x| x.scale(2.0)?.reshape(&[4, 16])))?;
                let y = match mark {
                    Some(mark) => {
                        y.set_mark(mark)?;
                        y
                    }
                    None => y,
                };
                y.exp()?.square()?.sum()
            };
            let what = format!("{around:?}, {mark:?}");
            let policy: Option<Rc<dyn Policy>> = match around {
                Around::Policy(mark) => Some(Rc::new(All(mark))),
                _ => None,
            };
            let predicted = Trace::record(&retape_core::meta(), policy.clone(), forward).unwrap();
            let predicted = predicted.run(policy.clone()).unwrap();
            device.meter().reset_peak();
            let tape = Tape::with(&device, TapeOptions { policy, ..TapeOptions::default() });
            let loss = forward(&tape).unwrap_or_else(|e| panic!("{what}: {e}"));
            let saved = tape.saved_bytes();
            let _gradients = tape.backward(&loss).unwrap();
            assert_eq!(saved, predicted.saved_bytes, "{what}: saved");
            assert_eq!(device.meter().step_peak(), predicted.peak_bytes, "{what}: peak");
            assert_eq!(device.meter().fingerprint(), predicted.fingerprint, "{what}: events");
        }
    }
}

/// The last handle of an operand takes what only it used, another operand of the same op among it.
#[test]
fn an_operand_that_only_another_one_read_goes_with_it() {
    let devices = [retape_cpu::device_with_threads(1).unwrap(), retape_core::meta()];
    let lossy = || Mark::all().filter(|mark| mark.is_lossy());
    for (device, mark) in devices.into_iter().flat_map(|device| lossy().map(move |mark| (device.clone(), mark))) {
        let before = device.meter().live();
        let policy: Rc<dyn Policy> = Rc::new(All(mark));
        let tape = Tape::with(&device, TapeOptions { policy: Some(policy), seed: Some(1), ..TapeOptions::default() });
        let x = tape.leaf(&random(&device, &[8, 8], 1, DType::F32)).unwrap();
        let a = x.scale(2.0).unwrap();
        let b = a.clone().gelu().unwrap();
        let c = tape.no_grad(|| a.mul(b)).unwrap();
        assert_eq!((tape.node_count(), tape.stats().quantized), (1, 0));
        drop((c, tape));
        assert_eq!(device.meter().live(), before);
    }
}

/// The last use of a value ends it before the next op allocates: a chain of `let h = h.f()?` holds two values at a
/// time.
#[test]
fn a_chain_holds_what_backward_reads() {
    let device = retape_core::meta();
    let run = |step: fn(Var) -> Result<Var>| {
        device.meter().reset_peak();
        let tape = Tape::new(&device);
        let mut h = tape.leaf(&random(&device, &[1000], 1, DType::F32)).unwrap();
        for _ in 0..10 {
            h = step(h).unwrap();
        }
        (tape.saved_bytes(), device.meter().step_peak())
    };
    // The leaf, one value and the next: `shift` reads nothing.
    assert_eq!(run(|h| h.shift(1.0)), (0, 3 * 4000));
    // Each is kept, `exp` reads its output.
    assert_eq!(run(|h| h.exp()).0, 10 * 4000 - 4000);
    let shadowed = |h: Var| {
        let h = h.shift(1.0)?;
        let h = h.shift(2.0)?;
        let residual = h.clone().shift(3.0)?;
        h.add(residual)
    };
    assert_eq!(run(shadowed), (0, 4 * 4000));
}

/// What waits settles at each call that isn't about the op's own outputs, and at none that is.
#[test]
fn operands_settle_at_the_next_call() {
    let device = retape_core::meta();
    let live = || device.meter().live();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[1000], 1, DType::F32)).unwrap();
    let base = live();
    let y = || x.clone().shift(1.0).unwrap().shift(2.0).unwrap();
    // Both values are there, whatever is asked of the second or of a view of it.
    let kept = y();
    assert_eq!(live() - base, 8000);
    (kept.shape(), kept.dtype(), kept.path(), kept.requires_grad(), kept.tensor().unwrap(), format!("{kept:?}"));
    kept.set_mark(Mark::Keep).unwrap();
    let kept = kept.reshape(&[10, 100]).unwrap().recompute().unwrap();
    assert_eq!(live() - base, 8000);
    drop(kept);
    assert_eq!(live(), base);
    type Call<'a> = (&'a str, &'a dyn Fn(&Var));
    let calls: [Call<'_>; 9] = [
        ("a getter of another value", &|_| drop(x.shape())),
        ("clone", &|y| drop(y.clone())),
        ("scope", &|_| drop(tape.scope("s"))),
        ("no_grad", &|_| tape.no_grad(|| ())),
        ("ledger", &|_| drop(tape.ledger().unwrap())),
        ("saved_bytes", &|_| assert_eq!(tape.saved_bytes(), 0)),
        ("node_count", &|_| assert!(tape.node_count() > 0)),
        ("stats", &|_| drop(tape.stats())),
        ("leaf", &|_| drop(tape.leaf(&x.tensor().unwrap()).unwrap())),
    ];
    for (name, call) in calls {
        let y = y();
        assert_eq!(live() - base, 8000, "{name}");
        call(&y);
        assert_eq!(live() - base, 4000, "{name}");
    }
    let y = y();
    let z = y.clone().neg().unwrap();
    assert_eq!(live() - base, 8000, "record: the first is gone, the last two are there");
    drop((y, z));
    assert_eq!(live(), base);
}

/// Operators take values and numbers in any mix, and the result of one on one side of another.
#[test]
fn operators_mix() -> Result<()> {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let leaf = |x: f64| tape.leaf(&Tensor::full(&device, &[], DType::F64, x)?);
    let (a, b) = (leaf(3.0)?, leaf(2.0)?);
    let numbers = [
        (&a + &b, 5.0),
        (a.clone() - &b, 1.0),
        (&a * b.clone(), 6.0),
        (a.clone() / b.clone(), 1.5),
        (&a + 1.0, 4.0),
        (1.0 - &a, -2.0),
        (a.clone() * 2.0, 6.0),
        (2.0 * a.clone(), 6.0),
        (6.0 / &a, 2.0),
        (&a / 2.0, 1.5),
        (1.0 + &a, 4.0),
        (-&a, -3.0),
        (-a.clone(), -3.0),
        (&a * &b + &a, 9.0),
        (&a + &a * &b, 9.0),
        (&a * &b - a.clone(), 3.0),
        (a.clone() / (&a * &b), 0.5),
        ((&a * &b)? + &a / &b, 7.5),
        ((1.0 - &a)? * 2.0, -4.0),
    ];
    for (i, (result, expected)) in numbers.into_iter().enumerate() {
        assert!((result?.item()? - expected).abs() < 1e-12, "number {i}");
    }
    let failed = a.clone().reshape(&[7]);
    assert!((failed + &b).is_err());
    // Two uses of one value.
    let x = leaf(4.0)?;
    let y = (&x * &x)?.add(x.clone().mul(x.clone())?)?.add(x.clone().square()?)?;
    assert_eq!(tape.backward(&y)?.of(&x).unwrap().item()?, 24.0);
    Ok(())
}
