//! Tiled attention (Dao 2023), forward, and what its backward shares with it.
//!
//! With s_ij = scale q_i . k_j (masked to -inf), lse_i = ln sum_j exp(s_ij), p_ij = exp(s_ij - lse_i):
//! out_i = sum_j p_ij v_j. Keys come in tiles; a row's running maximum m and sum l absorb each tile by
//! l = l e^(m - m') + sum_j e^(s_ij - m'), and out likewise. The maximum is never clamped.
//!
//! Tiles above the causal diagonal are never visited, only tiles on it are masked. Every tile's product is one small
//! GEMM on the operands as they lie in memory (of 16 bits, on a widened copy of their tile), so nothing beyond a tensor's
//! end is read and nothing is padded.

use crate::exec::Exec;
use crate::gemm::{Matrix, product};
use crate::math::{Float, sum_blocks};
use crate::random::words;
use crate::softmax::row_max;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::kernel::{AttentionSpec, RandomStream, Segments};
use retape_core::{DType, Result, Tensor};

/// Queries and keys of a tile of the forward pass. Keys are a multiple of the block.
const QUERIES: usize = 64;
const KEYS: usize = 256;

/// A tensor `[batch, time, heads, head size]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads<T> {
    span: Span<T>,
    strides: [usize; 4],
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub size: usize,
}

impl<T: Float> Heads<T> {
    pub fn of(tensor: &Tensor) -> Heads<T> {
        let (shape, strides) = (tensor.shape(), &tensor.layout().strides);
        Heads {
            span: Span::of(tensor),
            strides: [strides[0], strides[1], strides[2], strides[3]],
            batch: shape[0],
            time: shape[1],
            heads: shape[2],
            size: shape[3],
        }
    }

    /// Times `from .. from + len` of one head as a matrix `[len, head size]`.
    pub fn tile(&self, batch: usize, head: usize, from: usize, len: usize) -> Matrix<T> {
        Matrix {
            span: self.span,
            start: batch * self.strides[0] + from * self.strides[1] + head * self.strides[2],
            rows: len,
            cols: self.size,
            row_stride: self.strides[1],
            col_stride: self.strides[3],
        }
    }

    /// Elements that a widened copy of a tile of `len` times takes.
    pub fn scratch(&self, len: usize) -> usize {
        if self.span.rounds() { len * self.size } else { 0 }
    }

    /// One time of one head.
    #[inline(always)]
    pub fn row(&self, batch: usize, head: usize, time: usize) -> Span<T> {
        let start = batch * self.strides[0] + time * self.strides[1] + head * self.strides[2];
        self.span.part(start, self.size, self.strides[3])
    }
}

/// Which keys a query sees, and which weights are dropped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask<'a> {
    queries: usize,
    keys: usize,
    segments: Option<Segments<'a>>,
    causal: bool,
    window: Option<usize>,
    dropout: Option<(RandomStream, u64)>,
    /// 1 / (1 - p)
    pub keep: f64,
}

/// Where the sequence of a query or key begins and ends.
struct Sequence {
    first_query: usize,
    end_query: usize,
    first_key: usize,
    end_key: usize,
}

