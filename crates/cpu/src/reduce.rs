//! Sums, products and extrema over dimensions, and the sum of squares.
//!
//! A sum is cut by the logical shape alone, never by strides or threads: within a piece 64 lanes (along a row) or one
//! lane a column add up in the tensor's dtype, pieces are added in f64 in their order. The error is that of pairwise
//! summation for all practical sizes.

use crate::exec::Exec;
use crate::groups;
use crate::halves::Cell;
use crate::math::{Float, fold_lanes};
use crate::view::{BLOCK, Span, for_float, merged, offset_of};
use retape_core::kernel::Reduce;
use retape_core::layout::{Shape, Strides};
use retape_core::{Result, Tensor};

/// Elements of one piece of a row.
const PIECE: usize = 16 * 1024;
/// Rows that a column adds up in the tensor's dtype before it goes to f64.
const ROWS: usize = 128;
/// Columns of one task.
const COLUMNS: usize = 256;

/// Some dimensions of a tensor as one index in row-major order.
#[derive(Debug)]
pub(crate) struct Axis {
    shape: Shape,
    strides: Strides,
    pub len: usize,
}

impl Axis {
    pub fn new(x: &Tensor, dims: &[usize]) -> Axis {
        let shape: Shape = dims.iter().map(|&d| x.shape()[d]).collect();
        let strides: Strides = dims.iter().map(|&d| x.layout().strides[d]).collect();
        let (sizes, [steps]) = merged(&shape, &[&strides]);
        Axis { shape: sizes, strides: steps, len: shape.iter().product() }
    }

    #[inline(always)]
    pub fn offset(&self, index: usize) -> usize {
        match self.strides[..] {
            [] => 0,
            [stride] => index * stride,
            _ => offset_of(index, &self.shape, &self.strides),
        }
    }

    /// Block of elements from `index`, `base` elements into `span`.
    #[inline(always)]
    pub fn load<T: Cell>(&self, span: Span<T>, base: usize, index: usize, end: usize, fill: T) -> [T; BLOCK] {
        match self.strides[..] {
            [] => span.part(base, 1, 1).load(index, fill),
            [stride] => span.part(base + index * stride, end - index, stride).load(0, fill),
            _ => {
                let mut block = [fill; BLOCK];
                for (j, slot) in block.iter_mut().enumerate().take(end - index) {
                    *slot = span.get(base + self.offset(index + j));
                }
                block
            }
        }
    }
}

/// The dimensions that `out` reduces, and the others.
pub(crate) fn split_dims(x: &Tensor, out: &Tensor) -> (Shape, Shape) {
    (0..x.rank()).partition(|&d| out.shape()[d] == 1 && x.shape()[d] != 1)
}

