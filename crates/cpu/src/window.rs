//! Windows over planes: columns for convolutions (im2col and its transpose) and pooling. A task owns planes, so every
//! sum is made by one task in a fixed order.

use crate::exec::Exec;
use crate::halves::{Cell, unrounded};
use crate::math::Float;
use crate::view::{Span, for_float, unsupported};
use retape_core::kernel::{self, PoolDivisor, Window};
use retape_core::{DType, Result, Tensor};

/// A tensor `[n, channels, height, width]` of any strides.
#[derive(Debug, Clone, Copy)]
struct Planes<T> {
    span: Span<T>,
    strides: [usize; 4],
    channels: usize,
    count: usize,
    size: [usize; 2],
}

impl<T: Cell> Planes<T> {
    fn of(tensor: &Tensor) -> Planes<T> {
        let shape = tensor.shape();
        Planes {
            span: Span::of(tensor),
            strides: std::array::from_fn(|d| tensor.layout().strides[d]),
            channels: shape[1],
            count: shape[0] * shape[1],
            size: [shape[2], shape[3]],
        }
    }

    /// Row `y` of a plane.
    #[inline(always)]
    fn row(&self, plane: usize, y: usize) -> Span<T> {
        let start =
            plane / self.channels * self.strides[0] + plane % self.channels * self.strides[1] + y * self.strides[2];
        self.span.part(start, self.size[1], self.strides[3])
    }
}

/// The work of all places of the window for each element of a tensor.
fn work(of: &Tensor, w: &Window) -> usize {
    of.len().saturating_mul(w.kernel[0]).saturating_mul(w.kernel[1])
}

/// Along dimension `d`, the outputs `0 .. outputs` that see an element of `size` at place `k` of the window.
#[inline(always)]
fn inside(w: &Window, d: usize, k: usize, size: usize, outputs: usize) -> std::ops::Range<usize> {
    let (shift, before, stride) = (k * w.dilation[d], w.before[d], w.stride[d]);
    let first = before.saturating_sub(shift).div_ceil(stride).min(outputs);
    let end = (size + before).saturating_sub(shift).div_ceil(stride).min(outputs);
    first..end.max(first)
}

/// Where output `o` sees at place `k` along dimension `d`, if inside (see [`inside`]).
#[inline(always)]
fn at(w: &Window, d: usize, k: usize, o: usize) -> usize {
    o * w.stride[d] + k * w.dilation[d] - w.before[d]
}

/// Along dimension `d`, which of the outputs `0 .. outputs` sees element `i` at place `k` of the window, if one does.
#[inline(always)]
fn seeing(w: &Window, d: usize, k: usize, i: usize, outputs: usize) -> Option<usize> {
    let from = (i + w.before[d]).checked_sub(k * w.dilation[d])?;
    Some(from / w.stride[d]).filter(|&o| o < outputs && from.is_multiple_of(w.stride[d]))
}

/// The places of the window along dimension `d` at which output `o` sees an element of `size`.
#[inline(always)]
fn seen(w: &Window, d: usize, o: usize, size: usize) -> std::ops::Range<usize> {
    let (start, before, dilation) = (o * w.stride[d], w.before[d], w.dilation[d]);
    let first = before.saturating_sub(start).div_ceil(dilation).min(w.kernel[d]);
    let end = (size + before).saturating_sub(start).div_ceil(dilation).min(w.kernel[d]);
    first..end.max(first)
}

/// Columns: see [`retape_core::kernel::Im2col`].
pub(crate) fn im2col(exec: &Exec, k: &kernel::Im2col<'_>) -> Result<()> {
    for_float!("im2col", k.x.dtype(), T => im2col_of::<T>(exec, k))
}

