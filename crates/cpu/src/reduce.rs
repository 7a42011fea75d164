//! Sums, products and extrema over dimensions, and the sum of squares.
//!
//! A sum is cut by the logical shape alone, never by strides or threads: 64 lanes (along a row) or one lane a column
//! add up a few elements in the tensor's dtype, and these sums in f64; pieces are added in f64 in their order. So the
//! error doesn't grow with the number of elements. Products run in f64 alone: what a part of them exceeds, the whole
//! may not.

use crate::exec::Exec;
use crate::groups;
use crate::halves::Cell;
use crate::math::{DEPTH, Float, fold_lanes};
use crate::view::{BLOCK, Span, for_float, merged, offset_of};
use retape_core::kernel::{self, ReduceFn};
use retape_core::layout::{Shape, Strides};
use retape_core::{Result, Tensor};

/// Elements of one piece of a row.
const PIECE: usize = 16 * 1024;
/// The most pieces that one output or one strip of columns is cut into, and fewest rows of a piece of columns.
const PIECES: usize = 64;
const ROWS: usize = 128;
/// Columns of one task.
const COLUMNS: usize = 256;
/// Outputs (or strips of columns) from which on none is cut: there are tasks enough.
const ENOUGH: usize = 16;
/// The depth of folds that round nothing: more blocks than any lane meets.
const EXACT: usize = isize::MAX as usize / BLOCK;

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

impl Axis {
    /// Writes a block from `index`, up to `end`, `base` elements into `span`.
    #[inline(always)]
    pub fn store<T: Cell>(&self, span: Span<T>, base: usize, index: usize, end: usize, block: [T; BLOCK]) {
        match self.strides[..] {
            [stride] => span.part(base + index * stride, end - index, stride).store(0, block),
            _ => {
                for (j, &value) in block.iter().enumerate().take(end - index) {
                    span.set(base + self.offset(index + j), value);
                }
            }
        }
    }
}

/// The dimensions that `out` reduces, and the others.
pub(crate) fn split_dims(x: &Tensor, out: &Tensor) -> (Shape, Shape) {
    (0..x.rank()).partition(|&d| out.shape()[d] == 1 && x.shape()[d] != 1)
}

/// out = f over the dimensions where out has size 1 and x has not.
pub(crate) fn reduce(exec: &Exec, k: &kernel::Reduce<'_>) -> Result<()> {
    for_float!("reduce", k.x.dtype(), T => reduce_of::<T>(exec, k))?
}

fn reduce_of<T: Float>(exec: &Exec, k: &kernel::Reduce<'_>) -> Result<()> {
    let kernel::Reduce { f, x, out } = *k;
    match f {
        ReduceFn::Sum => fold::<T>(
            exec,
            x,
            out,
            (T::ZERO, DEPTH),
            #[inline(always)]
            |a, b| a + b,
            #[inline(always)]
            |a, b| a + b,
        ),
        ReduceFn::Prod => fold::<T>(
            exec,
            x,
            out,
            (T::ONE, 1),
            #[inline(always)]
            |a, b| a * b,
            #[inline(always)]
            |a, b| a * b,
        ),
        ReduceFn::Max => fold::<T>(
            exec,
            x,
            out,
            (-T::INFINITY, EXACT),
            #[inline(always)]
            |a, b| a.larger(b),
            #[inline(always)]
            |a, b| a.larger(b),
        ),
        ReduceFn::Min => fold::<T>(
            exec,
            x,
            out,
            (T::INFINITY, EXACT),
            #[inline(always)]
            |a, b| a.smaller(b),
            #[inline(always)]
            |a, b| a.smaller(b),
        ),
        _ => return groups::reduce(exec, k),
    }
    Ok(())
}