/// out = f over the dimensions where out has size 1 and x has not.
pub(crate) fn reduce(exec: &Exec, f: Reduce, x: &Tensor, out: &Tensor) -> Result<()> {
    for_float!("reduce", x.dtype(), T => match f {
        Reduce::Sum => fold::<T>(exec, x, out, T::ZERO, #[inline(always)] |a, b| a + b, |a, b| a + b),
        Reduce::Prod => fold::<T>(exec, x, out, T::ONE, #[inline(always)] |a, b| a * b, |a, b| a * b),
        Reduce::Max => fold::<T>(exec, x, out, -T::INFINITY, #[inline(always)] |a, b| a.larger(b), |a, b| a.larger(b)),
        Reduce::Min => fold::<T>(exec, x, out, T::INFINITY, #[inline(always)] |a, b| a.smaller(b), |a, b| a.smaller(b)),
        _ => return groups::reduce(exec, f, x, out),
    });
    Ok(())
}

#[inline(always)]
fn fold<T: Float>(
    exec: &Exec,
    x: &Tensor,
    out: &Tensor,
    start: T,
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync,
) {
    let (reduced, kept) = split_dims(x, out);
    let outs = Span::<T>::of(out);
    if x.is_empty() {
        return (0..outs.len()).for_each(|i| outs.set(i, start));
    }
    // The innermost group of neighbouring dimensions of one kind is the inner axis: a row to reduce, or columns to keep.
    let sized = |dims: &Shape| dims.iter().rev().find(|&&d| x.shape()[d] > 1).copied();
    let rows_reduced = match (sized(&reduced), sized(&kept)) {
        (Some(r), Some(k)) => r > k,
        (_, k) => k.is_none(),
    };
    let (own, other) = if rows_reduced { (&reduced, sized(&kept)) } else { (&kept, sized(&reduced)) };
    let cut = own.iter().position(|&d| other.is_none_or(|o| d > o)).unwrap_or(own.len());
    let inner = Axis::new(x, &own[cut..]);
    let outer = Axis::new(x, &own[..cut]);
    if rows_reduced {
        fold_rows(exec, x, outs, (&Axis::new(x, &kept), &outer, &inner), start, join, join_wide)
    } else {
        fold_columns(exec, x, outs, (&outer, &Axis::new(x, &reduced), &inner), start, join, join_wide)
    }
}

/// Each output is the fold of `outer` x `inner`.
#[inline(always)]
fn fold_rows<T: Float>(
    exec: &Exec,
    x: &Tensor,
    out: Span<T>,
    (kept, outer, inner): (&Axis, &Axis, &Axis),
    start: T,
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync,
) {
    let xs = Span::<T>::of(x);
    let group = outer.len * inner.len;
    let pieces = group.div_ceil(PIECE);
    let axes = (outer, inner);
    if pieces == 1 {
        let batch = (PIECE / group).max(1);
        return exec.run::<T>(
            kept.len.div_ceil(batch),
            x.len(),
            #[inline(always)]
            |task| {
                for o in task * batch..((task + 1) * batch).min(kept.len) {
                    out.set(o, fold_piece(xs, kept.offset(o), axes, 0..group, start, join));
                }
            },
        );
    }
    let parts = exec.collect::<T, _>(
        kept.len * pieces,
        x.len(),
        #[inline(always)]
        |task| {
            let (o, from) = (task / pieces, task % pieces * PIECE);
            fold_piece(xs, kept.offset(o), axes, from..group.min(from + PIECE), start, join).wide()
        },
    );
    for (o, parts) in parts.chunks(pieces).enumerate() {
        out.set(o, T::of(parts.iter().copied().reduce(&join_wide).unwrap_or(start.wide())));
    }
}

/// The fold of some elements of `outer` x `inner`, from `base`.
#[inline(always)]
fn fold_piece<T: Float>(
    xs: Span<T>,
    base: usize,
    (outer, inner): (&Axis, &Axis),
    range: std::ops::Range<usize>,
    start: T,
    join: impl Fn(T, T) -> T + Copy,
) -> T {
    let mut lanes = [start; BLOCK];
    let mut at = range.start;
    while at < range.end {
        let (row, column) = (at / inner.len, at % inner.len);
        let end = inner.len.min(column + range.end - at);
        let base = base + outer.offset(row);
        let row = match inner.strides[..] {
            [stride] => Some(xs.part(base + column * stride, end - column, stride)),
            _ => None,
        };
        for i in (column..end).step_by(BLOCK) {
            let block = match row {
                Some(row) => row.load(i - column, start),
                None => inner.load(xs, base, i, end, start),
            };
            for j in 0..BLOCK {
                lanes[j] = join(lanes[j], block[j]);
            }
        }
        at += end - column;
    }
    fold_lanes(lanes, join)
}

/// Each output (o, c) is the fold over `rows` of column c.
#[inline(always)]
fn fold_columns<T: Float>(
    exec: &Exec,
    x: &Tensor,
    out: Span<T>,
    (outer, rows, columns): (&Axis, &Axis, &Axis),
    start: T,
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync,
) {
    let xs = Span::<T>::of(x);
    let strips = columns.len.div_ceil(COLUMNS);
    // Few columns: the rows are cut too, into at most 64 pieces.
    let piece = if outer.len * strips >= 16 { rows.len } else { rows.len.div_ceil(64).max(ROWS) };
    let pieces = rows.len.div_ceil(piece);
    let parts = exec.collect::<T, _>(
        outer.len * strips * pieces,
        x.len(),
        #[inline(always)]
        |task| {
            let (o, strip, p) = (task / pieces / strips, task / pieces % strips, task % pieces);
            let (first, end) = (strip * COLUMNS, columns.len.min((strip + 1) * COLUMNS));
            let (from, to) = (p * piece, rows.len.min((p + 1) * piece));
            let mut total = vec![0f64; end - first];
            for (k, from) in (from..to).step_by(ROWS).enumerate() {
                let mut lanes = [[start; BLOCK]; COLUMNS / BLOCK];
                for r in from..to.min(from + ROWS) {
                    let base = outer.offset(o) + rows.offset(r);
                    for (lane, i) in lanes.iter_mut().zip((first..end).step_by(BLOCK)) {
                        let block = columns.load(xs, base, i, end, start);
                        for j in 0..BLOCK {
                            lane[j] = join(lane[j], block[j]);
                        }
                    }
                }
                for (sum, &lane) in total.iter_mut().zip(lanes.as_flattened()) {
                    *sum = if k == 0 { lane.wide() } else { join_wide(*sum, lane.wide()) };
                }
            }
            total
        },
    );
    let mut parts = parts.into_iter();
    for o in 0..outer.len {
        for strip in 0..strips {
            let mut total = parts.next().unwrap_or_default();
            for part in parts.by_ref().take(pieces - 1) {
                total.iter_mut().zip(part).for_each(|(sum, value)| *sum = join_wide(*sum, value));
            }
            for (c, sum) in total.into_iter().enumerate() {
                out.set(o * columns.len + strip * COLUMNS + c, T::of(sum));
            }
        }
    }
}

/// out `[]` (f64) = sum of squares, in f64.
pub(crate) fn squared_norm(exec: &Exec, x: &Tensor, out: &Tensor) -> Result<()> {
    let axis = Axis::new(x, &(0..x.rank()).collect::<Shape>());
    let len = axis.len;
    for_float!("squared_norm", x.dtype(), T => {
        let xs = Span::<T>::of(x);
        let parts = exec.collect::<T, _>(len.div_ceil(PIECE), len, #[inline(always)] |p| {
            let mut lanes = [0f64; BLOCK];
            let end = len.min((p + 1) * PIECE);
            for i in (p * PIECE..end).step_by(BLOCK) {
                let block = axis.load(xs, 0, i, end, T::ZERO);
                for j in 0..BLOCK {
                    let v = block[j].wide();
                    lanes[j] = f64::mul_add(v, v, lanes[j]);
                }
            }
            fold_lanes(lanes, #[inline(always)] |a, b| a + b)
        });
        Span::<f64>::of(out).set(0, parts.iter().fold(0.0, |sum, p| sum + p));
    });
    Ok(())
}
