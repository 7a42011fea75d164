//! What every device is held to, op by op over the registry. A device may lack kernels: what it refuses as unsupported
//! is gathered, and who calls compares that with what the device is documented to lack.

use crate::variations::filled;
use crate::{SampleMarks, floats, gradient_bytes, numbers, random, relative_error, run_sample, sample_tensor};
use retape_core::ops::{Op, Sample, SampleMemory, Spec};
use retape_core::{BackwardOptions, DType, Device, Error, Mark, MemoryKind, Result, Tape, Tensor, Var, meta};
use std::collections::BTreeSet;

/// The float dtypes.
pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Relative L2 error of the gradients of one op whose inputs and outputs all lie as int8. What is finer is well below.
pub const LOSSY_BOUND: f64 = 0.1;

/// Ops that a device refused, as `op (kernel)`.
pub type Refused = BTreeSet<String>;

/// No mark, and every kind of mark.
pub fn marks() -> Vec<Option<Mark>> {
    [None].into_iter().chain(Mark::all().map(Some)).collect()
}

/// Whether the mark may change bits of a sample in this dtype: not where it stores all inputs and outputs as they are.
fn loses_bits(mark: Mark, sample: &Sample, dtype: DType) -> bool {
    let mut specs: Vec<Spec> = sample.inputs.iter().map(|i| Spec::of(&sample_tensor(&meta(), i, dtype))).collect();
    let outputs = sample.op.rule().infer(&specs).expect("a sample is valid");
    specs.extend(outputs.into_iter().map(|output| output.spec));
    mark.is_lossy() && specs.iter().any(|spec| spec.dtype.is_float() && mark.bytes(spec).is_some())
}

/// The op and its sample, for messages.
pub fn label(sample: &Sample) -> String {
    format!("{:?} / {}", sample.op, sample.name)
}

/// The result, or None where the device has no kernel for the op, which is noted.
fn supported<T>(result: Result<T>, sample: &Sample, dtype: DType, refused: &mut Refused) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::Unsupported { kernel, .. }) => {
            refused.insert(format!("{} ({kernel})", sample.op.rule().name()));
            None
        }
        Err(error) => panic!("{dtype} {}: {error}", label(sample)),
    }
}

/// What one run of an op gave: outputs and gradients with their dtypes.
struct Run {
    outputs: Vec<(DType, Vec<f64>)>,
    gradients: Vec<Vec<f64>>,
}

/// Runs a sample whose inputs, and the gradients of its outputs, are rounded to `rounded` and then computed in `dtype`.
fn run_rounded(device: &Device, sample: &Sample, rounded: DType, dtype: DType) -> Result<Run> {
    run_from(device, sample, rounded, dtype, Tensor::clone)
}

/// The same, with the gradients of the outputs, before they are cast to `dtype`, replaced by another's.
fn run_from(
    device: &Device,
    sample: &Sample,
    rounded: DType,
    dtype: DType,
    replaced: impl Fn(&Tensor) -> Tensor,
) -> Result<Run> {
    let cast =
        |t: Tensor| if t.dtype().is_float() && rounded != dtype { t.cast(dtype, MemoryKind::Input) } else { Ok(t) };
    let tape = Tape::new(device);
    let leaves = sample.inputs.iter().map(|i| {
        let t = cast(sample_tensor(device, i, rounded))?;
        if t.dtype().is_float() { tape.leaf(&t) } else { tape.constant(&t) }
    });
    let leaves: Vec<_> = leaves.collect::<Result<_>>()?;
    let outputs = leaves[0].clone().apply_all(sample.op.clone(), leaves[1..].iter().cloned())?;
    let numbers = |y: &Var| Ok((y.dtype(), y.tensor()?.to_f64_vec()?));
    let outputs_as_numbers = outputs.iter().map(numbers).collect::<Result<_>>()?;
    let differentiable: Vec<&Var> = outputs.iter().filter(|y| y.dtype().is_float()).collect();
    let seed = |y: &&Var| replaced(&random(device, &y.shape(), 4, rounded)).cast(y.dtype(), MemoryKind::Input);
    let seeds: Vec<Tensor> = differentiable.iter().map(seed).collect::<Result<_>>()?;
    let gradients =
        tape.backward_from(&differentiable.into_iter().zip(&seeds).collect::<Vec<_>>(), BackwardOptions::default())?;
    let gradient = |x: &Var| gradients.of(x).map_or(Ok(Vec::new()), Tensor::to_f64_vec);
    Ok(Run { outputs: outputs_as_numbers, gradients: leaves.iter().map(gradient).collect::<Result<_>>()? })
}

