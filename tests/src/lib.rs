//! Shared helpers of the whole-system tests.

pub mod accumulation;
pub mod attention;
pub mod casts;
pub mod choices;
pub mod conformance;
pub mod far;
pub mod functions;
pub mod fuzz;
pub mod gpt_curve;
pub mod grown;
pub mod int8;
pub mod layouts;
pub mod models;
pub mod patterns;
pub mod programs;
pub mod sessions;
pub mod sums;
pub mod traced;
pub mod variations;
pub mod wrapped;

use half::{bf16, f16};
use retape_core::kernel::{self, RandomStream};
use retape_core::ops::{Op, Sample, SampleInput, SampleMemory, SampleValues};
use retape_core::{
    BackwardOptions, DType, Device, Element, Gradients, Mark, MemoryKind, Result, Tape, TapeOptions, Tensor, Var,
};

/// Numbers in [low, high), a pure function of the seed.
pub fn numbers(seed: u64, len: usize, low: f64, high: f64) -> Vec<f64> {
    let stream = RandomStream { seed, counter: 77 };
    (0..len as u64).map(|i| low + (high - low) * stream.word(i) as f64 / 4_294_967_296.0).collect()
}

/// A random f64 tensor in [-1, 1), cast to `dtype`.
pub fn random(device: &Device, shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let values = numbers(seed, shape.iter().product(), -1.0, 1.0);
    floats(device, shape, &values, dtype)
}

/// A float tensor of these values, rounded.
pub fn floats(device: &Device, shape: &[usize], values: &[f64], dtype: DType) -> Tensor {
    let bytes = match dtype {
        DType::F64 => f64::to_bytes(values),
        DType::F32 => f32::to_bytes(&values.iter().map(|&v| v as f32).collect::<Vec<_>>()),
        DType::BF16 => bf16::to_bytes(&values.iter().map(|&v| bf16::from_f64(v)).collect::<Vec<_>>()),
        DType::F16 => f16::to_bytes(&values.iter().map(|&v| f16::from_f64(v)).collect::<Vec<_>>()),
        other => panic!("the tests make float tensors, not {other}"),
    };
    Tensor::from_bytes(device, shape, dtype, &bytes).unwrap()
}

/// The numbers in a float tensor's bytes.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F64 => f64::from_bytes(bytes),
        DType::F32 => f32::from_bytes(bytes).into_iter().map(f64::from).collect(),
        DType::BF16 => bf16::from_bytes(bytes).into_iter().map(f64::from).collect(),
        DType::F16 => f16::from_bytes(bytes).into_iter().map(f64::from).collect(),
        other => panic!("{other} is no float"),
    }
}

/// The tensor of a sample's input, lying in memory as the sample says.
pub fn sample_tensor(device: &Device, input: &SampleInput, dtype: DType) -> Tensor {
    let len = input.shape.iter().product();
    let values = match &input.values {
        SampleValues::Random { seed, range } => numbers(*seed, len, -range, *range),
        SampleValues::Between { seed, low, high } => numbers(*seed, len, *low, *high),
        SampleValues::Floats(values) => values.clone(),
        SampleValues::Integers(values) => return Tensor::from_slice(device, &input.shape, values).unwrap(),
        SampleValues::Bools(values) => return Tensor::from_slice(device, &input.shape, values).unwrap(),
    };
    lay(device, &input.shape, &values, input.memory, dtype)
}

/// A tensor of these values in row-major order, lying in memory as asked.
fn lay(device: &Device, shape: &[usize], values: &[f64], memory: SampleMemory, dtype: DType) -> Tensor {
    let rank = shape.len();
    match memory {
        SampleMemory::Contiguous => floats(device, shape, values, dtype),
        SampleMemory::Transposed => {
            let (rows, columns) = (shape[rank - 2], shape[rank - 1]);
            let mut transposed = values.to_vec();
            for (from, to) in values.chunks(rows * columns).zip(transposed.chunks_mut(rows * columns)) {
                for i in 0..rows {
                    for j in 0..columns {
                        to[j * rows + i] = from[i * columns + j];
                    }
                }
            }
            let mut shape = shape.to_vec();
            shape.swap(rank - 2, rank - 1);
            floats(device, &shape, &transposed, dtype).transpose(rank - 2, rank - 1).unwrap()
        }
        SampleMemory::Narrowed => {
            // The last dimension lies inside a longer one, with NaN on both sides.
            let last = shape[rank - 1];
            let mut padded = Vec::new();
            for row in values.chunks(last.max(1)) {
                padded.extend([f64::NAN; 3]);
                padded.extend_from_slice(row);
                padded.extend([f64::NAN; 2]);
            }
            let mut wide = shape.to_vec();
            wide[rank - 1] = last + 5;
            floats(device, &wide, &padded, dtype).narrow(rank - 1, 3, last).unwrap()
        }
        SampleMemory::Expanded => {
            let mut row = shape.to_vec();
            row[0] = 1;
            let len = row.iter().product();
            floats(device, &row, &values[..len], dtype).expand(shape).unwrap()
        }
    }
}