impl Mask<'_> {
    pub fn new((spec, segments): (AttentionSpec, Option<Segments<'_>>), queries: usize, keys: usize) -> Mask<'_> {
        let dropout = (spec.dropout > 0.0).then(|| (spec.stream, RandomStream::threshold(spec.dropout)));
        let keep = 1.0 / (1.0 - spec.dropout);
        Mask { queries, keys, segments, causal: spec.causal, window: spec.window, dropout, keep }
    }

    /// The sequence that has time `t` by `bounds`, which are the segments' queries or keys; the only one without segments.
    #[inline(always)]
    fn sequence(&self, t: usize, bounds: impl FnOnce(Segments<'_>) -> &[usize]) -> Sequence {
        let (queries, keys, s) = match self.segments {
            None => (&[0, self.queries][..], &[0, self.keys][..], 0),
            Some(s) => (s.queries, s.keys, bounds(s).partition_point(|&bound| bound <= t).saturating_sub(1)),
        };
        Sequence { first_query: queries[s], end_query: queries[s + 1], first_key: keys[s], end_key: keys[s + 1] }
    }

    /// Query `i` sees keys up to before this. Causality is aligned at the end: the last query sees the last key.
    #[inline(always)]
    pub fn visible(&self, i: usize) -> usize {
        let s = self.sequence(i, |segments| segments.queries);
        if self.causal { (i + 1 + s.end_key).saturating_sub(s.end_query).max(s.first_key) } else { s.end_key }
    }

    /// Query `i` sees no key before this.
    #[inline(always)]
    pub fn first_key(&self, i: usize) -> usize {
        let s = self.sequence(i, |segments| segments.queries);
        let behind = |w| (i + 1 + s.end_key).saturating_sub(s.end_query).saturating_sub(w);
        self.window.map_or(s.first_key, |w| behind(w).max(s.first_key))
    }

    /// Behind the last query that sees key `j`.
    pub fn end_query(&self, j: usize) -> usize {
        let s = self.sequence(j, |segments| segments.keys);
        let end = |w: usize| (j.saturating_add(w) + s.end_query).saturating_sub(s.end_key);
        self.window.map_or(s.end_query, |w| end(w).clamp(s.first_query, s.end_query))
    }

    /// The first query that sees key `j`; `end_query` or more if none does.
    pub fn first_query(&self, j: usize) -> usize {
        let s = self.sequence(j, |segments| segments.keys);
        if self.causal { (j + s.end_query).saturating_sub(s.end_key).max(s.first_query) } else { s.first_query }
    }

    pub fn drops(&self) -> bool {
        self.dropout.is_some()
    }

    /// For query row `row` = (b H + h) Tq + i, which of the weights at keys `j .. j + 64` are kept.
    #[inline(always)]
    pub fn kept(&self, row: usize, j: usize) -> [bool; BLOCK] {
        match self.dropout {
            None => [true; BLOCK],
            Some((stream, threshold)) => {
                let words = words(stream, (row as u64) * self.keys as u64 + j as u64);
                lanes!(n => words[n] as u64 >= threshold)
            }
        }
    }
}

/// What the user's mask `[batch, heads, Tq, Tk]` does to scores.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bias<T> {
    Hides(Span<u8>, [usize; 4]),
    Adds(Span<T>, [usize; 4]),
}

impl<T: Float> Bias<T> {
    pub fn of(mask: &Tensor) -> Bias<T> {
        let strides = std::array::from_fn(|d| mask.layout().strides[d]);
        match mask.dtype() {
            DType::Bool => Bias::Hides(Span::of(mask), strides),
            _ => Bias::Adds(Span::of(mask), strides),
        }
    }

    /// Masks a row of scores from key `j`.
    #[inline(always)]
    pub fn apply(&self, scores: Span<T>, (b, h): (usize, usize), i: usize, j: usize) {
        let start = |s: &[usize; 4]| b * s[0] + h * s[1] + i * s[2] + j * s[3];
        match self {
            Bias::Adds(span, strides) => {
                let mask = span.part(start(strides), scores.len(), strides[3]);
                for c in (0..scores.len()).step_by(BLOCK) {
                    let (s, m) = (scores.load::<BLOCK>(c, T::ZERO), mask.load::<BLOCK>(c, T::ZERO));
                    scores.store(c, lanes!(n => s[n] + m[n]));
                }
            }
            Bias::Hides(span, strides) => {
                let mask = span.part(start(strides), scores.len(), strides[3]);
                for c in (0..scores.len()).step_by(BLOCK) {
                    let (s, m) = (scores.load::<BLOCK>(c, T::ZERO), mask.load::<BLOCK>(c, 0));
                    scores.store(c, lanes!(n => if m[n] != 0 { s[n] } else { -T::INFINITY }));
                }
            }
        }
    }
}

/// out = dropout(softmax(scale q k^T + mask)) v, and lse.
pub(crate) fn attention(
    exec: &Exec,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    bias: Option<&Tensor>,
    (spec, segments): (AttentionSpec, Option<Segments<'_>>),
    out: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    for_float!("attention", q.dtype(), T => {
        let [qs, ks, vs, outs] = [q, k, v, out].map(Heads::<T>::of);
        let (mask, lses) = (Mask::new((spec, segments), qs.time, ks.time), Span::<T>::of(lse));
        let bias = bias.map(Bias::<T>::of);
        let blocks = qs.time.div_ceil(QUERIES);
        let heads = qs.batch * qs.heads;
        exec.run::<T>(blocks * heads, work(&qs, ks.time), #[inline(always)] |task| {
            // The last queries see most: they go first.
            let (block, index) = (blocks - 1 - task / heads, task % heads);
            let (b, h) = (index / qs.heads, index % qs.heads);
            let from = block * QUERIES;
            let rows = QUERIES.min(qs.time - from);
            let copies = [qs.scratch(QUERIES), ks.scratch(KEYS), vs.scratch(KEYS)];
            let mut scratch = exec.scratch::<T>(QUERIES * (KEYS + vs.size + 2) + copies[0] + copies[1] + copies[2]);
            let memory = scratch.memory();
                let (q_memory, memory) = memory.split_at_mut(copies[0]);
                let (k_memory, memory) = memory.split_at_mut(copies[1]);
                let (v_memory, memory) = memory.split_at_mut(copies[2]);
                let (s_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
                let (o_memory, memory) = memory.split_at_mut(QUERIES * vs.size);
                let (maximum, sum) = memory.split_at_mut(QUERIES);
                maximum.fill(-T::INFINITY);
                sum.fill(T::ZERO);
                let kv_head = h / (qs.heads / ks.heads);
                let q_tile = qs.tile(b, h, from, rows).widened(q_memory);
                let o = Matrix::over(o_memory, rows, vs.size, vs.size);
                let end = mask.visible(from + rows - 1);
                let start = mask.first_key(from) / KEYS * KEYS;
                for j in (start..end).step_by(KEYS) {
                    let keys = KEYS.min(end - j);
                    let s = Matrix::over(s_memory, rows, keys, KEYS);
                    let k_tile = ks.tile(b, kv_head, j, keys).widened(k_memory);
                    product(s, false, q_tile, k_tile.t(), T::of(spec.scale));
                    for i in 0..rows {
                        let scores = s.span.part(i * KEYS, KEYS, 1);
                        let visible = mask.visible(from + i).saturating_sub(j).min(keys);
                        if let Some(bias) = &bias {
                            bias.apply(scores.sub(0, visible), (b, h), from + i, j);
                        }
                        scores.sub(0, mask.first_key(from + i).saturating_sub(j).min(visible)).fill(-T::INFINITY);
                        let row = (b * qs.heads + h) * qs.time + from + i;
                        let shrink = absorb(scores, visible, keys, (&mut maximum[i], &mut sum[i]), &mask, row, j);
                        if j > start && shrink != T::ONE {
                            scale_row(o.span.part(i * vs.size, vs.size, 1), shrink);
                        }
                    }
                    product(o, j > start, s, vs.tile(b, kv_head, j, keys).widened(v_memory), T::ONE);
                }
                for i in 0..rows {
                    let seen = sum[i] != T::ZERO;
                    let (source, target) = (o.span.part(i * vs.size, vs.size, 1), outs.row(b, h, from + i));
                    let inverse = T::ONE / sum[i];
                    for c in (0..vs.size).step_by(BLOCK) {
                        let values = source.load::<BLOCK>(c, T::ZERO);
                        target.store(c, lanes!(n => if seen { values[n] * inverse } else { T::ZERO }));
                    }
                    let row = (b * qs.heads + h) * qs.time + from + i;
                    lses.set(row, if seen { maximum[i] + Float::ln(sum[i]) } else { -T::INFINITY });
                }
        });
    });
    Ok(())
}

/// Turns a tile's row of scores into weights exp(s - m), 0 behind `visible`, with m the running maximum; updates m and
/// the running sum, drops weights, and gives the factor for what was gathered before.
#[inline(always)]
fn absorb<T: Float>(
    scores: Span<T>,
    visible: usize,
    keys: usize,
    (maximum, sum): (&mut T, &mut T),
    mask: &Mask<'_>,
    row: usize,
    j: usize,
) -> T {
    let seen = scores.sub(0, visible);
    let new = maximum.larger(row_max(seen));
    if new == -T::INFINITY {
        scores.fill(T::ZERO);
        return T::ONE;
    }
    let shrink = Float::exp(*maximum - new);
    let total = sum_blocks(
        visible,
        #[inline(always)]
        |c| {
            let s = seen.load::<BLOCK>(c, -T::INFINITY);
            let weights = lanes!(n => Float::exp(s[n] - new));
            let mut stored = weights;
            if mask.drops() {
                let (kept, scale) = (mask.kept(row, j + c), T::of(mask.keep));
                for (w, kept) in stored.iter_mut().zip(kept) {
                    *w = if kept { *w * scale } else { T::ZERO };
                }
            }
            // The row of the tile goes on to a multiple of the block: weights behind `visible` are 0.
            scores.store(c, stored);
            weights
        },
    );
    if visible.next_multiple_of(BLOCK) < keys {
        let blocks = visible.next_multiple_of(BLOCK);
        scores.sub(blocks, scores.len() - blocks).fill(T::ZERO);
    }
    *sum = *sum * shrink + total;
    *maximum = new;
    shrink
}

#[inline(always)]
fn scale_row<T: Float>(row: Span<T>, factor: T) {
    for c in (0..row.len()).step_by(BLOCK) {
        let x = row.load::<BLOCK>(c, T::ZERO);
        row.store(c, lanes!(n => x[n] * factor));
    }
}

/// Work of one pass, for the choice to go parallel.
pub(crate) fn work<T>(q: &Heads<T>, keys: usize) -> usize {
    (q.batch * q.heads * q.time).saturating_mul(keys).saturating_mul(q.size / 4 + 4)
}

/// delta `[batch, heads, Tq]` = sum over the head size of g o.
pub(crate) fn attention_delta(exec: &Exec, o: &Tensor, g: &Tensor, delta: &Tensor) -> Result<()> {
    for_float!("attention_delta", o.dtype(), T => {
        let (os, gs, deltas) = (Heads::<T>::of(o), Heads::<T>::of(g), Rows::<T>::of(delta));
        exec.run::<T>(os.batch * os.heads, o.len(), #[inline(always)] |index| {
            let (b, h) = (index / os.heads, index % os.heads);
            let delta = deltas.row(index);
            for i in 0..os.time {
                let (o, g) = (os.row(b, h, i), gs.row(b, h, i));
                delta.set(i, sum_blocks(os.size, #[inline(always)] |c| {
                    let (u, v) = (o.load::<BLOCK>(c, T::ZERO), g.load::<BLOCK>(c, T::ZERO));
                    lanes!(j => u[j] * v[j])
                }));
            }
        });
    });
    Ok(())
}
