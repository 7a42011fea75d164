//! Inputs that the tests run ops on.

use super::Op;

/// Inputs for testing an op; see [`OpRule::samples`](super::OpRule::samples).
#[derive(Debug, Clone)]
pub struct Sample {
    /// What it shows.
    pub name: &'static str,
    /// The op with its attributes.
    pub op: Op,
    /// The inputs.
    pub inputs: Vec<SampleInput>,
    /// False where the function has a kink at these inputs, so that finite differences mean nothing.
    pub smooth: bool,
}

/// One input of a [`Sample`].
#[derive(Debug, Clone)]
pub struct SampleInput {
    /// The shape as the op sees it.
    pub shape: Vec<usize>,
    /// The values in row-major order: floats as they are, integers rounded.
    pub values: SampleValues,
    /// How the tensor lies in memory.
    pub memory: SampleMemory,
}

/// The numbers of a sample's input.
#[derive(Debug, Clone)]
pub enum SampleValues {
    /// Pseudo-random floats in [-range, range), by seed.
    Random {
        /// Which numbers.
        seed: u64,
        /// Their range.
        range: f64,
    },
    /// Pseudo-random floats in [low, high), by seed: for ops with a domain.
    Between {
        /// Which numbers.
        seed: u64,
        /// Inclusive lower end.
        low: f64,
        /// Exclusive upper end.
        high: f64,
    },
    /// These floats.
    Floats(Vec<f64>),
    /// These integers, as i64.
    Integers(Vec<i64>),
    /// These truth values.
    Bools(Vec<bool>),
}

/// How a sample's tensor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleMemory {
    /// Row-major.
    Contiguous,
    /// The last two dimensions lie transposed (rank 2 and more).
    Transposed,
    /// A part of a larger tensor: offset and gaps, with NaN around it.
    Narrowed,
    /// Dimension 0 repeats one row (stride 0).
    Expanded,
}

impl SampleInput {
    /// Contiguous pseudo-random floats in [-1, 1).
    pub fn random(seed: u64, shape: &[usize]) -> SampleInput {
        SampleInput::new(shape, SampleValues::Random { seed, range: 1.0 })
    }
    /// Contiguous values.
    pub fn new(shape: &[usize], values: SampleValues) -> SampleInput {
        SampleInput { shape: shape.to_vec(), values, memory: SampleMemory::Contiguous }
    }
    /// The same values, lying otherwise in memory.
    pub fn lying(mut self, memory: SampleMemory) -> SampleInput {
        self.memory = memory;
        self
    }
    /// Floats as given.
    pub fn floats(shape: &[usize], values: &[f64]) -> SampleInput {
        SampleInput::new(shape, SampleValues::Floats(values.to_vec()))
    }
    /// Integers as given.
    pub fn integers(shape: &[usize], values: &[i64]) -> SampleInput {
        SampleInput::new(shape, SampleValues::Integers(values.to_vec()))
    }
}

impl Sample {
    /// A sample at which the op is smooth.
    pub fn smooth(name: &'static str, op: impl Into<Op>, inputs: impl Into<Vec<SampleInput>>) -> Sample {
        Sample { name, op: op.into(), inputs: inputs.into(), smooth: true }
    }
    /// A sample at a kink or an extreme, where finite differences mean nothing.
    pub fn kink(name: &'static str, op: impl Into<Op>, inputs: impl Into<Vec<SampleInput>>) -> Sample {
        Sample { smooth: false, ..Sample::smooth(name, op, inputs) }
    }
    /// The samples that suit every elementwise op of one input: ordinary, rank 0 and 5, strided, expanded, zero-sized.
    pub fn of_one_input(op: impl Into<Op> + Clone, values: impl Fn(u64) -> SampleValues) -> Vec<Sample> {
        let x = |seed, shape: &[usize]| SampleInput::new(shape, values(seed));
        let s = |name, input| Sample::smooth(name, op.clone(), [input]);
        vec![
            s("ordinary", x(1, &[3, 5])),
            s("rank 0", x(2, &[])),
            s("rank 5", x(3, &[2, 1, 3, 1, 2])),
            s("transposed", x(4, &[4, 6]).lying(SampleMemory::Transposed)),
            s("narrowed", x(5, &[3, 37]).lying(SampleMemory::Narrowed)),
            s("expanded", x(6, &[4, 5]).lying(SampleMemory::Expanded)),
            s("zero-sized", x(7, &[2, 0, 3])),
        ]
    }
}