fn im2col_of<T: Float>(exec: &Exec, k: &kernel::Im2col<'_>) {
    let kernel::Im2col { x, window: w, out } = *k;
    let (oh, ow) = (out.shape()[4], out.shape()[5]);
    let places = w.kernel[0] * w.kernel[1];

    let (xs, outs) = (Planes::<T>::of(x), Span::<T>::of(out));
    // A task is a place of the window over one plane.
    exec.run::<T>(
        xs.count * places,
        out.len(),
        #[inline(always)]
        |task| {
            let (plane, ky, kx) = (task / places, task % places / w.kernel[1], task % w.kernel[1]);
            let target = outs.sub(task * oh * ow, oh * ow);
            let (ys, cols) = (inside(&w, 0, ky, xs.size[0], oh), inside(&w, 1, kx, xs.size[1], ow));
            for y in 0..oh {
                let row = target.sub(y * ow, ow);
                if !ys.contains(&y) || cols.is_empty() {
                    row.fill(T::ZERO);
                    continue;
                }
                row.sub(0, cols.start).fill(T::ZERO);
                row.sub(cols.end, ow - cols.end).fill(T::ZERO);
                let source = xs.row(plane, at(&w, 0, ky, y));
                let first = at(&w, 1, kx, cols.start);
                row.sub(cols.start, cols.len()).copy_from(source.every(first, cols.len(), w.stride[1]));
            }
        },
    );
}

/// The transpose of columns.
pub(crate) fn col2im(exec: &Exec, k: &kernel::Col2im<'_>) -> Result<()> {
    for_float!("col2im", k.out.dtype(), T => col2im_of::<T>(exec, k))
}

fn col2im_of<T: Float>(exec: &Exec, k: &kernel::Col2im<'_>) {
    let kernel::Col2im { cols, window: w, out } = *k;
    let (oh, ow) = (cols.shape()[4], cols.shape()[5]);
    let places = w.kernel[0] * w.kernel[1];

    let (outs, columns) = (Planes::<T>::of(out), Span::<T>::of(cols));
    exec.run::<T>(
        outs.count,
        cols.len(),
        #[inline(always)]
        |plane| {
            for y in 0..outs.size[0] {
                unrounded(
                    exec,
                    outs.row(plane, y),
                    #[inline(always)]
                    |row| {
                        row.fill(T::ZERO);
                        for place in 0..places {
                            let (ky, kx) = (place / w.kernel[1], place % w.kernel[1]);
                            let Some(o) = seeing(&w, 0, ky, y, oh) else { continue };
                            let source = columns.sub((plane * places + place) * oh * ow + o * ow, ow);
                            for x in inside(&w, 1, kx, outs.size[1], ow) {
                                let i = at(&w, 1, kx, x);
                                row.set(i, row.get(i) + source.get(x));
                            }
                        }
                    },
                );
            }
        },
    );
}

/// Integers that may be i64 or i32.
#[derive(Debug, Clone, Copy)]
enum Indices {
    Wide(Planes<i64>),
    Narrow(Planes<i32>),
}

impl Indices {
    fn of(kernel: &'static str, tensor: &Tensor) -> Result<Indices> {
        match tensor.dtype() {
            DType::I64 => Ok(Indices::Wide(Planes::of(tensor))),
            DType::I32 => Ok(Indices::Narrow(Planes::of(tensor))),
            other => Err(unsupported(kernel, other)),
        }
    }
    #[inline(always)]
    fn put(&self, plane: usize, y: usize, x: usize, value: i64) {
        match self {
            Indices::Wide(p) => p.row(plane, y).set(x, value),
            Indices::Narrow(p) => p.row(plane, y).set(x, value as i32),
        }
    }
    #[inline(always)]
    fn get(&self, plane: usize, y: usize, x: usize) -> i64 {
        match self {
            Indices::Wide(p) => p.row(plane, y).get(x),
            Indices::Narrow(p) => p.row(plane, y).get(x) as i64,
        }
    }
}

pub(crate) fn max_pool(exec: &Exec, k: &kernel::MaxPool<'_>) -> Result<()> {
    for_float!("max_pool", k.x.dtype(), T => max_pool_of::<T>(exec, k))?
}

fn max_pool_of<T: Float>(exec: &Exec, k: &kernel::MaxPool<'_>) -> Result<()> {
    let kernel::MaxPool { x, window: w, out, index } = *k;
    let (xs, outs, indices) = (Planes::<T>::of(x), Planes::<T>::of(out), Indices::of("max_pool", index)?);
    exec.run::<T>(
        outs.count,
        work(out, &w),
        #[inline(always)]
        |plane| {
            for oy in 0..outs.size[0] {
                for ox in 0..outs.size[1] {
                    // A window that sees nothing: -inf, and an index that is none.
                    let (mut largest, mut place) = (-T::INFINITY, -1);
                    for ky in seen(&w, 0, oy, xs.size[0]) {
                        let y = at(&w, 0, ky, oy);
                        let row = xs.row(plane, y);
                        for kx in seen(&w, 1, ox, xs.size[1]) {
                            let x = at(&w, 1, kx, ox);
                            let v = row.get(x);
                            if place < 0 || v > largest || v.partial_cmp(&v).is_none() {
                                (largest, place) = (v, (y * xs.size[1] + x) as i64);
                            }
                        }
                    }
                    outs.row(plane, oy).set(ox, largest);
                    indices.put(plane, oy, ox, place);
                }
            }
        },
    );
    Ok(())
}

