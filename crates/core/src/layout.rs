//! Shapes, strides and views. All arithmetic is in 64 bits; strides count elements.

use crate::{Error, Result};
use smallvec::SmallVec;

/// Sizes of the dimensions, outermost first. Rank 0 (a scalar) and zero-sized dimensions are ordinary.
pub type Shape = SmallVec<[usize; 4]>;
/// Elements to step for one step in each dimension; 0 repeats (an expanded dimension).
pub type Strides = SmallVec<[usize; 4]>;

/// Where a tensor's elements lie in its storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Size of each dimension.
    pub shape: Shape,
    /// Stride of each dimension, in elements.
    pub strides: Strides,
    /// The first element, in elements from the storage's start.
    pub offset: usize,
}

/// Number of elements of a shape, or an error where it does not fit in 63 bits. Sizes of 0 are left out of that, so
/// that strides fit too.
pub fn element_count(shape: &[usize]) -> Result<usize> {
    let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1))).filter(|&n| n <= isize::MAX as usize);
    match count {
        Some(_) if shape.contains(&0) => Ok(0),
        Some(count) => Ok(count),
        None => Err(Error::tensor("shape", format!("{shape:?} has more elements than 63 bits can count"))),
    }
}

/// How far `count` elements `step` apart reach, from the first to the last; `None` where there are none, or where
/// that is more than the longest dimension.
pub fn reach(count: usize, step: usize) -> Option<usize> {
    count.checked_sub(1)?.checked_mul(step)?.checked_add(1).filter(|&n| n <= isize::MAX as usize)
}

/// A size with padding before and behind; `None` where that is more than the longest dimension.
pub fn padded(size: usize, before: usize, behind: usize) -> Option<usize> {
    size.checked_add(before)?.checked_add(behind).filter(|&n| n <= isize::MAX as usize)
}

