//! Gather and its counterpart, scatter-add, along one dimension.
//!
//! gather: y[.., i, ..] = x[.., index[.., i, ..], ..]. Its gradient adds each g to where it was taken from.
//! Of the ops with an index, `take_along_dim` and [`Var::index`] let -n..0 count from the end, as PyTorch's do;
//! `gather`, `index_select`, `scatter_add`, `index_add` and `embedding` refuse them, as PyTorch's do. scatter_add: y
//! = x, then y[.., index[.., i, ..], ..] += alpha source[.., i, ..]; dx = g, and the source's gradient is alpha times
//! g gathered at the index, 0 where the source reaches beyond the index. What meets in one place is put in order
//! first, in a workspace. It is summed in the order of the index, 16 at a time in the arithmetic's dtype and these
//! sums in f64, and rounded once: the same bits on every run. Selecting and adding whole rows are the same ops with
//! an index that repeats (stride 0) in the other dimensions.

use super::*;
use crate::kernel::UnaryFn;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// x as [`kernel::Gather`] wants it: the dimension that is indexed first, then the index's dimensions, of which the one
/// in its place repeats.
fn indexed(x: &Tensor, dim: usize, index: &[usize]) -> Result<Tensor> {
    let mut shape: Shape = smallvec![index[dim]];
    shape.extend_from_slice(x.shape());
    let x = x.expand(&shape)?.transpose(0, dim + 1)?;
    (0..index.len()).filter(|&d| d != dim).try_fold(x, |x, d| x.narrow(d + 1, 0, index[d]))
}

/// A scalar as a tensor of rank 1.
fn at_least_1d(x: &Tensor) -> Result<Tensor> {
    if x.rank() > 0 { Ok(x.clone()) } else { x.expand(&[1]) }
}

/// The shape with a scalar's as `[1]`.
fn vector(shape: &[usize]) -> Shape {
    if shape.is_empty() { smallvec![1] } else { shape.into() }
}

/// Adds `alpha source` to `out` where the index says; all with the ranks and sizes that `infer` has checked.
fn add_at(
    exec: &Exec<'_>,
    out: &Tensor,
    (dim, wrap): (usize, bool),
    index: &Tensor,
    source: &Tensor,
    alpha: f64,
) -> Result<()> {
    let (index, out, mut source) = (at_least_1d(index)?, at_least_1d(out)?, at_least_1d(source)?);
    if index.is_empty() {
        return Ok(());
    }
    for d in 0..index.rank() {
        source = source.narrow(d, 0, index.shape()[d])?;
    }
    let out = indexed(&out, dim, index.shape())?;
    exec.scatter_add(&source, &[&index], wrap, alpha, &out)
}

/// out = x gathered at the index.
fn gather_at(exec: &Exec<'_>, x: &Tensor, (dim, wrap): (usize, bool), index: &Tensor, out: &Tensor) -> Result<()> {
    let (x, index) = (at_least_1d(x)?, at_least_1d(index)?);
    if index.is_empty() {
        return Ok(());
    }
    let x = indexed(&x, dim, index.shape())?;
    exec.run(kernel::Gather { x: &x, indices: &[&index], wrap, out: &exec.reshape(out.clone(), index.shape())? })
}

/// Why an index of this spec doesn't fit `x`, if so.
fn fits(x: &[usize], dim: usize, index: &Spec) -> Result<(), String> {
    if !matches!(index.dtype, DType::I64 | DType::I32) {
        return Err(format!("the index must be i64 or i32, got {}", index.dtype));
    }
    let (x, index) = (vector(x), vector(&index.shape));
    if index.len() != x.len() || dim >= x.len() {
        return Err(format!("the index must have the input's rank {} and dimension {dim} must be in it", x.len()));
    }
    match (0..x.len()).find(|&d| d != dim && index[d] > x[d]) {
        Some(d) => Err(format!("the index has size {} in dimension {d}, where the input has only {}", index[d], x[d])),
        None => Ok(()),
    }
}

/// Elements of x by their index in one dimension. Inputs: x, index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gather {
    /// The dimension.
    pub dim: usize,
    /// Whether negative indices count from the end.
    pub wrap: bool,
}

