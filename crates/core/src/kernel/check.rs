//! What core checks of every kernel before a backend runs it. Kernels are called by safe code, an op defined outside this
//! crate among it, and backends work on raw memory: nothing that could make them leave an operand gets past this file.

use super::{AttentionSpec, CrossEntropySpec, Kernel, LossReduction, Sequences, Window, meeting};
use crate::device::{Device, Lock, same_device};
use crate::layout::{padded, reach};
use crate::{DType, Error, Result, Tensor};
use smallvec::SmallVec;

/// A kernel whose operands are checked, and locked until this is dropped. Only core makes one.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: Kernel<'a>,
    _locks: SmallVec<[Lock<'a>; 8]>,
}

impl<'a> Launch<'a> {
    /// Checks the operands of a kernel for this device, and locks them.
    pub(crate) fn new(kernel: Kernel<'a>, device: &Device) -> Result<Launch<'a>> {
        let check = Check { name: kernel.name(), operands: kernel.operands() };
        let _locks = check.lock()?;
        check.tensors(device)?;
        check.dtypes(device)?;
        check.shapes(&kernel)?;
        Ok(Launch { kernel, _locks })
    }

    /// The kernel.
    pub fn kernel(&self) -> &Kernel<'a> {
        &self.kernel
    }
}

/// What a kernel does with an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    /// Reads what may be the very tensor that is written.
    ReadInPlace,
    /// Writes a contiguous tensor.
    Write,
    /// Writes a tensor of any strides with distinct elements.
    WriteStrided,
    /// Writes a tensor of any strides with distinct elements, but for dimensions that repeat.
    WriteRepeated,
}

/// What an operand's elements must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Elements {
    Any,
    /// Those of the output.
    AsOut,
    /// Floats: f64 as all other floats of the kernel, or none of them f64.
    Float,
    /// What the kernel's floats are computed in.
    Statistic,
    Index,
    /// An index or a float.
    IndexOrFloat,
    /// A truth value or a float.
    BoolOrFloat,
    Exactly(DType),
}

#[derive(Debug, Clone, Copy)]
struct Operand<'a> {
    name: &'static str,
    tensor: &'a Tensor,
    access: Access,
    elements: Elements,
}

type Operands<'a> = SmallVec<[Operand<'a>; 12]>;

impl Operand<'_> {
    fn is_written(&self) -> bool {
        !matches!(self.access, Access::Read | Access::ReadInPlace)
    }

    /// The first byte that it reaches, and the end.
    fn reach(&self) -> (usize, usize) {
        let (layout, size) = (self.tensor.layout(), self.tensor.dtype().size());
        (layout.offset * size, (layout.offset + layout.span()) * size)
    }
}

/// The operands, each as `name: access elements`; those that are absent are left out.
macro_rules! operands {
    ($($name:ident: $access:ident $elements:expr),* $(,)?) => {{
        let mut all = Operands::new();
        $(
            let tensor: Option<&Tensor> = $name.into();
            all.extend(tensor.map(|tensor| Operand {
                name: stringify!($name),
                tensor,
                access: Access::$access,
                elements: $elements,
            }));
        )*
        all
    }};
}

