//! Loops over the registry: a new op is tested by being listed, with its samples.

use retape_core::kernel::{Binary, Unary};
use retape_core::ops::*;
use retape_core::{
    DType, Device, Error, Int8Spec, Kernel, Kind, Mark, Result, Tape, Tensor, Var, check_gradients, meta,
};
use retape_tests::wrapped::{self, Watch};
use retape_tests::{SampleMarks, floats, gradient_bytes, random, relative_error, run_sample, sample_tensor};
use std::rc::Rc;
use std::sync::Arc;

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Relative L2 error of the gradients of one op whose inputs and outputs all lie as int8.
const INT8_BOUND: f64 = 0.1;

fn marks() -> Vec<Option<Mark>> {
    vec![None, Some(Mark::Keep), Some(Mark::Recompute), Some(Mark::Int8(Int8Spec::default()))]
}

fn label(sample: &Sample) -> String {
    format!("{:?} / {}", sample.op, sample.name)
}

#[test]
fn every_op_has_samples_and_the_edges_among_them() {
    let samples = Op::all_samples();
    let mut names: Vec<&str> = samples.iter().map(|s| s.op.rule().name()).collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() >= 90, "{} ops: {names:?}", names.len());
    for name in names {
        let of = samples.iter().filter(|s| s.op.rule().name() == name);
        let empty = of.clone().any(|s| {
            let spec = |i: &SampleInput| Spec::of(&sample_tensor(&meta(), i, DType::F32));
            let outputs = s.op.rule().infer(&s.inputs.iter().map(spec).collect::<Vec<_>>()).unwrap();
            s.inputs.iter().any(|i| i.shape.contains(&0)) || outputs.iter().any(|o| o.spec.is_empty())
        });
        assert!(empty, "{name} has no zero-sized sample");
        assert!(of.count() >= 4, "{name} has too few samples");
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let device = retape_cpu::device();
    for sample in Op::all_samples().into_iter().filter(|s| s.smooth) {
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(&device, i, DType::F64)).collect();
        let check = check_gradients(&device, &inputs, 5, |_, x| {
            x[0].apply_all(sample.op.clone(), &x[1..].iter().collect::<Vec<_>>())
        });
        let check = check.unwrap_or_else(|e| panic!("{}: {e}", label(&sample)));
        assert!(check.worst() < 1e-7, "{}: {check:?}", label(&sample));
    }
}

#[test]
fn single_precision_agrees_with_double() {
    let device = retape_cpu::device();
    for sample in Op::all_samples() {
        let none = SampleMarks::default();
        let single =
            run_sample(&device, &sample, DType::F32, none, 1).unwrap_or_else(|e| panic!("{}: {e}", label(&sample)));
        let double = run_sample(&device, &sample, DType::F64, none, 1).unwrap();
        // bf16 and f16 results are coarse in themselves.
        let tolerance = if matches!(sample.op, Op::Cast(_)) { 1e-2 } else { 2e-5 };
        for (s, d) in single.numbers.iter().zip(&double.numbers) {
            let finite = |x: &[f64]| x.iter().map(|v| if v.is_finite() { *v } else { 0.0 }).collect::<Vec<_>>();
            assert_eq!(
                s.iter().map(|v| v.is_finite()).collect::<Vec<_>>(),
                d.iter().map(|v| v.is_finite()).collect::<Vec<_>>(),
                "{}",
                label(&sample)
            );
            let error = relative_error(&finite(s), &finite(d));
            assert!(error < tolerance, "{}: {error:e}", label(&sample));
        }
    }
}