/// The marks that may lose bits; groups are of 8 elements, so that small tensors have several.
pub fn lossy_marks() -> Vec<Mark> {
    let lossy = Mark::all().filter(|mark| mark.is_lossy());
    lossy.map(|mark| mark.with("group", "8").unwrap_or(mark)).collect()
}

/// What one run of a sample gave.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRun {
    /// The outputs' bytes (empty on meta).
    pub outputs: Vec<Vec<u8>>,
    /// The gradients' bytes by input, of the passes one after the other.
    pub gradients: Vec<Vec<Vec<u8>>>,
    /// The gradients as numbers, of the first pass.
    pub numbers: Vec<Vec<f64>>,
    /// The meter's highest step bytes.
    pub peak: u64,
    /// The meter's hash of all events.
    pub fingerprint: u64,
    /// Live bytes when all is gone, above those of the inputs.
    pub left: u64,
}

/// How to run a sample.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampleMarks {
    /// Mark of every float input, which is made the output of an op for it.
    pub inputs: Option<Mark>,
    /// Mark of every float output.
    pub outputs: Option<Mark>,
}

/// A contiguous copy that kernels may write, whoever holds it: it is still being made.
pub fn writable(tensor: &Tensor) -> Tensor {
    let out = Tensor::uninit(tensor.device(), tensor.shape(), tensor.dtype(), MemoryKind::Input).unwrap();
    tensor.device().run(kernel::Copy { x: tensor, out: &out }).unwrap();
    out
}

/// Runs a sample: each float leaf goes through `shift(0)` (so that it can be marked), the op, and a square of every
/// output (so that outputs are read by backward and their gradients aren't trivial).
pub fn run_sample(
    device: &Device,
    sample: &Sample,
    dtype: DType,
    marks: SampleMarks,
    passes: usize,
) -> Result<SampleRun> {
    let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(device, i, dtype)).collect();
    let before = device.meter().live();
    device.meter().reset_peak();
    let mut run = SampleRun { outputs: vec![], gradients: vec![], numbers: vec![], peak: 0, fingerprint: 0, left: 0 };
    {
        let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
        let is_float = |t: &Tensor| t.dtype().is_float();
        let leaves: Vec<Var> =
            inputs.iter().map(|t| if is_float(t) { tape.leaf(t) } else { tape.constant(t) }).collect::<Result<_>>()?;
        let mut outputs = {
            let inner: Vec<Var> = leaves
                .iter()
                .zip(&inputs)
                .map(|(leaf, t)| if is_float(t) { leaf.clone().shift(0.0) } else { Ok(leaf.clone()) })
                .collect::<Result<_>>()?;
            if let Some(mark) = marks.inputs {
                inner.iter().zip(&inputs).filter(|(_, t)| is_float(t)).try_for_each(|(v, _)| v.set_mark(mark))?;
            }
            inner[0].clone().apply_all(sample.op.clone(), inner[1..].iter().cloned())?
        };
        for y in &outputs {
            // A strided one is copied for reading; on meta too, so that the events are the same.
            let y = y.tensor()?.contiguous(MemoryKind::Workspace)?;
            run.outputs.push(if device.computes() { y.to_bytes()? } else { Vec::new() });
        }
        let is_view =
            matches!(sample.op, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_) | Op::Narrow(_) | Op::Split(_));
        if let Some(mark) = marks.outputs.filter(|_| !is_view) {
            outputs.iter().filter(|y| y.dtype().is_float()).try_for_each(|y| y.set_mark(mark))?;
        }
        let mut squares: Vec<Var> = outputs
            .drain(..)
            .filter(|y| y.dtype().is_float())
            .map(|y| y.clone().square()?.scale(0.5)?.add(&y))
            .collect::<Result<_>>()?;
        let seeds: Vec<Tensor> = squares.iter().map(|y| random(device, &y.shape(), 99, y.dtype())).collect();
        for pass in 0..passes {
            let pairs: Vec<(&Var, &Tensor)> = squares.iter().zip(&seeds).collect();
            let gradients = tape.backward_from(
                &pairs,
                BackwardOptions { retain_graph: pass + 1 < passes, ..BackwardOptions::default() },
            )?;
            if device.computes() {
                run.gradients.push(gradient_bytes(&gradients, &leaves)?);
            }
        }
        squares.clear();
        run.peak = device.meter().step_peak();
        run.fingerprint = device.meter().fingerprint();
    }
    run.left = device.meter().live() - before;
    let decode = |bytes: &Vec<u8>| decode(dtype, bytes);
    run.numbers = run.gradients.first().map_or(Vec::new(), |of_inputs| of_inputs.iter().map(decode).collect());
    Ok(run)
}

/// The bytes of each leaf's gradient; empty where it has none.
pub fn gradient_bytes(gradients: &Gradients, leaves: &[Var]) -> Result<Vec<Vec<u8>>> {
    leaves.iter().map(|l| gradients.of(l).map_or(Ok(Vec::new()), Tensor::to_bytes)).collect()
}

/// Relative L2 distance; where `expected` is nearly nothing (norm below 1e-2), the distance a hundredfold.
pub fn relative_error(actual: &[f64], expected: &[f64]) -> f64 {
    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error = actual.iter().zip(expected).map(|(a, e)| (a - e) * (a - e)).sum::<f64>().sqrt();
    error / norm.max(1e-2)
}
