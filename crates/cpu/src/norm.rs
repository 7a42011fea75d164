//! Layer norm over the last dimension (Ba, Kiros and Hinton 2016), and RMS norm (Zhang and Sennrich 2019), which is the
//! same with 0 in place of the mean.
//!
//! With xhat = (x - mean) rstd: out = xhat weight + bias. For the gradient let e = g weight; as mean and rstd depend on
//! every x of the row, dx = rstd (e - mean(e) - xhat mean(e xhat)). Mean and variance are taken in two passes.

use crate::exec::Exec;
use crate::math::{Float, fold_lanes, sum_blocks};
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::{Result, Tensor};

/// Rows added up in the tensor's dtype, and the most pieces that rows are cut into.
const ROWS: usize = 64;
const PIECES: usize = 64;

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

/// Operands of [`layer_norm`].
#[derive(Debug)]
pub(crate) struct LayerNorm<'a> {
    pub x: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
    pub eps: f64,
    pub out: &'a Tensor,
    pub mean: Option<&'a Tensor>,
    pub rstd: &'a Tensor,
}

pub(crate) fn layer_norm(exec: &Exec, op: LayerNorm<'_>) -> Result<()> {
    for_float!("layer_norm", op.x.dtype(), T => {
            let (xs, outs) = (Rows::<T>::of(op.x), Rows::<T>::of(op.out));
            let (means, rstds) = (op.mean.map(Stat::<T>::of), Stat::<T>::of(op.rstd));
            let (weight, bias) = (vector::<T>(op.weight), vector::<T>(op.bias));
            let (n, eps) = (T::of(xs.width as f64), T::of(op.eps));
            for_each_row::<T>(exec, xs.count, xs.width, 4, #[inline(always)] |r| {
                let (x, o) = (xs.row(r), outs.row(r));
                let mean = match &means {
                    Some(_) => sum_blocks(x.len(), #[inline(always)] |i| x.load::<BLOCK>(i, T::ZERO)) / n,
                    None => T::ZERO,
                };
                let squares = sum_blocks(x.len(), #[inline(always)] |i| {
                    let v = x.load::<BLOCK>(i, mean);
    lanes!(j => (v[j] - mean) * (v[j] - mean))
                });
                let rstd = T::ONE / (squares / n + eps).root();
                if let Some(means) = &means {
                    means.put(r, mean);
                }
                rstds.put(r, rstd);
                for i in (0..x.len()).step_by(BLOCK) {
                    let v = x.load::<BLOCK>(i, T::ZERO);
                    let (w, b) = (block_or(weight, i, T::ONE), block_or(bias, i, T::ZERO));
                    o.store(i, lanes!(j => Float::mul_add((v[j] - mean) * rstd, w[j], b[j])));
                }
            });
        });
    Ok(())
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
    let w = block_or(weight, i, T::ONE);
    (lanes!(j => (v[j] - mean) * rstd), lanes!(j => d[j] * w[j]))
}

pub(crate) fn layer_norm_grad(
    exec: &Exec,
    x: &Tensor,
    weight: Option<&Tensor>,
    (mean, rstd): (Option<&Tensor>, &Tensor),
    g: &Tensor,
    out: &Tensor,
) -> Result<()> {
    for_float!("layer_norm_grad", x.dtype(), T => {
        let (xs, gs, outs) = (Rows::<T>::of(x), Rows::<T>::of(g), Rows::<T>::of(out));
        let (means, rstds, weight) = (mean.map(Stat::<T>::of), Stat::<T>::of(rstd), vector::<T>(weight));
        let n = T::of(xs.width as f64);
        for_each_row::<T>(exec, xs.count, xs.width, 4, #[inline(always)] |r| {
            let (x, g, o) = (xs.row(r), gs.row(r), outs.row(r));
            let (mean, rstd) = (means.as_ref().map_or(T::ZERO, |m| m.at(r)), rstds.at(r));
            let (mut e_sum, mut ex_sum) = ([T::ZERO; BLOCK], [T::ZERO; BLOCK]);
            for i in (0..x.len()).step_by(BLOCK) {
                let (xhat, e) = xhat_and_e(x, g, weight, (mean, rstd), i);
                e_sum = lanes!(j => e_sum[j] + e[j]);
                ex_sum = lanes!(j => xhat[j].mul_add(e[j], ex_sum[j]));
            }
            let add = |a, b| a + b;
            let e_mean = if means.is_some() { fold_lanes(e_sum, add) / n } else { T::ZERO };
            let ex_mean = fold_lanes(ex_sum, add) / n;
            for i in (0..x.len()).step_by(BLOCK) {
                let (xhat, e) = xhat_and_e(x, g, weight, (mean, rstd), i);
                o.store(i, lanes!(j => rstd * (e[j] - e_mean - xhat[j] * ex_mean)));
            }
        });
    });
    Ok(())
}

/// dweight = sum over rows of g xhat, dbias = sum of g. Rows are cut into pieces by their number alone, and the pieces'
/// sums added in order.
pub(crate) fn layer_norm_param_grad(
    exec: &Exec,
    x: &Tensor,
    (mean, rstd): (Option<&Tensor>, &Tensor),
    g: &Tensor,
    dweight: Option<&Tensor>,
    dbias: Option<&Tensor>,
) -> Result<()> {
    for_float!("layer_norm_param_grad", x.dtype(), T => {
        let (xs, gs) = (Rows::<T>::of(x), Rows::<T>::of(g));
        let (means, rstds) = (mean.map(Stat::<T>::of), Stat::<T>::of(rstd));
        let (rows, n) = (xs.count, xs.width);
        let piece = rows.div_ceil(PIECES).next_multiple_of(ROWS);
        let parts = exec.collect::<T, _>(rows.div_ceil(piece.max(1)), rows * n * 3, #[inline(always)] |p| {
            let (mut dw, mut db) = (vec![0f64; n], vec![0f64; n]);
            let (mut w_memory, mut b_memory) = (vec![T::ZERO; n], vec![T::ZERO; n]);
            let (w, b) = (Span::over(&mut w_memory), Span::over(&mut b_memory));
            let end = rows.min((p + 1) * piece);
            for from in (p * piece..end).step_by(ROWS) {
                w.fill(T::ZERO);
                b.fill(T::ZERO);
                for r in from..end.min(from + ROWS) {
                    let (x, g, rstd) = (xs.row(r), gs.row(r), rstds.at(r));
                    let mean = means.as_ref().map_or(T::ZERO, |m| m.at(r));
                    for i in (0..n).step_by(BLOCK) {
                        let (v, d) = (x.load::<BLOCK>(i, T::ZERO), g.load::<BLOCK>(i, T::ZERO));
                        let (u, s) = (w.load::<BLOCK>(i, T::ZERO), b.load::<BLOCK>(i, T::ZERO));
                        w.store(i, lanes!(j => d[j].mul_add((v[j] - mean) * rstd, u[j])));
                        b.store(i, lanes!(j => s[j] + d[j]));
                    }
                }
                for (sum, part) in dw.iter_mut().zip(w.as_slice()) {
                    *sum += part.wide();
                }
                for (sum, part) in db.iter_mut().zip(b.as_slice()) {
                    *sum += part.wide();
                }
            }
            (dw, db)
        });
        for i in 0..n {
            if let Some(dw) = vector::<T>(dweight) {
                dw.set(i, T::of(parts.iter().fold(0.0, |sum, p| sum + p.0[i])));
            }
            if let Some(db) = vector::<T>(dbias) {
                db.set(i, T::of(parts.iter().fold(0.0, |sum, p| sum + p.1[i])));
            }
        }
    });
    Ok(())
}