/// Every mark on every op's inputs and outputs: the bits of all-unmarked (int8 apart), the dry run's bytes, nothing
/// left, and equal bits in every pass of a retained tape.
#[test]
fn every_mark_on_every_op() {
    for dtype in FLOATS {
        let device = retape_cpu::device();
        for sample in Op::all_samples() {
            let plain = run_sample(&device, &sample, dtype, SampleMarks::default(), 1).unwrap();
            for inputs in marks() {
                for outputs in marks() {
                    let marks = SampleMarks { inputs, outputs };
                    let context = || format!("{dtype} {} with {marks:?}", label(&sample));
                    let run = match run_sample(&device, &sample, dtype, marks, 1) {
                        Ok(run) => run,
                        // Refused where an input is read exactly.
                        Err(Error::MarkNotAllowed { mark: "int8", .. })
                            if sample.op.rule().saves(&[true; 3]).iter().any(|s| s.exact) =>
                        {
                            continue;
                        }
                        // -inf and NaN have no int8; that is an error by default.
                        Err(Error::NonFinite { .. }) => continue,
                        Err(error) => panic!("{}: {error}", context()),
                    };
                    assert_eq!(run.left, 0, "{}", context());
                    assert_eq!(run.outputs, plain.outputs, "{}", context());
                    let int8 = [inputs, outputs].iter().any(|m| matches!(m, Some(Mark::Int8(_))));
                    if int8 {
                        // Over all inputs together: one that sums over a broadcast may cancel to nearly nothing.
                        let error = relative_error(&run.numbers.concat(), &plain.numbers.concat());
                        assert!(!sample.smooth || error < INT8_BOUND, "{}: gradient error {error}", context());
                    } else {
                        assert_eq!(run.gradients, plain.gradients, "{}", context());
                    }
                    let dry = run_sample(&meta(), &sample, dtype, marks, 1).unwrap();
                    assert_eq!((dry.peak, dry.fingerprint), (run.peak, run.fingerprint), "{}", context());
                    let again = run_sample(&device, &sample, dtype, marks, 3).unwrap();
                    assert!(again.gradients.iter().all(|g| *g == run.gradients[0]), "{}", context());
                    let dry = run_sample(&meta(), &sample, dtype, marks, 3).unwrap();
                    assert_eq!((dry.peak, dry.fingerprint), (again.peak, again.fingerprint), "{}", context());
                }
            }
        }
    }
}

/// What one run of an op gave: outputs and gradients with their dtypes.
struct Run {
    outputs: Vec<(DType, Vec<f64>)>,
    gradients: Vec<Vec<f64>>,
}

/// Runs a sample whose inputs, and the gradients of its outputs, are rounded to `rounded` and then computed in `dtype`.
fn run_rounded(device: &Device, sample: &Sample, rounded: DType, dtype: DType) -> Result<Run> {
    let cast = |t: Tensor| if t.dtype().is_float() && rounded != dtype { t.cast(dtype, Kind::Input) } else { Ok(t) };
    let tape = Tape::new(device);
    let leaves = sample.inputs.iter().map(|i| {
        let t = cast(sample_tensor(device, i, rounded))?;
        if t.dtype().is_float() { tape.leaf(&t) } else { tape.constant(&t) }
    });
    let leaves: Vec<_> = leaves.collect::<Result<_>>()?;
    let outputs = leaves[0].apply_all(sample.op.clone(), &leaves[1..].iter().collect::<Vec<_>>())?;
    let numbers = |y: &Var| Ok((y.dtype(), y.tensor()?.to_f64_vec()?));
    let outputs_as_numbers = outputs.iter().map(numbers).collect::<Result<_>>()?;
    let differentiable: Vec<&Var> = outputs.iter().filter(|y| y.dtype().is_float()).collect();
    let seed = |y: &&Var| random(device, &y.shape(), 4, rounded).cast(y.dtype(), Kind::Input);
    let seeds: Vec<Tensor> = differentiable.iter().map(seed).collect::<Result<_>>()?;
    let gradients = tape.backward_from(&differentiable.into_iter().zip(&seeds).collect::<Vec<_>>(), false)?;
    let gradient = |x: &Var| gradients.of(x).map_or(Ok(Vec::new()), Tensor::to_f64_vec);
    Ok(Run { outputs: outputs_as_numbers, gradients: leaves.iter().map(gradient).collect::<Result<_>>()? })
}

