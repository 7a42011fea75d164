//! Random numbers and dropout.

use super::check::{Operands, Primitive, operands};
use crate::Tensor;

/// A position in the counter-based random stream: Philox4x32-10 keyed by `seed`, one stream per `counter`.
/// Element i of a random tensor is word i % 4 of block i / 4 of its stream, see [`crate::rng`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct RandomStream {
    /// The tape's seed.
    pub seed: u64,
    /// The op's number among random ops.
    pub counter: u64,
}

/// out = uniform numbers in [0, 1): 24 random bits for f32, word i as in [`RandomStream`]; likewise 32 bits for f64, 11
/// for f16, 8 for bf16.
#[derive(Debug, Clone, Copy)]
pub struct Uniform<'a> {
    /// Where the words come from.
    pub stream: RandomStream,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Uniform<'a> {
    fn name(&self) -> &'static str {
        "uniform"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => out: Write Float]
    }
}

/// out = normal numbers of mean 0 (Box-Muller on words 2i, 2i+1 of the stream; f64 arithmetic).
#[derive(Debug, Clone, Copy)]
pub struct Normal<'a> {
    /// Where the words come from.
    pub stream: RandomStream,
    /// Standard deviation.
    pub std: f64,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Normal<'a> {
    fn name(&self) -> &'static str {
        "normal"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => out: Write Float]
    }
}

/// out = 0 where the element's uniform number is below p, else x / (1 - p).
#[derive(Debug, Clone, Copy)]
pub struct Dropout<'a> {
    /// May be `out`.
    pub x: &'a Tensor,
    /// Probability of 0.
    pub p: f64,
    /// Where the uniform numbers come from.
    pub stream: RandomStream,
    /// Written; of x's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Dropout<'a> {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: ReadInPlace Float, out: Write Float]
    }
}
