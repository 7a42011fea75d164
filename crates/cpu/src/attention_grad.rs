//! Backward of tiled attention, in two passes that each recompute the weights p_ij = exp((s_ij - m_i) - l_i), where
//! stats are m_i, the largest score of the row, and l_i = ln sum_j exp(s_ij - m_i).
//!
//! With g the gradient of out, z_ij = kept_ij / (1 - p_drop) and delta_i = g_i . out_i:
//! dv_j = sum_i z_ij p_ij g_i, dp_ij = z_ij g_i . v_j, ds_ij = p_ij (dp_ij - delta_i),
//! dk_j = scale sum_i ds_ij q_i, dq_i = scale sum_j ds_ij k_j.
//!
//! The gradient of an additive mask is ds, summed over what the mask repeats.
//!
//! One pass owns blocks of keys and gives dk and dv, the other owns blocks of queries and gives dq: every sum is made
//! by one task in a fixed order.

use crate::attention::{Bias, Heads, Mask, Sight, scores, work};
use crate::exec::Exec;
use crate::gemm::{Matrix, product};
use crate::math::Float;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::Result;
use retape_core::kernel::{self, AttentionGradInputs};

/// Queries and keys of a tile. Keys are a multiple of the block.
const QUERIES: usize = 128;
const KEYS: usize = 128;

/// What all passes read.
struct Pass<'a, T> {
    q: Heads<T>,
    k: Heads<T>,
    v: Heads<T>,
    g: Heads<T>,
    /// One row for each query: its largest score, and ln of the sum of exponentials.
    stats: Rows<T>,
    delta: Rows<T>,
    mask: Mask<'a>,
    bias: Option<Bias<T>>,
    scale: T,
}

/// What a tile of scores is made of; of 16 bits, widened copies.
struct Tiles<T> {
    q: Matrix<T>,
    k: Matrix<T>,
    v: Matrix<T>,
    g: Matrix<T>,
}

impl<'a, T: Float> Pass<'a, T> {
    fn of(inputs: &AttentionGradInputs<'a>) -> Pass<'a, T> {
        let AttentionGradInputs { forward, g, stats, delta } = inputs;
        let [q, k, v, g] = [forward.q, forward.k, forward.v, *g].map(Heads::<T>::of);
        let (stats, delta) = (Rows::of(stats), Rows::of(delta));
        let bias = forward.mask.map(Bias::of);
        Pass { q, k, v, g, stats, delta, mask: Mask::of(forward), bias, scale: T::of(forward.spec.scale) }
    }

    /// Elements that the copies of a tile's operands take.
    fn scratch(&self) -> usize {
        self.q.scratch(QUERIES) + self.g.scratch(QUERIES) + self.k.scratch(KEYS) + self.v.scratch(KEYS)
    }

    /// Elements of a tile of any operand.
    fn spare(&self) -> usize {
        QUERIES.max(KEYS) * self.q.size.max(self.v.size)
    }

    fn sight(&self, head: (usize, usize), queries: (usize, usize), keys: (usize, usize)) -> Sight<'_, T> {
        Sight { mask: &self.mask, bias: self.bias.as_ref(), head, queries, keys }
    }

    /// The operands of `rows` queries from `i` and `keys` keys from `j` of one head.
    fn tiles(
        &self,
        (b, h): (usize, usize),
        (i, rows): (usize, usize),
        (j, keys): (usize, usize),
        memory: &mut [T],
    ) -> Tiles<T> {
        let kv_head = h / (self.q.heads / self.k.heads);
        let (q_memory, memory) = memory.split_at_mut(self.q.scratch(QUERIES));
        let (g_memory, memory) = memory.split_at_mut(self.g.scratch(QUERIES));
        let (k_memory, v_memory) = memory.split_at_mut(self.k.scratch(KEYS));
        Tiles {
            q: self.q.tile(b, h, i, rows).widened(q_memory),
            g: self.g.tile(b, h, i, rows).widened(g_memory),
            k: self.k.tile(b, kv_head, j, keys).widened(k_memory),
            v: self.v.tile(b, kv_head, j, keys).widened(v_memory),
        }
    }

