//! Gradients of many uses: sums of 16 bits are rounded once, and small parts add to the gradient that is there.

use retape_core::ops::{index::Index, pad::Pad, view::Split};
use retape_core::{DType, Device, Kind, Mark, ParameterId, Policy, Result, Tape, TapeOptions, Tensor, Var, meta};
use retape_tests::programs::RandomMarks;
use retape_tests::{floats, gradient_bytes, wrapped};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

fn ids(tape: &Tape, values: &[i64]) -> Result<Var> {
    tape.constant(&Tensor::from_slice(&tape.device(), &[values.len()], values)?)
}

/// One way to use a value `[8, 4]`: a name, the number that it takes, and what each of its elements gets as gradient.
type Use = (&'static str, fn(&Tape, &Var) -> Result<Var>, fn(usize) -> f64);

/// Every kind of use has a gradient of ones where it reads, added up over what repeats.
const USES: [Use; 12] = [
    ("cast", |_, x| x.cast(DType::F32)?.sum(), |_| 1.0),
    ("shift", |_, x| x.shift(1.0)?.cast(DType::F32)?.sum(), |_| 1.0),
    ("broadcast", |_, x| x.expand(&[3, 8, 4])?.cast(DType::F32)?.sum(), |_| 3.0),
    ("row", |_, x| x.select(0, 2)?.cast(DType::F32)?.sum(), |i| (i / 4 == 2) as u8 as f64),
    ("column", |_, x| x.select(1, 1)?.cast(DType::F32)?.sum(), |i| (i % 4 == 1) as u8 as f64),
    (
        "part of a part",
        |_, x| x.narrow(0, 1, 5)?.transpose(0, 1)?.narrow(0, 1, 2)?.cast(DType::F32)?.sum(),
        |i| ((1..6).contains(&(i / 4)) && (1..3).contains(&(i % 4))) as u8 as f64,
    ),
    ("one of three", |_, x| x.split(0, &[3, 1, 4])?[1].cast(DType::F32)?.sum(), |i| (i / 4 == 3) as u8 as f64),
    (
        "embedding",
        |tape, x| x.embedding(&ids(tape, &[5, 0, 5])?)?.cast(DType::F32)?.sum(),
        |i| match i / 4 {
            5 => 2.0,
            0 => 1.0,
            _ => 0.0,
        },
    ),
    (
        "padded embedding",
        |tape, x| x.embedding_padded(&ids(tape, &[7, 6])?, 7)?.cast(DType::F32)?.sum(),
        |i| (i / 4 == 6) as u8 as f64,
    ),
    (
        "index_select",
        |tape, x| x.index_select(1, &ids(tape, &[3, 3, 0])?)?.cast(DType::F32)?.sum(),
        |i| match i % 4 {
            3 => 2.0,
            0 => 1.0,
            _ => 0.0,
        },
    ),
    (
        "index",
        |tape, x| x.index(&[Index::Tensor(&ids(tape, &[-1, 2])?)])?.cast(DType::F32)?.sum(),
        |i| matches!(i / 4, 7 | 2) as u8 as f64,
    ),
    ("cut", |_, x| x.pad(&[-1, 0, 0, -6], 0.0)?.cast(DType::F32)?.sum(), |i| (i / 4 < 2 && i % 4 > 0) as u8 as f64),
];

/// Uses a value `count` times, the kinds in turn.
fn used(tape: &Tape, x: &Var, kinds: &[Use], count: usize) -> Result<Var> {
    let mut sum = (kinds[0].1)(tape, x)?;
    for i in 1..count {
        sum = sum.add(&(kinds[i % kinds.len()].1)(tape, x)?)?;
    }
    Ok(sum)
}

fn expected(kinds: &[Use], count: usize) -> Vec<f64> {
    (0..32).map(|i| (0..count).map(|k| (kinds[k % kinds.len()].2)(i)).sum()).collect()
}

/// The numbers as the dtype holds them: what one rounding of the exact sum gives.
fn rounded(device: &Device, values: &[f64], dtype: DType) -> Vec<f64> {
    floats(device, &[values.len()], values, dtype).to_f64_vec().unwrap()
}

#[test]
fn many_uses_of_16_bits_are_rounded_once() {
    let device = cpu();
    let mut mixtures: Vec<&[Use]> = USES.chunks(1).collect();
    mixtures.extend([&USES[..], &USES[3..], &USES[..4]]);
    for dtype in [DType::BF16, DType::F16] {
        let tensor = floats(&device, &[8, 4], &[1.0; 32], dtype);
        for kinds in &mixtures {
            let right = rounded(&device, &expected(kinds, 300), dtype);
            let run = |device: &Device, inner: bool, policy: Option<Rc<dyn Policy>>| -> Result<_> {
                let tensor =
                    if device.computes() { tensor.clone() } else { floats(device, &[8, 4], &[1.0; 32], dtype) };
                let before = device.meter().live();
                device.meter().reset_peak();
                let tape = Tape::with(device, TapeOptions { policy, ..TapeOptions::default() });
                let x = tape.leaf(&tensor)?;
                let loss = if inner { used(&tape, &x.shift(0.5)?, kinds, 300)? } else { used(&tape, &x, kinds, 300)? };
                let gradients = tape.backward(&loss)?;
                let figures = (device.meter().step_peak(), device.meter().fingerprint());
                let bytes = if device.computes() { gradient_bytes(&gradients, &[x.clone()])? } else { Vec::new() };
                let gradient = gradients.of(&x).unwrap().clone();
                drop((gradients, loss, x, tape));
                assert_eq!(device.meter().live() - before, gradient.storage_bytes() as u64);
                Ok((gradient, bytes, figures))
            };
            for inner in [false, true] {
                let name = kinds.iter().map(|k| k.0).collect::<Vec<_>>().join(", ");
                let (gradient, bytes, figures) = run(&device, inner, None).unwrap();
                assert_eq!(gradient.to_f64_vec().unwrap(), right, "{dtype} {name}, inner: {inner}");
                assert_eq!(run(&meta(), inner, None).unwrap().2, figures, "{dtype} {name}, inner: {inner}: dry");
                for seed in 0..2 {
                    let marks = || Some(Rc::new(RandomMarks::new(seed, false)) as Rc<dyn Policy>);
                    let marked = run(&device, inner, marks()).unwrap();
                    assert_eq!(marked.1, bytes, "{dtype} {name}, inner: {inner}, marks {seed}");
                    assert_eq!(run(&meta(), inner, marks()).unwrap().2, marked.2, "{dtype} {name}: dry, marks {seed}");
                }
            }
        }
    }
}

#[test]
fn a_parameter_of_many_leaves_is_rounded_once() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let tape = Tape::new(&device);
        let mut sum = tape.constant(&Tensor::full(&device, &[], DType::F32, 0.0).unwrap()).unwrap();
        for uses in 1..=150 {
            // It was updated since, and so has another leaf.
            let tensor = floats(&device, &[4], &[uses as f64; 4], dtype);
            for _ in 0..2 {
                let p = tape.parameter(ParameterId(3), &tensor, true).unwrap();
                sum = sum.add(&p.cast(DType::F32).unwrap().sum().unwrap()).unwrap();
            }
        }
        let gradients = tape.backward(&sum).unwrap();
        assert_eq!(gradients.parameter(ParameterId(3)).unwrap().to_f64_vec().unwrap(), [300.0; 4], "{dtype}");
        assert_eq!(gradients.parameter(ParameterId(3)).unwrap().dtype(), dtype);
        assert_eq!(gradients.parameter(ParameterId(3)).unwrap().storage().kind(), Kind::Gradient);
    }
}

