//! Elements by their position: reversed, gathered by index, and added at an index.

use crate::exec::{Baseline, Exec};
use crate::halves::Cell;
use crate::loss::{Integers, Numbers};
use crate::math::{DEPTH, Float};
use crate::reduce::Axis;
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Nest, Rows, Span, for_float, lanes};
use retape_core::layout::{Shape, Strides, contiguous_strides, position_of_first};
use retape_core::{Error, Result, Tensor, kernel};

/// Makes a call with `$t` bound to an unsigned integer as large as the dtype's elements: for moving them.
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
pub(crate) fn flip(exec: &Exec, k: &kernel::Flip<'_>) {
    for_size!(k.x.dtype(), T => flip_of::<T>(exec, k));
}

fn flip_of<T: Cell + Send + Sync>(exec: &Exec, k: &kernel::Flip<'_>) {
    let kernel::Flip { x, dims, out } = *k;
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
}

/// The most index tensors of one call.
const MAX_INDICES: usize = 8;

/// Index tensors, of which each names places of one dimension.
struct Places {
    /// The integers, and the size and stride of the dimension that they index.
    each: Vec<(Integers, i64, usize)>,
}

impl Places {
    /// For `tensor` with a leading dimension for each of `indices`. Fails where one lies outside.
    fn new(kernel: &'static str, tensor: &Tensor, indices: &[&Tensor], wrap: bool) -> Result<Places> {
        if indices.len() > MAX_INDICES {
            let reason = format!("{} index tensors; there may be {MAX_INDICES}", indices.len());
            return Err(Error::Unsupported { kernel, device: "cpu".into(), reason });
        }
        let mut each = Vec::with_capacity(indices.len());
        for (k, index) in indices.iter().enumerate() {
            let (n, stride) = (tensor.shape()[k] as i64, tensor.layout().strides[k]);
            each.push((Integers::of(kernel, index)?, n, stride));
            // Where an index repeats, it is looked at once.
            let once = (0..index.rank()).filter(|&d| repeats(indices, d));
            let once = once.into_iter().try_fold((*index).clone(), |index, d| index.narrow(d, 0, 1))?;
            let first = if wrap { -n } else { 0 };
            let numbers = Numbers::of(kernel, &once)?;
            if let Some(at) = (0..numbers.len()).find(|&at| !(first..n).contains(&numbers.get(at))) {
                let (i, at) = (numbers.get(at), position_of_first(at, once.shape(), index.shape()));
                let reason =
                    format!("index {i} at position {at} is outside a dimension of size {n}; allowed are {first}..{n}");
                return Err(Error::InvalidValue { kernel, reason });
            }
        }
        Ok(Places { each })
    }

    /// What the indices add to an offset, where index `k` stands at `offset(k)`.
    #[inline(always)]
    fn at(&self, offset: impl Fn(usize) -> usize) -> usize {
        let mut sum = 0;
        for (k, &(integers, n, stride)) in self.each.iter().enumerate() {
            let i = integers.at(offset(k));
            sum += (if i < 0 { i + n } else { i }) as usize * stride;
        }
        sum
    }
}

/// True where no index differs along dimension `d`.
fn repeats(indices: &[&Tensor], d: usize) -> bool {
    indices.iter().all(|index| index.layout().strides[d] == 0)
}

/// out[i] = x[indices[..][i], .., i]
pub(crate) fn gather(exec: &Exec, k: &kernel::Gather<'_>) -> Result<()> {
    if k.out.is_empty() {
        return Ok(());
    }
    let places = Places::new("gather", k.x, k.indices, k.wrap)?;
    match k.indices.len() {
        1 => for_size!(k.x.dtype(), T => gather_by::<T, 3>(exec, k, &places)),
        _ => for_size!(k.x.dtype(), T => gather_by::<T, { 2 + MAX_INDICES }>(exec, k, &places)),
    }
    Ok(())
}

/// K is 2 more than there may be indices.
fn gather_by<T: Cell + Send + Sync, const K: usize>(exec: &Exec, k: &kernel::Gather<'_>, places: &Places) {
    let kernel::Gather { x, indices, out, .. } = *k;
    let (xs, outs) = (Span::<T>::of(x), Span::<T>::of(out));
    let none = Strides::from_elem(0, out.rank());
    let steps: [&[usize]; K] = std::array::from_fn(|k| match k {
        0 => &out.layout().strides[..],
        1 => &x.layout().strides[indices.len()..],
        _ => indices.get(k - 2).map_or(&none[..], |index| &index.layout().strides[..]),
    });
    Nest::over(out.shape(), steps).for_each_run::<Baseline>(exec, 2, |run| {
        let o = run.of(0, outs);
        let at = |i: usize| places.at(|k| run.start(2 + k) + i * run.stride(2 + k));
        if (2..K).all(|k| run.stride(k) == 0) {
            return o.copy_from(xs.part(run.start(1) + at(0), run.len, run.stride(1)));
        }
        for i in 0..run.len {
            o.set(i, xs.get(run.start(1) + i * run.stride(1) + at(i)));
        }
    });
}

