//! Layer norm over the last dimension (Ba, Kiros and Hinton 2016), and RMS norm (Zhang and Sennrich 2019), which is the
//! same with 0 in place of the mean.
//!
//! With xhat = (x - mean) rstd: out = xhat weight + bias. For the gradient let e = g weight; as mean and rstd depend on
//! every x of the row, dx = rstd (e - mean(e) - xhat mean(e xhat)). Mean and variance are taken in two passes. A row
//! whose squares overflow, or vanish with no eps to speak of, or which lies so far from 0 that the mean's rounding
//! counts, is done again, scaled and in f64 ([`FarRow`]).

use crate::exec::Exec;
use crate::math::{DEPTH, Float, sum_blocks, sums_of_blocks};
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::{Result, Tensor, kernel};
use std::ops::Range;

/// Columns of one task of the parameters' gradients; the most pieces that rows are cut into, and fewest rows of one.
const COLUMNS: usize = 256;
const PIECES: usize = 64;
const ROWS: usize = 64;

/// Elements `[n]` that may be absent, as a row; read in blocks.
fn vector<T: Float>(tensor: Option<&Tensor>) -> Option<Span<T>> {
    tensor.map(|t| Rows::<T>::of(t).row(0))
}

#[inline(always)]
fn block_or<T: Float>(vector: Option<Span<T>>, i: usize, default: T) -> [T; BLOCK] {
    match vector {
        Some(v) => v.load(i, T::ZERO),
        None => [default; BLOCK],
    }
}

/// One number a row (mean, rstd), in the order of the rows.
#[derive(Debug)]
pub(crate) struct Stat<T>(Rows<T>);

impl<T: Float> Stat<T> {
    pub fn of(tensor: &Tensor) -> Stat<T> {
        Stat(Rows::of(tensor))
    }
    #[inline(always)]
    pub fn at(&self, r: usize) -> T {
        if self.0.width == 1 { self.0.row(r).get(0) } else { self.0.row(r / self.0.width).get(r % self.0.width) }
    }
    #[inline(always)]
    fn put(&self, r: usize, value: T) {
        if self.0.width == 1 {
            self.0.row(r).set(0, value)
        } else {
            self.0.row(r / self.0.width).set(r % self.0.width, value)
        }
    }
}

/// A power of two that brings this magnitude to 1..2, or near: 1 for what is 0 or not finite.
fn scale_of(most: f64) -> f64 {
    if most == 0.0 || !most.is_finite() {
        return 1.0;
    }
    let exponent = (most.to_bits() >> 52).clamp(1, 2045);
    f64::from_bits((2046 - exponent) << 52)
}

/// A row far from 1, scaled by a power of two, in f64: xhat = (x scale - mean) rstd.
struct FarRow {
    scale: f64,
    mean: f64,
    rstd: f64,
}

impl FarRow {
    #[cold]
    #[inline(never)]
    fn of<T: Float>(x: Span<T>, centred: bool, eps: f64) -> FarRow {
        let all = || (0..x.len()).map(|i| x.get(i).wide());
        let (scale, n) = (scale_of(all().fold(0.0, |m, v| m.larger(v.abs()))), x.len() as f64);
        let mean = if centred { all().map(|v| v * scale).sum::<f64>() / n } else { 0.0 };
        let squares: f64 = all().map(|v| (v * scale - mean) * (v * scale - mean)).sum();
        FarRow { scale, mean, rstd: 1.0 / (squares / n + eps * scale * scale).sqrt() }
    }

    #[inline(never)]
    fn write<T: Float>(&self, x: Span<T>, weight: Option<Span<T>>, bias: Option<Span<T>>, out: Span<T>) {
        for i in 0..x.len() {
            let xhat = (x.get(i).wide() * self.scale - self.mean) * self.rstd;
            let (w, b) = (weight.map_or(1.0, |w| w.get(i).wide()), bias.map_or(0.0, |b| b.get(i).wide()));
            out.set(i, T::of(xhat.mul_add(w, b)));
        }
    }
}