/// Elements of a plane whose gradients are summed at a time where sums would be rounded.
const STRIP: usize = 64 * 1024;

pub(crate) fn max_pool_grad(exec: &Exec, k: &kernel::MaxPoolGrad<'_>) -> Result<()> {
    for_float!("max_pool_grad", k.g.dtype(), T => max_pool_grad_of::<T>(exec, k))?
}

fn max_pool_grad_of<T: Float>(exec: &Exec, k: &kernel::MaxPoolGrad<'_>) -> Result<()> {
    let kernel::MaxPoolGrad { index, g, window: w, out } = *k;
    if out.is_empty() {
        return Ok(());
    }

    let (gs, outs, indices) = (Planes::<T>::of(g), Planes::<T>::of(out), Indices::of("max_pool_grad", index)?);
    let [height, width] = outs.size;
    exec.run::<T>(
        outs.count,
        g.len() + out.len(),
        #[inline(always)]
        |plane| {
            // Outputs in their order: an element's gradients are added in it, however many rows are summed at a time.
            if !outs.span.rounds() {
                for y in 0..height {
                    outs.row(plane, y).fill(T::ZERO);
                }
                for oy in 0..gs.size[0] {
                    let row = gs.row(plane, oy);
                    for ox in 0..gs.size[1] {
                        // What lies outside the plane, in indices that no pooling has made, is another task's.
                        let place = usize::try_from(indices.get(plane, oy, ox)).ok();
                        let Some(place) = place.filter(|&place| place < height * width) else { continue };
                        let (sums, x) = (outs.row(plane, place / width), place % width);
                        sums.set(x, sums.get(x) + row.get(ox));
                    }
                }
                return;
            }
            // Some rows at a time, in scratch.
            let strip = (STRIP / width).clamp(1, height);
            let mut scratch = exec.scratch::<T>(strip * width);
            for first in (0..height).step_by(strip) {
                let end = height.min(first + strip);
                let sums = &mut scratch.memory()[..width * (end - first)];
                sums.fill(T::ZERO);
                for oy in meeting(&w, first..end, gs.size[0]) {
                    for ox in 0..gs.size[1] {
                        let place = usize::try_from(indices.get(plane, oy, ox)).ok();
                        if let Some(sum) = place.and_then(|p| sums.get_mut(p.checked_sub(first * width)?)) {
                            *sum += gs.row(plane, oy).get(ox);
                        }
                    }
                }
                for (r, row) in sums.chunks_mut(width).enumerate() {
                    outs.row(plane, first + r).copy_from(Span::over(row));
                }
            }
        },
    );
    Ok(())
}

/// Which of the output rows `0 .. outputs` have windows that meet these rows of the input.
fn meeting(w: &Window, rows: std::ops::Range<usize>, outputs: usize) -> std::ops::Range<usize> {
    let reach = w.dilation[0] * (w.kernel[0] - 1);
    let first = (rows.start + w.before[0]).saturating_sub(reach).div_ceil(w.stride[0]);
    let end = (rows.end + w.before[0]).div_ceil(w.stride[0]).min(outputs);
    first.min(end)..end
}

/// Along dimension `d`, how many elements of the input of `size` and of its padding output `o` sees.
#[inline(always)]
fn padded(w: &Window, d: usize, o: usize, size: usize) -> usize {
    let start = o * w.stride[d];
    (start + w.kernel[d]).min(size + 2 * w.before[d]).saturating_sub(start)
}

/// What output (y, x) is divided by.
#[inline(always)]
fn count(w: &Window, divisor: PoolDivisor, (y, x): (usize, usize), size: [usize; 2]) -> f64 {
    match divisor {
        PoolDivisor::Inside => (seen(w, 0, y, size[0]).len() * seen(w, 1, x, size[1]).len()) as f64,
        PoolDivisor::Padded => (padded(w, 0, y, size[0]) * padded(w, 1, x, size[1])) as f64,
        PoolDivisor::Fixed(n) => n as f64,
    }
}