impl<'a> Kernel<'a> {
    /// The operands, and what the kernel does with each. The last of those that are written is the output that
    /// [`Elements::AsOut`] means.
    fn operands(&self) -> Operands<'a> {
        use Elements::{Any, AsOut, BoolOrFloat, Exactly, Float, Index, IndexOrFloat, Statistic};
        match *self {
            Kernel::Fill { out, .. } => operands![out: Write Any],
            Kernel::Copy { x, out } => operands![x: Read Any, out: WriteStrided Any],
            Kernel::Unary { x, out, .. } => operands![x: ReadInPlace Float, out: Write Float],
            Kernel::UnaryGrad { saved, g, out, .. } => {
                operands![saved: ReadInPlace Float, g: ReadInPlace Float, out: Write Float]
            }
            Kernel::Binary { a, b, out, .. } => operands![a: ReadInPlace Float, b: ReadInPlace Float, out: Write Float],
            Kernel::ExtremumGrad { a, b, g, out, .. } => {
                operands![a: Read Float, b: Read Float, g: ReadInPlace Float, out: Write Float]
            }
            Kernel::Ternary { a, b, c, out, .. } => {
                operands![a: ReadInPlace Float, b: ReadInPlace Float, c: ReadInPlace Float, out: Write Float]
            }
            Kernel::ClampGrad { x, low, high, g, out, .. } => {
                operands![x: Read Float, low: Read Float, high: Read Float, g: ReadInPlace Float, out: Write Float]
            }
            Kernel::Select { cond, a, b, out } => {
                operands![cond: Read Exactly(DType::Bool), a: ReadInPlace AsOut, b: ReadInPlace AsOut, out: Write Any]
            }
            Kernel::Reduce { x, out, .. } => operands![x: Read Float, out: Write Float],
            Kernel::ReduceGrad { x, y, g, out, .. } => {
                operands![x: Read Float, y: Read Float, g: Read Float, out: Write Float]
            }
            Kernel::MaxIndex { x, values, indices, .. } => {
                operands![x: Read Float, values: Write Float, indices: Write Exactly(DType::I64)]
            }
            Kernel::MaxIndexGrad { indices, g, out, .. } => {
                operands![indices: Read Exactly(DType::I64), g: Read Float, out: Write Float]
            }
            Kernel::Scan { x, out, .. } => operands![x: ReadInPlace Float, out: Write Float],
            Kernel::CumprodGrad { x, g, out, .. } => operands![x: Read Float, g: Read Float, out: Write Float],
            Kernel::Matmul { a, b, out, .. } => operands![a: Read Float, b: Read Float, out: Write Float],
            Kernel::Softmax { x, out } | Kernel::LogSoftmax { x, out } => operands![x: Read Float, out: Write Float],
            Kernel::SoftmaxGrad { y, g, out } | Kernel::LogSoftmaxGrad { y, g, out } => {
                operands![y: Read Float, g: ReadInPlace Float, out: Write Float]
            }
            Kernel::Triangle { x, out, .. } | Kernel::Dropout { x, out, .. } => {
                operands![x: ReadInPlace Float, out: Write Float]
            }
            Kernel::Flip { x, out, .. } => operands![x: Read AsOut, out: Write Any],
            Kernel::Gather { x, indices, out, .. } => {
                let mut all = operands![x: Read AsOut, out: Write Any];
                all.extend(indices.iter().map(|index| of_indices(index)));
                all
            }
            Kernel::ScatterAdd { source, indices, order, out, .. } => {
                let mut all = operands![source: Read Float, order: Write Exactly(DType::I64), out: WriteRepeated Float];
                all.extend(indices.iter().map(|index| of_indices(index)));
                all
            }
            Kernel::LayerNorm { x, weight, bias, out, mean, rstd, .. } => operands![
                x: Read Float, weight: Read Float, bias: Read Float, out: Write Float, mean: Write Statistic,
                rstd: Write Statistic,
            ],
            Kernel::LayerNormGrad { x, weight, mean, rstd, g, out } => operands![
                x: Read Float, weight: Read Float, mean: Read Statistic, rstd: Read Statistic, g: ReadInPlace Float,
                out: Write Float,
            ],
            Kernel::LayerNormParamGrad { x, mean, rstd, g, dweight, dbias } => operands![
                x: Read Float, mean: Read Statistic, rstd: Read Statistic, g: Read Float, dweight: Write Float,
                dbias: Write Float,
            ],
            Kernel::Embedding { table, ids, out } => operands![table: Read Float, ids: Read Index, out: Write Float],
            Kernel::EmbeddingGrad { ids, g, order, out } => {
                operands![ids: Read Index, g: Read Float, order: Write Exactly(DType::I64), out: Write Float]
            }
            Kernel::Loss { x, target, weight, out, .. } => {
                operands![x: Read Float, target: Read Float, weight: Read Float, out: Write Float]
            }
            Kernel::LossGrad { x, target, weight, g, out, .. } => {
                operands![x: Read Float, target: Read Float, weight: Read Float, g: ReadInPlace Float, out: Write Float]
            }
            Kernel::CrossEntropy { logits, target, weight, loss, stats, .. } => operands![
                logits: Read Float, target: Read IndexOrFloat, weight: Read Float, loss: Write Float,
                stats: Write Statistic,
            ],
            Kernel::CrossEntropyGrad { logits, target, weight, stats, g, out, .. } => operands![
                logits: ReadInPlace Float, target: Read IndexOrFloat, weight: Read Float, stats: Read Statistic,
                g: Read Float, out: WriteStrided Float,
            ],
            Kernel::NllLossGrad { target, weight, g, out, .. } => {
                operands![target: Read Index, weight: Read Float, g: Read Float, out: WriteStrided Float]
            }
            Kernel::CrossEntropyTargetGrad { logits, weight, stats, g, out, .. } => operands![
                logits: Read Float, weight: Read Float, stats: Read Statistic, g: Read Float, out: WriteStrided Float,
            ],
            Kernel::CrossEntropyWeightGrad { logits, target, weight, stats, g, out, .. } => operands![
                logits: Read Float, target: Read IndexOrFloat, weight: Read Float, stats: Read Statistic, g: Read Float,
                out: Write Float,
            ],
            Kernel::Im2col { x, out, .. } => operands![x: Read Float, out: Write Float],
            Kernel::Col2im { cols, out, .. } => operands![cols: Read Float, out: Write Float],
            Kernel::MaxPool { x, out, index, .. } => operands![x: Read Float, out: Write Float, index: Write Index],
            Kernel::MaxPoolGrad { index, g, out, .. } => operands![index: Read Index, g: Read Float, out: Write Float],
            Kernel::AvgPool { x, out, .. } => operands![x: Read Float, out: Write Float],
            Kernel::AvgPoolGrad { g, out, .. } => operands![g: Read Float, out: Write Float],
            Kernel::Attention { q, k, v, mask, out, stats, .. } => operands![
                q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat, out: WriteStrided Float,
                stats: Write Statistic,
            ],
            Kernel::AttentionDelta { o, g, delta } => operands![o: Read Float, g: Read Float, delta: Write Statistic],
            Kernel::AttentionGradKv { q, k, v, mask, g, stats, delta, dk, dv, .. } => operands![
                q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat, g: Read Float,
                stats: Read Statistic, delta: Read Statistic, dk: WriteStrided Float, dv: WriteStrided Float,
            ],
            Kernel::AttentionGradQ { q, k, v, mask, g, stats, delta, dq, .. } => operands![
                q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat, g: Read Float,
                stats: Read Statistic, delta: Read Statistic, dq: WriteStrided Float,
            ],
            Kernel::AttentionGradMask { q, k, v, mask, g, stats, delta, dmask, .. } => operands![
                q: Read Float, k: Read Float, v: Read Float, mask: Read BoolOrFloat, g: Read Float,
                stats: Read Statistic, delta: Read Statistic, dmask: WriteStrided Float,
            ],
            Kernel::Quantize { x, q, scales, .. } => {
                operands![x: Read Float, q: Write Exactly(DType::U8), scales: Write Statistic]
            }
            Kernel::Dequantize { q, scales, out, .. } => {
                operands![q: Read Exactly(DType::U8), scales: Read Statistic, out: Write Float]
            }
            Kernel::Uniform { out, .. } | Kernel::Normal { out, .. } => operands![out: Write Float],
            Kernel::AdamW { p, g, m, v, .. } => {
                operands![p: Write Float, g: Read Float, m: Write Float, v: Write Float]
            }
            Kernel::SquaredNorm { x, out } => operands![x: Read Float, out: Write Exactly(DType::F64)],
        }
    }
}

