//! Symmetric absmax int8 by groups of consecutive elements of the last dimension: q = (x / scale) 127 rounded to
//! nearest even, or up with the probability of what is cut off. The scale is the largest magnitude and not its 127th
//! part: that may be subnormal, and 127 times it more than the largest number. Each row is read once: a group stays
//! in cache between its absmax and its rounding.

use crate::exec::Exec;
use crate::math::{Float, reduce_blocks};
use crate::random::words;
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::Result;
use retape_core::kernel::{self, RandomStream};

pub(crate) fn quantize(exec: &Exec, k: &kernel::Quantize<'_>) -> Result<()> {
    for_float!("quantize", k.x.dtype(), T => quantize_of::<T>(exec, k))
}

fn quantize_of<T: Float>(exec: &Exec, k: &kernel::Quantize<'_>) {
    let kernel::Quantize { x, group, rounding, q, scales } = *k;
    let (xs, qs, scales) = (Rows::<T>::of(x), Rows::<u8>::of(q), Span::<T>::of(scales));
    let groups = xs.width.div_ceil(group);
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        3,
        #[inline(always)]
        |r| {
            let (x, q) = (xs.row(r), qs.row(r));
            for k in 0..groups {
                let (first, len) = (k * group, group.min(xs.width - k * group));
                let draws = rounding.map(|stream| (stream, (r * xs.width + first) as u64));
                scales.set(r * groups + k, quantize_group::<T>(x.sub(first, len), q.sub(first, len), draws));
            }
        },
    );
}

/// Quantizes one group and gives its scale. `draws`: the stream that decides what is rounded up, and the first
/// element's number in it.
#[inline(always)]
fn quantize_group<T: Float>(x: Span<T>, q: Span<u8>, draws: Option<(RandomStream, u64)>) -> T {
    let absmax = reduce_blocks(
        x.len(),
        T::ZERO,
        #[inline(always)]
        |i| {
            let v = x.load::<BLOCK>(i, T::ZERO);
            lanes!(j => v[j].magnitude())
        },
        #[inline(always)]
        |a, b| a.larger(b),
    );
    // NaN anywhere makes absmax NaN.
    let finite = absmax < T::INFINITY;
    let steps = T::of(127.0);
    // A loop for each, so that the usual one has no branch in it. No quotient is beyond 1, so none needs a limit.
    if absmax == T::ZERO || !finite {
        q.fill(0);
    } else if let Some((stream, start)) = draws {
        // The nearest whole number to the floor is the floor.
        let up = |x: T, word: u32| T::of((x.wide() + f64::from(word) / 4_294_967_296.0).floor());
        for i in (0..x.len()).step_by(BLOCK) {
            let (block, words) = (x.load::<BLOCK>(i, T::ZERO), words(stream, start + i as u64));
            q.store(i, lanes!(j => up(block[j] / absmax * steps, words[j]).to_byte()));
        }
    } else {
        for i in (0..x.len()).step_by(BLOCK) {
            let block = x.load::<BLOCK>(i, T::ZERO);
            q.store(i, lanes!(j => (block[j] / absmax * steps).to_byte()));
        }
    }
    if finite { absmax } else { T::of(f64::NAN) }
}

pub(crate) fn dequantize(exec: &Exec, k: &kernel::Dequantize<'_>) -> Result<()> {
    for_float!("dequantize", k.out.dtype(), T => dequantize_of::<T>(exec, k))
}

fn dequantize_of<T: Float>(exec: &Exec, k: &kernel::Dequantize<'_>) {
    let kernel::Dequantize { q, scales, group, out } = *k;
    let (qs, outs) = (Rows::<u8>::of(q), Rows::<T>::of(out));
    let scales = Rows::<T>::of(scales);
    let (groups, step) = (outs.width.div_ceil(group), T::of(1.0 / 127.0));
    for_each_row::<T>(
        exec,
        outs.count,
        outs.width,
        2,
        #[inline(always)]
        |r| {
            let (q, o) = (qs.row(r), outs.row(r));
            for k in 0..groups {
                let (first, len) = (k * group, group.min(outs.width - k * group));
                let scale = scales.row(r).get(k);
                let (q, o) = (q.sub(first, len), o.sub(first, len));
                for i in (0..len).step_by(BLOCK) {
                    let block = q.load::<BLOCK>(i, 0);
                    o.store(i, lanes!(j => T::of_byte(block[j]) * step * scale));
                }
            }
        },
    );
}
