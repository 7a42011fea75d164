//! Softmax over the last dimension, its gradient, and the causal mask.

use crate::exec::{Exec, Target};
use crate::math::{Float, reduce_blocks, sum_blocks};
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::{Result, kernel};

/// Elements that one task handles, in whole rows.
const TASK: usize = 16 * 1024;

/// Calls `body` for each row, in tasks of some rows.
#[inline(always)]
pub(crate) fn for_each_row<T: Target>(
    exec: &Exec,
    rows: usize,
    width: usize,
    cost: usize,
    body: impl Fn(usize) + Sync,
) {
    let batch = (TASK / width.max(1)).max(1);
    exec.run::<T>(
        rows.div_ceil(batch),
        rows * width * cost,
        #[inline(always)]
        |task| {
            for r in task * batch..((task + 1) * batch).min(rows) {
                body(r);
            }
        },
    );
}

/// The largest element of a row; -inf of an empty one, NaN if any is NaN.
#[inline(always)]
pub(crate) fn row_max<T: Float>(x: Span<T>) -> T {
    reduce_blocks(
        x.len(),
        -T::INFINITY,
        #[inline(always)]
        |i| x.load::<BLOCK>(i, -T::INFINITY),
        #[inline(always)]
        |a, b| a.larger(b),
    )
}

/// Sum of exp(x - max).
#[inline(always)]
pub(crate) fn sum_exp<T: Float>(x: Span<T>, max: T) -> T {
    sum_blocks(
        x.len(),
        #[inline(always)]
        |i| {
            let v = x.load::<BLOCK>(i, -T::INFINITY);
            lanes!(j => Float::exp(v[j] - max))
        },
    )
}

/// out_i = exp(x_i - max) / sum_j exp(x_j - max). A row of only -inf gives zeros.
pub(crate) fn softmax(exec: &Exec, k: &kernel::Softmax<'_>) -> Result<()> {
    for_float!("softmax", k.x.dtype(), T => softmax_of::<T>(exec, k))
}

fn softmax_of<T: Float>(exec: &Exec, k: &kernel::Softmax<'_>) {
    let kernel::Softmax { x, out } = *k;
    let (xs, outs) = (Rows::<T>::of(x), Rows::<T>::of(out));
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        12,
        #[inline(always)]
        |r| {
            let (x, o) = (xs.row(r), outs.row(r));
            let max = row_max(x);
            if max == -T::INFINITY {
                return o.fill(T::ZERO);
            }
            let sum = sum_blocks(
                x.len(),
                #[inline(always)]
                |i| {
                    let v = x.load::<BLOCK>(i, -T::INFINITY);
                    let e = lanes!(j => Float::exp(v[j] - max));
                    if !o.rounds() {
                        o.store(i, e);
                    }
                    e
                },
            );
            let inverse = T::ONE / sum;
            for i in (0..o.len()).step_by(BLOCK) {
                let e = if o.rounds() {
                    let v = x.load::<BLOCK>(i, T::ZERO);
                    lanes!(j => Float::exp(v[j] - max))
                } else {
                    o.load::<BLOCK>(i, T::ZERO)
                };
                o.store(i, lanes!(j => e[j] * inverse));
            }
        },
    );
}

/// out = y (g - sum(g y)).
pub(crate) fn softmax_grad(exec: &Exec, k: &kernel::SoftmaxGrad<'_>) -> Result<()> {
    for_float!("softmax_grad", k.y.dtype(), T => softmax_grad_of::<T>(exec, k))
}