fn of_indices(tensor: &Tensor) -> Operand<'_> {
    Operand { name: "indices", tensor, access: Access::Read, elements: Elements::Index }
}

struct Check<'a> {
    name: &'static str,
    operands: Operands<'a>,
}

impl<'a> Check<'a> {
    fn wrong(&self, reason: String) -> Error {
        Error::tensor(self.name, reason)
    }

    fn must(&self, right: bool, reason: impl FnOnce() -> String) -> Result<()> {
        if right { Ok(()) } else { Err(self.wrong(reason())) }
    }

    /// Devices, strides of what is written, what overlaps, and whose the outputs are.
    fn tensors(&self, device: &Device) -> Result<()> {
        for operand in &self.operands {
            same_device(self.name, operand.tensor.device(), device)?;
        }
        for out in self.operands.iter().filter(|o| o.is_written()) {
            let layout = out.tensor.layout();
            let (fits, right) = match out.access {
                Access::WriteStrided => (layout.is_distinct(false), "have distinct elements"),
                Access::WriteRepeated => (layout.is_distinct(true), "have distinct elements but for stride 0"),
                _ => (layout.is_contiguous(), "be contiguous"),
            };
            self.must(fits, || {
                let Operand { name, tensor, .. } = out;
                format!("`{name}` {:?} with strides {:?} must {right}", tensor.shape(), layout.strides)
            })?;
            let mut handles: SmallVec<[&Tensor; 4]> = SmallVec::new();
            for other in self.operands.iter().filter(|o| o.tensor.shares_storage(out.tensor)) {
                if !handles.iter().any(|handle| std::ptr::eq(*handle, other.tensor)) {
                    handles.push(other.tensor);
                }
                let is_itself = other.name == out.name && other.is_written();
                let in_place = other.access == Access::ReadInPlace
                    && other.tensor.layout() == layout
                    && other.tensor.dtype() == out.tensor.dtype();
                let ((from, end), (out_from, out_end)) = (other.reach(), out.reach());
                let apart = end <= out_from || out_end <= from || from == end || out_from == out_end;
                self.must(is_itself || in_place || apart, || {
                    format!("`{}` overlaps `{}`, which it writes; it needs memory of its own", other.name, out.name)
                })?;
            }
            self.must(out.tensor.storage().is_open() || out.tensor.holders() == handles.len(), || {
                format!(
                    "`{}` is a value that others hold, and values don't change; write to a new tensor, or to one that \
                     nobody else holds",
                    out.name
                )
            })?;
        }
        Ok(())
    }

