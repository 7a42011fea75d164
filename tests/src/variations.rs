//! Variations of a sample: other sizes, more leading dimensions, and any place in memory that views can express.

use crate::choices::Choices;
use crate::{gradient_bytes, numbers, random, relative_error};
use retape_core::ops::{Op, Sample, SampleInput, SampleMemory, SampleValues, Spec};
use retape_core::{BackwardOptions, DType, Device, Element, MemoryKind, Result, Tape, Tensor, Var};

/// The numbers of an input.
#[derive(Debug, Clone)]
pub enum Numbers {
    /// Of a float input.
    Floats(Vec<f64>),
    /// Of an i64 input.
    Integers(Vec<i64>),
    /// Of a bool input.
    Bools(Vec<bool>),
}

/// The first `len` of these, from the start again where they don't suffice.
pub(crate) fn cycled<T: Copy>(values: &[T], len: usize) -> Vec<T> {
    values.iter().copied().cycle().take(len).collect()
}

/// The numbers of a sample's input as a contiguous tensor has them.
pub fn numbers_of(input: &SampleInput) -> Numbers {
    let len = input.shape.iter().product();
    match &input.values {
        SampleValues::Random { seed, range } => Numbers::Floats(numbers(*seed, len, -range, *range)),
        SampleValues::Between { seed, low, high } => Numbers::Floats(numbers(*seed, len, *low, *high)),
        SampleValues::Floats(values) => Numbers::Floats(cycled(values, len)),
        SampleValues::Integers(values) => Numbers::Integers(cycled(values, len)),
        SampleValues::Bools(values) => Numbers::Bools(cycled(values, len)),
    }
}

/// The shapes and dtypes of a sample's inputs, floats as f64.
pub fn specs(sample: &Sample) -> Vec<Spec> {
    let dtype = |input: &SampleInput| match &input.values {
        SampleValues::Integers(_) => DType::I64,
        SampleValues::Bools(_) => DType::Bool,
        _ => DType::F64,
    };
    sample.inputs.iter().map(|i| Spec::new(&i.shape[..], dtype(i))).collect()
}

/// Whether its op takes a sample's inputs: their number, shapes and dtypes.
pub fn is_valid(sample: &Sample) -> bool {
    let has_numbers = |i: &SampleInput| match &i.values {
        SampleValues::Floats(v) => !v.is_empty() || i.shape.contains(&0),
        SampleValues::Integers(v) => !v.is_empty() || i.shape.contains(&0),
        SampleValues::Bools(v) => !v.is_empty() || i.shape.contains(&0),
        _ => true,
    };
    let small = |i: &SampleInput| i.shape.iter().product::<usize>() <= 4096;
    sample.inputs.iter().all(|i| has_numbers(i) && small(i)) && sample.op.rule().infer(&specs(sample)).is_ok()
}

/// The sample with all floats replaced by these, over and over.
pub fn filled(sample: &Sample, values: &[f64]) -> Sample {
    let mut sample = sample.clone();
    for (shift, input) in sample.inputs.iter_mut().enumerate() {
        if matches!(numbers_of(input), Numbers::Floats(_)) {
            let len: usize = input.shape.iter().product();
            input.values = SampleValues::Floats(values.iter().copied().cycle().skip(shift).take(len).collect());
            input.memory = SampleMemory::Contiguous;
        }
    }
    sample
}

/// The sample with these dimensions before those of every input, or of the first alone, where the op takes that.
pub fn with_leading(sample: &Sample, lead: &[usize]) -> Option<Sample> {
    [usize::MAX, 1].into_iter().map(|inputs| led(sample, lead, inputs)).find(is_valid)
}

