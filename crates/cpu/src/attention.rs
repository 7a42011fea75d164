//! Tiled attention (Dao 2023), forward, and what its backward shares with it.
//!
//! With s_ij = scale q_i . k_j (masked to -inf), m_i = max_j s_ij, l_i = ln sum_j exp(s_ij - m_i) and
//! p_ij = exp((s_ij - m_i) - l_i): out_i = sum_j p_ij v_j. Keys come in tiles; a row's running maximum m and sum z
//! absorb each tile by z = z e^(m - m') + sum_j e^(s_ij - m'), and out likewise. The maximum is never clamped.
//!
//! Backward rebuilds p from scores that it makes again, and m and l. Where scores are large, their last places decide
//! what a weight is; so all passes make them by [`scores`], which gives one pair the same bits in any tile.
//!
//! Tiles above the causal diagonal are never visited, only tiles on it are masked. Every tile's product is one small
//! GEMM on the operands as they lie in memory (of 16 bits, on a widened copy of their tile), so nothing beyond a
//! tensor's end is read and nothing is padded. Pairs of a tile that aren't seen have weight 0, which would be NaN
//! times a row that isn't finite: see [`Sight::product`].

use crate::exec::Exec;
use crate::gemm::{Matrix, product};
use crate::math::{Float, sum_blocks};
use crate::random::words;
use crate::softmax::row_max;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::kernel::{self, AttentionInputs, RandomStream, Sequences};
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
    sequences: Option<Sequences<'a>>,
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
    pub fn of<'a>(inputs: &AttentionInputs<'a>) -> Mask<'a> {
        let AttentionInputs { sequences, spec, .. } = *inputs;
        let (queries, keys) = (inputs.q.shape()[1], inputs.k.shape()[1]);
        let dropout = (spec.dropout > 0.0).then(|| (spec.stream, RandomStream::threshold(spec.dropout)));
        let keep = 1.0 / (1.0 - spec.dropout);
        // One that hides nothing is none, and sums with it don't wrap.
        let window = spec.window.filter(|&window| window < keys);
        Mask { queries, keys, sequences, causal: spec.causal, window, dropout, keep }
    }

    /// The sequence that has time `t` by `bounds`, which are the sequences' queries or keys; the only one without
    /// sequences.
    #[inline(always)]
    fn sequence(&self, t: usize, bounds: impl FnOnce(Sequences<'_>) -> &[usize]) -> Sequence {
        let (queries, keys, s) = match self.sequences {
            None => (&[0, self.queries][..], &[0, self.keys][..], 0),
            Some(s) => (s.queries, s.keys, bounds(s).partition_point(|&bound| bound <= t).saturating_sub(1)),
        };
        Sequence { first_query: queries[s], end_query: queries[s + 1], first_key: keys[s], end_key: keys[s + 1] }
    }

    /// Query `i` sees keys up to before this. Causality is aligned at the end: the last query sees the last key.
    #[inline(always)]
    pub fn visible(&self, i: usize) -> usize {
        let s = self.sequence(i, |sequences| sequences.queries);
        if self.causal { (i + 1 + s.end_key).saturating_sub(s.end_query).max(s.first_key) } else { s.end_key }
    }

    /// Query `i` sees no key before this.
    #[inline(always)]
    pub fn first_key(&self, i: usize) -> usize {
        let s = self.sequence(i, |sequences| sequences.queries);
        let behind = |w| (i + 1 + s.end_key).saturating_sub(s.end_query).saturating_sub(w);
        self.window.map_or(s.first_key, |w| behind(w).max(s.first_key))
    }

    /// Behind the last query that sees key `j`.
    pub fn end_query(&self, j: usize) -> usize {
        let s = self.sequence(j, |sequences| sequences.keys);
        let end = |w: usize| (j + w + s.end_query).saturating_sub(s.end_key);
        self.window.map_or(s.end_query, |w| end(w).clamp(s.first_query, s.end_query))
    }

    /// The first query that sees key `j`; `end_query` or more if none does.
    pub fn first_query(&self, j: usize) -> usize {
        let s = self.sequence(j, |sequences| sequences.keys);
        if self.causal { (j + s.end_query).saturating_sub(s.end_key).max(s.first_query) } else { s.first_query }
    }

    /// Whether `rows` queries from `i` all see all of `keys` keys from `j`.
    fn sees_all(&self, (i, rows): (usize, usize), (j, keys): (usize, usize)) -> bool {
        self.first_key(i + rows - 1) <= j && j + keys <= self.visible(i)
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

    /// Whether it hides key `j` from query `i`.
    fn hides(&self, (b, h): (usize, usize), i: usize, j: usize) -> bool {
        let at = |s: &[usize; 4]| b * s[0] + h * s[1] + i * s[2] + j * s[3];
        match self {
            Bias::Adds(span, strides) => span.get(at(strides)) == -T::INFINITY,
            Bias::Hides(span, strides) => span.get(at(strides)) == 0,
        }
    }

    /// Masks a row of scores from key `j`; what it hides is -inf whatever it was.
    #[inline(always)]
    pub fn apply(&self, scores: Span<T>, (b, h): (usize, usize), i: usize, j: usize) {
        let start = |s: &[usize; 4]| b * s[0] + h * s[1] + i * s[2] + j * s[3];
        match self {
            Bias::Adds(span, strides) => {
                let mask = span.part(start(strides), scores.len(), strides[3]);
                for c in (0..scores.len()).step_by(BLOCK) {
                    let (s, m) = (scores.load::<BLOCK>(c, T::ZERO), mask.load::<BLOCK>(c, T::ZERO));
                    scores.store(c, lanes!(n => if m[n] == -T::INFINITY { m[n] } else { s[n] + m[n] }));
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

/// A tile of pairs of a query and a key of one head.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a, T> {
    pub mask: &'a Mask<'a>,
    pub bias: Option<&'a Bias<T>>,
    /// Batch entry and query head.
    pub head: (usize, usize),
    /// The first query, and how many.
    pub queries: (usize, usize),
    /// The first key, and how many.
    pub keys: (usize, usize),
}

impl<T: Float> Sight<'_, T> {
    /// Whether query `r` of the tile sees its key `c`.
    fn sees(&self, r: usize, c: usize) -> bool {
        let (i, j) = (self.queries.0 + r, self.keys.0 + c);
        let within = self.mask.first_key(i) <= j && j < self.mask.visible(i);
        within && !self.bias.is_some_and(|bias| bias.hides(self.head, i, j))
    }

    /// out (+)= alpha weights rows, where the weights are the tile's (or its transpose), and 0 where a pair isn't
    /// seen. Such a pair takes nothing of its row, whatever that holds. `spare` has room for the rows.
    #[inline(always)]
    pub fn product(
        &self,
        (out, accumulate): (Matrix<T>, bool),
        (weights, transposed): (Matrix<T>, bool),
        rows: Matrix<T>,
        alpha: T,
        spare: &mut [T],
    ) {
        let weights = if transposed { weights.t() } else { weights };
        let mut finite = true;
        if self.bias.is_some() || !self.mask.sees_all(self.queries, self.keys) {
            for r in 0..rows.rows {
                finite &= is_finite(rows.row(r));
            }
        }
        if finite {
            return product(out, accumulate, weights, rows, alpha);
        }
        let sees = |r: usize, c: usize| if transposed { self.sees(c, r) } else { self.sees(r, c) };
        product_of_seen((out, accumulate), weights, rows, alpha, spare, &sees);
    }
}

/// Whether no element is NaN or an infinity.
#[inline(always)]
#[allow(clippy::eq_op)]
fn is_finite<T: Float>(row: Span<T>) -> bool {
    let mut finite = true;
    if row.is_plain() {
        for &x in row.as_slice() {
            finite &= x - x == T::ZERO;
        }
    } else {
        for i in 0..row.len() {
            finite &= row.get(i) - row.get(i) == T::ZERO;
        }
    }
    finite
}

/// [`Sight::product`] where some rows aren't finite: these count as 0 in the product, and are added pair by pair.
#[cold]
#[inline(never)]
fn product_of_seen<T: Float>(
    (out, accumulate): (Matrix<T>, bool),
    weights: Matrix<T>,
    rows: Matrix<T>,
    alpha: T,
    spare: &mut [T],
    sees: &dyn Fn(usize, usize) -> bool,
) {
    let finite = Matrix::over(spare, rows.rows, rows.cols, rows.cols);
    for c in 0..rows.rows {
        match is_finite(rows.row(c)) {
            true => finite.row(c).copy_from(rows.row(c)),
            false => finite.row(c).fill(T::ZERO),
        }
    }
    product(out, accumulate, weights, finite, alpha);
    for c in (0..rows.rows).filter(|&c| !is_finite(rows.row(c))) {
        for r in (0..out.rows).filter(|&r| sees(r, c)) {
            let (sum, row, weight) = (out.row(r), rows.row(c), alpha * weights.row(r).get(c));
            (0..row.len()).for_each(|n| sum.set(n, sum.get(n) + weight * row.get(n)));
        }
    }
}

/// s = scale q k^T for a tile of queries and one of keys, in memory of at least 2 rows and 128 columns. A score has
/// the same bits in whichever tile. faer adds in other orders where a product is a single row or column, of depth 1,
/// or small and of a depth above 64: the first are made of that one twice, the second here, the last of each key many
/// times.
pub(crate) fn scores<T: Float>(s: Matrix<T>, q: Matrix<T>, k: Matrix<T>, scale: T) {
    if q.cols == 1 {
        for r in 0..s.rows {
            (0..s.cols).for_each(|c| s.row(r).set(c, scale * (q.row(r).get(0) * k.row(c).get(0))));
        }
        return;
    }
    let twice = |m: Matrix<T>| if m.rows == 1 { Matrix { rows: 2, row_stride: 0, ..m } } else { m };
    let (q, k) = (twice(q), twice(k));
    if q.cols > 64 && q.rows * k.rows * q.cols <= 16 * 16 * 16 {
        for c in 0..k.rows {
            let key = Matrix { rows: 64, row_stride: 0, ..k.block((c, 1), (0, k.cols)) };
            product(s.block((0, q.rows), (c, key.rows)), false, q, key.t(), scale);
        }
        return;
    }
    product(Matrix { rows: q.rows, cols: k.rows, ..s }, false, q, k.t(), scale);
}

/// out = dropout(softmax(scale q k^T + mask)) v, and stats.
pub(crate) fn attention(exec: &Exec, k: &kernel::Attention<'_>) -> Result<()> {
    for_float!("attention", k.inputs.q.dtype(), T => attention_of::<T>(exec, k))
}

fn attention_of<T: Float>(exec: &Exec, k: &kernel::Attention<'_>) {
    let kernel::Attention { inputs, out, stats } = *k;
    let [qs, ks, vs, outs] = [inputs.q, inputs.k, inputs.v, out].map(Heads::<T>::of);
    let (mask, stats) = (Mask::of(&inputs), Rows::<T>::of(stats));
    let bias = inputs.mask.map(Bias::<T>::of);
    let scale = T::of(inputs.spec.scale);
    let blocks = qs.time.div_ceil(QUERIES);
    let heads = qs.batch * qs.heads;
    exec.run::<T>(
        blocks * heads,
        work(&qs, ks.time),
        #[inline(always)]
        |task| {
            // The last queries see most: they go first.
            let (block, index) = (blocks - 1 - task / heads, task % heads);
            let (b, h) = (index / qs.heads, index % qs.heads);
            let from = block * QUERIES;
            let rows = QUERIES.min(qs.time - from);
            let copies = [qs.scratch(QUERIES), ks.scratch(KEYS), vs.scratch(KEYS)];
            let len = QUERIES * (KEYS + vs.size + 2) + KEYS * vs.size + copies.iter().sum::<usize>();
            let mut scratch = exec.scratch::<T>(len);
            let memory = scratch.memory();
            let (q_memory, memory) = memory.split_at_mut(copies[0]);
            let (k_memory, memory) = memory.split_at_mut(copies[1]);
            let (v_memory, memory) = memory.split_at_mut(copies[2]);
            let (s_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (o_memory, memory) = memory.split_at_mut(QUERIES * vs.size);
            let (spare, memory) = memory.split_at_mut(KEYS * vs.size);
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
                scores(s, q_tile, k_tile, scale);
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
                let v_tile = vs.tile(b, kv_head, j, keys).widened(v_memory);
                let (queries, keys) = ((from, rows), (j, keys));
                let sight = Sight { mask: &mask, bias: bias.as_ref(), head: (b, h), queries, keys };
                sight.product((o, j > start), (s, false), v_tile, T::ONE, spare);
            }
            for i in 0..rows {
                let seen = maximum[i] != -T::INFINITY;
                let (source, target) = (o.span.part(i * vs.size, vs.size, 1), outs.row(b, h, from + i));
                let inverse = T::ONE / sum[i];
                for c in (0..vs.size).step_by(BLOCK) {
                    let values = source.load::<BLOCK>(c, T::ZERO);
                    target.store(c, lanes!(n => if seen { values[n] * inverse } else { T::ZERO }));
                }
                let stats = stats.row((b * qs.heads + h) * qs.time + from + i);
                stats.set(0, maximum[i]);
                stats.set(1, if seen { Float::ln(sum[i]) } else { T::ZERO });
            }
        },
    );
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
pub(crate) fn attention_delta(exec: &Exec, k: &kernel::AttentionDelta<'_>) -> Result<()> {
    for_float!("attention_delta", k.o.dtype(), T => attention_delta_of::<T>(exec, k))
}

fn attention_delta_of<T: Float>(exec: &Exec, k: &kernel::AttentionDelta<'_>) {
    let kernel::AttentionDelta { o, g, delta } = *k;
    let (os, gs, deltas) = (Heads::<T>::of(o), Heads::<T>::of(g), Rows::<T>::of(delta));
    exec.run::<T>(
        os.batch * os.heads,
        o.len(),
        #[inline(always)]
        |index| {
            let (b, h) = (index / os.heads, index % os.heads);
            let delta = deltas.row(index);
            for i in 0..os.time {
                let (o, g) = (os.row(b, h, i), gs.row(b, h, i));
                delta.set(
                    i,
                    sum_blocks(
                        os.size,
                        #[inline(always)]
                        |c| {
                            let (u, v) = (o.load::<BLOCK>(c, T::ZERO), g.load::<BLOCK>(c, T::ZERO));
                            lanes!(j => u[j] * v[j])
                        },
                    ),
                );
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same_bits<T: Float>() {
        let (queries, keys) = (130, 300);
        for size in [1, 2, 5, 16, 40, 64, 100, 128, 256, 600] {
            let stream = RandomStream { seed: size as u64, counter: 0 };
            let number = |i: usize| T::of(stream.word(i as u64) as f64 / 2f64.powi(31) - 1.0);
            let mut memory: Vec<T> = (0..(queries + keys) * size).map(number).collect();
            let (q_memory, k_memory) = memory.split_at_mut(queries * size);
            for columns in [false, true] {
                let lay = |memory: &mut [T], rows: usize| match columns {
                    false => Matrix::over(memory, rows, size, size),
                    true => Matrix::over(memory, size, rows, rows).t(),
                };
                let (q, k) = (lay(q_memory, queries), lay(k_memory, keys));
                let (mut all, mut part) = (vec![T::ZERO; queries * keys], vec![T::ZERO; queries * keys]);
                scores(Matrix::over(&mut all, queries, keys, keys), q, k, T::of(0.3));
                for (i, rows) in [(0, 1), (7, 1), (3, 2), (0, 64), (64, 66), (129, 1), (0, 128), (5, 17)] {
                    for (j, cols) in [(0, 1), (9, 1), (0, 256), (256, 44), (128, 128), (7, 3), (299, 1)] {
                        let (q, k) = (q.block((i, rows), (0, size)), k.block((j, cols), (0, size)));
                        scores(Matrix::over(&mut part, rows, cols, 256), q, k, T::of(0.3));
                        for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                            let (one, other) = (part[r * 256 + c].wide(), all[(i + r) * keys + j + c].wide());
                            let pair = (size, columns, (i, rows), (j, cols));
                            assert_eq!(one.to_bits(), other.to_bits(), "{one} and {other} of {r}, {c} in {pair:?}");
                        }
                    }
                }
            }
        }
    }

    /// Whatever else is in its tile: backward rebuilds weights from scores that it makes in tiles of other sizes.
    #[test]
    fn a_score_has_the_same_bits_in_every_tile() {
        same_bits::<f32>();
        same_bits::<f64>();
    }
}
