//! Samples of the registry made large: dimensions of a sample's inputs grown together, as far as its op allows.

use crate::numbers;
use crate::variations::{cycled, specs};
use retape_core::ops::view::{Expand, Reshape};
use retape_core::ops::{Op, Sample, SampleInput, SampleMemory, SampleValues, Spec};
use retape_core::{DType, Device, Element, Result, Tape, TapeOptions, Tensor};

/// The shapes and dtypes of a sample's inputs and outputs, floats as f32; none where the op refuses the inputs.
fn all_specs(sample: &Sample) -> Option<Vec<Spec>> {
    let narrow = |s: Spec| Spec { dtype: if s.dtype == DType::F64 { DType::F32 } else { s.dtype }, ..s };
    let mut all: Vec<Spec> = specs(sample).into_iter().map(narrow).collect();
    let outputs = sample.op.rule().infer(&all).ok()?;
    all.extend(outputs.into_iter().map(|o| o.spec));
    Some(all)
}

/// Bytes of the largest tensor.
fn largest(sample: &Sample) -> Option<u64> {
    all_specs(sample)?.iter().map(Spec::bytes).max()
}

/// Floating-point operations above which a sample takes too long.
const MOST_FLOPS: u64 = 2_000_000_000;

/// The sample with one dimension of some inputs grown by one factor, so that its largest tensor takes about `bytes`:
/// all ways that the op takes and that aren't too long, one for each way in which the shapes of inputs and outputs
/// grow.
pub fn grown(sample: &Sample, bytes: u64) -> Vec<Sample> {
    let mut found: Vec<Sample> = Vec::new();
    if sample.inputs.iter().any(|i| i.shape.contains(&0)) {
        return found;
    }
    let Some(small) = largest(sample) else { return found };
    let factor = (bytes / small.max(1)).max(2) as usize;
    // For each input no dimension, or one.
    let ways: usize = sample.inputs.iter().map(|i| i.shape.len() + 1).product();
    for way in 1..ways.min(4096) {
        let mut rest = way;
        let grow = |factor: usize| {
            let mut large = sample.clone();
            for input in &mut large.inputs {
                let d = rest % (input.shape.len() + 1);
                rest /= input.shape.len() + 1;
                if d > 0 {
                    input.shape[d - 1] *= factor;
                }
                if input.memory == SampleMemory::Expanded {
                    input.memory = SampleMemory::Contiguous;
                }
            }
            rest = way;
            large
        };
        found.extend(fitting(grow, factor, bytes));
    }
    found
}

/// The sample grown by a factor of which the largest tensor takes about `bytes`, if there is one near `factor`.
fn fitting(mut grow: impl FnMut(usize) -> Sample, factor: usize, bytes: u64) -> Option<Sample> {
    let is_near = |size: u64| (bytes / 2..=2 * bytes).contains(&size);
    let (mut factor, mut large) = (factor, grow(factor));
    for _ in 0..3 {
        let size = largest(&large)?;
        if is_near(size) {
            let specs = all_specs(&large)?;
            let (inputs, _) = specs.split_at(large.inputs.len());
            let outputs = large.op.rule().infer(inputs).ok()?;
            return Some(large).filter(|l| l.op.rule().cost(inputs, &outputs).flops <= MOST_FLOPS);
        }
        factor = (factor as u128 * bytes as u128 / size.max(1) as u128) as usize;
        if factor < 2 {
            return None;
        }
        large = grow(factor);
    }
    None
}

/// Large samples of every op of the registry, by the op's name: of its first samples that can be grown, `ways` ways.
pub fn all(bytes: u64, ways: usize) -> Vec<Sample> {
    let mut found: Vec<Sample> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    let samples = Op::all_samples();
    for sample in &samples {
        let name = sample.op.rule().name();
        if !names.contains(&name) {
            names.push(name);
            let all = samples.iter().filter(|s| s.op.rule().name() == name).flat_map(|s| grown(s, bytes)).take(ways);
            found.extend(all);
        }
    }
    // Those whose attributes are shapes.
    let n = bytes as usize / 4;
    found.push(Sample::smooth(
        "flat",
        Reshape { shape: [n].into_iter().collect() },
        [SampleInput::random(1, &[n / 4, 4])],
    ));
    let wide = Expand { shape: [4, n / 4].into_iter().collect() };
    found.push(Sample::smooth("rows", wide, [SampleInput::random(1, &[1, n / 4])]));
    found
}

/// The tensor of an input in f32, its numbers repeated.
fn tensor(device: &Device, input: &SampleInput) -> Tensor {
    const BASE: usize = 4093;
    let len: usize = input.shape.iter().product();
    let base = match &input.values {
        SampleValues::Random { seed, range } => numbers(*seed, BASE, -range, *range),
        SampleValues::Between { seed, low, high } => numbers(*seed, BASE, *low, *high),
        SampleValues::Floats(values) => values.clone(),
        SampleValues::Integers(values) => {
            return Tensor::from_slice(device, &input.shape, &cycled(values, len)).unwrap();
        }
        SampleValues::Bools(values) => return Tensor::from_slice(device, &input.shape, &cycled(values, len)).unwrap(),
    };
    let base: Vec<f32> = base.into_iter().map(|v| v as f32).collect();
    let bytes: Vec<u8> = f32::to_bytes(&base).into_iter().cycle().take(4 * len).collect();
    let rank = input.shape.len();
    let mut shape = input.shape.clone();
    if input.memory == SampleMemory::Transposed {
        shape.swap(rank - 2, rank - 1);
    }
    let tensor = Tensor::from_bytes(device, &shape, DType::F32, &bytes).unwrap();
    if input.memory == SampleMemory::Transposed { tensor.transpose(rank - 2, rank - 1).unwrap() } else { tensor }
}

/// The tensors of a sample's inputs.
pub fn tensors(device: &Device, sample: &Sample) -> Vec<Tensor> {
    sample.inputs.iter().map(|input| tensor(device, input)).collect()
}

/// Runs the op, and backward from the sum of its float outputs.
pub fn run(device: &Device, sample: &Sample, inputs: &[Tensor]) -> Result<()> {
    let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
    let leaves: Vec<_> = inputs
        .iter()
        .map(|t| if t.dtype().is_float() { tape.leaf(t) } else { tape.constant(t) })
        .collect::<Result<_>>()?;
    let outputs = leaves[0].clone().apply_all(sample.op.clone(), leaves[1..].iter().cloned())?;
    let sums: Vec<_> = outputs
        .into_iter()
        .filter(|y| y.dtype().is_float())
        .map(|y| y.cast(DType::F32)?.sum())
        .collect::<Result<_>>()?;
    let Some((first, rest)) = sums.split_first() else { return Ok(()) };
    let loss = rest.iter().try_fold(first.clone(), |sum, y| sum.add(y))?;
    tape.backward(&loss).map(drop)
}
