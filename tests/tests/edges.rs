//! Edges of every op, made of its samples: more dimensions, one input without a gradient, one value as two inputs,
//! views that overlap, and numbers at the ends of their range.

use retape_core::ops::{Op, Sample, Spec};
use retape_core::{DType, Device, Error, MemoryKind, Result, Tape, Tensor, check_gradients, kernel, kernel::BinaryFn};
use retape_tests::variations::{Numbers, bits, filled, is_valid, numbers_of, with_leading};
use retape_tests::{floats, numbers, sample_tensor};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

fn label(sample: &Sample) -> String {
    format!("{:?} / {}", sample.op, sample.name)
}

fn tensors(device: &Device, sample: &Sample, dtype: DType) -> Vec<Tensor> {
    sample.inputs.iter().map(|i| sample_tensor(device, i, dtype)).collect()
}

fn names<'a>(samples: impl Iterator<Item = &'a Sample>) -> BTreeSet<&'static str> {
    samples.map(|s| s.op.rule().name()).collect()
}

/// The gradients of some inputs have the bits that they have among all inputs' gradients.
#[test]
fn each_input_s_gradient_is_the_same_without_the_others() {
    let device = cpu();
    for sample in Op::all_samples() {
        let leaves = tensors(&device, &sample, DType::F32);
        let n = leaves.len().min(4);
        let run = |needs: &[bool]| bits(&device, &sample.op, &leaves, needs, |l| Ok(l.to_vec())).unwrap();
        let full = run(&vec![true; leaves.len()]);
        for subset in 0..(1 << n) - 1 {
            let needs: Vec<bool> = (0..leaves.len()).map(|i| i >= n || subset >> i & 1 == 1).collect();
            let part = run(&needs);
            assert_eq!(part.outputs, full.outputs, "{} needing {needs:?}", label(&sample));
            for (i, (part, full)) in part.gradients.iter().zip(&full.gradients).enumerate() {
                let expected = if needs[i] { full } else { &Vec::new() };
                assert_eq!(part, expected, "input {i} of {} needing {needs:?}", label(&sample));
            }
        }
    }
}

/// More dimensions in front, up to rank 8, and none of them with elements: right gradients, and every op of more than
/// fixed rank takes them.
#[test]
fn every_op_takes_more_dimensions() {
    let device = cpu();
    let samples = Op::all_samples();
    let mut deep = BTreeSet::new();
    for sample in &samples {
        for lead in [&[2][..], &[1, 2, 1], &[2, 1, 1, 2, 1], &[0], &[2, 0]] {
            let Some(sample) = with_leading(sample, lead) else { continue };
            let inputs = tensors(&device, &sample, DType::F64);
            if sample.inputs.iter().any(|i| i.shape.len() >= 5) {
                deep.insert(sample.op.rule().name());
            }
            let check = check_gradients(&device, &inputs, 5, |_, x| {
                x[0].clone().apply_all(sample.op.clone(), x[1..].iter().cloned())
            });
            let check = match check {
                // Indices of what is now another dimension.
                Err(Error::InvalidInput { reason, .. }) if reason.contains("outside a dimension") => continue,
                other => other.unwrap_or_else(|e| panic!("{} behind {lead:?}: {e}", label(&sample))),
            };
            // Among more numbers two may be nearly the largest, or nearly equal with a deviation of nearly 0.
            let picks = ["amax", "amin", "max", "max_pool2d", "std", "vector_norm"].contains(&sample.op.rule().name());
            assert!(picks || !sample.smooth || check.worst() < 1e-7, "{} behind {lead:?}: {check:?}", label(&sample));
        }
    }
    let flat: Vec<_> = names(samples.iter()).difference(&deep).copied().collect();
    // Of a fixed rank, or with attributes that name all dimensions.
    let expected = [
        "addmm",
        "attention",
        "avg_pool2d",
        "baddbmm",
        "conv2d",
        "embedding",
        "expand",
        "max_pool2d",
        "nll_loss",
        "pad",
        "permute",
        "repeat",
        "split",
    ];
    assert_eq!(flat, expected);
}

/// Pairs of float inputs with one shape.
fn twins(sample: &Sample) -> Vec<(usize, usize)> {
    let is_float = |i: usize| matches!(numbers_of(&sample.inputs[i]), Numbers::Floats(_));
    let n = sample.inputs.len();
    let pairs = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
    pairs.filter(|&(i, j)| is_float(i) && is_float(j) && sample.inputs[i].shape == sample.inputs[j].shape).collect()
}

fn sum(a: &Tensor, b: &Tensor) -> Tensor {
    let out = Tensor::uninit(a.device(), a.shape(), a.dtype(), MemoryKind::Input).unwrap();
    a.device().run(kernel::Binary { f: BinaryFn::Add, a, b, out: &out }).unwrap();
    out
}