/// Elements of one task of a scatter-add, and columns of one.
const TASK: usize = 16 * 1024;
const COLUMNS: usize = 128;

/// A scatter-add taken apart. Along `column` dimensions `out` differs and the indices repeat. All other dimensions
/// make the entries: where `out` differs there are segments, which share no place of it, and within a segment are
/// those that may meet.
struct Scatter<'a, T> {
    places: Places,
    /// Offsets of the indices, and of source and out, by segment and by entry within it.
    indices: Vec<(Axis, Axis)>,
    source: (Span<T>, Axis, Axis, Axis),
    out: (Span<T>, Axis, Axis),
    segments: usize,
    meeting: usize,
    alpha: f64,
    /// Place of each entry, with its number within the segment in the low `bits`, in order; empty where none meet.
    keys: &'a [u64],
    bits: u32,
}

/// out[indices[..][i], .., i] += alpha source[i]. Entries are sorted by their place, so those that meet stand
/// together, in their order: one task adds them up and then adds their sum.
pub(crate) fn scatter_add(exec: &Exec, k: &kernel::ScatterAdd<'_>) -> Result<()> {
    for_float!("scatter_add", k.out.dtype(), T => scatter_add_of::<T>(exec, k))?
}

fn scatter_add_of<T: Float>(exec: &Exec, k: &kernel::ScatterAdd<'_>) -> Result<()> {
    let kernel::ScatterAdd { source, indices, wrap, alpha, order, out } = *k;
    let name = "scatter_add";
    if source.is_empty() {
        return Ok(());
    }
    let places = Places::new(name, out, indices, wrap)?;
    let shape = source.shape();
    let differs = |d: usize| out.layout().strides[indices.len() + d] != 0;
    let sized = (0..shape.len()).filter(|&d| shape[d] > 1);
    let (columns, entries): (Shape, Shape) = sized.partition(|&d| differs(d) && repeats(indices, d));
    let (own, met): (Shape, Shape) = entries.into_iter().partition(|&d| differs(d));
    let behind = |dims: &[usize]| dims.iter().map(|&d| indices.len() + d).collect::<Shape>();
    let [segments, meeting] = [&own, &met].map(|dims| dims.iter().map(|&d| shape[d]).product::<usize>());
    let named: usize = out.shape()[..indices.len()].iter().product();
    let bits = meeting.next_power_of_two().trailing_zeros();
    if meeting > 1 && named > usize::MAX >> bits {
        let reason = format!("{meeting} entries in {named} places are more than 64 bits can number");
        return Err(Error::Unsupported { kernel: name, device: "cpu".into(), reason });
    }

    let mut scatter = Scatter::<T> {
        places,
        indices: indices.iter().map(|index| (Axis::new(index, &own), Axis::new(index, &met))).collect(),
        source: (Span::of(source), Axis::new(source, &own), Axis::new(source, &met), Axis::new(source, &columns)),
        out: (Span::of(out), Axis::new(out, &behind(&own)), Axis::new(out, &behind(&columns))),
        segments,
        meeting,
        alpha,
        keys: &[],
        bits,
    };
    if meeting > 1 {
        let keys = Span::<u64>::of(order).sub(0, segments * meeting);
        scatter.sort(exec, keys);
        scatter.keys = keys.as_slice();
    }
    scatter.add(exec);
    Ok(())
}