impl OpRule for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn formula(&self) -> &'static str {
        "y[.., i, ..] = x[.., index[.., i, ..], ..]"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2, inputs)?;
        // An empty index asks for nothing, and goes with any input.
        if !inputs[1].is_empty() || inputs[1].dtype.is_float() {
            fits(&inputs[0].shape, self.dim, &inputs[1])?;
        }
        Ok(one(Spec::new(inputs[1].shape.clone(), inputs[0].dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        gather_at(exec, &inputs[0], (self.dim, self.wrap), &inputs[1], &outputs[0])
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(1)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let index = cx.saved(Slot::In(1))?;
        let sum = cx.sum(0)?.zeroed(&exec)?;
        add_at(&exec, &sum, (self.dim, self.wrap), &index, &g, 1.0)
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::moved(&inputs[1..2], outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let (x, i) = (SampleInput::random, SampleInput::integers);
        let s = |name, dim, x, index| Sample::smooth(name, Gather { dim, wrap: false }, [x, index]);
        let from_the_end = [x(10, &[2, 4]), i(&[2, 3], &[-1, 0, -4, 3, -1, 1])];
        vec![
            Sample::smooth("from the end", Gather { dim: 1, wrap: true }, from_the_end),
            s("columns", 1, x(1, &[2, 4]), i(&[2, 3], &[3, 0, 3, 1, 1, 1])),
            s("rows", 0, x(2, &[3, 2]), i(&[4, 2], &[0, 2, 1, 1, 2, 0, 2, 2])),
            s("fewer than there are", 0, x(3, &[3, 4]), i(&[1, 2], &[2, 2])),
            s("rank 0", 0, x(4, &[]), i(&[], &[0])),
            s("rank 5", 2, x(5, &[1, 2, 3, 1, 2]), i(&[1, 2, 1, 1, 2], &[2, 0, 1, 1])),
            s("transposed", 1, x(6, &[4, 6]).lying(Transposed), i(&[2, 2], &[5, 0, 5, 1])),
            s("narrowed", 0, x(7, &[3, 5]).lying(Narrowed), i(&[1, 5], &[2, 1, 0, 1, 2])),
            s("expanded", 1, x(8, &[4, 5]).lying(Expanded), i(&[4, 1], &[4, 4, 0, 1])),
            s("no index", 1, x(9, &[3, 5]), i(&[3, 0], &[])),
        ]
    }
}

/// x with the source's elements added at their index in one dimension. Inputs: x, index, source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScatterAdd {
    /// The dimension.
    pub dim: usize,
    /// Factor on the source.
    pub alpha: f64,
}

impl OpRule for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn formula(&self) -> &'static str {
        "y = x; y[.., index[.., i, ..], ..] += alpha source[.., i, ..]"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3, inputs)?;
        one_float_dtype(&[inputs[0].clone(), inputs[2].clone()])?;
        if !inputs[1].is_empty() || inputs[1].dtype.is_float() {
            fits(&inputs[0].shape, self.dim, &inputs[1])?;
            let (index, source) = (vector(&inputs[1].shape), vector(&inputs[2].shape));
            if index.len() != source.len() || index.iter().zip(&source).any(|(i, s)| i > s) {
                return Err("the source must have the index's rank and at least its size in every dimension".into());
            }
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Copy { x: &inputs[0], out: &outputs[0] })?;
        add_at(exec, &outputs[0], (self.dim, false), &inputs[1], &inputs[2], self.alpha)
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        saves(needs[2].then_some(Slot::In(1)))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        if cx.needs(2) {
            let exec = cx.exec(2);
            let index = cx.saved(Slot::In(1))?;
            let reached = vector(index.shape());
            let all = reached == vector(&cx.input(2).shape);
            let part = if all { exec.empty_like(cx.input(2))? } else { exec.workspace(&reached, g.dtype())? };
            gather_at(&exec, &g, (self.dim, false), &index, &part)?;
            if self.alpha != 1.0 {
                exec.run(kernel::Unary { f: UnaryFn::Scale(self.alpha), x: &part, out: &part })?;
            }
            if all {
                cx.set(2, part);
            } else {
                let sum = cx.sum(2)?.zeroed(&exec)?;
                let inside = (0..reached.len()).try_fold(sum, |sum, d| sum.narrow(d, 0, reached[d]))?;
                exec.add_to(&inside, &part)?;
            }
        }
        if cx.needs(0) {
            cx.set(0, g);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: Cost::times(&[2, inputs[1].len()]), traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let (x, i) = (SampleInput::random, SampleInput::integers);
        let s =
            |name, dim, alpha, x, index, source| Sample::smooth(name, ScatterAdd { dim, alpha }, [x, index, source]);
        vec![
            s("columns", 1, 1.0, x(1, &[2, 4]), i(&[2, 3], &[3, 0, 3, 1, 1, 1]), x(11, &[2, 3])),
            s("rows", 0, -2.0, x(2, &[3, 2]), i(&[4, 2], &[0, 2, 1, 1, 2, 0, 2, 2]), x(12, &[4, 2])),
            s("a larger source", 0, 0.5, x(3, &[3, 4]), i(&[1, 2], &[2, 2]), x(13, &[2, 4])),
            s("rank 0", 0, 1.0, x(4, &[]), i(&[], &[0]), x(14, &[])),
            s("rank 5", 2, 1.0, x(5, &[1, 2, 3, 1, 2]), i(&[1, 2, 1, 1, 2], &[2, 0, 1, 1]), x(15, &[1, 2, 1, 1, 2])),
            s(
                "strided",
                1,
                1.0,
                x(6, &[4, 6]).lying(Transposed),
                i(&[2, 2], &[5, 0, 5, 1]),
                x(16, &[4, 6]).lying(Narrowed),
            ),
            s("expanded", 1, 3.0, x(8, &[4, 5]), i(&[4, 1], &[4, 4, 0, 1]), x(18, &[4, 1]).lying(Expanded)),
            s("no index", 1, 1.0, x(9, &[3, 5]), i(&[3, 0], &[]), x(19, &[3, 2])),
        ]
    }
}

