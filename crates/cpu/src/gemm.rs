//! Matrix product: out (+)= alpha a b, by faer's kernels on fixed tiles of `out`.
//!
//! The tiles follow from the shape alone. Each is computed by one thread over the whole of k (where that is long, in
//! pieces), so the result has the same bits for any number of threads. faer is equally fast for every orientation of
//! its operands, so views go in as they are. Operands of 16 bits are widened a block at a time: their tile of `out`
//! is summed over k in f32 and rounded once.

use crate::exec::{Baseline, Exec};
use crate::math::Float;
use crate::view::{Span, for_float, offset_of};
use faer::linalg::matmul::matmul as faer_matmul;
use faer::{Accum, MatMut, MatRef, Par};
use retape_core::{Result, Tensor, kernel};

/// Rows and columns of a tile: small enough to give every thread some, large enough to pack operands rarely.
const TILE: (usize, usize) = (256, 384);

/// From this k on a product is the sum of several.
const PIECE: usize = 4096;

/// How much of k is widened at a time.
const DEPTH: usize = 256;

/// A matrix somewhere in a tensor: first element, size and strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<T> {
    pub span: Span<T>,
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<T: Float> Matrix<T> {
    /// The row-major matrix at the start of a task's own memory, with rows `row_stride` apart.
    pub fn over(memory: &mut [T], rows: usize, cols: usize, row_stride: usize) -> Matrix<T> {
        Matrix { span: Span::over(memory), start: 0, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Matrix<T> {
        Matrix { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Rows `r.0 ..` (`r.1` of them) and columns `c.0 ..` (`c.1` of them).
    pub fn block(self, r: (usize, usize), c: (usize, usize)) -> Matrix<T> {
        let start = self.start + r.0 * self.row_stride + c.0 * self.col_stride;
        Matrix { start, rows: r.1, cols: c.1, ..self }
    }

    /// This matrix, or a copy of it in `memory` where its elements lie as 16 bits.
    pub fn widened(self, memory: &mut [T]) -> Matrix<T> {
        if !self.span.rounds() {
            return self;
        }
        if self.row_stride < self.col_stride {
            return self.t().widened(memory).t();
        }
        let copy = Matrix::over(memory, self.rows, self.cols, self.cols);
        copy.copy_from(self);
        copy
    }

    /// Copies a matrix of the same size.
    fn copy_from(self, source: Matrix<T>) {
        (0..self.rows).for_each(|r| self.row(r).copy_from(source.row(r)));
    }

    /// Row `r`.
    #[inline(always)]
    pub fn row(self, r: usize) -> Span<T> {
        self.span.part(self.start + r * self.row_stride, self.cols, self.col_stride)
    }

    fn checked(self) -> *mut T {
        if self.rows > 0 && self.cols > 0 {
            let last = self.start + (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
            assert!(last < self.span.len(), "a matrix reaches past its tensor");
        }
        self.span.ptr().wrapping_add(self.start)
    }
}

/// out (+)= alpha a b on one thread. `out` shares no element with a and b.
pub(crate) fn product<T: Float>(out: Matrix<T>, accumulate: bool, a: Matrix<T>, b: Matrix<T>, alpha: T) {
    assert!(a.rows == out.rows && a.cols == b.rows && b.cols == out.cols);
    if a.cols == 0 || out.rows == 0 || out.cols == 0 {
        if !accumulate {
            for r in 0..out.rows {
                for c in 0..out.cols {
                    out.span.set(out.start + r * out.row_stride + c * out.col_stride, T::ZERO);
                }
            }
        }
        return;
    }
    let beta = if accumulate { Accum::Add } else { Accum::Replace };
    let view = |m: Matrix<T>| {
        // SAFETY: `checked` found the matrix inside its span, and nothing writes a and b meanwhile.
        unsafe {
            MatRef::from_raw_parts(
                m.checked() as *const T,
                m.rows,
                m.cols,
                m.row_stride as isize,
                m.col_stride as isize,
            )
        }
    };
    // SAFETY: as above; `out` belongs to this task alone and its strides give distinct elements.
    let target = unsafe {
        let (rs, cs) = (out.row_stride as isize, out.col_stride as isize);
        MatMut::from_raw_parts_mut(out.checked(), out.rows, out.cols, rs, cs)
    };
    faer_matmul(target, beta, view(a), view(b), alpha, Par::Seq);
}

/// The same where some of them lie as 16 bits.
fn product_of_halves<T: Float>(exec: &Exec, out: Matrix<T>, accumulate: bool, a: Matrix<T>, b: Matrix<T>, alpha: T) {
    let (rows, cols, k) = (out.rows, out.cols, a.cols);
    let depth = k.min(DEPTH);
    let mut scratch = exec.scratch::<T>(rows * cols + depth * (rows + cols));
    let (sum_memory, memory) = scratch.memory().split_at_mut(rows * cols);
    let (a_memory, b_memory) = memory.split_at_mut(rows * depth);
    let sum = Matrix::over(sum_memory, rows, cols, cols);
    if accumulate {
        sum.copy_from(out);
    }
    for from in (0..k.max(1)).step_by(DEPTH) {
        let part = (from, DEPTH.min(k - from));
        let (a, b) = (a.block((0, rows), part).widened(a_memory), b.block(part, (0, cols)).widened(b_memory));
        product(sum, accumulate || from > 0, a, b, alpha);
    }
    out.copy_from(sum);
}

/// The same with k in pieces, whose products are added with compensation (Kahan 1965): over very many addends the error
/// of f32 sums would grow with their number.
fn product_in_pieces<T: Float>(exec: &Exec, out: Matrix<T>, accumulate: bool, a: Matrix<T>, b: Matrix<T>, alpha: T) {
    let (rows, cols, k) = (out.rows, out.cols, a.cols);
    let mut scratch = exec.scratch::<T>(3 * rows * cols);
    let (sum_memory, memory) = scratch.memory().split_at_mut(rows * cols);
    let (lost, part_memory) = memory.split_at_mut(rows * cols);
    let (sum, part) = (Matrix::over(sum_memory, rows, cols, cols), Matrix::over(part_memory, rows, cols, cols));
    sum.span.fill(T::ZERO);
    lost.fill(T::ZERO);
    if accumulate {
        sum.copy_from(out);
    }
    for from in (0..k).step_by(PIECE) {
        let piece = (from, PIECE.min(k - from));
        product_of_any(exec, part, false, a.block((0, rows), piece), b.block(piece, (0, cols)), alpha);
        for (i, lost) in lost.iter_mut().enumerate() {
            let (old, added) = (sum.span.get(i), part.span.get(i) - *lost);
            let new = old + added;
            // What is infinite or no number loses nothing.
            *lost = if (new - old).magnitude() < T::INFINITY { (new - old) - added } else { T::ZERO };
            sum.span.set(i, new);
        }
    }
    out.copy_from(sum);
}

/// The product, where some may lie as 16 bits.
fn product_of_any<T: Float>(exec: &Exec, out: Matrix<T>, accumulate: bool, a: Matrix<T>, b: Matrix<T>, alpha: T) {
    if [a.span, b.span, out.span].iter().any(|s| s.rounds()) {
        product_of_halves(exec, out, accumulate, a, b, alpha);
    } else {
        product(out, accumulate, a, b, alpha);
    }
}

/// The `index`-th matrix of a tensor `[.., rows, cols]`.
fn matrix<T: Float>(tensor: &Tensor, index: usize) -> Matrix<T> {
    let layout = tensor.layout();
    let batch = layout.rank() - 2;
    Matrix {
        span: Span::of(tensor),
        start: offset_of(index, &layout.shape[..batch], &layout.strides[..batch]),
        rows: layout.shape[batch],
        cols: layout.shape[batch + 1],
        row_stride: layout.strides[batch],
        col_stride: layout.strides[batch + 1],
    }
}

/// Cuts `len` into equal pieces of at most `most`, each a multiple of 16 but the last.
fn cut(len: usize, most: usize) -> usize {
    len.div_ceil(len.div_ceil(most).max(1)).next_multiple_of(16)
}

/// out (+)= alpha a b, `[.., m, k] x [.., k, n]`.
pub(crate) fn matmul(exec: &Exec, k: &kernel::Matmul<'_>) -> Result<()> {
    for_float!("matmul", k.out.dtype(), T => matmul_of::<T>(exec, k))
}

fn matmul_of<T: Float>(exec: &Exec, k: &kernel::Matmul<'_>) {
    let kernel::Matmul { a, b, alpha, accumulate, out } = *k;
    if out.is_empty() {
        return;
    }
    let rank = out.rank();
    let (m, n, k) = (out.shape()[rank - 2], out.shape()[rank - 1], a.shape()[rank - 1]);
    let batch = out.len() / (m * n);
    let (rows, cols) = (cut(m, TILE.0), cut(n, TILE.1));
    let (down, across) = (m.div_ceil(rows), n.div_ceil(cols));
    let tiles = batch * down * across;
    // Tiny products go several to a task.
    let together = (64 * 1024 / (rows.min(m) * cols.min(n) * k.max(1)).max(1)).clamp(1, 1024);

    let alpha = T::of(alpha);
    exec.run::<Baseline>(tiles.div_ceil(together), (batch * m * n).saturating_mul(k / 8 + 1), |task| {
        for tile in task * together..((task + 1) * together).min(tiles) {
            let (index, down_at, across_at) = (tile / (down * across), tile / across % down, tile % across);
            let (r, c) = (down_at * rows, across_at * cols);
            let (r, c) = ((r, rows.min(m - r)), (c, cols.min(n - c)));
            let (a, b) = (matrix::<T>(a, index).block(r, (0, k)), matrix::<T>(b, index).block((0, k), c));
            let out = matrix::<T>(out, index).block(r, c);
            if k > PIECE {
                product_in_pieces(exec, out, accumulate, a, b, alpha);
            } else {
                product_of_any(exec, out, accumulate, a, b, alpha);
            }
        }
    });
}