fn led(sample: &Sample, lead: &[usize], inputs: usize) -> Sample {
    let mut sample = sample.clone();
    for input in sample.inputs.iter_mut().take(inputs) {
        input.shape.splice(0..0, lead.iter().copied());
        let len: usize = input.shape.iter().product();
        if matches!(&input.values, SampleValues::Floats(v) if v.len() < len) {
            sample.smooth = false; // the same numbers twice: ties
        }
        match &mut input.values {
            SampleValues::Floats(v) => *v = cycled(v, len),
            SampleValues::Integers(v) => *v = cycled(v, len),
            SampleValues::Bools(v) => *v = cycled(v, len),
            SampleValues::Random { .. } | SampleValues::Between { .. } => {}
        }
        if lead.contains(&0) && input.memory == SampleMemory::Expanded {
            input.memory = SampleMemory::Contiguous;
        }
    }
    sample
}

/// The sample with every size replaced by another, the same for the same, where the op takes that.
pub fn resized(sample: &Sample, choices: &mut impl Choices) -> Option<Sample> {
    let mut new = std::collections::BTreeMap::new();
    let mut sample = sample.clone();
    for size in sample.inputs.iter_mut().flat_map(|i| &mut i.shape) {
        let old = *size;
        *size = *new.entry(old).or_insert_with(|| choices.pick(&[old, old, old, 1, 2, 3, 5, 8, 17, 0]));
    }
    is_valid(&sample).then_some(sample)
}

/// How a tensor comes to lie in memory: see `lay`.
#[derive(Debug, Clone)]
pub struct Place {
    /// The dimensions in the order in which they lie.
    order: Vec<usize>,
    /// Of each dimension: elements before, after, and the step.
    gaps: Vec<(usize, usize, usize)>,
    /// Of each dimension: whether it repeats one element.
    repeats: Vec<bool>,
}

impl Place {
    /// Any place for a tensor of this rank; contiguous where the choices are over.
    pub fn any(rank: usize, choices: &mut impl Choices) -> Place {
        let mut order: Vec<usize> = (0..rank).collect();
        for i in 1..rank {
            order.swap(i, i - choices.throw(i + 1));
        }
        let gaps = (0..rank).map(|_| (choices.throw(3), choices.throw(3), 1 + choices.throw(3))).collect();
        let repeats = (0..rank).map(|_| choices.throw(5) == 4).collect();
        Place { order, gaps, repeats }
    }
}

/// The numbers with one element repeated along the dimensions that repeat.
pub fn repeated<T: Copy>(values: &[T], shape: &[usize], place: &Place) -> Vec<T> {
    (0..values.len())
        .map(|flat| {
            let (mut rest, mut at, mut stride) = (flat, 0, 1);
            for d in (0..shape.len()).rev() {
                at += if place.repeats[d] { 0 } else { rest % shape[d] * stride };
                rest /= shape[d];
                stride *= shape[d];
            }
            values[at]
        })
        .collect()
}

/// A tensor of these numbers at a place: a view of a storage that is full of `filler` around it.
fn lay<T: Copy>(
    values: &[T],
    shape: &[usize],
    place: &Place,
    filler: T,
    make: impl Fn(&[usize], &[T]) -> Result<Tensor>,
) -> Result<Tensor> {
    let rank = shape.len();
    let kept: Vec<usize> = (0..rank).map(|d| if place.repeats[d] { shape[d].min(1) } else { shape[d] }).collect();
    let wide: Vec<usize> = (0..rank)
        .map(|d| {
            let (before, after, step) = place.gaps[d];
            before + after + kept[d].saturating_sub(1) * step + kept[d].min(1)
        })
        .collect();
    let storage_shape: Vec<usize> = place.order.iter().map(|&d| wide[d]).collect();
    let mut strides = vec![1; rank];
    for (i, &d) in place.order.iter().enumerate() {
        strides[d] = storage_shape[i + 1..].iter().product();
    }
    let mut storage = vec![filler; storage_shape.iter().product()];
    for (flat, &value) in values.iter().enumerate() {
        let (mut rest, mut at) = (flat, 0);
        for d in (0..rank).rev() {
            let i = if place.repeats[d] { 0 } else { rest % shape[d] };
            at += (place.gaps[d].0 + i * place.gaps[d].2) * strides[d];
            rest /= shape[d];
        }
        storage[at] = value;
    }
    let mut inverse = vec![0; rank];
    place.order.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
    let mut view = make(&storage_shape, &storage)?.permute(&inverse)?;
    for (d, (&len, &(before, _, step))) in kept.iter().zip(&place.gaps).enumerate() {
        view = view.slice(d, before, len, step)?;
    }
    // A dimension of no elements has nothing to repeat.
    if values.is_empty() { Ok(view) } else { view.expand(shape) }
}

