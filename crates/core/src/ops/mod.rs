//! Ops: what the engine knows of each. One file per op or family; the list at the end of this file is the registry.

use crate::kernel::{Binary, Reduce};
use crate::layout::Shape;
use crate::{DType, Device, Kernel, Kind, Result, Tensor};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;
use std::fmt::Debug;
use std::rc::Rc;
use std::time::Instant;

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
        self.shape.iter().product()
    }
    /// True where a dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }
    /// Bytes of the elements (of an expanded view, as many as a copy would take).
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
    /// True for per-row statistics (mean, rstd, log-sum-exp): kept exactly, never marked, not handed to the user.
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

/// A declaration of `saves`: the tensor, and whether it must be the exact one (never int8), because something
/// that is kept exactly belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Save {
    /// Which tensor.
    pub slot: Slot,
    /// True where int8 is refused.
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
    /// Bytes of every input and output together.
    pub fn touched(inputs: &[Spec], outputs: &[Output]) -> u64 {
        inputs.iter().map(Spec::bytes).chain(outputs.iter().map(|o| o.spec.bytes())).sum()
    }
}

/// The rule of one op: everything that the engine must know of it.
pub trait Rule: Debug {
    /// The usual name, as users write it in patterns: `layer_norm`.
    fn name(&self) -> &'static str;

    /// What it computes, in the words of the table in `docs/ops.md`. Every op of the registry says it.
    fn formula(&self) -> &'static str {
        ""
    }

    /// Shapes and dtypes of the outputs, or why the inputs are wrong and what would be right. The only place that
    /// rejects inputs for their shapes or dtypes.
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String>;

    /// For ops whose outputs are views of input 0: the views. They cost nothing and are never marked.
    fn view(&self, _input: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        None
    }

    /// Fills the outputs, which the engine has allocated as `infer` said. Not called for views.
    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()>;

    /// Exactly what backward reads, where the gradients of the inputs flagged in `needs` are wanted.
    fn saves(&self, needs: &[bool]) -> Saves;

    /// Sets the gradient of each input that needs one.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()>;

    /// The work of one forward run.
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost;

    /// Inputs that the tests run this op on: ordinary, broadcast, strided, zero-sized, kinks, extremes.
    fn samples() -> Vec<Sample>
    where
        Self: Sized;
}

/// Time in kernels, of one tape.
#[derive(Debug, Default)]
pub(crate) struct KernelClock {
    nanos: Cell<u64>,
    /// Wait for each kernel, on a device that only queues them: its own time counts, not that of queueing it.
    waits: bool,
}

impl KernelClock {
    pub(crate) fn new(waits: bool) -> KernelClock {
        KernelClock { nanos: Cell::new(0), waits }
    }

    pub(crate) fn nanos(&self) -> u64 {
        self.nanos.get()
    }
}

/// Where kernels of an op run: the device, what new tensors are counted as, and a clock.
#[derive(Debug)]
pub struct Exec<'a> {
    device: &'a Device,
    kind: Kind,
    clock: &'a KernelClock,
}