/// True where the mean's rounding counts beside the deviations; [`layer_norm`] has done such rows as [`FarRow`]s.
#[inline(always)]
fn is_far<T: Float>(mean: T, rstd: T) -> bool {
    size_of::<T>() == 4 && mean.magnitude() * rstd > T::of(1e3)
}

/// The mean of these rows, unrounded.
#[cold]
#[inline(never)]
fn wide_mean<T: Float>(xs: &Rows<T>, rows: Range<usize>) -> f64 {
    let n = rows.len() * xs.width;
    let sum = |x: Span<T>| (0..x.len()).map(|i| x.get(i).wide()).sum::<f64>();
    rows.map(|r| sum(xs.row(r))).sum::<f64>() / n as f64
}

/// The gradient by a row that is far, all in f64.
#[cold]
#[inline(never)]
fn far_grad<T: Float>(x: Span<T>, weight: Option<Span<T>>, (mean, rstd): (f64, f64), g: Span<T>, out: Span<T>) {
    let n = x.len() as f64;
    let xhat_and_e = |i: usize| {
        let e = g.get(i).wide() * weight.map_or(1.0, |w| w.get(i).wide());
        ((x.get(i).wide() - mean) * rstd, e)
    };
    let e_mean = (0..x.len()).map(|i| xhat_and_e(i).1).sum::<f64>() / n;
    let ex_mean = (0..x.len()).map(xhat_and_e).map(|(xhat, e)| xhat * e).sum::<f64>() / n;
    for i in 0..x.len() {
        let (xhat, e) = xhat_and_e(i);
        out.set(i, T::of(rstd * (e - e_mean - xhat * ex_mean)));
    }
}

/// Adds g xhat and g of a row that is far to the sums, from column `first`.
#[cold]
#[inline(never)]
fn add_far<T: Float>(x: Span<T>, g: Span<T>, (mean, rstd): (f64, f64), first: usize, [dw, db]: [&mut [T]; 2]) {
    for (i, (dw, db)) in (first..x.len()).zip(dw.iter_mut().zip(db)) {
        let xhat = T::of((x.get(i).wide() - mean) * rstd);
        *dw = Float::mul_add(g.get(i), xhat, *dw);
        *db += g.get(i);
    }
}

/// x becomes xhat as (x/2 + shift) factor: x - mean may overflow where xhat does not.
#[inline(always)]
fn centring<T: Float>(mean: T, rstd: T) -> (T, T) {
    (T::of(-0.5) * mean, rstd + rstd)
}

/// xhat, with what [`centring`] gives.
#[inline(always)]
fn centred<T: Float>(x: T, (shift, factor): (T, T)) -> T {
    Float::mul_add(x, T::of(0.5), shift) * factor
}

pub(crate) fn layer_norm(exec: &Exec, k: &kernel::LayerNorm<'_>) -> Result<()> {
    for_float!("layer_norm", k.x.dtype(), T => layer_norm_of::<T>(exec, k))
}

fn layer_norm_of<T: Float>(exec: &Exec, k: &kernel::LayerNorm<'_>) {
    let kernel::LayerNorm { x, weight, bias, out, mean, rstd, .. } = *k;
    let (xs, outs) = (Rows::<T>::of(x), Rows::<T>::of(out));
    let (means, rstds) = (mean.map(Stat::<T>::of), Stat::<T>::of(rstd));
    let (weight, bias) = (vector::<T>(weight), vector::<T>(bias));
    let (n, eps) = (T::of(xs.width as f64), T::of(k.eps));
    // Squares that add up to less have lost digits; and so has a variance that is a smaller part of the mean's square.
    let (least, part) = if size_of::<T>() == 4 { (T::of(1e-30), T::of(1e-6)) } else { (T::of(1e-290), T::ZERO) };
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        4,
        #[inline(always)]
        |r| {
            let (x, o) = (xs.row(r), outs.row(r));
            let mean = match &means {
                Some(_) => {
                    sum_blocks(
                        x.len(),
                        #[inline(always)]
                        |i| x.load::<BLOCK>(i, T::ZERO),
                    ) / n
                }
                None => T::ZERO,
            };
            let squares = sum_blocks(
                x.len(),
                #[inline(always)]
                |i| {
                    let v = x.load::<BLOCK>(i, mean);
                    lanes!(j => (v[j] - mean) * (v[j] - mean))
                },
            );
            let (variance, within) = (squares / n, mean * mean * part);
            let spread = variance + eps;
            if !(spread >= least && spread < T::INFINITY && variance >= within) {
                let far = FarRow::of(x, means.is_some(), k.eps);
                if let Some(means) = &means {
                    means.put(r, T::of(far.mean / far.scale));
                }
                rstds.put(r, T::of(far.rstd * far.scale));
                return far.write(x, weight, bias, o);
            }
            let rstd = T::ONE / spread.root();
            if let Some(means) = &means {
                means.put(r, mean);
            }
            rstds.put(r, rstd);
            for i in (0..x.len()).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, T::ZERO);
                let (w, b) = (block_or(weight, i, T::ONE), block_or(bias, i, T::ZERO));
                o.store(i, lanes!(j => Float::mul_add((v[j] - mean) * rstd, w[j], b[j])));
            }
        },
    );
}

