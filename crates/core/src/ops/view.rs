//! Views: the output shares the input's storage. They cost nothing, save nothing, and have no mark of their own: a
//! view's handles, reads and marks are those of the value that owns the storage.
//!
//! Gradients: reshape and permute undo themselves; expand sums over what it repeated; narrow adds g to its part of the
//! input's gradient; split joins the gradients of its parts, zeros where a part has none.

use super::*;
use crate::layout::{Extent, Layout, dimension, element_count};
use crate::tape::Var;

/// Runs the view function on a spec, so that `infer` and `view` reject the same inputs with the same words.
fn viewed(inputs: &[Spec], view: impl FnOnce(&Layout) -> Result<Layout>) -> Result<Outputs, String> {
    takes(1, inputs)?;
    let input = &inputs[0];
    match view(&Layout::contiguous(&input.shape)) {
        Ok(layout) => Ok(one(Spec::new(layout.shape, input.dtype))),
        Err(error) => Err(error.to_string()),
    }
}

macro_rules! is_view {
    () => {
        fn forward(&self, _: &Exec<'_>, _: &[Tensor], _: &[Tensor]) -> Result<()> {
            Ok(()) // the engine calls `view` instead
        }
        fn saves(&self, _: &[bool]) -> Saves {
            saves([])
        }
        fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
            Cost::default()
        }
    };
}

/// The same elements with another shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reshape {
    /// The new shape, with the same number of elements.
    pub shape: Shape,
}

impl OpRule for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }
    fn formula(&self) -> &'static str {
        "y = x with another shape (a view)"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| Ok(l.reshape(&self.shape)?.expect("a contiguous layout always reshapes")))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        // `Var::reshape` copies first where the strides don't allow a view.
        let view = x.view_as(&self.shape).and_then(|v| {
            v.ok_or_else(|| crate::Error::tensor("reshape", "these strides need a copy; call `contiguous` first"))
        });
        Some(view.map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let grad = cx.exec(0).reshape(g, &cx.input(0).shape)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, shape: &[usize], input| Sample::smooth(name, Reshape { shape: shape.into() }, [input]);
        vec![
            s("merge", &[6, 4], x(1, &[2, 3, 4])),
            s("split", &[2, 1, 3, 4], x(2, &[6, 4])),
            s("scalar", &[], x(3, &[1, 1])),
            s("narrowed rows", &[2, 2, 3], x(4, &[2, 6]).lying(SampleMemory::Narrowed)),
            s("zero-sized", &[0, 5], x(5, &[2, 0, 3])),
        ]
    }
}

/// The dimensions in another order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permute {
    /// `order[i]` is the input's dimension that becomes dimension i.
    pub order: Shape,
}

impl OpRule for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }
    fn formula(&self) -> &'static str {
        "y = x with its dimensions in another order (a view)"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.permute(&self.order))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(x.permute(&self.order).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let mut inverse: Shape = SmallVec::from_elem(0, self.order.len());
        for (i, &d) in self.order.iter().enumerate() {
            inverse[d] = i;
        }
        let grad = cx.grad0().permute(&inverse)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, order: &[usize], input| Sample::smooth(name, Permute { order: order.into() }, [input]);
        vec![
            s("transpose", &[1, 0], x(1, &[3, 4])),
            s("cycle", &[2, 0, 1], x(2, &[2, 3, 4])),
            s("rank 0", &[], x(3, &[])),
            s("narrowed", &[1, 0], x(4, &[3, 4]).lying(SampleMemory::Narrowed)),
            s("zero-sized", &[1, 0], x(5, &[0, 3])),
        ]
    }
}

/// Repeats dimensions of size 1 and adds leading ones, without copying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expand {
    /// The new shape.
    pub shape: Shape,
}

impl OpRule for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }
    fn formula(&self) -> &'static str {
        "y = x repeated along dimensions of size 1 (a view)"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.expand(&self.shape))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(x.expand(&self.shape).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let grad = cx.exec(0).sum_to(g, &cx.input(0).shape)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, shape: &[usize], input| Sample::smooth(name, Expand { shape: shape.into() }, [input]);
        vec![
            s("rows", &[4, 3], x(1, &[1, 3])),
            s("leading", &[2, 4, 3], x(2, &[3])),
            s("both", &[2, 3, 4], x(3, &[3, 1])),
            s("from a scalar", &[2, 2], x(4, &[])),
            s("to nothing", &[0, 3], x(5, &[1, 3])),
            s("unchanged", &[2, 3], x(6, &[2, 3])),
        ]
    }
}

/// Evenly spaced elements of one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Narrow {
    /// The dimension.
    pub dim: usize,
    /// Its first element.
    pub start: usize,
    /// How many.
    pub len: usize,
    /// How far apart.
    pub step: usize,
}

