//! Running folds along a dimension. Each line is one task's own, walked in order; it runs in f64.

use crate::exec::Exec;
use crate::groups::piece_of;
use crate::math::Float;
use crate::reduce::Axis;
use crate::view::{Span, for_float};
use retape_core::kernel::{self, ScanFn};
use retape_core::layout::Shape;
use retape_core::{Result, Tensor};

/// Elements that one task handles, in whole lines.
const TASK: usize = 16 * 1024;

/// A tensor as lines along a dimension.
#[derive(Debug)]
struct Lines<T> {
    span: Span<T>,
    others: Axis,
    stride: usize,
    len: usize,
}

impl<T: Float> Lines<T> {
    fn of(x: &Tensor, dim: usize) -> Lines<T> {
        let others: Shape = (0..x.rank()).filter(|&d| d != dim).collect();
        let (stride, len) = (x.layout().strides[dim], x.shape()[dim]);
        Lines { span: Span::of(x), others: Axis::new(x, &others), stride, len }
    }

    #[inline(always)]
    fn line(&self, k: usize) -> Span<T> {
        self.span.part(self.others.offset(k), self.len, self.stride)
    }

    #[inline(always)]
    fn for_each(&self, exec: &Exec, cost: usize, body: impl Fn(usize) + Sync) {
        if self.len == 0 {
            return;
        }
        let batch = (TASK / self.len).max(1);
        exec.run::<T>(
            self.others.len.div_ceil(batch),
            self.others.len * self.len * cost,
            #[inline(always)]
            |task| {
                for k in task * batch..((task + 1) * batch).min(self.others.len) {
                    body(k);
                }
            },
        );
    }
}

/// out = running fold of x along `dim`.
pub(crate) fn scan(exec: &Exec, k: &kernel::Scan<'_>) -> Result<()> {
    for_float!("scan", k.x.dtype(), T => scan_of::<T>(exec, k))
}

fn scan_of<T: Float>(exec: &Exec, k: &kernel::Scan<'_>) {
    let kernel::Scan { f, x, dim, out } = *k;
    let (xs, outs) = (Lines::<T>::of(x, dim), Lines::<T>::of(out, dim));
    xs.for_each(
        exec,
        2,
        #[inline(always)]
        |k| {
            let (x, o) = (xs.line(k), outs.line(k));
            let mut running = if f == ScanFn::Prod { 1.0 } else { 0.0 };
            for i in 0..xs.len {
                let i = if f == ScanFn::SumToEnd { xs.len - 1 - i } else { i };
                let v = x.get(i).wide();
                running = if f == ScanFn::Prod { running * v } else { running + v };
                o.set(i, T::of(running));
            }
        },
    );
}

/// out_i = P_i S_i with P_i the product of all x before i and S_i = g_i + x_(i+1) S_(i+1).
pub(crate) fn cumprod_grad(exec: &Exec, k: &kernel::CumprodGrad<'_>) -> Result<()> {
    for_float!("cumprod_grad", k.x.dtype(), T => cumprod_grad_of::<T>(exec, k))
}

fn cumprod_grad_of<T: Float>(exec: &Exec, k: &kernel::CumprodGrad<'_>) {
    let kernel::CumprodGrad { x, g, dim, out } = *k;
    let [xs, gs, outs] = [x, g, out].map(|t| Lines::<T>::of(t, dim));
    xs.for_each(
        exec,
        4,
        #[inline(always)]
        |k| {
            let (x, g, o) = (xs.line(k), gs.line(k), outs.line(k));
            // x_(i+1) S_(i+1) at the last i of each piece; within the piece it runs on.
            let piece = piece_of(xs.len);
            let mut scratch = exec.scratch::<f64>(xs.len.div_ceil(piece) + piece);
            let (behind, sums) = scratch.memory().split_at_mut(xs.len.div_ceil(piece));
            behind.fill(0.0);
            let step = |after: f64, i: usize| (after + g.get(i).wide()) * x.get(i).wide();
            for p in (1..behind.len()).rev() {
                behind[p - 1] = (p * piece..xs.len.min((p + 1) * piece)).rev().fold(behind[p], step);
            }
            let mut before = 1.0;
            for (p, &behind) in behind.iter().enumerate() {
                let (first, end) = (p * piece, xs.len.min((p + 1) * piece));
                let mut after = behind;
                for i in (first..end).rev() {
                    sums[i - first] = after + g.get(i).wide();
                    after = step(after, i);
                }
                for i in first..end {
                    o.set(i, T::of(before * sums[i - first]));
                    before *= x.get(i).wide();
                }
            }
        },
    );
}