/// In bf16 and f16 an output is the exact result rounded once (to nearest even; f32's own error aside), and a gradient,
/// which may be put together from rounded ones, is near it. Tolerances are in units of u, half the distance of 1 to the
/// next number.
#[test]
fn sixteen_bits_are_rounded_once() {
    let device = wrapped::device(Arc::new(Watch { poison: true, ..Watch::default() }));
    for (half, u) in [(DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
        for sample in Op::all_samples() {
            let actual =
                run_rounded(&device, &sample, half, half).unwrap_or_else(|e| panic!("{half} {}: {e}", label(&sample)));
            let expected = run_rounded(&device, &sample, half, DType::F64).unwrap();
            let outputs = actual.outputs.iter().zip(&expected.outputs).map(|((d, a), (_, e))| ("output", *d, a, e));
            let gradients = actual.gradients.iter().zip(&expected.gradients).map(|(a, e)| ("gradient", half, a, e));
            let numbers = || expected.outputs.iter().map(|o| &o.1).chain(&expected.gradients).flatten();
            let largest = numbers().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
            for (what, dtype, actual, expected) in outputs.chain(gradients) {
                assert_eq!(actual.len(), expected.len(), "{half} {}: {what}", label(&sample));
                let rounded = if dtype.is_float() {
                    floats(&device, &[expected.len()], expected, dtype).to_f64_vec().unwrap()
                } else {
                    expected.clone()
                };
                let allowed = |e: f64| match what {
                    "output" => u * e.abs() + 2e-5 * largest,
                    _ => 4.0 * u * largest,
                };
                for ((&a, &e), &r) in actual.iter().zip(expected).zip(&rounded) {
                    let same = a == r || a.is_nan() && r.is_nan();
                    let near = a.is_finite() && (a - e).abs() <= allowed(e);
                    assert!(same || near, "{half} {}: {what} {a:e}, expected {e:e}", label(&sample));
                }
            }
        }
    }
}

/// New memory holds NaN: nothing is read that wasn't written, and everything is written.
#[test]
fn what_memory_held_doesn_t_show() {
    let poisoned = wrapped::device(Arc::new(Watch { poison: true, ..Watch::default() }));
    let device = retape_cpu::device();
    for dtype in FLOATS {
        for sample in Op::all_samples() {
            let run = |device: &Device| {
                let run = run_sample(device, &sample, dtype, SampleMarks::default(), 1);
                let run = run.unwrap_or_else(|e| panic!("{dtype} {}: {e}", label(&sample)));
                (run.outputs, run.gradients)
            };
            assert_eq!(run(&poisoned), run(&device), "{dtype} {}", label(&sample));
        }
    }
}

/// A strided input gives the bits of its contiguous copy.
#[test]
fn strides_don_t_show_in_the_numbers() {
    let device = retape_cpu::device();
    for (sample, dtype) in Op::all_samples().into_iter().flat_map(|s| FLOATS.map(|dtype| (s.clone(), dtype))) {
        if sample.inputs.iter().all(|i| i.memory == SampleMemory::Contiguous) {
            continue;
        }
        let run = |contiguous: bool| -> Result<Vec<Vec<u8>>> {
            let tape = Tape::new(&device);
            let leaves = sample.inputs.iter().map(|i| {
                let t = sample_tensor(&device, i, dtype);
                let t = if contiguous { t.copy(Kind::Input)? } else { t };
                if t.dtype().is_float() { tape.leaf(&t) } else { tape.constant(&t) }
            });
            let leaves: Vec<_> = leaves.collect::<Result<_>>()?;
            let outputs = leaves[0].apply_all(sample.op.clone(), &leaves[1..].iter().collect::<Vec<_>>())?;
            let mut bytes: Vec<Vec<u8>> = outputs.iter().map(|y| y.tensor()?.to_bytes()).collect::<Result<_>>()?;
            let differentiable: Vec<_> = outputs.iter().filter(|y| y.dtype().is_float()).collect();
            let seeds: Vec<Tensor> = differentiable
                .iter()
                .map(|y| random(&device, &y.shape(), 4, dtype).cast(y.dtype(), Kind::Input))
                .collect::<Result<_>>()?;
            let gradients = tape.backward_from(&differentiable.into_iter().zip(&seeds).collect::<Vec<_>>(), false)?;
            bytes.extend(gradient_bytes(&gradients, &leaves)?);
            Ok(bytes)
        };
        assert_eq!(run(false).unwrap(), run(true).unwrap(), "{dtype} {}", label(&sample));
    }
}

/// A product rule with a fault: what a mistaken op would look like.
#[derive(Debug)]
struct FaultyProduct(Fault);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    Sign,
    Factor,
    MissingTerm,
    SwappedOperands,
    CutGradient,
}