/// `depth` elements of a lane are joined in T, what comes of them in f64.
#[inline(always)]
fn fold<T: Float>(
    exec: &Exec,
    x: &Tensor,
    out: &Tensor,
    start: (T, usize),
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync + Copy,
) {
    let (reduced, kept) = split_dims(x, out);
    let outs = Span::<T>::of(out);
    if x.is_empty() {
        return (0..outs.len()).for_each(|i| outs.set(i, start.0));
    }
    // The innermost group of neighbouring dimensions of one kind is the inner axis: a row to reduce, or columns to
    // keep.
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
    start: (T, usize),
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync + Copy,
) {
    let xs = Span::<T>::of(x);
    let group = outer.len * inner.len;
    let axes = (outer, inner);
    let most = if kept.len >= ENOUGH { 1 } else { PIECES };
    let piece = group.div_ceil(group.div_ceil(PIECE).min(most)).next_multiple_of(BLOCK);
    let pieces = group.div_ceil(piece);
    let mut scratch = exec.scratch::<f64>(if pieces > 1 { kept.len * pieces } else { 0 });
    let parts = Span::over(scratch.memory());
    let batch = if pieces > 1 { 1 } else { (PIECE / group).max(1) };
    exec.run::<T>(
        (kept.len * pieces).div_ceil(batch),
        x.len(),
        #[inline(always)]
        |task| {
            for item in task * batch..((task + 1) * batch).min(kept.len * pieces) {
                let (o, from) = (item / pieces, item % pieces * piece);
                let part = fold_piece(xs, kept.offset(o), axes, from..group.min(from + piece), start, join, join_wide);
                if pieces > 1 { parts.set(item, part) } else { out.set(o, T::of(part)) }
            }
        },
    );
    if pieces > 1 {
        for (o, parts) in parts.as_slice().chunks(pieces).enumerate() {
            out.set(o, T::of(parts.iter().copied().reduce(join_wide).unwrap_or(start.0.wide())));
        }
    }
}

/// The fold of some elements of `outer` x `inner`, from `base`.
#[inline(always)]
fn fold_piece<T: Float>(
    xs: Span<T>,
    base: usize,
    (outer, inner): (&Axis, &Axis),
    range: std::ops::Range<usize>,
    (start, depth): (T, usize),
    join: impl Fn(T, T) -> T + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Copy,
) -> f64 {
    let mut lanes = [start; BLOCK];
    let mut wide = [start.wide(); BLOCK];
    // Blocks that the lanes hold, and whether the wide ones hold any.
    let (mut held, mut widened) = (0, depth == 1);
    let mut at = range.start;
    while at < range.end {
        let (row, column) = (at / inner.len, at % inner.len);
        let end = inner.len.min(column + range.end - at);
        let base = base + outer.offset(row);
        let row = match inner.strides[..] {
            [stride] => Some(xs.part(base + column * stride, end - column, stride)),
            _ => None,
        };
        let mut first = column;
        while first < end {
            let to = end.min(first + (depth - held) * BLOCK);
            for i in (first..to).step_by(BLOCK) {
                let block = match row {
                    Some(row) => row.load(i - column, start),
                    None => inner.load(xs, base, i, end, start),
                };
                for j in 0..BLOCK {
                    lanes[j] = join(lanes[j], block[j]);
                }
            }
            held += (to - first).div_ceil(BLOCK);
            first = to;
            if held == depth {
                for j in 0..BLOCK {
                    wide[j] = join_wide(wide[j], lanes[j].wide());
                }
                lanes = [start; BLOCK];
                (held, widened) = (0, true);
            }
        }
        at += end - column;
    }
    if !widened {
        return fold_lanes(lanes, join).wide();
    }
    for j in 0..BLOCK {
        wide[j] = join_wide(wide[j], lanes[j].wide());
    }
    fold_lanes(wide, join_wide)
}