impl<'a> Exec<'a> {
    pub(crate) fn new(device: &'a Device, kind: Kind, clock: &'a KernelClock) -> Exec<'a> {
        Exec { device, kind, clock }
    }

    /// Runs one kernel.
    pub fn run(&self, kernel: Kernel<'_>) -> Result<()> {
        let start = Instant::now();
        let mut result = self.device.backend().run(&kernel);
        if self.clock.waits {
            result = result.and_then(|()| self.device.synchronize());
        }
        self.clock.nanos.set(self.clock.nanos() + start.elapsed().as_nanos() as u64);
        result
    }

    /// A new tensor with undefined contents.
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::uninit(self.device, shape, dtype, self.kind)
    }

    /// A new tensor of a spec.
    pub fn empty_like(&self, spec: &Spec) -> Result<Tensor> {
        self.empty(&spec.shape, spec.dtype)
    }

    /// A declared workspace.
    pub fn workspace(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::uninit(self.device, shape, dtype, Kind::Workspace)
    }

    /// Where a kernel may write a result of x's shape that replaces x: x itself if nobody else holds it (the kernel
    /// must allow this in-place use), else a new tensor.
    pub fn replace(&self, x: &Tensor) -> Result<Tensor> {
        if x.is_sole_owner() { Ok(x.clone()) } else { self.empty(x.shape(), x.dtype()) }
    }

    /// A contiguous version of x, copied only if needed.
    pub fn contiguous(&self, x: Tensor) -> Result<Tensor> {
        if x.is_contiguous() {
            return Ok(x);
        }
        let out = self.empty(x.shape(), x.dtype())?;
        self.run(Kernel::Copy { x: &x, out: &out })?;
        Ok(out)
    }

    /// x with another shape: a view, or a copy where the strides force one.
    pub fn reshape(&self, x: Tensor, shape: &[usize]) -> Result<Tensor> {
        if let Some(view) = x.view_as(shape)? {
            return Ok(view);
        }
        let copy = self.contiguous(x)?;
        Ok(copy.view_as(shape)?.expect("a contiguous tensor can always be viewed with another shape"))
    }

    /// Where to put together, in several kernels, what goes to `out`: `out` itself, or where that would round in between,
    /// an f32 workspace of its shape. Ends with [`put`](Exec::put).
    pub fn assemble(&self, out: &Tensor) -> Result<Tensor> {
        let dtype = out.dtype().computed_in();
        if dtype == out.dtype() { Ok(out.clone()) } else { self.workspace(out.shape(), dtype) }
    }

    /// Moves what was put together to `out`, rounding it once.
    pub fn put(&self, assembled: &Tensor, out: &Tensor) -> Result<()> {
        if assembled.dtype() == out.dtype() { Ok(()) } else { self.run(Kernel::Copy { x: assembled, out }) }
    }

    /// Where to write the terms of `input`'s gradient, of g's shape: where they are to be summed by
    /// [`sum_terms`](Exec::sum_terms), unrounded, in an f32 workspace.
    pub fn terms(&self, g: &Tensor, input: &Spec) -> Result<Tensor> {
        match g.shape() == &input.shape[..] {
            true => self.empty(g.shape(), g.dtype()),
            false => self.workspace(g.shape(), g.dtype().computed_in()),
        }
    }

    /// The gradient of an input that was repeated: sums [`terms`](Exec::terms), and rounds once.
    pub fn sum_terms(&self, terms: Tensor, input: &Spec) -> Result<Tensor> {
        self.sum_as(terms, &input.shape, input.dtype)
    }

    /// The gradient of a broadcast: sums g over the dimensions in which `shape` was repeated.
    pub fn sum_to(&self, g: Tensor, shape: &[usize]) -> Result<Tensor> {
        let dtype = g.dtype();
        self.sum_as(g, shape, dtype)
    }

    fn sum_as(&self, g: Tensor, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if g.shape() == shape {
            return Ok(g);
        }
        let lead = g.rank() - shape.len();
        let kept: Shape = (0..g.rank()).map(|d| if d < lead { 1 } else { shape[d - lead] }).collect();
        let out = self.empty(&kept, dtype)?;
        self.run(Kernel::Reduce { f: Reduce::Sum, x: &g, out: &out })?;
        self.reshape(out, shape)
    }

    /// a += b, in the storage of whichever of the two nobody else holds, else in a new tensor.
    pub fn accumulate(&self, a: Tensor, b: Tensor) -> Result<Tensor> {
        // Addition commutes bit for bit, so which buffer is reused doesn't show in the numbers.
        let (first, second) = if !a.is_sole_owner() && b.is_sole_owner() { (b, a) } else { (a, b) };
        let out = self.replace(&first)?;
        self.run(Kernel::Binary { f: Binary::Add, a: &first, b: &second, out: &out })?;
        Ok(out)
    }
}

/// Where a [`Backward`] gets saved tensors from.
pub(crate) trait SavedSource {
    /// The tensor of a declared slot; the source gives up its own claim on it.
    fn take(&mut self, slot: Slot) -> Result<Tensor>;
}

/// What an op's `backward` works with. Saved tensors and output gradients are *taken*: each may be asked for once, and
/// dropping it early frees its memory early (the weight's gradient first, then the saved input goes before the
/// input's gradient is allocated).
pub struct Backward<'a> {
    pub(crate) device: &'a Device,
    pub(crate) clock: &'a KernelClock,
    pub(crate) saved: &'a mut dyn SavedSource,
    pub(crate) output_grads: SmallVec<[Option<Tensor>; 1]>,
    pub(crate) input_grads: SmallVec<[Option<Tensor>; 3]>,
    pub(crate) needs: &'a [bool],
    pub(crate) leaves: &'a [bool],
    pub(crate) inputs: &'a [Spec],
}