/// One value as two inputs: its gradient is the sum of the two that separate values have.
#[test]
fn one_value_as_two_inputs() {
    let device = cpu();
    let mut seen = Vec::new();
    let samples = Op::all_samples();
    for sample in &samples {
        for (i, j) in twins(sample) {
            let mut leaves = tensors(&device, sample, DType::F32);
            leaves[j] = leaves[i].clone();
            let needs = vec![true; leaves.len()];
            let apart = bits(&device, &sample.op, &leaves, &needs, |l| Ok(l.to_vec())).unwrap();
            let shared = bits(&device, &sample.op, &leaves, &needs, |l| {
                let mut inputs = l.to_vec();
                inputs[j] = inputs[i].clone();
                Ok(inputs)
            });
            let shared = shared.unwrap();
            assert_eq!(shared.outputs, apart.outputs, "{} with inputs {i} and {j} one", label(sample));
            let of = |bytes: &[u8]| Tensor::from_bytes(&device, leaves[i].shape(), DType::F32, bytes).unwrap();
            if !apart.gradients.is_empty() {
                let expected = sum(&of(&apart.gradients[i]), &of(&apart.gradients[j])).to_bytes().unwrap();
                assert_eq!(shared.gradients[i], expected, "{} with inputs {i} and {j} one", label(sample));
            }
            seen.push(sample);
        }
    }
    assert!(names(seen.into_iter()).len() > 15);
}

/// Two views of one value that overlap, as two inputs.
#[test]
fn views_that_overlap_as_two_inputs() {
    let device = cpu();
    let mut seen = Vec::new();
    let samples = Op::all_samples();
    for sample in &samples {
        for (i, j) in twins(sample).into_iter().filter(|&(i, _)| !sample.inputs[i].shape.is_empty()) {
            let shape = &sample.inputs[i].shape;
            let mut leaves = tensors(&device, sample, DType::F32);
            let wide: Vec<usize> = std::iter::once(shape[0] + 1).chain(shape[1..].iter().copied()).collect();
            let (Numbers::Floats(mut values), Numbers::Floats(more)) =
                (numbers_of(&sample.inputs[i]), numbers_of(&sample.inputs[j]))
            else {
                unreachable!("twins are floats")
            };
            values.extend(&more[..wide.iter().product::<usize>() - values.len()]);
            let base = floats(&device, &wide, &values, DType::F32);
            let n = shape[0];
            let view = |from: usize| base.narrow(0, from, n).unwrap();
            (leaves[i], leaves[j]) = (view(0), view(1));
            let needs = vec![true; leaves.len()];
            let plain = |l: &[retape_core::Var]| Ok(l.to_vec());
            // Leaves that overlap, against copies that don't.
            let overlapping = bits(&device, &sample.op, &leaves, &needs, plain).unwrap();
            let copies: Vec<Tensor> = leaves.iter().map(|t| t.copy(MemoryKind::Input).unwrap()).collect();
            let apart = bits(&device, &sample.op, &copies, &needs, plain).unwrap();
            assert_eq!(overlapping, apart, "{} with inputs {i} and {j} overlapping", label(sample));
            // Views on the tape: the value's gradient is the sum of theirs, each in its place.
            let mut with_base = leaves.clone();
            with_base.push(base.clone());
            let needs = vec![true; with_base.len()];
            let shared = bits(&device, &sample.op, &with_base, &needs, |l| {
                let mut inputs = l[..l.len() - 1].to_vec();
                let base = &l[l.len() - 1];
                (inputs[i], inputs[j]) = (base.clone().narrow(0, 0, n)?, base.clone().narrow(0, 1, n)?);
                Ok(inputs)
            });
            let shared = shared.unwrap();
            assert_eq!(shared.outputs, apart.outputs, "{} with inputs {i} and {j} overlapping", label(sample));
            if apart.gradients.is_empty() {
                continue;
            }
            let row = 4 * shape[1..].iter().product::<usize>();
            let of = |bytes: Vec<u8>| Tensor::from_bytes(&device, &wide, DType::F32, &bytes).unwrap();
            let first = of([&apart.gradients[i][..], &vec![0; row]].concat());
            let second = of([&vec![0; row], &apart.gradients[j][..]].concat());
            let expected = sum(&first, &second).to_bytes().unwrap();
            // Adding nothing to what one view alone shows gives a zero its sign.
            let shared = sum(&of(shared.gradients[leaves.len()].clone()), &of(vec![0; 4 * base.len()]));
            let shared = shared.to_bytes().unwrap();
            assert_eq!(shared, expected, "{} with inputs {i} and {j} views", label(sample));
            seen.push(sample);
        }
    }
    assert!(names(seen.into_iter()).len() > 15);
}

/// Numbers at the ends of their range, infinities and NaN: no panic, forward or backward, in any op.
#[test]
fn extreme_numbers_are_no_panic() {
    let device = cpu();
    let (most, least) = (f32::MAX as f64, f32::MIN_POSITIVE as f64);
    for sample in Op::all_samples() {
        for values in [
            &[f64::NAN][..],
            &[f64::INFINITY],
            &[f64::NEG_INFINITY, f64::INFINITY],
            &[1.0, f64::NAN, -2.0, f64::INFINITY, 0.5],
            &[most],
            &[-most, most, 1.0],
            &[least, -least / 4.0, 1e-45, 0.0, -0.0],
            &[0.0],
            &[-0.0, 0.0],
            &[1e300, -1e300, 1e-300, 5e-324],
        ] {
            let sample = filled(&sample, values);
            for dtype in [DType::F32, DType::F64] {
                let run = || -> Result<()> {
                    let leaves = tensors(&device, &sample, dtype);
                    bits(&device, &sample.op, &leaves, &vec![true; leaves.len()], |l| Ok(l.to_vec())).map(drop)
                };
                let result = catch_unwind(AssertUnwindSafe(run));
                assert!(result.is_ok(), "{} {dtype} of {values:?} panics", label(&sample));
            }
        }
    }
}