pub(crate) fn avg_pool(exec: &Exec, k: &kernel::AvgPool<'_>) -> Result<()> {
    for_float!("avg_pool", k.x.dtype(), T => avg_pool_of::<T>(exec, k))
}

fn avg_pool_of<T: Float>(exec: &Exec, k: &kernel::AvgPool<'_>) {
    let kernel::AvgPool { x, window: w, divisor, out } = *k;
    let (xs, outs) = (Planes::<T>::of(x), Planes::<T>::of(out));
    exec.run::<T>(
        outs.count,
        work(out, &w),
        #[inline(always)]
        |plane| {
            for oy in 0..outs.size[0] {
                for ox in 0..outs.size[1] {
                    let (columns, mut sum) = (seen(&w, 1, ox, xs.size[1]), 0.0);
                    for ky in seen(&w, 0, oy, xs.size[0]) {
                        let row = xs.row(plane, at(&w, 0, ky, oy));
                        for kx in columns.clone() {
                            sum += row.get(at(&w, 1, kx, ox)).wide();
                        }
                    }
                    let nothing = seen(&w, 0, oy, xs.size[0]).is_empty() || columns.is_empty();
                    let mean = sum / count(&w, divisor, (oy, ox), xs.size);
                    outs.row(plane, oy).set(ox, if nothing { T::ZERO } else { T::of(mean) });
                }
            }
        },
    );
}

pub(crate) fn avg_pool_grad(exec: &Exec, k: &kernel::AvgPoolGrad<'_>) -> Result<()> {
    for_float!("avg_pool_grad", k.g.dtype(), T => avg_pool_grad_of::<T>(exec, k))
}

fn avg_pool_grad_of<T: Float>(exec: &Exec, k: &kernel::AvgPoolGrad<'_>) {
    let kernel::AvgPoolGrad { g, window: w, divisor, out } = *k;
    let (gs, outs) = (Planes::<T>::of(g), Planes::<T>::of(out));
    exec.run::<T>(
        outs.count,
        work(g, &w),
        #[inline(always)]
        |plane| {
            for y in 0..outs.size[0] {
                unrounded(
                    exec,
                    outs.row(plane, y),
                    #[inline(always)]
                    |row| {
                        row.fill(T::ZERO);
                        // Later places of the window are those of earlier outputs.
                        for ky in (0..w.kernel[0]).rev() {
                            let Some(oy) = seeing(&w, 0, ky, y, gs.size[0]) else { continue };
                            for ox in 0..gs.size[1] {
                                let share = gs.row(plane, oy).get(ox) / T::of(count(&w, divisor, (oy, ox), outs.size));
                                for kx in seen(&w, 1, ox, outs.size[1]) {
                                    let x = at(&w, 1, kx, ox);
                                    row.set(x, row.get(x) + share);
                                }
                            }
                        }
                    },
                );
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All outputs that see a row of a strip; and over all strips few more than there are.
    #[test]
    fn a_strip_is_met_by_few_outputs() {
        for (kernel, stride, before, dilation) in
            [(2, 2, 0, 1), (3, 1, 1, 1), (1, 3, 0, 1), (3, 2, 4, 4), (5, 7, 2, 1), (1, 20, 0, 1), (4, 1, 6, 5)]
        {
            let w = Window { kernel: [kernel, 1], stride: [stride, 1], before: [before, 0], dilation: [dilation, 1] };
            let (height, reach) = (60, dilation * (kernel - 1));
            let outputs = (height + 2 * before - reach - 1) / stride + 1;
            for strip in [1, 7, 16, 60, 100] {
                let mut visits = 0;
                for first in (0..height).step_by(strip) {
                    let rows = first..height.min(first + strip);
                    let met = meeting(&w, rows.clone(), outputs);
                    for oy in 0..outputs {
                        let sees = seen(&w, 0, oy, height).any(|k| rows.contains(&at(&w, 0, k, oy)));
                        assert!(!sees || met.contains(&oy), "{w:?} {rows:?}: output {oy} is left out of {met:?}");
                    }
                    visits += met.len();
                }
                let strips = height.div_ceil(strip);
                assert!(visits <= outputs + strips * (reach / stride + 1), "{w:?}, strips of {strip}: {visits} visits");
            }
        }
    }
}