/// Block `i` of a row's xhat and e.
#[inline(always)]
fn xhat_and_e<T: Float>(
    x: Span<T>,
    g: Span<T>,
    weight: Option<Span<T>>,
    (mean, rstd): (T, T),
    i: usize,
) -> ([T; BLOCK], [T; BLOCK]) {
    let (v, d) = (x.load::<BLOCK>(i, mean), g.load::<BLOCK>(i, T::ZERO));
    let (w, by) = (block_or(weight, i, T::ONE), centring(mean, rstd));
    (lanes!(j => centred(v[j], by)), lanes!(j => d[j] * w[j]))
}

pub(crate) fn layer_norm_grad(exec: &Exec, k: &kernel::LayerNormGrad<'_>) -> Result<()> {
    for_float!("layer_norm_grad", k.x.dtype(), T => layer_norm_grad_of::<T>(exec, k))
}

fn layer_norm_grad_of<T: Float>(exec: &Exec, k: &kernel::LayerNormGrad<'_>) {
    let kernel::LayerNormGrad { x, weight, mean, rstd, g, out } = *k;
    let (xs, gs, outs) = (Rows::<T>::of(x), Rows::<T>::of(g), Rows::<T>::of(out));
    let (means, rstds, weight) = (mean.map(Stat::<T>::of), Stat::<T>::of(rstd), vector::<T>(weight));
    let n = T::of(xs.width as f64);
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        4,
        #[inline(always)]
        |r| {
            let (x, g, o) = (xs.row(r), gs.row(r), outs.row(r));
            let (mean, rstd) = (means.as_ref().map_or(T::ZERO, |m| m.at(r)), rstds.at(r));
            if is_far(mean, rstd) {
                return far_grad(x, weight, (wide_mean(&xs, r..r + 1), rstd.wide()), g, o);
            }
            let [e_sum, ex_sum] = sums_of_blocks(
                x.len(),
                #[inline(always)]
                |i| {
                    let (xhat, e) = xhat_and_e(x, g, weight, (mean, rstd), i);
                    [e, lanes!(j => xhat[j] * e[j])]
                },
            );
            let e_mean = if means.is_some() { e_sum / n } else { T::ZERO };
            let ex_mean = ex_sum / n;
            for i in (0..x.len()).step_by(BLOCK) {
                let (xhat, e) = xhat_and_e(x, g, weight, (mean, rstd), i);
                o.store(i, lanes!(j => rstd * (e[j] - e_mean - xhat[j] * ex_mean)));
            }
        },
    );
}

/// dweight = sum over rows of g xhat, dbias = sum of g. Columns are cut into strips; where these are few, rows are
/// cut into pieces by their number alone, and the pieces' sums added in order. DEPTH rows are added in the tensor's
/// dtype, such sums in f64.
pub(crate) fn layer_norm_param_grad(exec: &Exec, k: &kernel::LayerNormParamGrad<'_>) -> Result<()> {
    for_float!("layer_norm_param_grad", k.x.dtype(), T => layer_norm_param_grad_of::<T>(exec, k))
}