impl Var {
    /// y[.., i, ..] = self[.., index[.., i, ..], ..] along `dim`. The index (i64 or i32) has this value's rank and in
    /// the other dimensions at most its size; one outside 0..n is an error. Backward reads the index.
    pub fn gather(self, dim: isize, index: impl Into<Var>) -> Result<Var> {
        let dim = self.dim_or_scalar("gather", dim)?;
        self.gathered(dim, false, index.into())
    }

    fn gathered(self, dim: usize, wrap: bool, index: Var) -> Result<Var> {
        self.apply(Gather { dim, wrap }, [index])
    }

    /// Positions `index` (rank 1) of dimension `dim`. One outside 0..n is an error. Backward reads the index.
    pub fn index_select(self, dim: isize, index: impl Into<Var>) -> Result<Var> {
        let index = index.into();
        let dim = self.dim_or_scalar("index_select", dim)?;
        let (own, mut shape) = (self.shape(), vector(&self.shape()));
        shape[dim] = self.index_len("index_select", &index)?;
        let scalar = own.is_empty();
        if scalar && shape[dim] != 1 {
            return Err(self.invalid("index_select", "one index can be selected from a scalar"));
        }
        let taken = self.gather(dim as isize, index.along(dim, &shape)?)?;
        if scalar { taken.reshape(&own) } else { Ok(taken) }
    }

    /// [`gather`](Var::gather) with this and the index broadcast to each other in all dimensions but `dim`; without a
    /// dimension, of both in row-major order. Here -n..0 count from the end.
    pub fn take_along_dim(self, index: impl Into<Var>, dim: Option<isize>) -> Result<Var> {
        let index = index.into();
        let Some(dim) = dim else {
            return self.flatten(0, -1)?.gathered(0, true, index.flatten(0, -1)?);
        };
        let (mut x, mut shape) = (self.shape(), index.shape());
        let dim = self.dim("take_along_dim", dim)?;
        if x.len() != shape.len() {
            return Err(self.invalid("take_along_dim", format!("the index must have rank {} too", x.len())));
        }
        let (n, count) = (std::mem::replace(&mut x[dim], 1), std::mem::replace(&mut shape[dim], 1));
        let Some(mut shape) = broadcast_shapes(&x, &shape) else {
            let reason = format!("the index {:?} doesn't broadcast with it outside dimension {dim}", index.shape());
            return Err(self.invalid("take_along_dim", reason));
        };
        shape[dim] = n;
        let x = if self.shape() == shape { self } else { self.expand(&shape)? };
        shape[dim] = count;
        let index = if index.shape() == shape { index } else { index.expand(&shape)? };
        x.gathered(dim, true, index)
    }

    /// This with `source` added at `index` along `dim`: y[.., index[.., i, ..], ..] += source[.., i, ..]. The source
    /// may reach beyond the index; one outside 0..n is an error. Backward reads the index.
    pub fn scatter_add(self, dim: isize, index: impl Into<Var>, source: impl Into<Var>) -> Result<Var> {
        let dim = self.dim_or_scalar("scatter_add", dim)?;
        self.apply(ScatterAdd { dim, alpha: 1.0 }, [index.into(), source.into()])
    }

    /// This with `alpha` times position i of `source` added to position `index[i]` of dimension `dim`. Backward reads
    /// the index.
    pub fn index_add(self, dim: isize, index: impl Into<Var>, source: impl Into<Var>, alpha: f64) -> Result<Var> {
        let (index, source) = (index.into(), source.into());
        let dim = self.dim_or_scalar("index_add", dim)?;
        let count = self.index_len("index_add", &index)?;
        let mut shape = vector(&self.shape());
        shape[dim] = count;
        if vector(&source.shape()) != shape || self.shape().is_empty() != source.shape().is_empty() {
            let reason = format!("the source must be {shape:?} for {count} positions, got {:?}", source.shape());
            return Err(self.invalid("index_add", reason));
        }
        self.apply(ScatterAdd { dim, alpha }, [index.along(dim, &shape)?, source])
    }

    /// How many positions an index of rank 1 (or 0) names.
    fn index_len(&self, op: &'static str, index: &Var) -> Result<usize> {
        match index.shape()[..] {
            [] => Ok(1),
            [n] => Ok(n),
            ref other => Err(self.invalid(op, format!("the index must have rank 1, got {other:?}"))),
        }
    }

    /// This index of rank 1, repeated in the other dimensions of `shape`.
    fn along(self, dim: usize, shape: &[usize]) -> Result<Var> {
        let row: Shape = (0..shape.len()).map(|d| if d == dim { shape[d] } else { 1 }).collect();
        self.reshape(&row)?.expand(shape)
    }
}