    fn dtypes(&self, device: &Device) -> Result<()> {
        let out = self.operands.iter().rfind(|o| o.is_written()).map_or(DType::F32, |o| o.tensor.dtype());
        let float = self.operands.iter().find(|o| o.elements == Elements::Float).map(|o| o.tensor.dtype());
        for Operand { name, tensor, elements, .. } in &self.operands {
            let dtype = tensor.dtype();
            let is_index = matches!(dtype, DType::I64 | DType::I32);
            let goes = |with: DType| (dtype == DType::F64) == (with == DType::F64);
            let of_floats = dtype.is_float() && float.is_none_or(goes);
            let right = match elements {
                Elements::Any => true,
                Elements::AsOut => dtype == out,
                Elements::Float => of_floats,
                Elements::Statistic => float.is_some_and(|float| dtype == float.computed_in()),
                Elements::Index => is_index,
                Elements::IndexOrFloat => is_index || of_floats,
                Elements::BoolOrFloat => dtype == DType::Bool || of_floats,
                Elements::Exactly(exactly) => dtype == *exactly,
            };
            if !right {
                let given: Vec<String> =
                    self.operands.iter().map(|o| format!("{} {}", o.name, o.tensor.dtype())).collect();
                let reason = format!("no kernel for {dtype} as `{name}` (given {})", given.join(", "));
                return Err(Error::Unsupported { kernel: self.name, device: device.name(), reason });
            }
        }
        Ok(())
    }

    /// Locks what is written and what is read.
    fn lock(&self) -> Result<SmallVec<[Lock<'a>; 8]>> {
        let mut locks = SmallVec::new();
        for writes in [true, false] {
            for (i, operand) in self.operands.iter().enumerate().filter(|(_, o)| o.is_written() == writes) {
                let earlier = |(j, other): (usize, &Operand<'a>)| {
                    let is_earlier = if other.is_written() == writes { j < i } else { other.is_written() };
                    is_earlier && other.tensor.shares_storage(operand.tensor)
                };
                if self.operands.iter().enumerate().any(earlier) {
                    continue;
                }
                let busy = || self.wrong(format!("another thread is at work on `{}` at this moment", operand.name));
                locks.push(operand.tensor.storage().lock(writes).ok_or_else(busy)?);
            }
        }
        Ok(locks)
    }

    /// Fails unless a tensor has this shape.
    fn shape(&self, name: &str, tensor: &Tensor, right: &[usize]) -> Result<()> {
        self.must(tensor.shape() == right, || format!("`{name}` must be {right:?}, got {:?}", tensor.shape()))
    }

    /// Fails unless all operands have the shape of the first.
    fn alike(&self) -> Result<()> {
        let first = self.operands[0].tensor.shape();
        self.operands.iter().try_for_each(|o| self.shape(o.name, o.tensor, first))
    }

    fn rank(&self, name: &str, tensor: &Tensor, right: usize) -> Result<()> {
        self.must(tensor.rank() == right, || format!("`{name}` must have rank {right}, got {:?}", tensor.shape()))
    }

    fn dim(&self, x: &Tensor, dim: usize) -> Result<()> {
        self.must(dim < x.rank(), || format!("there is no dimension {dim} in {:?}", x.shape()))
    }

    /// Fails unless a tensor is x with size 1 in one dimension.
    fn without(&self, name: &str, tensor: &Tensor, x: &[usize], dim: usize) -> Result<()> {
        let right =
            tensor.rank() == x.len() && (0..x.len()).all(|d| tensor.shape()[d] == if d == dim { 1 } else { x[d] });
        self.must(right, || format!("`{name}` must be {x:?} with size 1 in dimension {dim}, got {:?}", tensor.shape()))
    }