impl Narrow {
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        x.slice(self.dim, self.start, self.len, self.step)
    }
}

impl OpRule for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }
    fn formula(&self) -> &'static str {
        "y[i] = x[start + i step] (a view)"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.slice(self.dim, self.start, self.len, self.step))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(self.of(x).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g, sum) = (cx.exec(0), cx.grad0(), cx.sum(0)?);
        if !sum.is_new {
            return exec.add_to(&self.of(&sum.tensor)?, &g);
        }
        let part = self.of(&sum.tensor)?;
        sum.zeroed(&exec)?;
        exec.run(kernel::Copy { x: &g, out: &part })
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, dim, start, len, input| Sample::smooth(name, Narrow { dim, start, len, step: 1 }, [input]);
        vec![
            s("rows", 0, 1, 2, x(1, &[4, 3])),
            s("columns", 1, 2, 3, x(2, &[4, 6])),
            s("middle", 1, 0, 1, x(3, &[2, 3, 4])),
            s("nothing", 0, 4, 0, x(4, &[4, 3])),
            s("transposed", 1, 1, 2, x(5, &[4, 6]).lying(SampleMemory::Transposed)),
            Sample::smooth("every third", Narrow { dim: 1, start: 1, len: 3, step: 3 }, [x(6, &[2, 8, 2])]),
        ]
    }
}

/// Into how many parts a dimension can be cut: each is a value of its own.
const MOST_PARTS: usize = 1 << 20;

/// One dimension cut into runs, as several views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The dimension.
    pub dim: usize,
    /// The length of each part; together the whole dimension.
    pub sizes: Shape,
}

impl Split {
    /// (part, start, length) of each part.
    fn parts(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.sizes.iter().enumerate().scan(0, |start, (part, &len)| {
            *start += len;
            Some((part, *start - len, len))
        })
    }
}

impl OpRule for Split {
    fn name(&self) -> &'static str {
        "split"
    }
    fn formula(&self) -> &'static str {
        "y_1, y_2, .. = x cut along a dimension (views)"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let x = &inputs[0].shape;
        if self.dim >= x.len()
            || self.sizes.is_empty()
            || self.sizes.iter().try_fold(0usize, |n, &len| n.checked_add(len)) != Some(x[self.dim])
        {
            return Err(format!("the sizes {:?} must add up to dimension {}", self.sizes, self.dim));
        }
        let part = |&len: &usize| {
            let mut shape = x.clone();
            shape[self.dim] = len;
            Output::new(shape, inputs[0].dtype)
        };
        Ok(self.sizes.iter().map(part).collect())
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(self.parts().map(|(_, start, len)| x.narrow(self.dim, start, len)).collect())
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, sum) = (cx.exec(0), cx.sum(0)?);
        for (part, start, len) in self.parts() {
            let slice = sum.tensor.narrow(self.dim, start, len)?;
            match cx.grad(part) {
                Some(g) if sum.is_new => exec.run(kernel::Copy { x: &g, out: &slice })?,
                Some(g) => exec.add_to(&slice, &g)?,
                None if sum.is_new => {
                    let zero = exec.workspace(&[], slice.dtype())?;
                    exec.run(kernel::Fill { value: 0.0, out: &zero })?;
                    exec.run(kernel::Copy { x: &zero.expand(slice.shape())?, out: &slice })?;
                }
                None => {}
            }
        }
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, dim, sizes: &[usize], input| Sample::smooth(name, Split { dim, sizes: sizes.into() }, [input]);
        vec![
            s("thirds", 1, &[2, 2, 2], x(1, &[3, 6])),
            s("uneven", 0, &[1, 3], x(2, &[4, 2])),
            s("an empty part", 2, &[0, 3], x(3, &[2, 1, 3])),
            s("one part", 0, &[3], x(4, &[3])),
        ]
    }
}

impl Var {
    /// The same elements with another shape, in which one size may be -1: what the others leave. A view, or a copy
    /// first where the strides don't allow one (then op `contiguous` is recorded too).
    pub fn reshape<N: Extent>(self, shape: &[N]) -> Result<Var> {
        let have: usize = self.shape().iter().product();
        let shape = complete(shape, have).map_err(|reason| self.invalid("reshape", reason))?;
        let copies = element_count(&shape)? == have && self.tensor()?.view_as(&shape)?.is_none();
        let op = Reshape { shape };
        if copies { self.contiguous()?.apply(op, []) } else { self.apply(op, []) }
    }