    /// Fills `p` with z p and `ds` with ds for queries `i ..` and keys `j ..` of one head; both 0 where a pair isn't
    /// seen, whatever its rows hold.
    #[inline(always)]
    fn weights(&self, (b, h): (usize, usize), i: usize, j: usize, tiles: &Tiles<T>, p: Matrix<T>, ds: Matrix<T>) {
        let (rows, keys) = (p.rows, p.cols);
        scores(p, tiles.q, tiles.k, self.scale);
        product(ds, false, tiles.g, tiles.v.t(), T::ONE);
        let index = b * self.q.heads + h;
        let deltas = self.delta.row(index);
        let keep = T::of(self.mask.keep);
        for r in 0..rows {
            let (p, ds) = (p.span.part(r * KEYS, KEYS, 1), ds.span.part(r * KEYS, KEYS, 1));
            let visible = self.mask.visible(i + r).saturating_sub(j).min(keys);
            let (stats, delta) = (self.stats.row(index * self.q.time + i + r), deltas.get(i + r));
            let (maximum, log_sum) = (stats.get(0), stats.get(1));
            if let Some(bias) = &self.bias {
                bias.apply(p.sub(0, visible), (b, h), i + r, j);
            }
            let first = self.mask.first_key(i + r).saturating_sub(j).min(visible);
            p.sub(0, first).fill(-T::INFINITY);
            // Whether there may be -inf among the scores, which are hidden pairs.
            let hides = first > 0 || self.bias.is_some() || maximum == -T::INFINITY;
            for c in (0..keys).step_by(BLOCK) {
                let (s, dp) = (p.load::<BLOCK>(c, T::ZERO), ds.load::<BLOCK>(c, T::ZERO));
                let (mut weights, mut grads) = ([T::ZERO; BLOCK], [T::ZERO; BLOCK]);
                if c < visible {
                    let below = lanes!(n => s[n] - maximum);
                    // No score is above the largest, and no weight above 1, even if a product has rounded otherwise
                    // than forward's.
                    weights = lanes!(n => Float::exp((if below[n] > T::ZERO { T::ZERO } else { below[n] }) - log_sum));
                    if self.mask.drops() {
                        let kept = self.mask.kept(index * self.q.time + i + r, j + c);
                        for n in 0..BLOCK {
                            let z = if kept[n] { keep } else { T::ZERO };
                            grads[n] = weights[n] * (z * dp[n] - delta);
                            weights[n] = z * weights[n];
                        }
                    } else {
                        for n in 0..BLOCK {
                            grads[n] = weights[n] * (dp[n] - delta);
                        }
                    }
                    if hides {
                        for n in 0..BLOCK {
                            let seen = s[n] != -T::INFINITY;
                            weights[n] = if seen { weights[n] } else { T::ZERO };
                            grads[n] = if seen { grads[n] } else { T::ZERO };
                        }
                    }
                    if visible < c + BLOCK {
                        for n in 0..BLOCK {
                            weights[n] = if c + n < visible { weights[n] } else { T::ZERO };
                            grads[n] = if c + n < visible { grads[n] } else { T::ZERO };
                        }
                    }
                }
                p.store(c, weights);
                ds.store(c, grads);
            }
        }
    }
}

/// Writes a matrix of scratch to its place in a tensor.
#[inline(always)]
fn write<T: Float>(from: Matrix<T>, out: &Heads<T>, (b, h): (usize, usize), time: usize) {
    for r in 0..from.rows {
        let (source, target) = (from.span.part(r * from.row_stride, from.cols, 1), out.row(b, h, time + r));
        target.copy_from(source);
    }
}

/// dk and dv, summed over the query heads that a kv head serves.
pub(crate) fn attention_grad_kv(exec: &Exec, k: &kernel::AttentionGradKv<'_>) -> Result<()> {
    for_float!("attention_grad_kv", k.inputs.forward.q.dtype(), T => attention_grad_kv_of::<T>(exec, k))
}