    /// Fails unless a tensor is x with size 1 in some dimensions.
    fn reduced(&self, name: &str, tensor: &Tensor, x: &[usize]) -> Result<()> {
        let right = tensor.rank() == x.len() && tensor.shape().iter().zip(x).all(|(&t, &n)| t == n || t == 1);
        self.must(right, || format!("`{name}` must be {x:?} with size 1 in what is reduced, got {:?}", tensor.shape()))
    }

    /// Fails unless a tensor has one number for each row of x.
    fn a_row(&self, name: &str, tensor: Option<&Tensor>, x: &Tensor) -> Result<()> {
        let rows: usize = x.shape().split_last().map_or(1, |(_, rows)| rows.iter().product());
        match tensor {
            Some(t) if t.len() != rows => {
                Err(self.wrong(format!("`{name}` must have one number for each of {rows} rows, got {:?}", t.shape())))
            }
            _ => Ok(()),
        }
    }

    /// Fails unless a tensor holds the two numbers a row from which its weights are rebuilt.
    fn row_stats(&self, stats: &Tensor, rows: &[usize]) -> Result<()> {
        self.joined("stats", stats, rows, &[2])
    }

    /// Fails unless a tensor has one number for each element of x's rows.
    fn a_column(&self, name: &str, tensor: Option<&Tensor>, x: &Tensor) -> Result<()> {
        tensor.map_or(Ok(()), |t| self.shape(name, t, &[x.shape().last().copied().unwrap_or(1)]))
    }

    /// Fails unless `lead` then `tail` is the shape.
    fn joined(&self, name: &str, tensor: &Tensor, lead: &[usize], tail: &[usize]) -> Result<()> {
        let shape = tensor.shape();
        let right = shape.len() == lead.len() + tail.len() && shape.starts_with(lead) && shape.ends_with(tail);
        self.must(right, || format!("`{name}` must be {lead:?} followed by {tail:?}, got {shape:?}"))
    }

    fn indices(&self, indices: &[&Tensor], whole: &Tensor, part: &Tensor) -> Result<()> {
        let n = indices.len();
        self.must(n > 0 && whole.rank() == n + part.rank() && whole.shape()[n..] == *part.shape(), || {
            let (whole, part) = (whole.shape(), part.shape());
            format!("{n} indices of {whole:?} need a dimension each in front of {part:?}")
        })?;
        indices.iter().try_for_each(|index| self.shape("indices", index, part.shape()))
    }

    /// Fails unless places of a window on planes of these sizes can be counted.
    fn window(&self, w: &Window, x: [usize; 2], out: [usize; 2]) -> Result<()> {
        let counts = |d: usize| {
            let last = reach(out[d].max(1), w.stride[d])?;
            let padded = padded(x[d], w.before[d], w.before[d])?;
            last.checked_add(reach(w.kernel[d], w.dilation[d])?)?
                .checked_add(padded)
                .filter(|&n| n <= isize::MAX as usize)
        };
        let right = (0..2).all(|d| w.stride[d] > 0 && w.dilation[d] > 0 && counts(d).is_some());
        let area = w.kernel[0].checked_mul(w.kernel[1]);
        self.must(right && area.is_some(), || {
            format!("{w:?} from {x:?} to {out:?} reaches further than 63 bits can count, or has a size of 0")
        })
    }

    fn planes(&self, w: &Window, x: &Tensor, out: &Tensor) -> Result<()> {
        self.rank("x", x, 4)?;
        self.rank("out", out, 4)?;
        let (x, out) = (x.shape(), out.shape());
        self.must(x[..2] == out[..2], || format!("samples and channels of {x:?} and {out:?} must agree"))?;
        self.window(w, [x[2], x[3]], [out[2], out[3]])
    }

    fn columns(&self, w: &Window, x: &Tensor, columns: &Tensor) -> Result<()> {
        self.rank("the image", x, 4)?;
        self.rank("the columns", columns, 6)?;
        let (x, c) = (x.shape(), columns.shape());
        let right = c[..2] == x[..2] && c[2..4] == w.kernel;
        self.must(right, || format!("the columns of {x:?} must be [n, channels, {:?}, ..], got {c:?}", w.kernel))?;
        self.window(w, [x[2], x[3]], [c[4], c[5]])
    }