#[test]
fn many_seeds_of_one_value_are_rounded_once() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16] {
        let tape = Tape::new(&device);
        let x = tape.leaf(&floats(&device, &[4], &[1.0; 4], dtype)).unwrap();
        let y = x.shift(1.0).unwrap();
        let one = floats(&device, &[4], &[1.0; 4], dtype);
        let seeds: Vec<(&Var, &Tensor)> = (0..300).map(|_| (&y, &one)).collect();
        let gradients = tape.backward_from(&seeds, true).unwrap();
        assert_eq!(gradients.of(&x).unwrap().to_f64_vec().unwrap(), [300.0; 4]);
        // The inner value's own.
        let seeds: Vec<(&Var, &Tensor)> = (0..300).map(|_| (&x, &one)).collect();
        assert_eq!(tape.backward_from(&seeds, false).unwrap().of(&x).unwrap().to_f64_vec().unwrap(), [300.0; 4]);
        assert_eq!(one.to_f64_vec().unwrap(), [1.0; 4]);
        // The gradient of an inner value.
        let tape = Tape::new(&device);
        let x = tape.leaf(&one).unwrap();
        let y = x.shift(1.0).unwrap();
        let loss = used_flat(&y, 300).unwrap();
        assert_eq!(tape.grad(&loss, &[&y]).unwrap()[0].to_f64_vec().unwrap(), [300.0; 4]);
    }
}

