//! Elements by their position: reversed, gathered by index, and added at an index.

use crate::exec::{Baseline, Exec};
use crate::loss::integers;
use crate::math::Float;
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Nest, Rows, Span, for_float, lanes, offset_of};
use retape_core::layout::{Shape, Strides, contiguous_strides, position_of_first};
use retape_core::{Error, Result, Tensor};

/// Runs the body with `$t` bound to an unsigned integer as large as the dtype's elements: for moving them.
macro_rules! for_size {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype.size() {
            1 => {
                type $t = u8;
                $body
            }
            2 => {
                type $t = u16;
                $body
            }
            4 => {
                type $t = u32;
                $body
            }
            _ => {
                type $t = u64;
                $body
            }
        }
    };
}

/// out = x, in reverse along `dims`.
pub(crate) fn flip(exec: &Exec, x: &Tensor, dims: &[usize], out: &Tensor) {
    let outer = &x.shape()[..x.rank().saturating_sub(1)];
    let steps = contiguous_strides(outer);
    // Which of x's rows goes to out's row r.
    let source = |r: usize| -> usize {
        let place = |d: usize| {
            let i = r / steps[d] % outer[d];
            (if dims.contains(&d) { outer[d] - 1 - i } else { i }) * steps[d]
        };
        (0..outer.len()).map(place).sum()
    };
    let reversed = dims.contains(&outer.len());
    for_size!(x.dtype(), T => {
        let (xs, outs) = (Rows::<T>::of(x), Rows::<T>::of(out));
        for_each_row::<Baseline>(exec, outs.count, outs.width, 1, |r| {
            let (x, o) = (xs.row(source(r)), outs.row(r));
            if reversed {
                for i in 0..o.len() {
                    o.set(i, x.get(o.len() - 1 - i));
                }
            } else {
                o.copy_from(x);
            }
        });
    });
}

/// What the indices add to the offset of an element of the tensor that they index; strides of 0 where all of them repeat.
struct Offsets {
    values: Vec<usize>,
    strides: Strides,
}

impl Offsets {
    /// For `tensor` with a leading dimension for each of `indices`.
    fn new(kernel: &'static str, tensor: &Tensor, indices: &[&Tensor], wrap: bool) -> Result<Offsets> {
        let shape = indices[0].shape();
        let repeats = |d: usize| indices.iter().all(|i| i.layout().strides[d] == 0);
        let once: Shape = (0..shape.len()).map(|d| if repeats(d) { 1 } else { shape[d] }).collect();
        let mut strides = contiguous_strides(&once);
        strides.iter_mut().zip(&once).filter(|(_, n)| **n == 1).for_each(|(s, _)| *s = 0);
        let mut values = vec![0; once.iter().product()];
        for (k, index) in indices.iter().enumerate() {
            let (n, stride) = (tensor.shape()[k], tensor.layout().strides[k]);
            let mut index: Tensor = (*index).clone();
            for d in 0..once.len() {
                index = index.narrow(d, 0, once[d])?;
            }
            for (at, (value, i)) in values.iter_mut().zip(integers(kernel, &index)?).enumerate() {
                let place = if wrap && i < 0 { i + n as i64 } else { i };
                let Some(place) = usize::try_from(place).ok().filter(|&place| place < n) else {
                    let first = if wrap { -(n as i64) } else { 0 };
                    let at = position_of_first(at, &once, shape);
                    let reason = format!(
                        "index {i} at position {at} is outside a dimension of size {n}; allowed are {first}..{n}"
                    );
                    return Err(Error::InvalidValue { kernel, reason });
                };
                *value += place * stride;
            }
        }
        Ok(Offsets { values, strides })
    }
}

