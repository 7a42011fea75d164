//! Indexing as in `x[1, ::2, None, .., ids, mask]`. Numbers, slices and new axes are views; tensors of integers take
//! elements, with a gradient that adds each g to where it was taken from, in the order of the index.

use super::*;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = x with some dimensions replaced by the (broadcast) dimensions of index tensors:
/// `y[.., b, ..] = x[.., i_1[b], .., i_2[b], ..]`. Negative indices count from the end. Inputs: x, then one index for
/// each of `dims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// The dimensions that are indexed.
    pub dims: SmallVec<[usize; 4]>,
    /// Where the indices' dimensions go among those that stay.
    pub at: usize,
}

impl Gathered {
    /// x as [`kernel::Gather`] wants it, the dimensions that are indexed first and then the output's, and the indices
    /// in the output's shape.
    pub(super) fn operands(&self, x: &Tensor, indices: &[Tensor]) -> Result<(Tensor, SmallVec<[Tensor; 4]>)> {
        let kept: Shape = (0..x.rank()).filter(|d| !self.dims.contains(d)).collect();
        let (before, behind) = kept.split_at(self.at);
        let named = indices.iter().fold(Shape::new(), |shape, i| {
            broadcast_shapes(&shape, i.shape()).expect("`infer` found that they broadcast")
        });
        let n = named.len();

        let mut shape = named.clone();
        shape.extend_from_slice(x.shape());
        let mut order: Shape = self.dims.iter().map(|d| n + d).collect();
        order.extend(before.iter().map(|d| n + d).chain(0..n).chain(behind.iter().map(|d| n + d)));
        let view = x.expand(&shape)?.permute(&order)?;

        let mut shape: Shape = kept.iter().map(|&d| x.shape()[d]).collect();
        shape.extend_from_slice(&named);
        let order: Shape = (0..self.at).chain(kept.len()..shape.len()).chain(self.at..kept.len()).collect();
        let indices = indices.iter().map(|i| i.expand(&shape)?.permute(&order)).collect::<Result<_>>()?;
        Ok((view, indices))
    }
}