fn used_flat(x: &Var, count: usize) -> Result<Var> {
    let mut sum = x.cast(DType::F32)?.sum()?;
    for _ in 1..count {
        sum = sum.add(&x.cast(DType::F32)?.sum()?)?;
    }
    Ok(sum)
}

/// One use, or two (whose sum is rounded once where they meet), take no memory beyond the gradients; from three on there is
/// one sum in f32, counted as the step's.
#[test]
fn a_sum_in_f32_is_there_only_where_three_meet() {
    for device in [cpu(), meta()] {
        let tensor = floats(&device, &[1024], &[1.0; 1024], DType::BF16);
        let peak = |uses: usize| {
            let tape = Tape::new(&device);
            let x = tape.leaf(&tensor).unwrap();
            let seeds: Vec<Var> = (0..uses).map(|_| x.scale(2.0).unwrap()).collect();
            let pairs: Vec<(&Var, &Tensor)> = seeds.iter().map(|v| (v, &tensor)).collect();
            device.meter().reset_peak();
            let before = device.meter().live();
            let gradients = tape.backward_from(&pairs, true).unwrap();
            assert_eq!(gradients.of(&x).unwrap().storage_bytes(), 2048);
            drop(gradients);
            assert_eq!(device.meter().live(), before);
            (device.meter().peak() - before, device.meter().step_peak() - device.meter().step_live())
        };
        assert_eq!(peak(1), (2048, 0));
        assert_eq!(peak(2), (4096, 0));
        // Two gradients of 16 bits, and the sum.
        assert_eq!(peak(3), (8192, 4096));
        assert_eq!(peak(30), (8192, 4096));
    }
}

/// A part of `[n, 4]` by its number, as a vector or matrix.
type Part = (&'static str, fn(&Tape, &Var, usize, usize) -> Result<Var>);

const PARTS: [Part; 17] = [
    ("select", |_, x, t, _| x.select(0, t)),
    ("select of columns", |_, x, t, _| x.reshape(&[4, -1])?.select(1, t)),
    ("select of the transposed", |_, x, t, _| x.transpose(0, 1)?.select(1, t)),
    ("narrow", |_, x, t, n| x.narrow(0, t.min(n - 3), 3)?.sum_dims(&[0], false)),
    ("narrow twice", |_, x, t, n| x.narrow(0, 1, n - 1)?.narrow(0, t.min(n - 2), 1)),
    ("strided slice", |_, x, t, n| {
        let start = t.min(n - 4) as isize;
        x.index(&[Index::Slice { start: Some(start), stop: Some(start + 4), step: 2 }])?.sum_dims(&[0], false)
    }),
    ("numbers behind a slice", |_, x, t, _| {
        x.index(&[Index::Slice { start: None, stop: None, step: 1 }, Index::At((t % 4) as isize)])?.select(0, t)
    }),
    ("a diagonal step", |_, x, t, _| x.select(0, t)?.select(0, t % 4)),
    ("index tensor", |tape, x, t, _| x.index(&[Index::Tensor(&ids(tape, &[t as i64])?)])),
    ("index_select", |tape, x, t, _| x.index_select(0, &ids(tape, &[t as i64])?)),
    ("gather", |tape, x, t, _| x.gather(0, &ids(tape, &[t as i64])?.reshape(&[1, 1])?)),
    ("take_along_dim", |tape, x, t, _| x.take_along_dim(&ids(tape, &[t as i64])?, None)),
    ("embedding", |tape, x, t, _| x.embedding(&ids(tape, &[t as i64])?)),
    ("padded embedding", |tape, x, t, _| x.embedding_padded(&ids(tape, &[t as i64])?, 3)),
    ("split", |_, x, t, n| {
        Ok(x.apply_all(Split { dim: 0, sizes: [t, 1, n - t - 1].into_iter().collect() }, &[])?.swap_remove(1))
    }),
    ("cut", |_, x, t, n| {
        let widths = [(-(t as isize), t as isize + 1 - n as isize), (0, 0)].into_iter().collect();
        x.apply(Pad { widths, value: 0.0 }, &[])
    }),
    ("the end of scatter_add", |tape, x, t, _| {
        let zeros = Tensor::full(&tape.device(), &[1, 4], DType::F64, 0.0)?;
        let index = ids(tape, &[0])?.reshape(&[1, 1])?;
        tape.constant(&zeros)?.scatter_add(0, &index, x)?.add(&x.select(0, t)?)
    }),
];

/// Bytes that backward's kernels touch where a loop takes `n` parts of a value of n rows, and its gradient.
fn work(part: Part, n: usize) -> (u64, Vec<f64>) {
    let watch = Arc::new(wrapped::Watch::default());
    let device = wrapped::device(watch.clone());
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, &[n, 4], &vec![1.0; 4 * n], DType::F64)).unwrap();
    let mut sum = tape.constant(&Tensor::full(&device, &[], DType::F64, 0.0).unwrap()).unwrap();
    for t in 0..n {
        let read = (part.1)(&tape, &x, t, n).unwrap_or_else(|e| panic!("{}: {e}", part.0));
        sum = sum.add(&read.sum().unwrap()).unwrap();
    }
    let before = watch.bytes.load(Ordering::Relaxed);
    let gradients = tape.backward(&sum).unwrap();
    let gradient = gradients.of(&x).unwrap().to_f64_vec().unwrap();
    (watch.bytes.load(Ordering::Relaxed) - before, gradient)
}