    fn scores(&self, logits: &Tensor, target: Option<&Tensor>, weight: Option<&Tensor>) -> Result<()> {
        let Some((&classes, rows)) = logits.shape().split_last().filter(|(classes, _)| **classes > 0) else {
            return Err(self.wrong(format!("needs at least one class, got {:?}", logits.shape())));
        };
        if let Some(target) = target {
            let right = if target.dtype().is_float() { logits.shape() } else { rows };
            self.shape("target", target, right)?;
        }
        weight.map_or(Ok(()), |w| self.shape("weight", w, &[classes]))
    }

    fn loss(&self, name: &str, loss: &Tensor, logits: &Tensor, spec: CrossEntropySpec) -> Result<()> {
        let rows = &logits.shape()[..logits.rank() - 1];
        self.shape(name, loss, if spec.reduction == LossReduction::None { rows } else { &[] })
    }

    /// Queries, keys, values and mask; gives the shape of what has one number a query.
    fn attention(
        &self,
        [q, k, v]: [&Tensor; 3],
        mask: Option<&Tensor>,
        sequences: Option<Sequences<'_>>,
        spec: AttentionSpec,
    ) -> Result<[usize; 3]> {
        for (name, t) in [("q", q), ("k", k), ("v", v)] {
            self.rank(name, t, 4)?;
        }
        let (q, k, v) = (q.shape(), k.shape(), v.shape());
        let right =
            k[..3] == v[..3] && q[0] == k[0] && q[3] == k[3] && (k[2] > 0 && q[2].is_multiple_of(k[2]) || q[2] == 0);
        self.must(right, || {
            format!(
                "q {q:?}, k {k:?} and v {v:?} must be [batch, time, heads, size] with one batch, one time and one number \
                 of heads of k and v, which goes into that of q, and one size of q and k"
            )
        })?;
        self.must((0.0..1.0).contains(&spec.dropout), || format!("dropout must be in [0, 1), got {}", spec.dropout))?;
        let scores = [q[0], q[2], q[1], k[1]];
        mask.map_or(Ok(()), |mask| self.shape("mask", mask, &scores))?;
        if let Some(Sequences { queries, keys }) = sequences {
            let bounds = |bounds: &[usize], time: usize| {
                bounds.first() == Some(&0) && bounds.last() == Some(&time) && bounds.is_sorted()
            };
            let right = q[0] == 1 && queries.len() == keys.len() && bounds(queries, q[1]) && bounds(keys, k[1]);
            self.must(right, || {
                format!(
                    "the bounds {queries:?} and {keys:?} must rise from 0 to {} and {}, in a batch of 1",
                    q[1], k[1]
                )
            })?;
        }
        Ok([q[0], q[2], q[1]])
    }

    /// What the gradients of attention read; as [`attention`](Check::attention).
    fn attention_grad(
        &self,
        [q, k, v]: [&Tensor; 3],
        mask: Option<&Tensor>,
        sequences: Option<Sequences<'_>>,
        spec: AttentionSpec,
        [g, statistic, delta]: [&Tensor; 3],
    ) -> Result<()> {
        let rows = self.attention([q, k, v], mask, sequences, spec)?;
        self.shape("g", g, &[rows[0], rows[2], rows[1], v.shape()[3]])?;
        self.row_stats(statistic, &rows)?;
        self.shape("delta", delta, &rows)
    }