/// Strides of a contiguous (row-major) tensor of this shape.
pub fn contiguous_strides(shape: &[usize]) -> Strides {
    let mut strides: Strides = SmallVec::from_elem(1, shape.len());
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

/// Where the element that is number `at` in row-major order of `once` first stands in `shape`, whose sizes are those
/// of `once` where that repeats nothing, and 1 in `once` where it is repeated.
pub fn position_of_first(mut at: usize, once: &[usize], shape: &[usize]) -> usize {
    let mut position = 0;
    for (d, stride) in contiguous_strides(shape).into_iter().enumerate().rev() {
        position += at % once[d] * stride;
        at /= once[d];
    }
    position
}

/// The shape that two shapes broadcast to, by the usual rule: aligned at the last dimension, a size of 1 repeats.
pub fn broadcast_shapes(a: &[usize], b: &[usize]) -> Option<Shape> {
    let rank = a.len().max(b.len());
    let at = |s: &[usize], d: usize| if d + s.len() < rank { 1 } else { s[d + s.len() - rank] };
    (0..rank)
        .map(|d| match (at(a, d), at(b, d)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

impl Layout {
    /// The contiguous layout of a shape, from offset 0.
    pub fn contiguous(shape: &[usize]) -> Layout {
        Layout { shape: shape.into(), strides: contiguous_strides(shape), offset: 0 }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True where a dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// True where the elements lie in row-major order without gaps (dimensions of size 1 may have any stride).
    pub fn is_contiguous(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut expected = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// True where each step surely leads to an element of its own, as each stride is longer than all that the shorter
    /// ones reach together; with `repeats` apart from dimensions of stride 0.
    pub(crate) fn is_distinct(&self, repeats: bool) -> bool {
        let steps = || self.shape.iter().zip(&self.strides).filter(|(n, s)| **n > 1 && !(repeats && **s == 0));
        let reach = |stride: usize| -> usize { steps().filter(|s| *s.1 < stride).map(|(n, s)| (n - 1) * s).sum() };
        let twins = |stride: usize| steps().filter(|s| *s.1 == stride).count();
        self.is_empty() || steps().all(|(_, &stride)| stride > reach(stride) && twins(stride) == 1)
    }

    /// Elements of the storage that this layout spans, from `offset` (one past the last, 0 if empty).
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        1 + self.shape.iter().zip(&self.strides).map(|(&n, &s)| (n - 1) * s).sum::<usize>()
    }

    /// How many neighbours in row-major order are one element: the last dimensions that repeat.
    pub fn repeats(&self) -> usize {
        let dims = self.shape.iter().zip(&self.strides).rev();
        dims.take_while(|&(&n, &stride)| n == 1 || stride == 0).map(|(&n, _)| n).product()
    }

    /// The view with another shape of the same number of elements, where no copy is needed.
    pub fn reshape(&self, shape: &[usize]) -> Result<Option<Layout>> {
        if element_count(shape)? != self.len() {
            return Err(Error::tensor(
                "reshape",
                format!(
                    "{:?} has {} elements, {shape:?} has {}; both must agree",
                    self.shape,
                    self.len(),
                    element_count(shape)?
                ),
            ));
        }
        if self.is_contiguous() {
            return Ok(Some(Layout { shape: shape.into(), strides: contiguous_strides(shape), offset: self.offset }));
        }
        // Walk both shapes from the front, matching groups of dimensions with equal products; a group of the
        // old shape must be mergeable (each stride is the next one's stride times its size).
        let old: SmallVec<[(usize, usize); 4]> =
            self.shape.iter().zip(&self.strides).filter(|(n, _)| **n != 1).map(|(&n, &s)| (n, s)).collect();
        let mut strides: Strides = SmallVec::from_elem(1, shape.len());
        let (mut o, mut n) = (0, 0);
        while o < old.len() {
            let (mut have, mut want, n0, o0) = (old[o].0, 1, n, o);
            o += 1;
            loop {
                if want < have {
                    want *= shape[n];
                    n += 1;
                } else if have < want {
                    if old[o - 1].1 != old[o].1 * old[o].0 {
                        return Ok(None);
                    }
                    have *= old[o].0;
                    o += 1;
                } else {
                    break;
                }
            }
            debug_assert!(o > o0);
            let mut stride = old[o - 1].1;
            for d in (n0..n).rev() {
                strides[d] = stride;
                stride *= shape[d];
            }
        }
        Ok(Some(Layout { shape: shape.into(), strides, offset: self.offset }))
    }

    /// The view with its dimensions in another order; `order` names each dimension once.
    pub fn permute(&self, order: &[usize]) -> Result<Layout> {
        let mut seen: SmallVec<[bool; 4]> = SmallVec::from_elem(false, self.rank());
        let valid = order.len() == self.rank()
            && order.iter().all(|&d| d < seen.len() && !std::mem::replace(&mut seen[d], true));
        if !valid {
            return Err(Error::tensor(
                "permute",
                format!("{order:?} is not an order of the {} dimensions of {:?}", self.rank(), self.shape),
            ));
        }
        Ok(Layout {
            shape: order.iter().map(|&d| self.shape[d]).collect(),
            strides: order.iter().map(|&d| self.strides[d]).collect(),
            offset: self.offset,
        })
    }

    /// The view broadcast to `shape`: new leading dimensions and dimensions of size 1 repeat (stride 0).
    pub fn expand(&self, shape: &[usize]) -> Result<Layout> {
        element_count(shape)?;
        if broadcast_shapes(&self.shape, shape).is_none_or(|s| s[..] != *shape) {
            return Err(Error::tensor(
                "expand",
                format!("{:?} can't be expanded to {shape:?}: each size must agree or be 1", self.shape),
            ));
        }
        let lead = shape.len() - self.rank();
        let strides = (0..shape.len())
            .map(|d| match d.checked_sub(lead) {
                Some(i) if self.shape[i] == shape[d] => self.strides[i],
                _ => 0,
            })
            .collect();
        Ok(Layout { shape: shape.into(), strides, offset: self.offset })
    }

    /// The view of `len` elements of dimension `dim`, from `start`.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Layout> {
        self.slice(dim, start, len, 1)
    }

    /// The view of `len` elements of dimension `dim`, from `start`, `step` apart.
    pub fn slice(&self, dim: usize, start: usize, len: usize, step: usize) -> Result<Layout> {
        let end = len.checked_sub(1).map_or(Some(start), |n| n.checked_mul(step)?.checked_add(start)?.checked_add(1));
        if dim >= self.rank() || step == 0 || end.is_none_or(|end| end > self.shape[dim]) {
            let step = if step == 1 { String::new() } else { format!(" in steps of {step}") };
            return Err(Error::tensor(
                "narrow",
                format!("dimension {dim} from {start} for {len}{step} is not inside {:?}", self.shape),
            ));
        }
        let mut view = self.clone();
        view.shape[dim] = len;
        if !view.is_empty() {
            // Of no elements it reaches none, and its strides may be anything.
            view.offset += start * self.strides[dim];
        }
        // The stride of a single element is never used; the old one can't overflow.
        view.strides[dim] = if len > 1 { step * self.strides[dim] } else { self.strides[dim] };
        Ok(view)
    }
}

/// A whole number as users write sizes, positions and dimensions: of any usual integer type, negative where the call
/// says what that means.
pub trait Extent: Copy {
    /// The number; one too large for any tensor stays too large.
    fn get(self) -> isize;
}

macro_rules! extent {
    ($($t:ty),*) => {$(
        impl Extent for $t {
            fn get(self) -> isize {
                isize::try_from(self).unwrap_or(isize::MAX)
            }
        }
    )*};
}
extent!(usize, isize, i64, i32);

/// Turns a dimension counted from the end (`-1` is the last) into an index, or says what is allowed.
pub fn dimension(dim: isize, rank: usize) -> std::result::Result<usize, String> {
    let index = if dim < 0 { dim + rank as isize } else { dim };
    if (0..rank as isize).contains(&index) {
        Ok(index as usize)
    } else {
        Err(format!("dimension {dim} is not in a tensor of rank {rank}"))
    }
}