fn attention_grad_kv_of<T: Float>(exec: &Exec, k: &kernel::AttentionGradKv<'_>) {
    let kernel::AttentionGradKv { inputs, dk, dv } = *k;
    let pass = Pass::<T>::of(&inputs);
    let (dks, dvs) = (Heads::<T>::of(dk), Heads::<T>::of(dv));
    let (size, v_size, heads) = (pass.k.size, pass.v.size, pass.k.batch * pass.k.heads);
    let group = pass.q.heads / pass.k.heads.max(1);
    let tasks = pass.k.time.div_ceil(KEYS) * heads;
    exec.run::<T>(
        tasks,
        work(&pass.q, pass.k.time),
        #[inline(always)]
        |task| {
            // The first keys are seen by most: they go first, as they come.
            let (j, index) = (task / heads * KEYS, task % heads);
            let (b, kv_head) = (index / pass.k.heads, index % pass.k.heads);
            let keys = KEYS.min(pass.k.time - j);
            let len = pass.scratch() + 2 * QUERIES * KEYS + pass.spare() + KEYS * (size + v_size);
            let mut scratch = exec.scratch::<T>(len);
            let memory = scratch.memory();
            let (copies, memory) = memory.split_at_mut(pass.scratch());
            let (p_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (ds_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (spare, memory) = memory.split_at_mut(pass.spare());
            memory.fill(T::ZERO);
            let (dk_memory, dv_memory) = memory.split_at_mut(KEYS * size);
            let (dk, dv) = (Matrix::over(dk_memory, keys, size, size), Matrix::over(dv_memory, keys, v_size, v_size));
            for h in kv_head * group..(kv_head + 1) * group {
                let first = pass.mask.first_query(j);
                let end = pass.mask.end_query(j + keys - 1);
                for i in (first..end).step_by(QUERIES) {
                    let rows = QUERIES.min(end - i);
                    let p = Matrix::over(p_memory, rows, keys, KEYS);
                    let ds = Matrix::over(ds_memory, rows, keys, KEYS);
                    let tiles = pass.tiles((b, h), (i, rows), (j, keys), copies);
                    pass.weights((b, h), i, j, &tiles, p, ds);
                    let sight = pass.sight((b, h), (i, rows), (j, keys));
                    sight.product((dv, true), (p, true), tiles.g, T::ONE, spare);
                    sight.product((dk, true), (ds, true), tiles.q, pass.scale, spare);
                }
            }
            write(dk, &dks, (b, kv_head), j);
            write(dv, &dvs, (b, kv_head), j);
        },
    );
}

/// dq.
pub(crate) fn attention_grad_q(exec: &Exec, k: &kernel::AttentionGradQ<'_>) -> Result<()> {
    for_float!("attention_grad_q", k.inputs.forward.q.dtype(), T => attention_grad_q_of::<T>(exec, k))
}

fn attention_grad_q_of<T: Float>(exec: &Exec, k: &kernel::AttentionGradQ<'_>) {
    let kernel::AttentionGradQ { inputs, dq } = *k;
    let (pass, dqs) = (Pass::<T>::of(&inputs), Heads::<T>::of(dq));
    let (size, heads, blocks) = (pass.q.size, pass.q.batch * pass.q.heads, pass.q.time.div_ceil(QUERIES));
    exec.run::<T>(
        blocks * heads,
        work(&pass.q, pass.k.time),
        #[inline(always)]
        |task| {
            let (i, index) = ((blocks - 1 - task / heads) * QUERIES, task % heads);
            let (b, h) = (index / pass.q.heads, index % pass.q.heads);
            let rows = QUERIES.min(pass.q.time - i);
            let mut scratch = exec.scratch::<T>(pass.scratch() + 2 * QUERIES * KEYS + pass.spare() + QUERIES * size);
            let memory = scratch.memory();
            let (copies, memory) = memory.split_at_mut(pass.scratch());
            let (p_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (ds_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (spare, dq_memory) = memory.split_at_mut(pass.spare());
            dq_memory.fill(T::ZERO);
            let dq = Matrix::over(dq_memory, rows, size, size);
            let end = pass.mask.visible(i + rows - 1);
            for j in (pass.mask.first_key(i) / KEYS * KEYS..end).step_by(KEYS) {
                let keys = KEYS.min(end - j);
                let (p, ds) = (Matrix::over(p_memory, rows, keys, KEYS), Matrix::over(ds_memory, rows, keys, KEYS));
                let tiles = pass.tiles((b, h), (i, rows), (j, keys), copies);
                pass.weights((b, h), i, j, &tiles, p, ds);
                let sight = pass.sight((b, h), (i, rows), (j, keys));
                sight.product((dq, true), (ds, false), tiles.k, pass.scale, spare);
            }
            write(dq, &dqs, (b, h), i);
        },
    );
}

/// dmask `[batch or 1, heads or 1, Tq or 1, Tk]`. A task owns a strip of keys of one of the mask's heads, and adds up
/// the heads and queries that it serves in their order, a tile of rows after the other.
pub(crate) fn attention_grad_mask(exec: &Exec, k: &kernel::AttentionGradMask<'_>) -> Result<()> {
    for_float!("attention_grad_mask", k.inputs.forward.q.dtype(), T => attention_grad_mask_of::<T>(exec, k))
}

fn attention_grad_mask_of<T: Float>(exec: &Exec, k: &kernel::AttentionGradMask<'_>) {
    let kernel::AttentionGradMask { inputs, dmask } = *k;
    let (pass, sums) = (Pass::<T>::of(&inputs), Rows::<T>::of(dmask));
    let (masks, rows_of_mask) = ([dmask.shape()[0], dmask.shape()[1]], dmask.shape()[2]);
    let strips = pass.k.time.div_ceil(KEYS);
    exec.run::<T>(
        strips * masks[0] * masks[1],
        work(&pass.q, pass.k.time),
        #[inline(always)]
        |task| {
            let (j, index) = (task % strips * KEYS, task / strips);
            let keys = KEYS.min(pass.k.time - j);
            let served = |size: usize, own: usize, all: usize| if size == 1 { 0..all } else { own..own + 1 };
            let mut scratch = exec.scratch::<T>(pass.scratch() + 3 * QUERIES * KEYS);
            let (copies, memory) = scratch.memory().split_at_mut(pass.scratch());
            let (p_memory, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (ds_memory, sum_memory) = memory.split_at_mut(QUERIES * KEYS);
            // Some queries that have rows of their own at a time, or all of them into one row.
            let (together, own) = if rows_of_mask == 1 { (pass.q.time.max(1), 0) } else { (QUERIES, 1) };
            for first in (0..pass.q.time.max(rows_of_mask)).step_by(together) {
                let of_mask = together.min(rows_of_mask - first);
                let sum = Span::over(sum_memory);
                sum.fill(T::ZERO);
                for b in served(masks[0], index / masks[1], pass.q.batch) {
                    for h in served(masks[1], index % masks[1], pass.q.heads) {
                        let end = pass.q.time.min(first + together);
                        for i in (first..end).step_by(QUERIES) {
                            let rows = QUERIES.min(end - i);
                            let (p, ds) =
                                (Matrix::over(p_memory, rows, keys, KEYS), Matrix::over(ds_memory, rows, keys, KEYS));
                            let tiles = pass.tiles((b, h), (i, rows), (j, keys), copies);
                            pass.weights((b, h), i, j, &tiles, p, ds);
                            for r in 0..rows {
                                let (sum, part) = (sum.part(own * r * KEYS, keys, 1), ds.span.part(r * KEYS, keys, 1));
                                for c in (0..keys).step_by(BLOCK) {
                                    let (u, v) = (sum.load::<BLOCK>(c, T::ZERO), part.load::<BLOCK>(c, T::ZERO));
                                    sum.store(c, lanes!(n => u[n] + v[n]));
                                }
                            }
                        }
                    }
                }
                for r in 0..of_mask {
                    sums.row(index * rows_of_mask + first + r).sub(j, keys).copy_from(sum.part(r * KEYS, keys, 1));
                }
            }
        },
    );
}
