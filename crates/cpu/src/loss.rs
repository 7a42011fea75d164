//! Softmax cross-entropy: with class weights w and a target distribution q, the loss of a row is
//! sum over c of w_c q_c s_c, where s_c = -ln p_c = (m - x_c) + log, m = max x, log = ln sum exp(x - m); s_t for a plain
//! class t. m and log are never added up: where logits are large, their sum has lost log.
//! The gradient is softmax sum(w q) - w q over the count; nothing of the logits' size is held besides its result.

use crate::exec::Exec;
use crate::halves::Cell;
use crate::math::{Float, sum_blocks};
use crate::norm::Stat;
use crate::softmax::{for_each_row, row_max, sum_exp};
use crate::view::{BLOCK, Rows, Span, for_float, lanes, unsupported};
use retape_core::kernel::{CrossEntropySpec, LossReduction};
use retape_core::{DType, Error, Result, Tensor};

/// The integers of an index tensor, widened, in row-major order.
pub(crate) fn integers(kernel: &'static str, tensor: &Tensor) -> Result<Vec<i64>> {
    fn read<T: Cell>(tensor: &Tensor, widen: impl Fn(T) -> i64) -> Vec<i64> {
        let rows = Rows::<T>::of(tensor);
        let values = (0..rows.count).flat_map(|r| {
            let row = rows.row(r);
            (0..row.len()).map(move |i| row.get(i))
        });
        values.map(widen).collect()
    }
    match tensor.dtype() {
        DType::I64 => Ok(read::<i64>(tensor, |v| v)),
        DType::I32 => Ok(read::<i32>(tensor, i64::from)),
        other => Err(unsupported(kernel, other)),
    }
}

/// What all kernels of the family read. Rows run along the last dimension of the logits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scores<'a> {
    pub logits: &'a Tensor,
    pub target: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub spec: CrossEntropySpec,
}

/// What relates a row's scores to probabilities: p = exp((x - most) - log).
#[derive(Debug, Clone, Copy)]
struct Base<T> {
    most: T,
    log: T,
}

impl<T: Float> Base<T> {
    /// That of log-probabilities.
    const NONE: Base<T> = Base { most: T::ZERO, log: T::ZERO };

    #[inline(always)]
    fn of(x: Span<T>) -> Base<T> {
        let most = row_max(x);
        Base { most, log: if most == -T::INFINITY { T::ZERO } else { Float::ln(sum_exp(x, most)) } }
    }

    #[inline(always)]
    fn read(stats: &Rows<T>, r: usize) -> Base<T> {
        let row = stats.row(r);
        Base { most: row.get(0), log: row.get(1) }
    }

    /// A row of only -inf.
    #[inline(always)]
    fn is_nothing(self) -> bool {
        self.most == -T::INFINITY
    }

    /// The same, with inf and not NaN as -ln p in a row of only -inf.
    #[inline(always)]
    fn finite(self) -> Base<T> {
        if self.is_nothing() { Base::NONE } else { self }
    }

    /// -ln p.
    #[inline(always)]
    fn surprise(self, x: T) -> T {
        (self.most - x) + self.log
    }

    #[inline(always)]
    fn surprise_wide(self, x: T) -> f64 {
        (self.most.wide() - x.wide()) + self.log.wide()
    }
}

/// The targets of rows.
enum Targets<T> {
    /// A class, `None` where the row is ignored.
    Classes(Vec<Option<usize>>),
    /// A distribution.
    Given(Rows<T>),
}

/// The terms w_c q_c of each row: q_c = keep p_c + spread, with p given or all on one class.
struct Terms<T> {
    x: Rows<T>,
    targets: Targets<T>,
    weight: Option<Span<T>>,
    keep: T,
    spread: T,
    /// The sum of w.
    total: T,
    /// What the sum over rows is divided by.
    count: f64,
}

impl<T: Float> Terms<T> {
    fn of(kernel: &'static str, scores: Scores<'_>) -> Result<Terms<T>> {
        let Scores { logits, target, weight, spec } = scores;
        let x = Rows::<T>::of(logits);
        let weight = weight.map(|w| Rows::<T>::of(w).row(0));
        let targets = if target.dtype().is_float() {
            Targets::Given(Rows::of(target))
        } else {
            let check = |(row, id): (usize, i64)| match usize::try_from(id) {
                _ if id == spec.ignore => Ok(None),
                Ok(class) if class < x.width => Ok(Some(class)),
                _ => {
                    let (classes, ignore) = (x.width, spec.ignore);
                    let reason =
                        format!("target {id} in row {row} is neither in 0..{classes} nor the ignored value {ignore}");
                    Err(Error::InvalidValue { kernel, reason })
                }
            };
            Targets::Classes(integers(kernel, target)?.into_iter().enumerate().map(check).collect::<Result<_>>()?)
        };
        let keep = T::of(1.0 - spec.smoothing);
        let spread = T::of(spec.smoothing / x.width as f64);
        let total = T::of((0..x.width).map(|c| weight.map_or(1.0, |w| w.get(c).wide())).sum());
        let mut terms = Terms { x, targets, weight, keep, spread, total, count: 1.0 };
        if spec.reduction == LossReduction::Mean {
            terms.count = match &terms.targets {
                Targets::Classes(ids) => ids.iter().flatten().map(|&t| terms.of_class(t).wide()).sum(),
                Targets::Given(_) => terms.x.count as f64,
            };
        }
        Ok(terms)
    }