/// Half the distance of 1 to the next number.
fn unit(dtype: DType) -> f64 {
    2f64.powi(match dtype {
        DType::BF16 => -8,
        DType::F16 => -11,
        DType::F32 => -24,
        _ => -53,
    })
}

/// An output is the exact result rounded once (to nearest even; the error of the arithmetic aside), and a gradient,
/// which may be put together from rounded ones, is near it: against `reference`, a device that computes the same in
/// f64. Where `weights_too`, attention rounds its weights to 16 bits as well, as tensor cores take them, before they
/// multiply v.
pub fn outputs_are_rounded_once(device: &Device, reference: &Device, dtypes: &[DType], weights_too: bool) -> Refused {
    let mut refused = Refused::new();
    for (&dtype, sample) in dtypes.iter().flat_map(|dtype| Op::all_samples().into_iter().map(move |s| (dtype, s))) {
        let run = run_rounded(device, &sample, dtype, dtype);
        let Some(actual) = supported(run, &sample, dtype, &mut refused) else { continue };
        let expected = run_rounded(reference, &sample, dtype, DType::F64).unwrap();
        let outputs = actual.outputs.iter().zip(&expected.outputs).map(|((d, a), (_, e))| ("output", *d, a, e));
        let gradients = actual.gradients.iter().zip(&expected.gradients).map(|(a, e)| ("gradient", dtype, a, e));
        let numbers = || expected.outputs.iter().map(|o| &o.1).chain(&expected.gradients).flatten();
        let largest = numbers().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
        let (u, arithmetic) = (unit(dtype), if dtype == DType::F64 { 1e-13 } else { 2e-5 });
        for (what, dtype, actual, expected) in outputs.chain(gradients) {
            assert_eq!(actual.len(), expected.len(), "{dtype} {}: {what}", label(&sample));
            let rounded = if dtype.is_float() {
                floats(reference, &[expected.len()], expected, dtype).to_f64_vec().unwrap()
            } else {
                expected.clone()
            };
            let once = what == "output" && !(weights_too && matches!(sample.op, Op::Attention(_)));
            let allowed = |e: f64| match once {
                true => unit(dtype).max(u) * e.abs() + arithmetic * largest,
                false => (4.0 * u).max(arithmetic) * largest,
            };
            for ((&a, &e), &r) in actual.iter().zip(expected).zip(&rounded) {
                let same = a == r || a.is_nan() && r.is_nan();
                let near = a.is_finite() && (a - e).abs() <= allowed(e);
                assert!(same || near, "{dtype} {}: {what} {a:e}, expected {e:e}", label(&sample));
            }
        }
    }
    refused
}

/// What is below this counts as 0 in a dtype: f32's exponential flushes what isn't normal, and f16's numbers end there.
fn least(dtype: DType) -> f64 {
    2f64.powi(if dtype == DType::F16 { -24 } else { -125 })
}

/// The samples whose outputs or gradients are not what f64 makes of the same (rounded) inputs: NaN and infinity where
/// f64 has them, else within some roundings of the number, and 1e-5 of the largest number *of that output or gradient*.
/// So a gradient of 1e-20 counts as much as one of 1. A gradient may be as far off as f64's moves when what comes from
/// behind is moved by its last digit: where its terms cancel, they leave that. Inputs are never moved: they are what
/// they are. Attention's weights may be rounded to its dtype, and its mask's gradients cancel to nothing.
pub fn differences_from_f64(device: &Device, reference: &Device, dtypes: &[DType], samples: &[Sample]) -> Vec<String> {
    let mut refused = Refused::new();
    let mut differences = Vec::new();
    for (&dtype, sample) in dtypes.iter().flat_map(|dtype| samples.iter().map(move |s| (dtype, s))) {
        let run = run_rounded(device, sample, dtype, dtype);
        let Some(actual) = supported(run, sample, dtype, &mut refused) else { continue };
        let expected = run_rounded(reference, sample, dtype, DType::F64).unwrap();
        let outputs = actual.outputs.iter().zip(&expected.outputs).map(|((d, a), (_, e))| ("output", *d, 1.01, a, e));
        let gradients = actual.gradients.iter().zip(&expected.gradients).map(|(a, e)| ("gradient", dtype, 4.0, a, e));
        let moved = |seed| {
            let step = |t: &Tensor| {
                let steps = numbers(seed, t.len(), 1.0 - 2.0 * unit(dtype), 1.0 + 2.0 * unit(dtype));
                let values: Vec<f64> = t.to_f64_vec().unwrap().iter().zip(steps).map(|(v, step)| v * step).collect();
                Tensor::from_slice(reference, t.shape(), &values).unwrap()
            };
            run_from(reference, sample, dtype, DType::F64, step).unwrap().gradients
        };
        let moved: Vec<_> = (1..4).map(moved).collect();
        let farthest = |a: &[f64], e: &[f64]| a.iter().zip(e).map(|(a, e)| (a - e).abs()).fold(0.0, f64::max);
        let conditions = (0..expected.gradients.len())
            .map(|i| moved.iter().map(|m| farthest(&m[i], &expected.gradients[i])).fold(0.0, f64::max));
        let conditions = expected.outputs.iter().map(|_| 0.0).chain(conditions);
        let both = outputs.chain(gradients).zip(conditions);
        let difference = both.into_iter().find_map(|((what, dtype, roundings, actual, expected), condition)| {
            let rounded = match dtype.is_float() {
                true => floats(reference, &[expected.len()], expected, dtype).to_f64_vec().unwrap(),
                false => expected.clone(),
            };
            let held = expected.iter().zip(&rounded).filter(|(_, r)| r.is_finite());
            let largest = held.fold(0.0, |m: f64, (e, _)| m.max(e.abs()));
            let attention = matches!(sample.op, Op::Attention(_));
            let cancels = if attention { 4.0 * unit(dtype) } else { 0.0 };
            let exact = what == "output" && !attention;
            let of_largest = if exact { 1e-5 } else { (4.0 * unit(dtype)).max(1e-5) };
            actual.iter().zip(expected).zip(&rounded).find_map(|((&a, &e), &r)| {
                let same = a == r || a.is_nan() && r.is_nan();
                let allowed =
                    roundings * unit(dtype) * e.abs() + of_largest * largest + 8.0 * condition + cancels + least(dtype);
                let near = a.is_finite() && (a - e).abs() <= allowed;
                (!same && !near).then(|| format!("{what} {a:e}, f64 has {e:e}, the largest is {largest:e}"))
            })
        });
        differences.extend(difference.map(|d| format!("{dtype} {}: {d}", label(sample))));
    }
    differences
}