/// out[i] = x[indices[..][i], .., i]
pub(crate) fn gather(exec: &Exec, x: &Tensor, indices: &[&Tensor], wrap: bool, out: &Tensor) -> Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let Offsets { values, strides } = Offsets::new("gather", x, indices, wrap)?;
    let steps = [&out.layout().strides[..], &x.layout().strides[indices.len()..], &strides[..]];
    for_size!(x.dtype(), T => {
        let (xs, outs) = (Span::<T>::of(x), Span::<T>::of(out));
        Nest::over(out.shape(), steps).for_each_run::<Baseline>(exec, 2, |run| {
            let o = run.of(0, outs);
            if run.stride(2) == 0 {
                return o.copy_from(xs.part(run.start(1) + values[run.start(2)], run.len, run.stride(1)));
            }
            for i in 0..run.len {
                let offset = values[run.start(2) + i * run.stride(2)];
                o.set(i, xs.get(run.start(1) + i * run.stride(1) + offset));
            }
        });
    });
    Ok(())
}

/// out[indices[..][i], .., i] += alpha source[i]. A task owns some of the dimensions in which `out` doesn't repeat, so no
/// two add to one place; it adds in the order of i.
pub(crate) fn scatter_add(
    exec: &Exec,
    source: &Tensor,
    indices: &[&Tensor],
    wrap: bool,
    alpha: f64,
    out: &Tensor,
) -> Result<()> {
    if source.is_empty() {
        return Ok(());
    }
    let Offsets { values, strides } = Offsets::new("scatter_add", out, indices, wrap)?;
    let (shape, places) = (source.shape(), &out.layout().strides[indices.len()..]);
    let (owned, met): (Shape, Shape) = (0..shape.len()).filter(|&d| shape[d] > 1).partition(|&d| places[d] != 0);
    let of = |dims: &[usize], all: &[usize]| dims.iter().map(|&d| all[d]).collect::<Shape>();

    let (met_shape, own_shape) = (of(&met, shape), of(&owned, shape));
    let steps = &source.layout().strides;
    let (by_source, by_index) = (of(&met, steps), of(&met, &strides));
    let meet: usize = met_shape.iter().product();
    // Where each of those that meet lies in the source and among the offsets.
    let meeting: Vec<(usize, usize)> =
        (0..meet).map(|m| (offset_of(m, &met_shape, &by_source), offset_of(m, &met_shape, &by_index))).collect();

    let nest = Nest::over(&own_shape, [&of(&owned, places), &of(&owned, steps), &of(&owned, &strides)]);
    let some = (16 * 1024 / meet).max(BLOCK);
    for_float!("scatter_add", out.dtype(), T => {
        let (sources, outs, alpha) = (Span::<T>::of(source), Span::<T>::of(out), T::of(alpha));
        nest.for_each_run_in::<T>(exec, some, meet * 2, #[inline(always)] |run| {
            if outs.rounds() {
                let mut adds = Vec::with_capacity(meeting.len());
                for i in 0..run.len {
                    let own = |k: usize| run.start(k) + i * run.stride(k);
                    adds.clear();
                    adds.extend(meeting.iter().map(|&(from, at)| (own(0) + values[at + own(2)], own(1) + from)));
                    // In one place in the order of `meeting`, and rounded once.
                    adds.sort_by_key(|&(place, _)| place);
                    for adds in adds.chunk_by(|a, b| a.0 == b.0) {
                        let sum = outs.get(adds[0].0);
                        outs.set(adds[0].0, adds.iter().fold(sum, |sum, &(_, from)| sum + alpha * sources.get(from)));
                    }
                }
                return;
            }
            for &(from, at) in &meeting {
                let g = sources.part(run.start(1) + from, run.len, run.stride(1));
                if run.stride(2) == 0 {
                    let o = outs.part(run.start(0) + values[at + run.start(2)], run.len, run.stride(0));
                    for i in (0..run.len).step_by(BLOCK) {
                        let (sum, g) = (o.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                        o.store(i, lanes!(j => sum[j] + alpha * g[j]));
                    }
                } else {
                    for i in 0..run.len {
                        let place = run.start(0) + i * run.stride(0) + values[at + run.start(2) + i * run.stride(2)];
                        outs.set(place, outs.get(place) + alpha * g.get(i));
                    }
                }
            }
        });
    });
    Ok(())
}