    /// w_c
    #[inline(always)]
    fn of_class(&self, c: usize) -> T {
        self.weight.map_or(T::ONE, |w| w.get(c))
    }

    /// w of a block of classes.
    #[inline(always)]
    fn weights(&self, i: usize) -> [T; BLOCK] {
        self.weight.map_or([T::ONE; BLOCK], |w| w.load(i, T::ZERO))
    }

    /// q of a block of classes of a row; without what is on one class.
    #[inline(always)]
    fn shares(&self, r: usize, i: usize) -> [T; BLOCK] {
        match &self.targets {
            Targets::Classes(_) => [self.spread; BLOCK],
            Targets::Given(p) => {
                let p = p.row(r).load::<BLOCK>(i, T::ZERO);
                lanes!(j => self.keep.mul_add(p[j], self.spread))
            }
        }
    }

    /// The class that holds what isn't spread; `Err` where the row is ignored.
    #[inline(always)]
    fn class(&self, r: usize) -> Result<Option<usize>, ()> {
        match &self.targets {
            Targets::Classes(ids) => ids[r].map(Some).ok_or(()),
            Targets::Given(_) => Ok(None),
        }
    }

    /// The loss of a row.
    #[inline(always)]
    fn loss(&self, r: usize, base: Base<T>) -> f64 {
        let Ok(class) = self.class(r) else { return 0.0 };
        let (x, base) = (self.x.row(r), base.finite());
        let own = class.map_or(0.0, |t| self.keep.wide() * self.of_class(t).wide() * base.surprise_wide(x.get(t)));
        if class.is_some() && self.spread == T::ZERO {
            return own;
        }
        let rest = sum_blocks(
            x.len(),
            #[inline(always)]
            |i| {
                let (v, w, q) = (x.load::<BLOCK>(i, T::ZERO), self.weights(i), self.shares(r, i));
                let within = x.len() - i;
                // What has no share counts nothing, were it infinite.
                let share = lanes!(j => if j < within { w[j] * q[j] } else { T::ZERO });
                lanes!(j => if share[j] == T::ZERO { T::ZERO } else { share[j] * base.surprise(v[j]) })
            },
        );
        own + rest.wide()
    }

    /// The sum of w q of a row with its class.
    #[inline(always)]
    fn mass(&self, r: usize, class: Option<usize>) -> T {
        match class {
            Some(t) => self.keep * self.of_class(t) + self.spread * self.total,
            None => sum_blocks(
                self.x.width,
                #[inline(always)]
                |i| {
                    let (w, q, within) = (self.weights(i), self.shares(r, i), self.x.width - i);
                    lanes!(j => if j < within { w[j] * q[j] } else { T::ZERO })
                },
            ),
        }
    }
}

/// The gradient of each row's loss, by row.
fn upstream<T: Float>(g: &Tensor, spec: CrossEntropySpec, count: f64) -> impl Fn(usize) -> T + Sync + use<T> {
    let gs = Stat::<T>::of(g);
    let each = spec.reduction == LossReduction::None;
    move |r| T::of(gs.at(if each { r } else { 0 }).wide() / count)
}

pub(crate) fn cross_entropy(exec: &Exec, scores: Scores<'_>, loss: &Tensor, stats: Option<&Tensor>) -> Result<()> {
    for_float!("cross_entropy", scores.logits.dtype(), T => {
        let terms = Terms::<T>::of("cross_entropy", scores)?;
        let (xs, stats) = (&terms.x, stats.map(Rows::<T>::of));
        let mut losses = vec![0f64; xs.count];
        let own = Span::over(&mut losses);
        for_each_row::<T>(exec, xs.count, xs.width, 12, #[inline(always)] |r| {
            // A match: SIMD wouldn't reach into a closure given to `map_or`.
            let base = match &stats {
                Some(stats) => {
                    let (base, row) = (Base::of(xs.row(r)), stats.row(r));
                    row.set(0, base.most);
                    row.set(1, base.log);
                    base
                }
                None => Base::NONE,
            };
            own.set(r, terms.loss(r, base));
        });
        let out = Span::<T>::of(loss);
        match scores.spec.reduction {
            LossReduction::None => losses.iter().enumerate().for_each(|(r, &l)| out.set(r, T::of(l))),
            _ => out.set(0, T::of(losses.iter().fold(0.0, |sum, l| sum + l) / terms.count)),
        }
    });
    Ok(())
}