/// Ops that multiply or add up, and whose result may overflow on the way, as elsewhere, where its end would not.
const OVERFLOWS: &[&str] = &[
    "addcmul",
    "addmm",
    "avg_pool2d",
    "baddbmm",
    "binary_cross_entropy_with_logits",
    "conv2d",
    "div",
    "kl_div",
    "lerp",
    "linear",
    "matmul",
    "mean",
    "mse_loss",
    "mul",
    "pow_scalar",
    "scatter_add",
    "square",
];

/// Every sample with its first input, if that is floats, filled with large, saturated and tiny numbers. Two ops apart:
/// attention, whose scores are products of two inputs (it has tests of its own), and pow, whose powers overflow.
pub fn far_out_samples(dtype: DType) -> Vec<Sample> {
    let lists: [&[f64]; 12] = [
        &[1e19, -2e19, 3e19, 5e18, 7e18],
        &[1e-25, -2e-25, 3e-25, 5e-26],
        &[1e8],
        &[-1e9],
        &[1e9, 9e8, 1.1e9],
        &[1e4, -1e4, 9e3],
        &[-1e4],
        &[f32::MIN as f64],
        &[f64::NEG_INFINITY],
        &[6e4, -6e4, 5.9e4],
        &[1e6, 1e6 + 1.0, 1e6 + 2.0, 1e6 + 3.0],
        &[0.5, f64::INFINITY, -2.0],
    ];
    let most = if dtype == DType::F16 { 1e4 } else { 1e18 };
    let mut samples = Vec::new();
    for sample in Op::all_samples().into_iter().filter(|s| !["attention", "pow"].contains(&s.op.rule().name())) {
        let overflows = OVERFLOWS.contains(&sample.op.rule().name());
        let held = |v: &f64| v.abs() <= most || v.is_infinite();
        for values in lists.iter().filter(|values| !overflows || values.iter().all(held)) {
            let mut far = sample.clone();
            far.inputs[..1].clone_from_slice(&filled(&sample, values).inputs[..1]);
            samples.push(far);
        }
    }
    samples
}