/// The same numbers twice: contiguous, and at a place.
pub fn both(device: &Device, numbers: &Numbers, shape: &[usize], place: &Place, dtype: DType) -> Result<[Tensor; 2]> {
    let mut place = place.clone();
    if shape.contains(&0) {
        place.repeats.fill(false);
    }
    let place = &place;
    macro_rules! both {
        ($values:expr, $filler:expr, $make:expr) => {{
            let values = repeated($values, shape, place);
            Ok([$make(shape, &values)?, lay(&values, shape, place, $filler, $make)?])
        }};
    }
    match numbers {
        Numbers::Floats(v) if dtype == DType::F32 => {
            let v: Vec<f32> = v.iter().map(|&v| v as f32).collect();
            both!(&v, f32::NAN, |shape: &[usize], v: &[f32]| Tensor::from_slice(device, shape, v))
        }
        Numbers::Floats(v) => both!(v, f64::NAN, |shape: &[usize], v: &[f64]| Tensor::from_slice(device, shape, v)),
        Numbers::Integers(v) => both!(v, 1 << 40, |shape: &[usize], v: &[i64]| Tensor::from_slice(device, shape, v)),
        Numbers::Bools(v) => both!(v, true, |shape: &[usize], v: &[bool]| Tensor::from_slice(device, shape, v)),
    }
}

/// The bytes of an op's outputs, and of the gradients of its inputs under fixed random cotangents.
#[derive(Debug, Clone, PartialEq)]
pub struct Bits {
    /// Per visible output.
    pub outputs: Vec<Vec<u8>>,
    /// Per leaf; empty where it has no gradient.
    pub gradients: Vec<Vec<u8>>,
}

/// Runs an op on leaves that `inputs` makes out of the tape; gradients are those of the leaves.
pub fn bits(
    device: &Device,
    op: &Op,
    leaves: &[Tensor],
    needs: &[bool],
    inputs: impl FnOnce(&[Var]) -> Result<Vec<Var>>,
) -> Result<Bits> {
    let tape = Tape::new(device);
    let leaf = |(t, need): (&Tensor, &bool)| {
        if t.dtype().is_float() && *need { tape.leaf(t) } else { tape.constant(t) }
    };
    let leaves: Vec<Var> = leaves.iter().zip(needs).map(leaf).collect::<Result<_>>()?;
    let inputs = inputs(&leaves)?;
    let outputs = match op {
        // The op itself takes only what needs no copy; the method copies first.
        Op::Reshape(reshape) => {
            vec![inputs[0].clone().reshape(&reshape.shape.iter().map(|&n| n as isize).collect::<Vec<_>>())?]
        }
        _ => inputs[0].clone().apply_all(op.clone(), inputs[1..].iter().cloned())?,
    };
    drop(inputs);
    let mut bits = Bits { outputs: vec![], gradients: vec![] };
    for y in &outputs {
        bits.outputs.push(y.tensor()?.to_bytes()?);
    }
    let reached: Vec<&Var> = outputs.iter().filter(|y| y.requires_grad()).collect();
    let seeds: Vec<Tensor> = reached
        .iter()
        .map(|y| random(device, &y.shape(), 4, DType::F64).cast(y.dtype(), MemoryKind::Input))
        .collect::<Result<_>>()?;
    if !reached.is_empty() {
        let gradients =
            tape.backward_from(&reached.into_iter().zip(&seeds).collect::<Vec<_>>(), BackwardOptions::default())?;
        bits.gradients = gradient_bytes(&gradients, &leaves)?;
    }
    Ok(bits)
}