fn layer_norm_param_grad_of<T: Float>(exec: &Exec, k: &kernel::LayerNormParamGrad<'_>) {
    let kernel::LayerNormParamGrad { x, mean, rstd, g, dweight, dbias } = *k;
    let (xs, gs) = (Rows::<T>::of(x), Rows::<T>::of(g));
    let (means, rstds) = (mean.map(Stat::<T>::of), Stat::<T>::of(rstd));
    let (rows, n) = (xs.count, xs.width);
    // Rows that were normalised as one.
    let together = mean.map_or(1, |mean| mean.layout().repeats());
    let strips = n.div_ceil(COLUMNS);
    let piece = if strips >= 16 { rows } else { rows.div_ceil(PIECES).next_multiple_of(ROWS) };
    let pieces = rows.div_ceil(piece.max(1)).max(1);
    // Of each strip and piece: the sums of g xhat, then those of g.
    let mut scratch = exec.scratch::<f64>(if pieces > 1 { strips * pieces * 2 * COLUMNS } else { 0 });
    let parts = Span::over(scratch.memory());
    let outs = [vector::<T>(dweight), vector::<T>(dbias)];
    let put = |strip: usize, totals: &[[f64; COLUMNS]; 2]| {
        for (out, totals) in outs.iter().zip(totals) {
            let Some(out) = out else { continue };
            let first = strip * COLUMNS;
            (first..n.min(first + COLUMNS)).for_each(|c| out.set(c, T::of(totals[c - first])));
        }
    };
    exec.run::<T>(
        strips * pieces,
        rows * n * 3,
        #[inline(always)]
        |task| {
            let (strip, p) = (task / pieces, task % pieces);
            let (first, end) = (strip * COLUMNS, n.min((strip + 1) * COLUMNS));
            let (from, to) = (p * piece, rows.min((p + 1) * piece));
            let mut totals = [[0f64; COLUMNS]; 2];
            // The far rows that were met last, and their mean.
            let mut far = (0..0, 0.0);
            for from in (from..to).step_by(DEPTH) {
                let mut sums = [[[T::ZERO; BLOCK]; COLUMNS / BLOCK]; 2];
                let [dw, db] = &mut sums;
                for r in from..to.min(from + DEPTH) {
                    let (x, g, rstd) = (xs.row(r), gs.row(r), rstds.at(r));
                    let mean = means.as_ref().map_or(T::ZERO, |m| m.at(r));
                    if is_far(mean, rstd) {
                        if !far.0.contains(&r) {
                            let start = r / together * together;
                            far = (start..start + together, wide_mean(&xs, start..start + together));
                        }
                        let sums = [dw.as_flattened_mut(), db.as_flattened_mut()];
                        add_far(x, g, (far.1, rstd.wide()), first, sums);
                        continue;
                    }
                    let by = centring(mean, rstd);
                    for ((dw, db), i) in dw.iter_mut().zip(db.iter_mut()).zip((first..end).step_by(BLOCK)) {
                        let (v, d) = (x.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                        for j in 0..BLOCK {
                            dw[j] = Float::mul_add(d[j], centred(v[j], by), dw[j]);
                            db[j] += d[j];
                        }
                    }
                }
                for (total, &sum) in totals.as_flattened_mut().iter_mut().zip(sums.as_flattened().as_flattened()) {
                    *total += sum.wide();
                }
            }
            if pieces > 1 {
                parts.sub(task * 2 * COLUMNS, 2 * COLUMNS).as_mut_slice().copy_from_slice(totals.as_flattened());
            } else {
                put(strip, &totals);
            }
        },
    );
    for strip in 0..strips {
        if pieces == 1 {
            break;
        }
        let mut totals = [[0f64; COLUMNS]; 2];
        for p in 0..pieces {
            let part = parts.sub((strip * pieces + p) * 2 * COLUMNS, 2 * COLUMNS).as_slice();
            totals.as_flattened_mut().iter_mut().zip(part).for_each(|(total, part)| *total += part);
        }
        put(strip, &totals);
    }
}
