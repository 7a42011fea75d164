//! What the rule of an op says, and in which words.

use super::{Backward, Exec, Sample};
use crate::layout::Shape;
use crate::{DType, Result, Tensor};
use smallvec::{SmallVec, smallvec};
use std::fmt::Debug;

/// Shape and dtype of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Sizes of the dimensions.
    pub shape: Shape,
    /// The elements' type.
    pub dtype: DType,
}

impl Spec {
    /// A spec from its parts.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Spec {
        Spec { shape: shape.into(), dtype }
    }
    /// The spec of a tensor.
    pub fn of(tensor: &Tensor) -> Spec {
        Spec::new(tensor.shape(), tensor.dtype())
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().fold(1, |n, &size| n.saturating_mul(size))
    }
    /// True where a dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }
    /// Bytes of the elements (of an expanded view, those of a copy).
    pub fn bytes(&self) -> u64 {
        (self.len() as u64).saturating_mul(self.dtype.size() as u64)
    }
}

impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// One output of an op, as `infer` promises it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Shape and dtype.
    pub spec: Spec,
    /// True for per-row statistics (mean, rstd, maximum and log of the sum): kept exactly, never marked, not handed to
    /// the user.
    pub statistic: bool,
}

impl Output {
    /// An ordinary output.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Output {
        Output { spec: Spec::new(shape, dtype), statistic: false }
    }
    /// A per-row statistic.
    pub fn statistic(shape: impl Into<Shape>, dtype: DType) -> Output {
        Output { spec: Spec::new(shape, dtype), statistic: true }
    }
}

/// The outputs of an op; few.
pub type Outputs = SmallVec<[Output; 1]>;

/// A tensor that backward may read: the op's input or output of that index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Slot {
    In(usize),
    Out(usize),
}

/// A declaration of `saves`: the tensor, and whether it must be the exact one (never a lossy format), because something
/// that is kept exactly belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Save {
    /// Which tensor.
    pub slot: Slot,
    /// True where lossy marks are refused.
    pub exact: bool,
}

/// What backward reads.
pub type Saves = SmallVec<[Save; 4]>;

/// Declares slots whose value may be stored as the user likes.
pub fn saves(slots: impl IntoIterator<Item = Slot>) -> Saves {
    slots.into_iter().map(|slot| Save { slot, exact: false }).collect()
}

/// What a product of its first two inputs reads: each factor whose partner needs a gradient.
pub(crate) fn factors(needs: &[bool]) -> Saves {
    saves([(needs[1], Slot::In(0)), (needs[0], Slot::In(1))].into_iter().filter(|s| s.0).map(|s| s.1))
}

/// The work of one forward run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations: 2mnk for a product, one per element and elementary function elsewhere.
    pub flops: u64,
    /// Bytes read and written.
    pub traffic: u64,
}

impl Cost {
    /// `per_element` FLOPs for each element of the first output; every input read and every output written once.
    pub fn elementwise(per_element: u64, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost {
            flops: Cost::times(&[per_element as usize, outputs[0].spec.len()]),
            traffic: Cost::touched(inputs, outputs),
        }
    }
    /// The product of these numbers, or the largest there is: sizes on the meta device may be absurd.
    pub fn times(factors: &[usize]) -> u64 {
        factors.iter().fold(1, |product: u64, &f| product.saturating_mul(f as u64))
    }
    /// Bytes of these inputs, and of the first output read elsewhere and written.
    pub(crate) fn moved(inputs: &[Spec], outputs: &[Output]) -> u64 {
        Cost::touched(inputs, &[]).saturating_add(outputs[0].spec.bytes().saturating_mul(2))
    }
    /// Bytes of every input and output together.
    pub fn touched(inputs: &[Spec], outputs: &[Output]) -> u64 {
        let all = inputs.iter().map(Spec::bytes).chain(outputs.iter().map(|o| o.spec.bytes()));
        all.fold(0, u64::saturating_add)
    }
}

/// The rule of one op: everything that the engine must know of it.
///
/// What a rule gets wrong is [`Error::BrokenRule`](crate::Error::BrokenRule), or the error of the kernel that it called
/// wrongly, and the tape is as it was before the call; a `backward` that consumes its tape has consumed it then. The same
/// holds where a method panics. A rule may use its own tape, and what it records there stays. What the engine can't see is
/// the rule's own business: numbers of outputs that forward never writes are undefined, and a `forward` that gives other
/// numbers when it is run again makes replays differ.
pub trait OpRule: Debug {
    /// The usual name, as users write it in patterns: `layer_norm`.
    fn name(&self) -> &'static str;

    /// What it computes, in the words of the table in `docs/ops.md`. Every op of the registry says it.
    fn formula(&self) -> &'static str {
        ""
    }

    /// Shapes and dtypes of the outputs, or why the inputs are wrong and what would be right. The only place that
    /// rejects inputs for their shapes or dtypes. At least one output isn't a statistic.
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String>;

    /// For ops whose outputs are views of input 0: the views, as `infer` promised them. They cost nothing and are never
    /// marked.
    fn view(&self, _input: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        None
    }

    /// Fills the outputs, which the engine has allocated as `infer` said. Not called for views.
    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()>;

    /// Exactly what backward reads, each once, where the gradients of the inputs flagged in `needs` are wanted.
    fn saves(&self, needs: &[bool]) -> Saves;

    /// Sets the gradient of each input that needs one, once, with the input's shape and dtype.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()>;

    /// The work of one forward run.
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost;

    /// Inputs that the tests run this op on: ordinary, broadcast, strided, zero-sized, kinks, extremes.
    fn samples() -> Vec<Sample>
    where
        Self: Sized;
}

/// Fails unless all inputs are floats of one dtype.
pub(crate) fn one_float_dtype(inputs: &[Spec]) -> Result<DType, String> {
    let dtype = inputs[0].dtype;
    if !dtype.is_float() {
        return Err(format!("computes floats, got {dtype}; cast it with `cast(DType::F32)`"));
    }
    match inputs.iter().find(|i| i.dtype != dtype) {
        Some(other) => {
            Err(format!("the inputs must have one dtype, got {dtype} and {}; cast one of them", other.dtype))
        }
        None => Ok(dtype),
    }
}

/// True where a number is 0 for kernels on tensors of this dtype.
pub(crate) fn rounds_to_zero(number: f64, dtype: DType) -> bool {
    number == 0.0 || dtype.computed_in() == DType::F32 && number as f32 == 0.0
}

/// Fails unless there are `n` inputs.
pub(crate) fn takes(n: usize, inputs: &[Spec]) -> Result<(), String> {
    let given = inputs.len();
    if given == n { Ok(()) } else { Err(format!("takes {n} input{}, got {given}", if n == 1 { "" } else { "s" })) }
}

/// One output of this spec.
pub(crate) fn one(spec: Spec) -> Outputs {
    smallvec![Output { spec, statistic: false }]
}