impl<'a> Backward<'a> {
    /// True where the gradient of this input is wanted.
    pub fn needs(&self, input: usize) -> bool {
        self.needs[input]
    }
    /// Shape and dtype of an input.
    pub fn input(&self, input: usize) -> &'a Spec {
        &self.inputs[input]
    }
    /// Takes the gradient of an output; `None` where nothing depends on that output.
    pub fn grad(&mut self, output: usize) -> Option<Tensor> {
        self.output_grads[output].take()
    }
    /// Takes the gradient of the first output, which an op with one output always has.
    pub fn grad0(&mut self) -> Tensor {
        self.grad(0).expect("the engine visits a node only with a gradient, and each is taken once")
    }
    /// Takes a tensor that `saves` declared, replayed or dequantized as its mark says.
    pub fn saved(&mut self, slot: Slot) -> Result<Tensor> {
        self.saved.take(slot)
    }
    /// Sets the gradient of an input.
    pub fn set(&mut self, input: usize, grad: Tensor) {
        self.input_grads[input] = Some(grad);
    }
    /// Where to compute the gradient of an input: a leaf's is counted as [`Kind::Gradient`].
    pub fn exec(&self, input: usize) -> Exec<'a> {
        let kind = if self.leaves[input] { Kind::Gradient } else { Kind::Activation };
        Exec::new(self.device, kind, self.clock)
    }
}

/// Inputs for testing an op; see [`Rule::samples`].
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

macro_rules! registry {
    ($($module:ident :: $op:ident),* $(,)?) => {
        /// Every op.
        #[derive(Debug, Clone)]
        #[allow(missing_docs)]
        pub enum Op {
            $($op($module::$op),)*
            /// An op defined outside this crate.
            Custom(Rc<dyn Rule>),
        }

        impl Op {
            /// The op's rule.
            pub fn rule(&self) -> &dyn Rule {
                match self {
                    $(Op::$op(op) => op,)*
                    Op::Custom(rule) => &**rule,
                }
            }

            /// The samples of every op by the file that defines it, in the registry's order.
            pub fn samples_by_file() -> Vec<(&'static str, Vec<Sample>)> {
                vec![$((stringify!($module), <$module::$op as Rule>::samples())),*]
            }

            /// The samples of every op, for tests that loop over the registry.
            pub fn all_samples() -> Vec<Sample> {
                Op::samples_by_file().into_iter().flat_map(|(_, samples)| samples).collect()
            }
        }

        $(impl From<$module::$op> for Op {
            fn from(op: $module::$op) -> Op {
                Op::$op(op)
            }
        })*
    };
}

pub mod attention;
pub mod binary;
pub mod causal_mask;
pub mod clamp;
pub mod conv;
pub mod copy;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod flip;
pub mod gather;
pub mod glu;
pub mod group_norm;
pub mod index;
pub mod join;
pub mod layer_norm;
pub mod loss;
pub mod matmul;
pub mod max_index;
pub mod pad;
pub mod pool;
pub mod reduce;
pub mod repeat;
pub mod rms_norm;
pub mod roll;
pub mod scan;
pub mod softmax;
pub mod ternary;
pub mod triangle;
pub mod unary;
pub mod view;
pub mod where_;

registry! {
    unary::UnaryOp,
    binary::BinaryOp,
    ternary::TernaryOp,
    clamp::ClampBetween,
    where_::Where,
    reduce::ReduceOp,
    max_index::MaxIndex,
    scan::ScanOp,
    matmul::Matmul,
    matmul::Linear,
    matmul::AddMatmul,
    softmax::Softmax,
    softmax::LogSoftmax,
    causal_mask::CausalMask,
    dropout::Dropout,
    attention::Attention,
    layer_norm::LayerNorm,
    embedding::Embedding,
    rms_norm::RmsNorm,
    group_norm::GroupNorm,
    cross_entropy::CrossEntropy,
    cross_entropy::NllLoss,
    loss::LossOp,
    conv::Conv2d,
    pool::MaxPool2d,
    pool::AvgPool2d,
    view::Reshape,
    view::Permute,
    view::Expand,
    view::Narrow,
    view::Split,
    join::Cat,
    flip::Flip,
    roll::Roll,
    repeat::Repeat,
    pad::Pad,
    triangle::Triangle,
    glu::Glu,
    gather::Gather,
    gather::ScatterAdd,
    index::Gathered,
    copy::Contiguous,
    copy::Cast,
}
