//! Symmetric absmax int8 by groups of consecutive elements of the last dimension (the last group of a row may be
//! short).

use super::RandomStream;
use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// The scale is the group's largest magnitude itself, which its dtype holds exactly, and a step is scale / 127:
/// q = round-to-nearest-even((x / scale) 127) in [-127, 127] as bytes (u8 holding i8); with `rounding`,
/// q = floor((x / scale) 127 + u) where u in [0, 1) is word i of the stream for element i in row-major order, so that
/// q steps are x on average. Each operation is one in the scales' dtype, f32, or f64 for f64; the sum with u is in f64.
/// A zero group has scale 0 and q 0. A group with a NaN or infinity gets scale NaN (the engine looks for it) and q 0.
#[derive(Debug, Clone, Copy)]
pub struct Quantize<'a> {
    /// f64, f32, bf16 or f16. Rank 0 counts as one row of one element.
    pub x: &'a Tensor,
    /// Elements of a group.
    pub group: usize,
    /// What decides which are rounded up; to nearest if absent.
    pub rounding: Option<RandomStream>,
    /// Written: u8, of x's shape.
    pub q: &'a Tensor,
    /// Written: a statistic for each group of each row, `[.., groups]`.
    pub scales: &'a Tensor,
}

impl<'a> Primitive<'a> for Quantize<'a> {
    fn name(&self) -> &'static str {
        "quantize"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Float, q: Write Exactly(DType::U8), scales: Write Statistic]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("q", self.q, self.x.shape())?;
        groups(check, self.x.shape(), self.group, self.scales)
    }
}

/// out = (q (1/127)) scale, in the original's dtype and shape: finite for every finite group, exact at the largest
/// magnitude, and within half a step of x, or a step where q was rounded by chance (and the rounding of out), from the
/// subnormal numbers to the largest.
#[derive(Debug, Clone, Copy)]
pub struct Dequantize<'a> {
    /// As [`Quantize`] wrote it.
    pub q: &'a Tensor,
    /// As [`Quantize`] wrote it.
    pub scales: &'a Tensor,
    /// Elements of a group.
    pub group: usize,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Dequantize<'a> {
    fn name(&self) -> &'static str {
        "dequantize"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => q: Read Exactly(DType::U8), scales: Read Statistic, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.shape("out", self.out, self.q.shape())?;
        groups(check, self.q.shape(), self.group, self.scales)
    }
}

/// Fails unless there is a scale for each group of x.
fn groups(check: &Check<'_>, x: &[usize], group: usize, scales: &Tensor) -> Result<()> {
    let (n, rows) = x.split_last().map_or((1, x), |(&n, rows)| (n, rows));
    check.must(group > 0, || "a group needs at least 1 element".into())?;
    if x.is_empty() {
        return check.must(scales.len() == 1, || format!("`scales` must be one number, got {:?}", scales.shape()));
    }
    check.joined("scales", scales, rows, &[n.div_ceil(group)])
}