#[test]
fn a_loop_over_parts_takes_linear_work() {
    for part in PARTS {
        let ((few, _), (many, _)) = (work(part, 500), work(part, 4000));
        assert!(few > 0 && many < 9 * few, "{}: {few} bytes for 500 parts, {many} for 4000", part.0);
    }
}

/// Parts that differ all the time add up to what one part after the other gives: finite differences of a linear function.
#[test]
fn parts_add_up_to_the_gradient_of_all() {
    for part in PARTS {
        let n = 8;
        let (_, gradient) = work(part, n);
        let device = cpu();
        let value = |at: Option<usize>| {
            let tape = Tape::new(&device);
            let mut values = vec![1.0; 4 * n];
            if let Some(at) = at {
                values[at] += 1.0;
            }
            let x = tape.constant(&floats(&device, &[n, 4], &values, DType::F64)).unwrap();
            (0..n).map(|t| (part.1)(&tape, &x, t, n).unwrap().sum().unwrap().item().unwrap()).sum::<f64>()
        };
        let right: Vec<f64> = (0..4 * n).map(|at| value(Some(at)) - value(None)).collect();
        // The padding's row has no gradient by definition.
        let zeroed = |i: usize| part.0 == "padded embedding" && i / 4 == 3;
        let right: Vec<f64> = right.iter().enumerate().map(|(i, &g)| if zeroed(i) { 0.0 } else { g }).collect();
        assert_eq!(gradient, right, "{}", part.0);
    }
}

/// A part's gradient added to one that is there has the bits of any marks, handles and passes.
#[test]
fn marks_don_t_show_where_parts_add_up() {
    let device = cpu();
    for dtype in [DType::F32, DType::BF16] {
        let tensor = retape_tests::random(&device, &[8, 4], 5, dtype);
        let run = |mark: Option<Mark>| {
            let tape = Tape::new(&device);
            let x = tape.leaf(&tensor).unwrap();
            let y = x.gelu().unwrap();
            let mut sum = y.square().unwrap().sum().unwrap();
            for t in 0..8 {
                let part = y.select(0, t).unwrap().tanh().unwrap();
                if let Some(mark) = mark {
                    part.set_mark(mark).unwrap();
                }
                sum = sum.add(&part.square().unwrap().sum().unwrap()).unwrap();
            }
            if let Some(mark) = mark {
                y.set_mark(mark).unwrap();
            }
            drop(y);
            let first = gradient_bytes(&tape.backward_retain(&sum).unwrap(), &[x.clone()]).unwrap();
            let second = gradient_bytes(&tape.backward(&sum).unwrap(), &[x]).unwrap();
            assert_eq!(first, second);
            first
        };
        assert_eq!(run(Some(Mark::Recompute)), run(None));
        assert_eq!(run(Some(Mark::Keep)), run(None));
    }
}
