//! Elements by their position: reversed, gathered by index, added at an index, and the place of the largest.

use super::check::{Access, Check, Elements, Operand, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// `out[i] = x[n - 1 - i]` along each of `dims`. Any dtype.
#[derive(Debug, Clone, Copy)]
pub struct Flip<'a> {
    /// What is reversed.
    pub x: &'a Tensor,
    /// Dimensions, without repeats.
    pub dims: &'a [usize],
    /// Written; of x's shape and dtype.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Flip<'a> {
    fn name(&self) -> &'static str {
        "flip"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read AsOut, out: Write Any]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let (x, dims) = (self.x, self.dims);
        let wrong = |(i, d): (usize, &usize)| *d >= x.rank() || dims[..i].contains(d);
        check.must(!dims.iter().enumerate().any(wrong), || {
            format!("{dims:?} must name dimensions of {:?}, each once", x.shape())
        })?;
        check.alike()
    }
}

/// `out[i] = x[indices[0][i], indices[1][i], .., i]`. Any dtype. An index outside its dimension is an InvalidValue
/// error. Indices that repeat (stride 0) along a dimension are read once.
#[derive(Debug, Clone, Copy)]
pub struct Gather<'a> {
    /// One leading dimension for each index tensor, then out's dimensions.
    pub x: &'a Tensor,
    /// i64 or i32, of out's shape.
    pub indices: &'a [&'a Tensor],
    /// -n..0 count from the end.
    pub wrap: bool,
    /// Written; of x's dtype.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Gather<'a> {
    fn name(&self) -> &'static str {
        "gather"
    }
    fn operands(&self) -> Operands<'a> {
        let mut all = operands![self => x: Read AsOut, out: Write Any];
        all.extend(of_indices(self.indices));
        all
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        fit(check, self.indices, self.x, self.out)
    }
}

/// `out[indices[0][i], indices[1][i], .., i] += alpha source[i]`: [`Gather`]'s counterpart. What meets in one place is
/// summed in the row-major order of i, 16 at a time in the arithmetic's dtype and these sums in f64, then added and
/// rounded once.
#[derive(Debug, Clone, Copy)]
pub struct ScatterAdd<'a> {
    /// What is added.
    pub source: &'a Tensor,
    /// i64 or i32, of the source's shape.
    pub indices: &'a [&'a Tensor],
    /// -n..0 count from the end.
    pub wrap: bool,
    /// Factor on the source.
    pub alpha: f64,
    /// A workspace for putting together what meets: i64, of [`meeting`] elements.
    pub order: &'a Tensor,
    /// Updated, not wholly written. One leading dimension for each index tensor, then the source's; may be a view whose
    /// trailing dimensions repeat (stride 0): there everything meets in one place.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for ScatterAdd<'a> {
    fn name(&self) -> &'static str {
        "scatter_add"
    }
    fn operands(&self) -> Operands<'a> {
        let mut all = operands![
            self => source: Read Float, order: Write Exactly(DType::I64), out: WriteRepeated Float
        ];
        all.extend(of_indices(self.indices));
        all
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let ScatterAdd { source, indices, order, out, .. } = *self;
        fit(check, indices, out, source)?;
        let strides = &out.layout().strides;
        let distinct = (0..indices.len()).all(|d| out.shape()[d] <= 1 || strides[d] != 0);
        check.must(distinct, || {
            format!("`out` {:?} with strides {strides:?} repeats a dimension that is indexed", out.shape())
        })?;
        check.shape("order", order, &[meeting(source, indices, out)])
    }
}

/// The index tensors as operands.
fn of_indices<'a>(indices: &'a [&'a Tensor]) -> impl Iterator<Item = Operand<'a>> {
    let (access, elements) = (Access::Read, Elements::Index);
    indices.iter().map(move |tensor| Operand { name: "indices", tensor, access, elements })
}

/// Fails unless the whole has a dimension for each index in front of the part's, and the indices have the part's shape.
fn fit(check: &Check<'_>, indices: &[&Tensor], whole: &Tensor, part: &Tensor) -> Result<()> {
    let n = indices.len();
    check.must(n > 0 && whole.rank() == n + part.rank() && whole.shape()[n..] == *part.shape(), || {
        let (whole, part) = (whole.shape(), part.shape());
        format!("{n} indices of {whole:?} need a dimension each in front of {part:?}")
    })?;
    indices.iter().try_for_each(|index| check.shape("indices", index, part.shape()))
}

/// How many elements of a [`ScatterAdd`]'s source are put in order before they are added: a number for each
/// combination of the dimensions in which an index differs or `out` repeats, and none where no two elements can meet.
pub fn meeting(source: &Tensor, indices: &[&Tensor], out: &Tensor) -> usize {
    let shape = source.shape();
    let fits = out.rank() == indices.len() + shape.len() && indices.iter().all(|i| i.rank() == shape.len());
    if !fits {
        return 0; // the kernel says what is wrong
    }
    let places = &out.layout().strides[indices.len()..];
    let meets = |d: usize| places[d] == 0;
    let differs = |d: usize| indices.iter().any(|i| i.layout().strides[d] != 0);
    let sized = || (0..shape.len()).filter(|&d| shape[d] != 1);
    if sized().filter(|&d| meets(d)).map(|d| shape[d]).product::<usize>() <= 1 {
        return 0;
    }
    sized().filter(|&d| meets(d) || differs(d)).map(|d| shape[d]).product()
}

/// The largest along `dim` and where it first stands; a NaN counts as the largest.
#[derive(Debug, Clone, Copy)]
pub struct MaxIndex<'a> {
    /// Not empty along `dim`.
    pub x: &'a Tensor,
    /// The dimension.
    pub dim: usize,
    /// Written; size 1 in `dim`.
    pub values: &'a Tensor,
    /// Written; i64, size 1 in `dim`.
    pub indices: &'a Tensor,
}

impl<'a> Primitive<'a> for MaxIndex<'a> {
    fn name(&self) -> &'static str {
        "max_index"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, values: Write Float, indices: Write Exactly(DType::I64)]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let (x, dim) = (self.x, self.dim);
        check.dim(x, dim)?;
        check.must(x.shape()[dim] > 0, || format!("dimension {dim} of {:?} has no largest", x.shape()))?;
        check.without("values", self.values, x.shape(), dim)?;
        check.without("indices", self.indices, x.shape(), dim)
    }
}

/// out = g at the given index along `dim`, else 0.
#[derive(Debug, Clone, Copy)]
pub struct MaxIndexGrad<'a> {
    /// i64, size 1 in `dim`.
    pub indices: &'a Tensor,
    /// Gradient by the largest; size 1 in `dim`.
    pub g: &'a Tensor,
    /// The dimension.
    pub dim: usize,
    /// Written: the gradient by x.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for MaxIndexGrad<'a> {
    fn name(&self) -> &'static str {
        "max_index_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => indices: Read Exactly(DType::I64), g: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.dim(self.out, self.dim)?;
        check.without("g", self.g, self.out.shape(), self.dim)?;
        check.without("indices", self.indices, self.out.shape(), self.dim)
    }
}