/// Ops that run a matrix product, whose order of additions depends on how its operands lie.
const PRODUCTS: [&str; 6] = ["attention", "matmul", "linear", "addmm", "baddbmm", "conv2d"];

impl Bits {
    /// Whether these are the same bits; for a product, the same numbers to rounding.
    fn agree(&self, other: &Bits, op: &Op, dtype: DType) -> bool {
        if !PRODUCTS.contains(&op.rule().name()) {
            return self == other;
        }
        let numbers = |bytes: &Vec<u8>| match dtype {
            DType::F32 => f32::from_bytes(bytes).into_iter().map(f64::from).collect(),
            _ => f64::from_bytes(bytes),
        };
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-13 };
        // All together: a gradient that cancels to nothing (of the query and key of a single time) is rounding.
        let near = |a: &[Vec<u8>], b: &[Vec<u8>]| {
            let [a, b] = [a, b].map(|list| list.iter().flat_map(numbers).collect::<Vec<f64>>());
            a.len() == b.len() && (a == b || relative_error(&a, &b) < tolerance)
        };
        self.outputs.len() == other.outputs.len()
            && self.gradients.len() == other.gradients.len()
            && near(&self.outputs, &other.outputs)
            && near(&self.gradients, &other.gradients)
    }
}

/// A sample varied in sizes and leading dimensions, where its op takes that.
pub fn varied(sample: &Sample, choices: &mut impl Choices) -> Sample {
    let mut sample = sample.clone();
    if choices.throw(2) == 1
        && let Some(new) = resized(&sample, choices)
    {
        sample = new;
    }
    if choices.throw(3) == 2 {
        let lead: Vec<usize> = (0..=choices.throw(3)).map(|_| choices.pick(&[2, 1, 3, 0])).collect();
        sample = with_leading(&sample, &lead).unwrap_or(sample);
    }
    sample
}

/// Where an op's inputs lie doesn't show in the bits of its outputs and gradients (products apart). Returns whether any
/// lay strangely.
pub fn places_don_t_show(device: &Device, samples: &[Sample], choices: &mut impl Choices) -> bool {
    let at = choices.throw(256) * 256 + choices.throw(256);
    let sample = varied(&samples[at % samples.len()], choices);
    let dtype = choices.pick(&[DType::F32, DType::F64]);
    let mut needs: Vec<bool> = sample.inputs.iter().map(|_| choices.throw(4) < 3).collect();
    if !needs.contains(&true) {
        needs[0] = true;
    }
    let pairs: Vec<[Tensor; 2]> = sample
        .inputs
        .iter()
        .map(|input| {
            let place = Place::any(input.shape.len(), choices);
            both(device, &numbers_of(input), &input.shape, &place, dtype).unwrap()
        })
        .collect();
    let run = |i: usize| {
        let leaves: Vec<Tensor> = pairs.iter().map(|pair| pair[i].clone()).collect();
        bits(device, &sample.op, &leaves, &needs, |leaves| Ok(leaves.to_vec()))
    };
    let layouts = || pairs.iter().map(|pair| pair[1].layout()).collect::<Vec<_>>();
    let (placed, plain) = (run(1), run(0));
    let agree = match (&placed, &plain) {
        (Ok(placed), Ok(plain)) => placed.agree(plain, &sample.op, dtype),
        (placed, plain) => placed == plain,
    };
    let (op, name) = (&sample.op, sample.name);
    let shown = |bits: &Result<Bits>| format!("{bits:.300?}").chars().take(300).collect::<String>();
    assert!(
        agree,
        "{op:?} / {name} {dtype} at {:?}, needing {needs:?}: {} instead of {}",
        layouts(),
        shown(&placed),
        shown(&plain)
    );
    pairs.iter().any(|pair| !pair[1].is_contiguous())
}