/// y = a b + a.
impl Rule for FaultyProduct {
    fn name(&self) -> &'static str {
        "faulty_product"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
    }
    fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
        exec.run(Kernel::Binary { f: Binary::Mul, a: &x[0], b: &x[1], out: &out[0] })?;
        exec.run(Kernel::Binary { f: Binary::Add, a: &out[0], b: &x[0], out: &out[0] })
    }
    fn saves(&self, _: &[bool]) -> Saves {
        saves([Slot::In(0), Slot::In(1)])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let (mut a, mut b) = (cx.saved(Slot::In(0))?, cx.saved(Slot::In(1))?);
        if self.0 == Fault::SwappedOperands {
            std::mem::swap(&mut a, &mut b);
        }
        let exec = cx.exec(0);
        let (da, db) = (exec.empty(g.shape(), g.dtype())?, exec.empty(g.shape(), g.dtype())?);
        exec.run(Kernel::Binary { f: Binary::Mul, a: &g, b: &b, out: &da })?;
        if self.0 != Fault::MissingTerm {
            exec.run(Kernel::Binary { f: Binary::Add, a: &da, b: &g, out: &da })?;
        }
        exec.run(Kernel::Binary { f: Binary::Mul, a: &g, b: &a, out: &db })?;
        let factor = match self.0 {
            Fault::Sign => -1.0,
            Fault::Factor => 1.01,
            Fault::CutGradient => 0.0,
            _ => 1.0,
        };
        exec.run(Kernel::Unary { f: Unary::Scale(factor), x: &db, out: &db })?;
        cx.set(0, da);
        cx.set(1, db);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }
    fn samples() -> Vec<Sample> {
        vec![]
    }
}

#[test]
fn the_checker_catches_planted_faults() {
    let device = retape_cpu::device();
    let inputs = [random(&device, &[3, 4], 1, DType::F64), random(&device, &[3, 4], 2, DType::F64)];
    let check = |fault| {
        let op = Op::Custom(Rc::new(FaultyProduct(fault)));
        check_gradients(&device, &inputs, 5, |_, x| Ok(vec![x[0].apply(op.clone(), &[&x[1]])?])).unwrap().worst()
    };
    assert!(check(Fault::None) < 1e-7);
    for fault in [Fault::Sign, Fault::Factor, Fault::MissingTerm, Fault::SwappedOperands, Fault::CutGradient] {
        assert!(check(fault) > 5e-3, "{fault:?} passed with {}", check(fault));
    }
}

/// Any op applied by hand to too few or too many inputs.
#[test]
fn a_wrong_number_of_inputs_is_an_error() {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[2, 2], 1, DType::F32)).unwrap();
    // `cat` takes any number.
    for sample in Op::all_samples().into_iter().filter(|s| !matches!(s.op, Op::Cat(_))) {
        let n = sample.inputs.len();
        for others in [vec![], vec![&x; n]] {
            if others.len() + 1 != n {
                let error = x.apply_all(sample.op.clone(), &others).unwrap_err();
                assert!(error.to_string().contains(&format!("takes {n} input")), "{}: {error}", label(&sample));
            }
        }
    }
}

#[test]
fn an_undeclared_read_is_an_error() {
    #[derive(Debug)]
    struct ReadsMore;
    impl Rule for ReadsMore {
        fn name(&self) -> &'static str {
            "reads_more"
        }
        fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
            Ok([Output::new(inputs[0].shape.clone(), inputs[0].dtype)].into_iter().collect())
        }
        fn forward(&self, exec: &Exec<'_>, x: &[Tensor], out: &[Tensor]) -> Result<()> {
            exec.run(Kernel::Copy { x: &x[0], out: &out[0] })
        }
        fn saves(&self, _: &[bool]) -> Saves {
            saves([])
        }
        fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
            let g = cx.saved(Slot::In(0))?;
            cx.set(0, g);
            Ok(())
        }
        fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
            Cost::default()
        }
        fn samples() -> Vec<Sample> {
            vec![]
        }
    }
    let device: Device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[3], 1, DType::F32)).unwrap();
    let y = x.apply(Op::Custom(Rc::new(ReadsMore)), &[]).unwrap().sum().unwrap();
    let error = tape.backward(&y).unwrap_err();
    assert!(error.to_string().contains("`saves` doesn't declare"), "{error}");
}