impl<T: Float> Scatter<'_, T> {
    /// The number of the place that an entry names, among those that the indices may name.
    #[inline(always)]
    fn place(&self, segment: usize, entry: usize) -> usize {
        let mut place = 0;
        for (&(integers, n, _), (own, met)) in self.places.each.iter().zip(&self.indices) {
            let i = integers.at(own.offset(segment) + met.offset(entry));
            place = place * n as usize + (if i < 0 { i + n } else { i }) as usize;
        }
        place
    }

    /// Fills the keys and sorts those of each segment.
    fn sort(&self, exec: &Exec, keys: Span<u64>) {
        let (segments, meeting) = (self.segments, self.meeting);
        let key = |segment: usize, entry: usize| (self.place(segment, entry) << self.bits | entry) as u64;
        if segments == 1 {
            exec.run::<Baseline>(meeting.div_ceil(TASK), meeting * 4, |task| {
                for entry in task * TASK..meeting.min((task + 1) * TASK) {
                    keys.set(entry, key(0, entry));
                }
            });
            return exec.sort(keys.as_mut_slice());
        }
        let batch = (TASK / meeting).max(1);
        exec.run::<Baseline>(segments.div_ceil(batch), segments * meeting * 16, |task| {
            for segment in task * batch..segments.min((task + 1) * batch) {
                let own = keys.sub(segment * meeting, meeting);
                (0..meeting).for_each(|entry| own.set(entry, key(segment, entry)));
                own.as_mut_slice().sort_unstable();
            }
        });
    }

    fn add(&self, exec: &Exec) {
        let (meeting, columns) = (self.meeting, self.out.2.len);
        let entries = self.segments * meeting;
        let width = columns.min(COLUMNS);
        let (strips, rows) = (columns.div_ceil(width), (TASK / width).max(1));
        exec.run::<T>(
            entries.div_ceil(rows) * strips,
            entries * columns * 2,
            #[inline(always)]
            |task| {
                let (first, strip) = (task / strips * rows, task % strips * width);
                let strip = strip..columns.min(strip + width);
                for at in first..entries.min(first + rows) {
                    let segment = at / meeting;
                    if self.keys.is_empty() {
                        let place = self.places.at(|k| self.indices[k].0.offset(segment));
                        self.add_group(segment, place, strip.clone(), 1, |_| 0);
                        continue;
                    }
                    // The entries of one place; those that don't begin here are another task's or were taken.
                    let (end, place) = ((segment + 1) * meeting, self.keys[at] >> self.bits);
                    let same = |at: usize| self.keys[at] >> self.bits == place;
                    if at > segment * meeting && same(at - 1) {
                        continue;
                    }
                    let count = (at..end).take_while(|&at| same(at)).count();
                    let entry = |i: usize| (self.keys[at + i] & ((1 << self.bits) - 1)) as usize;
                    let first = entry(0);
                    let offset = |k: usize| {
                        let (own, met) = &self.indices[k];
                        own.offset(segment) + met.offset(first)
                    };
                    self.add_group(segment, self.places.at(offset), strip.clone(), count, entry);
                }
            },
        );
    }

    /// Adds the sum of `count` entries of a segment to the place at this offset, in some columns: DEPTH of them are
    /// added in T, these sums in f64.
    #[inline(always)]
    fn add_group(
        &self,
        segment: usize,
        place: usize,
        columns: std::ops::Range<usize>,
        count: usize,
        entry: impl Fn(usize) -> usize,
    ) {
        let (source, own, met, source_columns) = &self.source;
        let (out, out_own, out_columns) = &self.out;
        let (from, to) = (own.offset(segment), place + out_own.offset(segment));
        if columns.len() < BLOCK / 4 {
            for c in columns {
                let (from, to) = (from + source_columns.offset(c), to + out_columns.offset(c));
                let mut total = 0.0;
                for first in (0..count).step_by(DEPTH) {
                    let mut sum = T::ZERO;
                    for i in first..count.min(first + DEPTH) {
                        sum += source.get(from + met.offset(entry(i)));
                    }
                    total += sum.wide();
                }
                out.set(to, T::of(out.get(to).wide() + self.alpha * total));
            }
            return;
        }
        for c in columns.clone().step_by(BLOCK) {
            if count <= DEPTH && self.alpha == 1.0 {
                // In f64 it would be rounded to the same bits.
                let mut sum = [T::ZERO; BLOCK];
                for i in 0..count {
                    let g = source_columns.load(*source, from + met.offset(entry(i)), c, columns.end, T::ZERO);
                    sum = lanes!(j => sum[j] + g[j]);
                }
                let old = out_columns.load(*out, to, c, columns.end, T::ZERO);
                out_columns.store(*out, to, c, columns.end, lanes!(j => old[j] + sum[j]));
                continue;
            }
            let mut total = [0f64; BLOCK];
            for first in (0..count).step_by(DEPTH) {
                let mut sum = [T::ZERO; BLOCK];
                for i in first..count.min(first + DEPTH) {
                    let g = source_columns.load(*source, from + met.offset(entry(i)), c, columns.end, T::ZERO);
                    sum = lanes!(j => sum[j] + g[j]);
                }
                total = lanes!(j => total[j] + sum[j].wide());
            }
            let old = out_columns.load(*out, to, c, columns.end, T::ZERO);
            out_columns.store(*out, to, c, columns.end, lanes!(j => T::of(old[j].wide() + self.alpha * total[j])));
        }
    }
}