fn softmax_grad_of<T: Float>(exec: &Exec, k: &kernel::SoftmaxGrad<'_>) {
    let kernel::SoftmaxGrad { y, g, out } = *k;
    let (ys, gs, outs) = (Rows::<T>::of(y), Rows::<T>::of(g), Rows::<T>::of(out));
    for_each_row::<T>(
        exec,
        ys.count,
        ys.width,
        4,
        #[inline(always)]
        |r| {
            let (y, g, o) = (ys.row(r), gs.row(r), outs.row(r));
            let dot = sum_blocks(
                y.len(),
                #[inline(always)]
                |i| {
                    let (u, v) = (y.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                    lanes!(j => u[j] * v[j])
                },
            );
            for i in (0..o.len()).step_by(BLOCK) {
                let (u, v) = (y.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                o.store(i, lanes!(j => u[j] * (v[j] - dot)));
            }
        },
    );
}

/// out_i = x_i - ln sum_j exp(x_j). A row of only -inf stays so.
pub(crate) fn log_softmax(exec: &Exec, k: &kernel::LogSoftmax<'_>) -> Result<()> {
    for_float!("log_softmax", k.x.dtype(), T => log_softmax_of::<T>(exec, k))
}

fn log_softmax_of<T: Float>(exec: &Exec, k: &kernel::LogSoftmax<'_>) {
    let kernel::LogSoftmax { x, out } = *k;
    let (xs, outs) = (Rows::<T>::of(x), Rows::<T>::of(out));
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        10,
        #[inline(always)]
        |r| {
            let (x, o) = (xs.row(r), outs.row(r));
            let max = row_max(x);
            if max == -T::INFINITY {
                return o.fill(max);
            }
            let log = Float::ln(sum_exp(x, max));
            for i in (0..o.len()).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, T::ZERO);
                o.store(i, lanes!(j => (v[j] - max) - log));
            }
        },
    );
}

/// out = g - e^y sum(g), 0 in a row of only -inf.
pub(crate) fn log_softmax_grad(exec: &Exec, k: &kernel::LogSoftmaxGrad<'_>) -> Result<()> {
    for_float!("log_softmax_grad", k.y.dtype(), T => log_softmax_grad_of::<T>(exec, k))
}

fn log_softmax_grad_of<T: Float>(exec: &Exec, k: &kernel::LogSoftmaxGrad<'_>) {
    let kernel::LogSoftmaxGrad { y, g, out } = *k;
    let (ys, gs, outs) = (Rows::<T>::of(y), Rows::<T>::of(g), Rows::<T>::of(out));
    for_each_row::<T>(
        exec,
        ys.count,
        ys.width,
        10,
        #[inline(always)]
        |r| {
            let (y, g, o) = (ys.row(r), gs.row(r), outs.row(r));
            if row_max(y) == -T::INFINITY {
                return o.fill(T::ZERO);
            }
            let sum = sum_blocks(
                g.len(),
                #[inline(always)]
                |i| g.load::<BLOCK>(i, T::ZERO),
            );
            for i in (0..o.len()).step_by(BLOCK) {
                let (u, v) = (y.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                o.store(i, lanes!(j => v[j] - Float::exp(u[j]) * sum));
            }
        },
    );
}

/// x `[.., rows, columns]`; out = x where j - i <= diagonal (>= with `upper`), else value.
pub(crate) fn triangle(exec: &Exec, k: &kernel::Triangle<'_>) -> Result<()> {
    for_float!("triangle", k.x.dtype(), T => triangle_of::<T>(exec, k))
}

fn triangle_of<T: Float>(exec: &Exec, k: &kernel::Triangle<'_>) {
    let kernel::Triangle { x, upper, diagonal, value, out } = *k;
    let (rows, columns) = (x.shape()[x.rank() - 2], x.shape()[x.rank() - 1]);

    let (xs, outs, value) = (Rows::<T>::of(x), Rows::<T>::of(out), T::of(value));
    for_each_row::<T>(
        exec,
        xs.count,
        columns,
        1,
        #[inline(always)]
        |r| {
            let (x, o) = (xs.row(r), outs.row(r));
            let on = diagonal.saturating_add((r % rows) as isize);
            let within = |j: isize| j.clamp(0, columns as isize) as usize;
            let (first, end) = if upper { (within(on), columns) } else { (0, within(on.saturating_add(1))) };
            for i in (0..columns).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, value);
                o.store(i, lanes!(j => if first <= i + j && i + j < end { v[j] } else { value }));
            }
        },
    );
}
