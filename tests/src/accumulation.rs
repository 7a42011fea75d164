//! Values that are used often, whole and in parts: what their gradients are.

use crate::programs::RandomMarks;
use crate::{floats, gradient_bytes};
use retape_core::ops::{index::Index, pad::Pad, view::Split};
use retape_core::{DType, Device, Policy, Result, Tape, TapeOptions, Tensor, Var, meta};
use std::rc::Rc;

fn ids(tape: &Tape, values: &[i64]) -> Result<Var> {
    tape.constant(&Tensor::from_slice(&tape.device(), &[values.len()], values)?)
}

/// One way to use a value `[8, 4]`: a name, the number that it takes, and what each of its elements gets as gradient.
pub type Use = (&'static str, fn(&Tape, &Var) -> Result<Var>, fn(usize) -> f64);

/// Every kind of use has a gradient of ones where it reads, added up over what repeats.
pub const USES: [Use; 12] = [
    ("cast", |_, x| x.clone().cast(DType::F32)?.sum(), |_| 1.0),
    ("shift", |_, x| x.clone().shift(1.0)?.cast(DType::F32)?.sum(), |_| 1.0),
    ("broadcast", |_, x| x.clone().expand(&[3, 8, 4])?.cast(DType::F32)?.sum(), |_| 3.0),
    ("row", |_, x| x.clone().select(0, 2)?.cast(DType::F32)?.sum(), |i| (i / 4 == 2) as u8 as f64),
    ("column", |_, x| x.clone().select(1, 1)?.cast(DType::F32)?.sum(), |i| (i % 4 == 1) as u8 as f64),
    (
        "part of a part",
        |_, x| x.clone().narrow(0, 1, 5)?.transpose(0, 1)?.narrow(0, 1, 2)?.cast(DType::F32)?.sum(),
        |i| ((1..6).contains(&(i / 4)) && (1..3).contains(&(i % 4))) as u8 as f64,
    ),
    (
        "one of three",
        |_, x| x.clone().split(0, &[3, 1, 4])?[1].clone().cast(DType::F32)?.sum(),
        |i| (i / 4 == 3) as u8 as f64,
    ),
    (
        "embedding",
        |tape, x| x.clone().embedding(&ids(tape, &[5, 0, 5])?)?.cast(DType::F32)?.sum(),
        |i| match i / 4 {
            5 => 2.0,
            0 => 1.0,
            _ => 0.0,
        },
    ),
    (
        "padded embedding",
        |tape, x| x.clone().embedding_padded(&ids(tape, &[7, 6])?, 7)?.cast(DType::F32)?.sum(),
        |i| (i / 4 == 6) as u8 as f64,
    ),
    (
        "index_select",
        |tape, x| x.clone().index_select(1, &ids(tape, &[3, 3, 0])?)?.cast(DType::F32)?.sum(),
        |i| match i % 4 {
            3 => 2.0,
            0 => 1.0,
            _ => 0.0,
        },
    ),
    (
        "index",
        |tape, x| x.clone().index(&[Index::Tensor(&ids(tape, &[-1, 2])?)])?.cast(DType::F32)?.sum(),
        |i| matches!(i / 4, 7 | 2) as u8 as f64,
    ),
    (
        "cut",
        |_, x| x.clone().pad(&[-1, 0, 0, -6], 0.0)?.cast(DType::F32)?.sum(),
        |i| (i / 4 < 2 && i % 4 > 0) as u8 as f64,
    ),
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

/// Gradients of 300 uses in 16 bits are the exact sums, rounded once, whatever the marks; and take the dry run's
/// memory.
pub fn many_uses_are_rounded_once(device: &Device, mixtures: &[&[Use]]) {
    for dtype in [DType::BF16, DType::F16] {
        let tensor = floats(device, &[8, 4], &[1.0; 32], dtype);
        for kinds in mixtures {
            let right = rounded(device, &expected(kinds, 300), dtype);
            let run = |device: &Device, inner: bool, policy: Option<Rc<dyn Policy>>| -> Result<_> {
                let tensor =
                    if device.computes() { tensor.clone() } else { floats(device, &[8, 4], &[1.0; 32], dtype) };
                let before = device.meter().live();
                device.meter().reset_peak();
                let tape = Tape::with(device, TapeOptions { policy, ..TapeOptions::default() });
                let x = tape.leaf(&tensor)?;
                let loss =
                    if inner { used(&tape, &x.clone().shift(0.5)?, kinds, 300)? } else { used(&tape, &x, kinds, 300)? };
                let gradients = tape.backward(&loss)?;
                let figures = (device.meter().step_peak(), device.meter().fingerprint());
                let bytes =
                    if device.computes() { gradient_bytes(&gradients, std::slice::from_ref(&x))? } else { Vec::new() };
                let gradient = gradients.of(&x).unwrap().clone();
                drop((gradients, loss, x, tape));
                assert_eq!(device.meter().live() - before, gradient.storage_bytes() as u64);
                Ok((gradient, bytes, figures))
            };
            for inner in [false, true] {
                let name = kinds.iter().map(|k| k.0).collect::<Vec<_>>().join(", ");
                let (gradient, bytes, figures) = run(device, inner, None).unwrap();
                assert_eq!(gradient.to_f64_vec().unwrap(), right, "{dtype} {name}, inner: {inner}");
                assert_eq!(run(&meta(), inner, None).unwrap().2, figures, "{dtype} {name}, inner: {inner}: dry");
                for seed in 0..2 {
                    let marks = || Some(Rc::new(RandomMarks::new(seed, false)) as Rc<dyn Policy>);
                    let marked = run(device, inner, marks()).unwrap();
                    assert_eq!(marked.1, bytes, "{dtype} {name}, inner: {inner}, marks {seed}");
                    assert_eq!(run(&meta(), inner, marks()).unwrap().2, marked.2, "{dtype} {name}: dry, marks {seed}");
                }
            }
        }
    }
}

/// A part of `[n, 4]` by its number, as a vector or matrix.
pub type Part = (&'static str, fn(&Tape, &Var, usize, usize) -> Result<Var>);

/// Every op that reads a small part of its input.
pub const PARTS: [Part; 17] = [
    ("select", |_, x, t, _| x.clone().select(0, t)),
    ("select of columns", |_, x, t, _| x.clone().reshape(&[4, -1])?.select(1, t)),
    ("select of the transposed", |_, x, t, _| x.clone().transpose(0, 1)?.select(1, t)),
    ("narrow", |_, x, t, n| x.clone().narrow(0, t.min(n - 3), 3)?.sum_dims(&[0], false)),
    ("narrow twice", |_, x, t, n| x.clone().narrow(0, 1, n - 1)?.narrow(0, t.min(n - 2), 1)),
    ("strided slice", |_, x, t, n| {
        let start = t.min(n - 4) as isize;
        x.clone().index(&[Index::Slice { start: Some(start), stop: Some(start + 4), step: 2 }])?.sum_dims(&[0], false)
    }),
    ("numbers behind a slice", |_, x, t, _| {
        x.clone().index(&[Index::Slice { start: None, stop: None, step: 1 }, Index::At((t % 4) as isize)])?.select(0, t)
    }),
    ("a diagonal step", |_, x, t, _| x.clone().select(0, t)?.select(0, t % 4)),
    ("index tensor", |tape, x, t, _| x.clone().index(&[Index::Tensor(&ids(tape, &[t as i64])?)])),
    ("index_select", |tape, x, t, _| x.clone().index_select(0, &ids(tape, &[t as i64])?)),
    ("gather", |tape, x, t, _| x.clone().gather(0, &ids(tape, &[t as i64])?.reshape(&[1, 1])?)),
    ("take_along_dim", |tape, x, t, _| x.clone().take_along_dim(&ids(tape, &[t as i64])?, None)),
    ("embedding", |tape, x, t, _| x.clone().embedding(&ids(tape, &[t as i64])?)),
    ("padded embedding", |tape, x, t, _| x.clone().embedding_padded(&ids(tape, &[t as i64])?, 3)),
    ("split", |_, x, t, n| {
        Ok(x.clone().apply_all(Split { dim: 0, sizes: [t, 1, n - t - 1].into_iter().collect() }, [])?.swap_remove(1))
    }),
    ("cut", |_, x, t, n| {
        let widths = [(-(t as isize), t as isize + 1 - n as isize), (0, 0)].into_iter().collect();
        x.clone().apply(Pad { widths, value: 0.0 }, [])
    }),
    ("the end of scatter_add", |tape, x, t, _| {
        let zeros = Tensor::full(&tape.device(), &[1, 4], DType::F64, 0.0)?;
        let index = ids(tape, &[0])?.reshape(&[1, 1])?;
        tape.constant(&zeros)?.scatter_add(0, &index, x)?.add(&x.clone().select(0, t)?)
    }),
];

/// The sum of a loop over the parts of x.
pub fn sum_of_parts(part: Part, x: &Var) -> Result<Var> {
    let (tape, n) = (x.tape(), x.shape()[0]);
    let mut sum = tape.constant(&Tensor::full(&tape.device(), &[], DType::F64, 0.0)?)?;
    for t in 0..n {
        sum = sum.add(&(part.1)(tape, x, t, n)?.sum()?)?;
    }
    Ok(sum)
}

/// Parts that differ all the time add up to what one part after the other gives: finite differences of a linear
/// function.
pub fn parts_add_up(device: &Device) {
    for part in PARTS {
        let n = 8;
        let tape = Tape::new(device);
        let x = tape.leaf(&floats(device, &[n, 4], &vec![1.0; 4 * n], DType::F64)).unwrap();
        let sum = sum_of_parts(part, &x).unwrap_or_else(|e| panic!("{}: {e}", part.0));
        let gradient = tape.backward(&sum).unwrap().of(&x).unwrap().to_f64_vec().unwrap();
        let value = |at: Option<usize>| {
            let tape = Tape::new(device);
            let mut values = vec![1.0; 4 * n];
            if let Some(at) = at {
                values[at] += 1.0;
            }
            let x = tape.constant(&floats(device, &[n, 4], &values, DType::F64)).unwrap();
            sum_of_parts(part, &x).unwrap().item().unwrap()
        };
        let right: Vec<f64> = (0..4 * n).map(|at| value(Some(at)) - value(None)).collect();
        // The padding's row has no gradient by definition.
        let zeroed = |i: usize| part.0 == "padded embedding" && i / 4 == 3;
        let right: Vec<f64> = right.iter().enumerate().map(|(i, &g)| if zeroed(i) { 0.0 } else { g }).collect();
        assert_eq!(gradient, right, "{}", part.0);
    }
}