/// Each output (o, c) is the fold over `rows` of column c.
#[inline(always)]
fn fold_columns<T: Float>(
    exec: &Exec,
    x: &Tensor,
    out: Span<T>,
    (outer, rows, columns): (&Axis, &Axis, &Axis),
    (start, depth): (T, usize),
    join: impl Fn(T, T) -> T + Sync + Copy,
    join_wide: impl Fn(f64, f64) -> f64 + Sync + Copy,
) {
    let xs = Span::<T>::of(x);
    let strips = columns.len.div_ceil(COLUMNS);
    // Few columns: the rows are cut too.
    let enough = outer.len * strips >= ENOUGH;
    let piece = if enough { rows.len } else { rows.len.div_ceil(PIECES).max(ROWS) };
    let pieces = rows.len.div_ceil(piece);
    let mut scratch = exec.scratch::<f64>(if pieces > 1 { outer.len * strips * pieces * COLUMNS } else { 0 });
    let parts = Span::over(scratch.memory());
    let put = |o: usize, strip: usize, total: &[f64; COLUMNS]| {
        let first = strip * COLUMNS;
        (first..columns.len.min(first + COLUMNS)).for_each(|c| out.set(o * columns.len + c, T::of(total[c - first])));
    };
    exec.run::<T>(
        outer.len * strips * pieces,
        x.len(),
        #[inline(always)]
        |task| {
            let (o, strip, p) = (task / pieces / strips, task / pieces % strips, task % pieces);
            let (first, end) = (strip * COLUMNS, columns.len.min((strip + 1) * COLUMNS));
            let (from, to) = (p * piece, rows.len.min((p + 1) * piece));
            let mut total = [start.wide(); COLUMNS];
            for from in (from..to).step_by(depth) {
                let mut lanes = [[start; BLOCK]; COLUMNS / BLOCK];
                for r in from..to.min(from + depth) {
                    let base = outer.offset(o) + rows.offset(r);
                    for (lane, i) in lanes.iter_mut().zip((first..end).step_by(BLOCK)) {
                        let block = columns.load(xs, base, i, end, start);
                        for j in 0..BLOCK {
                            lane[j] = join(lane[j], block[j]);
                        }
                    }
                }
                for (sum, &lane) in total.iter_mut().zip(lanes.as_flattened()) {
                    *sum = join_wide(*sum, lane.wide());
                }
            }
            if pieces > 1 {
                parts.sub(task * COLUMNS, COLUMNS).as_mut_slice().copy_from_slice(&total);
            } else {
                put(o, strip, &total);
            }
        },
    );
    for at in 0..outer.len * strips {
        if pieces == 1 {
            break;
        }
        let mut total = [start.wide(); COLUMNS];
        for part in parts.sub(at * pieces * COLUMNS, pieces * COLUMNS).as_slice().chunks(COLUMNS) {
            total.iter_mut().zip(part).for_each(|(sum, &value)| *sum = join_wide(*sum, value));
        }
        put(at / strips, at % strips, &total);
    }
}

/// out `[]` (f64) = sum of squares, in f64.
pub(crate) fn squared_norm(exec: &Exec, k: &kernel::SquaredNorm<'_>) -> Result<()> {
    for_float!("squared_norm", k.x.dtype(), T => squared_norm_of::<T>(exec, k))
}

fn squared_norm_of<T: Float>(exec: &Exec, k: &kernel::SquaredNorm<'_>) {
    let kernel::SquaredNorm { x, out } = *k;
    let axis = Axis::new(x, &(0..x.rank()).collect::<Shape>());
    let len = axis.len;
    let piece = len.div_ceil(PIECES).max(PIECE).next_multiple_of(BLOCK);
    let mut parts = [0f64; PIECES];

    let (xs, sums) = (Span::<T>::of(x), Span::over(&mut parts));
    exec.run::<T>(
        len.div_ceil(piece),
        len,
        #[inline(always)]
        |p| {
            let mut lanes = [0f64; BLOCK];
            let end = len.min((p + 1) * piece);
            for i in (p * piece..end).step_by(BLOCK) {
                let block = axis.load(xs, 0, i, end, T::ZERO);
                for j in 0..BLOCK {
                    let v = block[j].wide();
                    lanes[j] = f64::mul_add(v, v, lanes[j]);
                }
            }
            sums.set(
                p,
                fold_lanes(
                    lanes,
                    #[inline(always)]
                    |a, b| a + b,
                ),
            );
        },
    );

    Span::<f64>::of(out).set(0, parts.iter().sum());
}