/// Large and tiny numbers whose squares f32 holds: where f64 has a result that f32 holds, f32 is close to it.
#[test]
fn f32_is_close_to_f64_far_out() {
    let device = cpu();
    let mut compared = 0;
    for sample in Op::all_samples() {
        for values in [
            &[1e12][..],
            &[-1e12],
            &[1e12, 2e12, 3e12, 5e11, 7e12],
            &[1e-12, 2e-12, 3e-12, 5e-13],
            &[-1e-12, -3e-12],
            &[1e-30, 2e-30],
            &[30.0, 80.0, 60.0],
            &[-80.0, -30.0],
            &[1e-6, 1.0, 1e6],
        ] {
            let values: Vec<f64> = values.iter().map(|&v| v as f32 as f64).collect();
            let sample = filled(&sample, &values);
            // With `moved`, each float is moved by about the last digit that f32 has, up or down.
            let run = |dtype, moved: Option<u64>| -> Result<Vec<Vec<f64>>> {
                let tape = Tape::new(&device);
                let mut inputs = tensors(&device, &sample, dtype);
                for (i, t) in inputs.iter_mut().enumerate().filter(|(_, t)| t.dtype().is_float()) {
                    if let Some(seed) = moved {
                        let steps = numbers(seed + i as u64, t.len(), -1.2e-7, 1.2e-7);
                        let values: Vec<f64> = t.to_f64_vec()?.iter().zip(steps).map(|(v, s)| v + v * s).collect();
                        *t = Tensor::from_slice(&device, t.shape(), &values)?;
                    }
                }
                let x = inputs.iter().map(|t| tape.constant(t)).collect::<Result<Vec<_>>>()?;
                let y = x[0].clone().apply_all(sample.op.clone(), x[1..].iter().cloned())?;
                y.iter().map(|y| y.tensor()?.to_f64_vec()).collect()
            };
            let (Ok(single), Ok(double)) = (run(DType::F32, None), run(DType::F64, None)) else { continue };
            let moved: Vec<Vec<Vec<f64>>> = (0..4).map(|seed| run(DType::F64, Some(100 * seed)).unwrap()).collect();
            for (k, (s, d)) in single.iter().zip(&double).enumerate() {
                let in_range = |d: f64| d.is_finite() && d.abs() < 1e38;
                // Relative to the largest result, which a smaller one may come from by a difference.
                let largest = d.iter().filter(|d| in_range(**d)).fold(0.0f64, |m, d| m.max(d.abs()));
                // And no closer than f64 is to itself when its inputs are rounded.
                let distance = |m: &Vec<Vec<f64>>| m[k].iter().zip(d).fold(0.0f64, |w, (m, d)| w.max((m - d).abs()));
                let conditioning = moved.iter().map(distance).fold(0.0f64, f64::max);
                let tolerance = if matches!(sample.op, Op::Cast(_)) { 1e-2 } else { 2e-5 };
                for (&s, &d) in s.iter().zip(d).filter(|(_, d)| in_range(**d)) {
                    let close = (s - d).abs() <= tolerance * largest + 10.0 * conditioning + 1e-38;
                    assert!(close, "{} of {values:?}: f32 {s:e}, f64 {d:e}", label(&sample));
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

#[test]
fn samples_vary() {
    // What `with_leading` and `filled` make is what the ops take.
    let samples = Op::all_samples();
    assert!(samples.iter().all(|s| is_valid(s) || matches!(s.op, Op::Cast(_))));
    let spec = |s: &Sample| Spec::new(&s.inputs[0].shape[..], DType::F64);
    assert!(samples.iter().filter_map(|s| with_leading(s, &[2, 1])).all(|s| spec(&s).shape.len() >= 2));
}

/// A row that repeats one number (stride 0) once counted further elements, up to a whole block.
#[test]
fn a_row_that_repeats_one_number_ends_where_it_ends() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = floats(&device, &[2, 1], &[3.0, -1.0], DType::F32).expand(&[2, 4]).unwrap();
    let x = tape.constant(&x).unwrap();
    let numbers = |y: Result<retape_core::Var>| y.unwrap().tensor().unwrap().to_f64_vec().unwrap();
    assert_eq!(numbers(x.clone().softmax()), [0.25; 8]);
    assert_eq!(numbers(x.clone().sum_dims(&[1], false)), [12.0, -4.0]);
    assert_eq!(numbers(x.layer_norm(None, None, 1e-5)), [0.0; 8]);
}