    fn shapes(&self, kernel: &Kernel<'_>) -> Result<()> {
        match *kernel {
            Kernel::Fill { .. } | Kernel::Uniform { .. } | Kernel::Normal { .. } => Ok(()),
            Kernel::Copy { .. }
            | Kernel::Unary { .. }
            | Kernel::UnaryGrad { .. }
            | Kernel::Binary { .. }
            | Kernel::ExtremumGrad { .. }
            | Kernel::Ternary { .. }
            | Kernel::ClampGrad { .. }
            | Kernel::Select { .. }
            | Kernel::Softmax { .. }
            | Kernel::SoftmaxGrad { .. }
            | Kernel::LogSoftmax { .. }
            | Kernel::LogSoftmaxGrad { .. }
            | Kernel::Dropout { .. }
            | Kernel::Loss { .. }
            | Kernel::AdamW { .. } => self.alike(),
            Kernel::LossGrad { by, weight, .. } => {
                self.must(by < 2 || by == 2 && weight.is_some(), || format!("there is no input {by} to derive by"))?;
                self.alike()
            }
            Kernel::Reduce { x, out, .. } => self.reduced("out", out, x.shape()),
            Kernel::ReduceGrad { x, y, g, out, .. } => {
                self.shape("out", out, x.shape())?;
                self.shape("g", g, y.shape())?;
                self.reduced("y", y, x.shape())
            }
            Kernel::MaxIndex { x, dim, values, indices } => {
                self.dim(x, dim)?;
                self.must(x.shape()[dim] > 0, || format!("dimension {dim} of {:?} has no largest", x.shape()))?;
                self.without("values", values, x.shape(), dim)?;
                self.without("indices", indices, x.shape(), dim)
            }
            Kernel::MaxIndexGrad { indices, g, dim, out } => {
                self.dim(out, dim)?;
                self.without("g", g, out.shape(), dim)?;
                self.without("indices", indices, out.shape(), dim)
            }
            Kernel::Scan { x, dim, .. } | Kernel::CumprodGrad { x, dim, .. } => {
                self.dim(x, dim)?;
                self.alike()
            }
            Kernel::Matmul { a, b, out, .. } => {
                let n = a.rank();
                let (a, b, c) = (a.shape(), b.shape(), out.shape());
                let right = n >= 2
                    && b.len() == n
                    && c.len() == n
                    && (a[..n - 2] == b[..n - 2] && a[..n - 2] == c[..n - 2])
                    && (a[n - 1] == b[n - 2] && c[n - 2] == a[n - 2] && c[n - 1] == b[n - 1]);
                self.must(right, || format!("{a:?} by {b:?} to {c:?}; needs [.., m, k] x [.., k, n] -> [.., m, n]"))
            }
            Kernel::Triangle { x, .. } => {
                self.must(x.rank() >= 2, || format!("needs matrices [.., rows, columns], got {:?}", x.shape()))?;
                self.alike()
            }
            Kernel::Flip { x, dims, .. } => {
                let wrong = |(i, d): (usize, &usize)| *d >= x.rank() || dims[..i].contains(d);
                self.must(!dims.iter().enumerate().any(wrong), || {
                    format!("{dims:?} must name dimensions of {:?}, each once", x.shape())
                })?;
                self.alike()
            }
            Kernel::Gather { x, indices, out, .. } => self.indices(indices, x, out),
            Kernel::ScatterAdd { source, indices, order, out, .. } => {
                self.indices(indices, out, source)?;
                let strides = &out.layout().strides;
                let distinct = (0..indices.len()).all(|d| out.shape()[d] <= 1 || strides[d] != 0);
                self.must(distinct, || {
                    format!("`out` {:?} with strides {strides:?} repeats a dimension that is indexed", out.shape())
                })?;
                self.shape("order", order, &[meeting(source, indices, out)])
            }
            Kernel::LayerNorm { x, weight, bias, out, mean, rstd, .. } => {
                self.shape("out", out, x.shape())?;
                self.a_column("weight", weight, x)?;
                self.a_column("bias", bias, x)?;
                self.a_row("mean", mean, x)?;
                self.a_row("rstd", Some(rstd), x)
            }
            Kernel::LayerNormGrad { x, weight, mean, rstd, g, out } => {
                self.shape("out", out, x.shape())?;
                self.shape("g", g, x.shape())?;
                self.a_column("weight", weight, x)?;
                self.a_row("mean", mean, x)?;
                self.a_row("rstd", Some(rstd), x)
            }
            Kernel::LayerNormParamGrad { x, mean, rstd, g, dweight, dbias } => {
                self.shape("g", g, x.shape())?;
                self.a_column("dweight", dweight, x)?;
                self.a_column("dbias", dbias, x)?;
                self.a_row("mean", mean, x)?;
                self.a_row("rstd", Some(rstd), x)
            }
            Kernel::Embedding { table, ids, out } => {
                self.rank("table", table, 2)?;
                self.joined("out", out, ids.shape(), &table.shape()[1..])
            }
            Kernel::EmbeddingGrad { ids, g, order, out } => {
                self.rank("out", out, 2)?;
                self.shape("order", order, &[ids.len()])?;
                self.joined("g", g, ids.shape(), &out.shape()[1..])
            }
            Kernel::CrossEntropy { logits, target, weight, spec, loss, stats } => {
                self.scores(logits, Some(target), weight)?;
                self.loss("loss", loss, logits, spec)?;
                let rows = &logits.shape()[..logits.rank() - 1];
                stats.map_or(Ok(()), |stats| self.row_stats(stats, rows))
            }
            Kernel::CrossEntropyGrad { logits, target, weight, stats, g, spec, out } => {
                self.scores(logits, Some(target), weight)?;
                self.loss("g", g, logits, spec)?;
                self.shape("out", out, logits.shape())?;
                self.row_stats(stats, &logits.shape()[..logits.rank() - 1])
            }
            Kernel::NllLossGrad { target, weight, g, spec, out } => {
                self.scores(out, Some(target), weight)?;
                self.loss("g", g, out, spec)
            }
            Kernel::CrossEntropyTargetGrad { logits, weight, stats, g, spec, out } => {
                self.scores(logits, None, weight)?;
                self.loss("g", g, logits, spec)?;
                self.shape("out", out, logits.shape())?;
                self.row_stats(stats, &logits.shape()[..logits.rank() - 1])
            }
            Kernel::CrossEntropyWeightGrad { logits, target, weight, stats, g, spec, out } => {
                self.scores(logits, Some(target), Some(weight))?;
                self.loss("g", g, logits, spec)?;
                self.shape("out", out, weight.shape())?;
                let rows = &logits.shape()[..logits.rank() - 1];
                stats.map_or(Ok(()), |stats| self.row_stats(stats, rows))
            }
            Kernel::Im2col { x, ref window, out } => self.columns(window, x, out),
            Kernel::Col2im { cols, ref window, out } => {
                self.must(cols.is_contiguous(), || "`cols` must be contiguous".into())?;
                self.columns(window, out, cols)
            }
            Kernel::MaxPool { x, ref window, out, index } => {
                self.shape("index", index, out.shape())?;
                self.planes(window, x, out)
            }
            Kernel::MaxPoolGrad { index, g, ref window, out } => {
                self.shape("index", index, g.shape())?;
                self.planes(window, out, g)
            }
            Kernel::AvgPool { x, ref window, out, .. } => self.planes(window, x, out),
            Kernel::AvgPoolGrad { g, ref window, out, .. } => self.planes(window, out, g),
            Kernel::Attention { q, k, v, mask, sequences, spec, out, stats } => {
                let rows = self.attention([q, k, v], mask, sequences, spec)?;
                self.shape("out", out, &[rows[0], rows[2], rows[1], v.shape()[3]])?;
                self.row_stats(stats, &rows)
            }
            Kernel::AttentionDelta { o, g, delta } => {
                self.rank("o", o, 4)?;
                self.shape("g", g, o.shape())?;
                self.shape("delta", delta, &[o.shape()[0], o.shape()[2], o.shape()[1]])
            }
            Kernel::AttentionGradKv { q, k, v, mask, sequences, g, stats, delta, spec, dk, dv } => {
                self.attention_grad([q, k, v], mask, sequences, spec, [g, stats, delta])?;
                self.shape("dk", dk, k.shape())?;
                self.shape("dv", dv, v.shape())
            }
            Kernel::AttentionGradQ { q, k, v, mask, sequences, g, stats, delta, spec, dq } => {
                self.attention_grad([q, k, v], mask, sequences, spec, [g, stats, delta])?;
                self.shape("dq", dq, q.shape())
            }
            Kernel::AttentionGradMask { q, k, v, mask, sequences, g, stats, delta, spec, dmask } => {
                self.attention_grad([q, k, v], mask, sequences, spec, [g, stats, delta])?;
                let scores = [q.shape()[0], q.shape()[2], q.shape()[1], k.shape()[1]];
                self.reduced("dmask", dmask, &scores)?;
                self.must(dmask.shape()[3] == scores[3], || "`dmask` must have a number for each key".into())
            }
            Kernel::Quantize { x, group, q, scales, .. } => {
                self.shape("q", q, x.shape())?;
                self.groups(x.shape(), group, scales)
            }
            Kernel::Dequantize { q, scales, group, out } => {
                self.shape("out", out, q.shape())?;
                self.groups(q.shape(), group, scales)
            }
            Kernel::SquaredNorm { out, .. } => self.shape("out", out, &[]),
        }
    }

    fn groups(&self, x: &[usize], group: usize, scales: &Tensor) -> Result<()> {
        let (n, rows) = x.split_last().map_or((1, x), |(&n, rows)| (n, rows));
        self.must(group > 0, || "a group needs at least 1 element".into())?;
        if x.is_empty() {
            return self.must(scales.len() == 1, || format!("`scales` must be one number, got {:?}", scales.shape()));
        }
        self.joined("scales", scales, rows, &[n.div_ceil(group)])
    }
}