    /// A view with the dimensions in another order: `order[i]` (negative counts from the end) becomes dimension i.
    pub fn permute<N: Extent>(self, order: &[N]) -> Result<Var> {
        let order = order.iter().map(|d| self.dim("permute", d.get())).collect::<Result<_>>()?;
        self.apply(Permute { order }, [])
    }

    /// A view with two dimensions exchanged (negative counts from the end).
    pub fn transpose(self, a: isize, b: isize) -> Result<Var> {
        let (a, b) = (self.dim_or_scalar("transpose", a)?, self.dim_or_scalar("transpose", b)?);
        let mut order: Shape = (0..self.shape().len()).collect();
        if a != b {
            order.swap(a, b);
        }
        self.permute(&order)
    }

    /// A view with dimensions of size 1 repeated and leading dimensions added; -1 leaves a size as it is.
    pub fn expand<N: Extent>(self, shape: &[N]) -> Result<Var> {
        let have = self.shape();
        let size = |(d, n): (usize, &N)| match (n.get(), (d + have.len()).checked_sub(shape.len())) {
            (-1, Some(d)) => Ok(have[d]),
            (n, _) => usize::try_from(n).map_err(|_| {
                self.invalid(
                    "expand",
                    format!("size {n} is negative; -1 leaves a size as it is, new dimensions need one"),
                )
            }),
        };
        let shape = shape.iter().enumerate().map(size).collect::<Result<_>>()?;
        self.apply(Expand { shape }, [])
    }

    /// A view of `len` elements of dimension `dim` from `start` (negative counts from the end). It holds the whole of
    /// what it views.
    pub fn narrow(self, dim: isize, start: impl Extent, len: impl Extent) -> Result<Var> {
        let dim = self.dim("narrow", dim)?;
        let (n, start, len) = (self.shape()[dim] as isize, start.get(), len.get());
        if !(-n..=n).contains(&start) || len < 0 {
            let reason =
                format!("start {start} and length {len}; allowed are a start in {}..={n} and 0 or more elements", -n);
            return Err(self.invalid("narrow", reason));
        }
        let start = if start < 0 { start + n } else { start } as usize;
        self.apply(Narrow { dim, start, len: len as usize, step: 1 }, [])
    }

    /// As [`narrow`](Var::narrow), from the number in `start`, an integer tensor of rank 0 (read on the host).
    pub fn narrow_at(self, dim: isize, start: impl Into<Var>, len: impl Extent) -> Result<Var> {
        let start = start.into();
        if !start.shape().is_empty() || start.dtype().is_float() || start.dtype() == DType::Bool {
            let reason = format!("start must be an integer tensor of rank 0, got {}{:?}", start.dtype(), start.shape());
            return Err(self.invalid("narrow", reason));
        }
        self.narrow(dim, start.item()? as isize, len)
    }

    /// Views of consecutive runs of dimension `dim`; their lengths add up to it.
    pub fn split(self, dim: isize, sizes: &[usize]) -> Result<Vec<Var>> {
        let dim = self.dim("split", dim)?;
        self.apply_all(Split { dim, sizes: sizes.into() }, [])
    }

    /// Views of consecutive runs of `size` elements of dimension `dim`, the last one shorter where they don't go into
    /// it.
    pub fn split_every(self, dim: isize, size: usize) -> Result<Vec<Var>> {
        let n = self.shape()[self.dim("split", dim)?];
        if size == 0 && n > 0 {
            return Err(self.invalid("split", format!("dimension {dim} of size {n} can't be cut into runs of size 0")));
        }
        let count = if n == 0 { 1 } else { n.div_ceil(size) };
        self.may_cut("split", count)?;
        let sizes: Shape = (0..count).map(|i| size.min(n - i * size)).collect();
        self.split(dim, &sizes)
    }

    /// At most `chunks` views of consecutive runs of dimension `dim`, of equal lengths but for the last.
    pub fn chunk(self, chunks: usize, dim: isize) -> Result<Vec<Var>> {
        let n = self.shape()[self.dim("chunk", dim)?];
        match (chunks, n) {
            (0, _) => Err(self.invalid("chunk", "needs at least one chunk")),
            (_, 0) => {
                self.may_cut("chunk", chunks)?;
                self.split(dim, &vec![0; chunks])
            }
            _ => self.split_every(dim, n.div_ceil(chunks)),
        }
    }

    /// Fails for more parts than anybody holds handles on.
    fn may_cut(&self, op: &'static str, parts: usize) -> Result<()> {
        if parts <= MOST_PARTS {
            return Ok(());
        }
        Err(self.invalid(op, format!("would give {parts} parts; at most {MOST_PARTS} are allowed")))
    }