/// These marks on every op's inputs and outputs: the bits of all-unmarked (lossy ones apart), the dry run's bytes,
/// nothing left, and equal bits in every pass of a retained tape.
pub fn marks_don_t_show(device: &Device, dtypes: &[DType], marks: &[SampleMarks]) -> Refused {
    let mut refused = Refused::new();
    for (&dtype, sample) in dtypes.iter().flat_map(|dtype| Op::all_samples().into_iter().map(move |s| (dtype, s))) {
        let plain = run_sample(device, &sample, dtype, SampleMarks::default(), 1);
        let Some(plain) = supported(plain, &sample, dtype, &mut refused) else { continue };
        for &marks in marks {
            let context = || format!("{dtype} {} with {marks:?}", label(&sample));
            let given = [marks.inputs, marks.outputs].into_iter().flatten();
            let lossy: Vec<Mark> = given.filter(|&mark| loses_bits(mark, &sample, dtype)).collect();
            let is_lossy = |name: &str| lossy.iter().any(|mark| mark.name() == name);
            let run = match run_sample(device, &sample, dtype, marks, 1) {
                Ok(run) => run,
                // Refused where an input is read exactly.
                Err(Error::MarkNotAllowed { mark, .. })
                    if is_lossy(mark) && sample.op.rule().saves(&[true; 3]).iter().any(|s| s.exact) =>
                {
                    continue;
                }
                // -inf and NaN have no lossy form; that is an error by default.
                Err(Error::NonFinite { format, .. }) if is_lossy(format) => continue,
                Err(error) => panic!("{}: {error}", context()),
            };
            assert_eq!(run.left, 0, "{}", context());
            assert_eq!(run.outputs, plain.outputs, "{}", context());
            if !lossy.is_empty() {
                // Over all inputs together: one that sums over a broadcast may cancel to nearly nothing.
                let error = relative_error(&run.numbers.concat(), &plain.numbers.concat());
                assert!(!sample.smooth || error < LOSSY_BOUND, "{}: gradient error {error}", context());
            } else {
                assert_eq!(run.gradients, plain.gradients, "{}", context());
            }
            let dry = run_sample(&meta(), &sample, dtype, marks, 1).unwrap();
            assert_eq!((dry.peak, dry.fingerprint), (run.peak, run.fingerprint), "{}", context());
            let again = run_sample(device, &sample, dtype, marks, 3).unwrap();
            assert!(again.gradients.iter().all(|g| *g == run.gradients[0]), "{}", context());
            let dry = run_sample(&meta(), &sample, dtype, marks, 3).unwrap();
            assert_eq!((dry.peak, dry.fingerprint), (again.peak, again.fingerprint), "{}", context());
        }
    }
    refused
}

/// The bytes of a sample's outputs and gradients, its inputs lying as the sample says or contiguous.
fn bytes_of(device: &Device, sample: &Sample, dtype: DType, contiguous: bool) -> Result<Vec<Vec<u8>>> {
    let tape = Tape::new(device);
    let leaves = sample.inputs.iter().map(|i| {
        let t = sample_tensor(device, i, dtype);
        let t = if contiguous { t.copy(MemoryKind::Input)? } else { t };
        if t.dtype().is_float() { tape.leaf(&t) } else { tape.constant(&t) }
    });
    let leaves: Vec<_> = leaves.collect::<Result<_>>()?;
    let outputs = leaves[0].clone().apply_all(sample.op.clone(), leaves[1..].iter().cloned())?;
    let mut bytes: Vec<Vec<u8>> = outputs.iter().map(|y| y.tensor()?.to_bytes()).collect::<Result<_>>()?;
    let differentiable: Vec<_> = outputs.iter().filter(|y| y.dtype().is_float()).collect();
    let seed = |y: &&Var| random(device, &y.shape(), 4, dtype).cast(y.dtype(), MemoryKind::Input);
    let seeds: Vec<Tensor> = differentiable.iter().map(seed).collect::<Result<_>>()?;
    let gradients =
        tape.backward_from(&differentiable.into_iter().zip(&seeds).collect::<Vec<_>>(), BackwardOptions::default())?;
    bytes.extend(gradient_bytes(&gradients, &leaves)?);
    Ok(bytes)
}

/// A strided input gives the numbers of its contiguous copy: their bits, or, where a device may take another kernel for
/// another layout, what is within `tolerance` of them in relative L2.
pub fn strides_don_t_show(device: &Device, dtypes: &[DType], tolerance: f64) -> Refused {
    let mut refused = Refused::new();
    for (&dtype, sample) in dtypes.iter().flat_map(|dtype| Op::all_samples().into_iter().map(move |s| (dtype, s))) {
        if sample.inputs.iter().all(|i| i.memory == SampleMemory::Contiguous) {
            continue;
        }
        let strided = bytes_of(device, &sample, dtype, false);
        let Some(strided) = supported(strided, &sample, dtype, &mut refused) else { continue };
        let contiguous = bytes_of(device, &sample, dtype, true).unwrap();
        if tolerance > 0.0 && strided != contiguous {
            let strided = run_rounded(device, &sample, dtype, dtype).unwrap();
            let reference = run_rounded(device, &sample, dtype, DType::F64).unwrap();
            for (a, b) in strided.gradients.iter().zip(&reference.gradients) {
                let error = relative_error(a, b);
                assert!(error < tolerance, "{dtype} {}: {error:e}", label(&sample));
            }
        } else {
            assert_eq!(strided, contiguous, "{dtype} {}", label(&sample));
        }
    }
    refused
}