impl OpRule for Gathered {
    fn name(&self) -> &'static str {
        "index"
    }

    fn formula(&self) -> &'static str {
        "y[.., i, ..] = x[.., ids[i], ..], several index tensors together"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1 + self.dims.len(), inputs)?;
        let (x, indices) = (&inputs[0], &inputs[1..]);
        let distinct = self.dims.iter().enumerate().all(|(i, d)| *d < x.shape.len() && !self.dims[..i].contains(d));
        if indices.is_empty() || !distinct {
            return Err(format!("needs one index tensor for each of the dimensions {:?}", self.dims));
        }
        if let Some(i) = indices.iter().find(|i| !matches!(i.dtype, DType::I64 | DType::I32)) {
            return Err(format!("indices must be i64 or i32, got {}", i.dtype));
        }
        let named = indices.iter().try_fold(Shape::new(), |shape, i| broadcast_shapes(&shape, &i.shape));
        let named = named.ok_or("the index tensors don't broadcast")?;
        let mut shape: Shape = (0..x.shape.len()).filter(|d| !self.dims.contains(d)).map(|d| x.shape[d]).collect();
        if self.at > shape.len() {
            return Err(format!("there is no place {} among {} dimensions", self.at, shape.len()));
        }
        shape.insert_many(self.at, named);
        Ok(one(Spec::new(shape, x.dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (x, indices) = self.operands(&inputs[0], &inputs[1..])?;
        let indices: SmallVec<[&Tensor; 4]> = indices.iter().collect();
        exec.run(kernel::Gather { x: &x, indices: &indices, wrap: true, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves((0..self.dims.len()).map(|i| Slot::In(1 + i)))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let indices: SmallVec<[Tensor; 4]> =
            (0..self.dims.len()).map(|i| cx.saved(Slot::In(1 + i))).collect::<Result<_>>()?;
        let (view, indices) = self.operands(&cx.sum(0)?.zeroed(&exec)?, &indices)?;
        let indices: SmallVec<[&Tensor; 4]> = indices.iter().collect();
        exec.scatter_add(&g, &indices, true, 1.0, &view)
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::moved(&inputs[1..], outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let (x, i) = (SampleInput::random, SampleInput::integers);
        let s = |name, dims: &[usize], at, inputs: Vec<SampleInput>| {
            Sample::smooth(name, Gathered { dims: dims.into(), at }, inputs)
        };
        vec![
            s("rows", &[0], 0, vec![x(1, &[4, 3]), i(&[5], &[1, -1, 1, 0, 3])]),
            s("columns", &[1], 1, vec![x(2, &[2, 4, 3]), i(&[2, 2], &[0, -4, 3, 3])]),
            s("pairs", &[0, 1], 0, vec![x(3, &[3, 4]), i(&[3], &[0, 0, 2]), i(&[3], &[1, 1, -1])]),
            s("apart", &[0, 2], 0, vec![x(4, &[3, 2, 4]), i(&[2, 1], &[0, 2]), i(&[3], &[1, 1, 3])]),
            s("rank 0", &[0], 0, vec![x(5, &[4]), i(&[], &[2])]),
            s("rank 5", &[1, 2], 1, vec![x(6, &[2, 2, 3, 1, 2]), i(&[2], &[0, 1]), i(&[2], &[2, 2])]),
            s("transposed", &[1], 1, vec![x(7, &[4, 6]).lying(Transposed), i(&[2], &[5, 5])]),
            s("narrowed", &[0], 0, vec![x(8, &[3, 5]).lying(Narrowed), i(&[2], &[2, 0])]),
            s("expanded", &[1], 0, vec![x(9, &[4, 5]).lying(Expanded), i(&[3], &[0, 4, 0])]),
            s("no index", &[0], 0, vec![x(10, &[3, 5]), i(&[0], &[])]),
        ]
    }
}

/// One place of an index expression, see [`Var::index`].
#[derive(Debug, Clone)]
pub enum Index<'a> {
    /// One position, which takes the dimension away.
    At(isize),
    /// Every `step`-th position from `start` up to `stop`, as in Python.
    Slice {
        /// The first; the beginning if absent.
        start: Option<isize>,
        /// The one behind the last; the end if absent.
        stop: Option<isize>,
        /// At least 1.
        step: isize,
    },
    /// A new dimension of size 1.
    NewAxis,
    /// All dimensions that no other index takes, whole.
    Ellipsis,
    /// Positions (i64, i32), or a mask (bool) over the number of dimensions that it has. A mask's elements are read on
    /// the host.
    Tensor(&'a Var),
}

impl From<isize> for Index<'_> {
    fn from(at: isize) -> Self {
        Index::At(at)
    }
}

impl<'a> From<&'a Var> for Index<'a> {
    fn from(positions: &'a Var) -> Self {
        Index::Tensor(positions)
    }
}

impl Var {
    /// `self[places]`, with PyTorch's meaning: numbers, slices, new axes and an ellipsis give views; index tensors are
    /// broadcast to each other, and their dimensions stand where the first was if they were neighbours, else in
    /// front. An index out of range is an error. Backward reads the index tensors.
    pub fn index(self, places: &[Index<'_>]) -> Result<Var> {
        let taken = |place: &Index<'_>| match place {
            Index::At(_) | Index::Slice { .. } => 1,
            Index::Tensor(t) => {
                if t.dtype() == DType::Bool {
                    t.shape().len()
                } else {
                    1
                }
            }
            Index::NewAxis | Index::Ellipsis => 0,
        };
        let rank = self.shape().len();
        let Some(left) = rank.checked_sub(places.iter().map(taken).sum()) else {
            return Err(self.invalid("index", format!("more indices than the {rank} dimensions")));
        };
        if places.iter().filter(|place| matches!(place, Index::Ellipsis)).count() > 1 {
            return Err(self.invalid("index", "an index has at most one ellipsis"));
        }
        let (mut x, mut dim) = (self, 0);
        let mut dims: SmallVec<[usize; 4]> = SmallVec::new();
        let mut indices: Vec<Var> = Vec::new();
        for place in places {
            match *place {
                Index::At(at) => x = x.select(dim as isize, at)?,
                Index::Slice { start, stop, step } => {
                    x = x.sliced(dim, start, stop, step)?;
                    dim += 1;
                }
                Index::NewAxis => {
                    x = x.unsqueeze(dim as isize)?;
                    dim += 1;
                }
                Index::Ellipsis => dim += left,
                Index::Tensor(positions) if positions.dtype() == DType::Bool => {
                    if positions.shape().is_empty() {
                        x = x.unsqueeze(dim as isize)?; // a scalar mask takes or leaves the whole
                    }
                    for positions in x.positions_of(dim, positions)? {
                        dims.push(dim);
                        indices.push(positions);
                        dim += 1;
                    }
                }
                Index::Tensor(positions) => {
                    dims.push(dim);
                    indices.push(positions.clone());
                    dim += 1;
                }
            }
        }
        if indices.is_empty() {
            return Ok(x);
        }
        let neighbours = dims.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let at = if neighbours { dims[0] } else { 0 };
        x.apply(Gathered { dims, at }, indices)
    }

    /// A slice of one dimension: start and stop count from the end if negative, and are clamped into the dimension.
    fn sliced(self, dim: usize, start: Option<isize>, stop: Option<isize>, step: isize) -> Result<Var> {
        let Ok(step @ 1..) = usize::try_from(step) else {
            return Err(self.invalid("index", format!("a slice in steps of {step}; needs 1 or more, see `flip`")));
        };
        let n = self.shape()[dim] as isize;
        let place = |at: isize| (if at < 0 { at + n } else { at }).clamp(0, n) as usize;
        let (start, stop) = (place(start.unwrap_or(0)), stop.map_or(n as usize, place));
        let len = stop.saturating_sub(start).div_ceil(step);
        if len == n as usize {
            return Ok(self);
        }
        self.apply(view::Narrow { dim, start, len, step }, [])
    }

    /// Where `mask` over the dimensions from `dim` is true: one index tensor for each of its dimensions.
    fn positions_of(&self, dim: usize, mask: &Var) -> Result<Vec<Var>> {
        let shape = if mask.shape().is_empty() { smallvec![1] } else { mask.shape() };
        if self.shape()[dim..dim + shape.len()] != shape[..] {
            let reason = format!("the mask {shape:?} must have the sizes of dimension {dim} and following");
            return Err(self.invalid("index", reason));
        }
        let truths = mask.tensor()?.to_vec::<bool>()?;
        let found: Vec<usize> = (0..truths.len()).filter(|&i| truths[i]).collect();
        let column = |d: usize| {
            let step: usize = shape[d + 1..].iter().product();
            let places: Vec<i64> = found.iter().map(|at| (at / step % shape[d]) as i64).collect();
            self.tape().constant(&Tensor::from_slice(&self.tape().device(), &[places.len()], &places)?)
        };
        (0..shape.len()).map(column).collect()
    }
}
