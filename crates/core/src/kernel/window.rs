//! Windows over images: columns for convolutions, and pooling.

use super::check::{Check, Operands, Primitive, operands};
use crate::layout::{padded, reach};
use crate::{Result, Tensor};

/// A window that slides over the last two dimensions: output (y, x) sees the inputs at
/// (y, x) stride - before + (i, j) dilation for (i, j) within `kernel`; what lies outside the input is padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs)]
pub struct Window {
    pub kernel: [usize; 2],
    pub stride: [usize; 2],
    /// Padding before the first row and column.
    pub before: [usize; 2],
    pub dilation: [usize; 2],
}

/// What an average over a window divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum PoolDivisor {
    /// The elements inside the input.
    Inside,
    /// The elements inside the input and its padding, which is as wide behind as before.
    Padded,
    /// This number.
    Fixed(i64),
}

/// What each place of the window sees, 0 in the padding.
#[derive(Debug, Clone, Copy)]
pub struct Im2col<'a> {
    /// `[n, channels, height, width]`.
    pub x: &'a Tensor,
    /// The window.
    pub window: Window,
    /// Written: `[n, channels, kernel height, kernel width, out height, out width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Im2col<'a> {
    fn name(&self) -> &'static str {
        "im2col"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        columns(check, &self.window, self.x, self.out)
    }
}

/// The transpose of [`Im2col`]: the sum of all places that see an element.
#[derive(Debug, Clone, Copy)]
pub struct Col2im<'a> {
    /// `[n, channels, kernel height, kernel width, out height, out width]`, contiguous.
    pub cols: &'a Tensor,
    /// The window.
    pub window: Window,
    /// Written: `[n, channels, height, width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Col2im<'a> {
    fn name(&self) -> &'static str {
        "col2im"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => cols: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.must(self.cols.is_contiguous(), || "`cols` must be contiguous".into())?;
        columns(check, &self.window, self.out, self.cols)
    }
}

/// out = the largest that the window sees in x (NaN if it sees one). Padding is never the largest.
#[derive(Debug, Clone, Copy)]
pub struct MaxPool<'a> {
    /// `[n, channels, height, width]`.
    pub x: &'a Tensor,
    /// The window.
    pub window: Window,
    /// Written: `[n, channels, out height, out width]`.
    pub out: &'a Tensor,
    /// Written: where the largest lies in its plane, the first of equals. i64 or i32, of out's shape.
    pub index: &'a Tensor,
}

impl<'a> Primitive<'a> for MaxPool<'a> {
    fn name(&self) -> &'static str {
        "max_pool"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float, index: Write Index]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("index", self.index, self.out.shape())?;
        planes(check, &self.window, self.x, self.out)
    }
}

/// out = the sum of g over the outputs whose index an element is.
#[derive(Debug, Clone, Copy)]
pub struct MaxPoolGrad<'a> {
    /// As [`MaxPool`] wrote it: each lies in its output's window.
    pub index: &'a Tensor,
    /// Gradient by the pooled, of index's shape.
    pub g: &'a Tensor,
    /// The window.
    pub window: Window,
    /// Written: `[n, channels, height, width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for MaxPoolGrad<'a> {
    fn name(&self) -> &'static str {
        "max_pool_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => index: Read Index, g: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("index", self.index, self.g.shape())?;
        planes(check, &self.window, self.out, self.g)
    }
}

/// out = the sum of what the window sees in x, divided as said.
#[derive(Debug, Clone, Copy)]
pub struct AvgPool<'a> {
    /// `[n, channels, height, width]`.
    pub x: &'a Tensor,
    /// The window.
    pub window: Window,
    /// What the sum is divided by.
    pub divisor: PoolDivisor,
    /// Written: `[n, channels, out height, out width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for AvgPool<'a> {
    fn name(&self) -> &'static str {
        "avg_pool"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        planes(check, &self.window, self.x, self.out)
    }
}

/// The transpose of [`AvgPool`].
#[derive(Debug, Clone, Copy)]
pub struct AvgPoolGrad<'a> {
    /// Gradient by the pooled: `[n, channels, out height, out width]`.
    pub g: &'a Tensor,
    /// The window.
    pub window: Window,
    /// What the sum was divided by.
    pub divisor: PoolDivisor,
    /// Written: `[n, channels, height, width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for AvgPoolGrad<'a> {
    fn name(&self) -> &'static str {
        "avg_pool_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => g: Read Float, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        planes(check, &self.window, self.out, self.g)
    }
}

/// Fails unless places of a window on planes of these sizes can be counted.
fn countable(check: &Check<'_>, w: &Window, x: [usize; 2], out: [usize; 2]) -> Result<()> {
    let counts = |d: usize| {
        let last = reach(out[d].max(1), w.stride[d])?;
        let padded = padded(x[d], w.before[d], w.before[d])?;
        last.checked_add(reach(w.kernel[d], w.dilation[d])?)?.checked_add(padded).filter(|&n| n <= isize::MAX as usize)
    };
    let right = (0..2).all(|d| w.stride[d] > 0 && w.dilation[d] > 0 && counts(d).is_some());
    let area = w.kernel[0].checked_mul(w.kernel[1]);
    check.must(right && area.is_some(), || {
        format!("{w:?} from {x:?} to {out:?} reaches further than 63 bits can count, or has a size of 0")
    })
}

fn planes(check: &Check<'_>, w: &Window, x: &Tensor, out: &Tensor) -> Result<()> {
    check.rank("x", x, 4)?;
    check.rank("out", out, 4)?;
    let (x, out) = (x.shape(), out.shape());
    check.must(x[..2] == out[..2], || format!("samples and channels of {x:?} and {out:?} must agree"))?;
    countable(check, w, [x[2], x[3]], [out[2], out[3]])
}

fn columns(check: &Check<'_>, w: &Window, x: &Tensor, columns: &Tensor) -> Result<()> {
    check.rank("the image", x, 4)?;
    check.rank("the columns", columns, 6)?;
    let (x, c) = (x.shape(), columns.shape());
    let right = c[..2] == x[..2] && c[2..4] == w.kernel;
    check.must(right, || format!("the columns of {x:?} must be [n, channels, {:?}, ..], got {c:?}", w.kernel))?;
    countable(check, w, [x[2], x[3]], [c[4], c[5]])
}