/// out = g (softmax mass - w q) / count.
pub(crate) fn cross_entropy_grad(
    exec: &Exec,
    scores: Scores<'_>,
    stats: &Tensor,
    g: &Tensor,
    out: &Tensor,
) -> Result<()> {
    for_float!("cross_entropy_grad", scores.logits.dtype(), T => {
        let terms = Terms::<T>::of("cross_entropy_grad", scores)?;
        let (xs, outs, stats) = (&terms.x, Rows::<T>::of(out), Rows::<T>::of(stats));
        let upstream = upstream::<T>(g, scores.spec, terms.count);
        for_each_row::<T>(exec, xs.count, xs.width, 10, #[inline(always)] |r| {
            let (x, o, base) = (xs.row(r), outs.row(r), Base::read(&stats, r));
            let class = match terms.class(r) {
                Ok(class) if !base.is_nothing() => class,
                _ => return o.fill(T::ZERO),
            };
            let scale = upstream(r);
            let whole = scale * terms.mass(r, class);
            for i in (0..o.len()).step_by(BLOCK) {
                let (v, w, q) = (x.load::<BLOCK>(i, T::ZERO), terms.weights(i), terms.shares(r, i));
                let mut grads = lanes!(j => whole * Float::exp((v[j] - base.most) - base.log) - scale * w[j] * q[j]);
                if let Some(t) = class.filter(|t| (i..i + BLOCK).contains(t)) {
                    grads[t - i] += -(scale * terms.keep * terms.of_class(t));
                }
                o.store(i, grads);
            }
        });
    });
    Ok(())
}

/// out = -g w / count at the target, else 0.
pub(crate) fn nll_loss_grad(exec: &Exec, scores: Scores<'_>, g: &Tensor, out: &Tensor) -> Result<()> {
    for_float!("nll_loss_grad", out.dtype(), T => {
        let terms = Terms::<T>::of("nll_loss_grad", scores)?;
        let (outs, upstream) = (Rows::<T>::of(out), upstream::<T>(g, scores.spec, terms.count));
        for_each_row::<T>(exec, outs.count, outs.width, 1, #[inline(always)] |r| {
            outs.row(r).fill(T::ZERO);
            if let Ok(Some(t)) = terms.class(r) {
                outs.row(r).set(t, -(upstream(r) * terms.of_class(t)));
            }
        });
    });
    Ok(())
}

/// out = g (1 - smoothing) w ((m - logits) + log) / count.
pub(crate) fn target_grad(exec: &Exec, scores: Scores<'_>, stats: &Tensor, g: &Tensor, out: &Tensor) -> Result<()> {
    for_float!("cross_entropy_target_grad", scores.logits.dtype(), T => {
        let terms = Terms::<T>::of("cross_entropy_target_grad", scores)?;
        let (xs, outs, stats) = (&terms.x, Rows::<T>::of(out), Rows::<T>::of(stats));
        let upstream = upstream::<T>(g, scores.spec, terms.count);
        for_each_row::<T>(exec, xs.count, xs.width, 4, #[inline(always)] |r| {
            let (x, o, scale) = (xs.row(r), outs.row(r), upstream(r) * terms.keep);
            let base = Base::read(&stats, r).finite();
            for i in (0..o.len()).step_by(BLOCK) {
                let (v, w) = (x.load::<BLOCK>(i, T::ZERO), terms.weights(i));
                o.store(i, lanes!(j => scale * w[j] * base.surprise(v[j])));
            }
        });
    });
    Ok(())
}

/// out_c = the sum over rows of g q_c ((m - x_c) + log) / count; and where the count is a sum of weights, less what a weight
/// takes from the mean by being in it. Class weights are seldom learned: one thread.
pub(crate) fn weight_grad(scores: Scores<'_>, stats: Option<&Tensor>, g: &Tensor, out: &Tensor) -> Result<()> {
    for_float!("cross_entropy_weight_grad", scores.logits.dtype(), T => {
        let terms = Terms::<T>::of("cross_entropy_weight_grad", scores)?;
        let (stats, upstream) = (stats.map(Rows::<T>::of), upstream::<T>(g, scores.spec, terms.count));
        let classes = terms.x.width;
        let (mut sums, mut rows) = (vec![0f64; classes], vec![0f64; classes]);
        for r in 0..terms.x.count {
            let Ok(class) = terms.class(r) else { continue };
            let (x, scale) = (terms.x.row(r), upstream(r).wide());
            let base = stats.as_ref().map_or(Base::NONE, |stats| Base::read(stats, r).finite());
            for i in (0..classes).step_by(BLOCK) {
                let q = terms.shares(r, i);
                for c in i..classes.min(i + BLOCK) {
                    let own = if class == Some(c) { terms.keep } else { T::ZERO };
                    let q = (q[c - i] + own).wide();
                    // Of what has no share nothing counts, were it infinite.
                    sums[c] += if q == 0.0 { 0.0 } else { scale * q * base.surprise_wide(x.get(c)) };
                }
            }
            if let Some(t) = class {
                rows[t] += 1.0;
            }
        }
        let mean: f64 = match scores.spec.reduction {
            LossReduction::Mean => (0..classes).map(|c| terms.of_class(c).wide() * sums[c]).sum::<f64>() / terms.count,
            _ => 0.0,
        };
        let outs = Span::<T>::of(out);
        (0..classes).for_each(|c| outs.set(c, T::of(if rows[c] > 0.0 { sums[c] - mean * rows[c] } else { sums[c] })));
    });
    Ok(())
}