    /// A view without the dimensions of size 1.
    pub fn squeeze(self) -> Result<Var> {
        let shape: Shape = self.shape().into_iter().filter(|&n| n != 1).collect();
        self.reshape(&shape)
    }

    /// A view without those of `dims` that have size 1; the others stay.
    pub fn squeeze_dims(self, dims: &[isize]) -> Result<Var> {
        let mut shape = self.shape();
        let mut named: SmallVec<[usize; 4]> =
            dims.iter().map(|&d| self.dim_or_scalar("squeeze", d)).collect::<Result<_>>()?;
        named.sort_unstable();
        if named.windows(2).any(|w| w[0] == w[1]) {
            return Err(self.invalid("squeeze", format!("a dimension is named twice in {dims:?}")));
        }
        for d in named.into_iter().rev() {
            if shape.get(d) == Some(&1) {
                shape.remove(d);
            }
        }
        self.reshape(&shape)
    }

    /// A view with a new dimension of size 1 before dimension `dim`; negative counts from behind the last.
    pub fn unsqueeze(self, dim: isize) -> Result<Var> {
        let mut shape = self.shape();
        let dim = dimension(dim, shape.len() + 1).map_err(|_| {
            let n = shape.len() as isize;
            self.invalid("unsqueeze", format!("a new dimension goes to {}..={n}, not to {dim}", -n - 1))
        })?;
        shape.insert(dim, 1);
        self.reshape(&shape)
    }

    /// A view of position `index` (negative counts from the end) of dimension `dim`, which vanishes.
    pub fn select(self, dim: isize, index: impl Extent) -> Result<Var> {
        let dim = self.dim("select", dim)?;
        let (mut shape, index) = (self.shape(), index.get());
        let Ok(start) = dimension(index, shape[dim]) else {
            return Err(
                self.invalid("select", format!("index {index} is outside dimension {dim} of size {}", shape[dim]))
            );
        };
        shape.remove(dim);
        self.apply(Narrow { dim, start, len: 1, step: 1 }, [])?.reshape(&shape)
    }

    /// Views of every position of dimension `dim`, which vanishes.
    pub fn unbind(self, dim: isize) -> Result<Vec<Var>> {
        let dim = self.dim("unbind", dim)?;
        let mut shape = self.shape();
        let n = shape.remove(dim);
        if n == 0 {
            return Ok(Vec::new());
        }
        self.may_cut("unbind", n)?;
        let parts = self.apply_all(Split { dim, sizes: SmallVec::from_elem(1, n) }, [])?;
        parts.into_iter().map(|part| part.reshape(&shape)).collect()
    }

    /// Dimensions `start` to `end` (both included) as one; a scalar becomes `[1]`. A copy where the strides force one.
    pub fn flatten(self, start: isize, end: isize) -> Result<Var> {
        let (start, end) = (self.dim_or_scalar("flatten", start)?, self.dim_or_scalar("flatten", end)?);
        if start > end {
            return Err(self.invalid("flatten", format!("dimension {start} comes after dimension {end}")));
        }
        let mut shape = self.shape();
        let merged = shape.iter().take(end + 1).skip(start).product();
        shape.drain(start..(end + 1).min(shape.len()));
        shape.insert(start, merged);
        self.reshape(&shape)
    }

    /// The index of a dimension that may be counted from the end.
    pub(crate) fn dim(&self, op: &'static str, dim: isize) -> Result<usize> {
        dimension(dim, self.shape().len()).map_err(|reason| self.invalid(op, reason))
    }

    /// The same for calls that take a scalar for a tensor of rank 1.
    pub(crate) fn dim_or_scalar(&self, op: &'static str, dim: isize) -> Result<usize> {
        dimension(dim, self.shape().len().max(1)).map_err(|reason| self.invalid(op, reason))
    }
}

/// The shape with its -1 replaced by the size that makes `count` elements.
fn complete<N: Extent>(shape: &[N], count: usize) -> Result<Shape, String> {
    let sizes: SmallVec<[isize; 4]> = shape.iter().map(|n| n.get()).collect();
    let known: Shape = sizes.iter().filter(|&&n| n >= 0).map(|&n| n as usize).collect();
    if sizes.iter().any(|&n| n < -1) || sizes.len() > known.len() + 1 {
        return Err(format!("{sizes:?} is no shape; one size may be -1, the others are 0 or more"));
    }
    let rest = element_count(&known).map_err(|e| e.to_string())?;
    if sizes.len() > known.len() && (rest == 0 || !count.is_multiple_of(rest)) {
        return Err(format!("no size for the -1 in {sizes:?} gives {count} elements, or every size does"));
    }
    Ok(sizes.iter().map(|&n| if n < 0 { count / rest } else { n as usize }).collect())
}
