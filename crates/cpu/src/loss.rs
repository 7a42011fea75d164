//! Softmax cross-entropy: with class weights w and a target distribution q, the loss of a row is
//! sum over c of w_c q_c s_c, where s_c = -ln p_c = (m - x_c) + log, m = max x, log = ln sum exp(x - m); s_t for a
//! plain class t. m and log are never added up: where logits are large, their sum has lost log. The gradient is
//! softmax sum(w q) - w q over the count; nothing of the logits' size is held besides its result.

use crate::exec::Exec;
use crate::math::{Float, sum_blocks};
use crate::norm::Stat;
use crate::reduce::Axis;
use crate::softmax::{for_each_row, row_max, sum_exp};
use crate::view::{BLOCK, Rows, Span, for_float, lanes, unsupported};
use retape_core::kernel::{self, ClassScores, CrossEntropySpec, LossReduction};
use retape_core::layout::Shape;
use retape_core::{DType, Error, Result, Tensor};

/// The integers of an index tensor, i64 or i32, where they lie.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Integers {
    Wide(Span<i64>),
    Narrow(Span<i32>),
}

impl Integers {
    pub fn of(kernel: &'static str, tensor: &Tensor) -> Result<Integers> {
        match tensor.dtype() {
            DType::I64 => Ok(Integers::Wide(Span::of(tensor))),
            DType::I32 => Ok(Integers::Narrow(Span::of(tensor))),
            other => Err(unsupported(kernel, other)),
        }
    }

    /// The one at this offset.
    #[inline(always)]
    pub fn at(self, offset: usize) -> i64 {
        match self {
            Integers::Wide(span) => span.get(offset),
            Integers::Narrow(span) => i64::from(span.get(offset)),
        }
    }
}

/// The integers of an index tensor in row-major order.
#[derive(Debug)]
pub(crate) struct Numbers {
    integers: Integers,
    axis: Axis,
}

impl Numbers {
    /// All of the tensor's.
    pub fn of(kernel: &'static str, tensor: &Tensor) -> Result<Numbers> {
        Numbers::along(kernel, tensor, &(0..tensor.rank()).collect::<Shape>())
    }

    /// Those along some dimensions.
    pub fn along(kernel: &'static str, tensor: &Tensor, dims: &[usize]) -> Result<Numbers> {
        Ok(Numbers { integers: Integers::of(kernel, tensor)?, axis: Axis::new(tensor, dims) })
    }

    pub fn len(&self) -> usize {
        self.axis.len
    }

    #[inline(always)]
    pub fn get(&self, i: usize) -> i64 {
        self.integers.at(self.axis.offset(i))
    }
}

/// Elements of one task of the loss, and the most tasks.
const TASK: usize = 16 * 1024;
const SUMS: usize = 256;
/// Classes whose gradients are summed at a time.
const STRIP: usize = 1024;

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
    /// A class, or the ignored number.
    Classes(Numbers),
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
    /// The class of rows that don't count.
    ignore: i64,
}

impl<T: Float> Terms<T> {
    fn of(kernel: &'static str, scores: ClassScores<'_>) -> Result<Terms<T>> {
        let ClassScores { logits, target, weight, spec } = scores;
        let x = Rows::<T>::of(logits);
        let weight = weight.map(|w| Rows::<T>::of(w).row(0));
        let targets = if target.dtype().is_float() {
            Targets::Given(Rows::of(target))
        } else {
            let ids = Numbers::of(kernel, target)?;
            let allowed = |id: i64| id == spec.ignore || usize::try_from(id).is_ok_and(|class| class < x.width);
            if let Some(row) = (0..ids.len()).find(|&row| !allowed(ids.get(row))) {
                let (id, classes, ignore) = (ids.get(row), x.width, spec.ignore);
                let reason =
                    format!("target {id} in row {row} is neither in 0..{classes} nor the ignored value {ignore}");
                return Err(Error::InvalidValue { kernel, reason });
            }
            Targets::Classes(ids)
        };
        let keep = T::of(1.0 - spec.smoothing);
        let spread = T::of(spec.smoothing / x.width as f64);
        let total = T::of((0..x.width).map(|c| weight.map_or(1.0, |w| w.get(c).wide())).sum());
        let mut terms = Terms { x, targets, weight, keep, spread, total, count: 1.0, ignore: spec.ignore };
        if spec.reduction == LossReduction::Mean {
            terms.count = match &terms.targets {
                Targets::Classes(ids) => {
                    (0..ids.len()).filter_map(|r| terms.class(r).ok()?).map(|t| terms.of_class(t).wide()).sum()
                }
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
            Targets::Classes(ids) => match ids.get(r) {
                id if id == self.ignore => Err(()),
                id => Ok(Some(id as usize)),
            },
            Targets::Given(_) => Ok(None),
        }
    }

    /// The loss of a row.
    #[inline(always)]
    fn loss(&self, r: usize, base: Base<T>) -> f64 {
        let Ok(class) = self.class(r) else { return 0.0 };
        let (x, base) = (self.x.row(r), base.finite());
        let own = class.map_or(0.0, |t| {
            let share = self.keep.wide() * self.of_class(t).wide();
            if share == 0.0 { 0.0 } else { share * base.surprise_wide(x.get(t)) }
        });
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

pub(crate) fn cross_entropy(exec: &Exec, k: &kernel::CrossEntropy<'_>) -> Result<()> {
    for_float!("cross_entropy", k.scores.logits.dtype(), T => cross_entropy_of::<T>(exec, k))?
}

fn cross_entropy_of<T: Float>(exec: &Exec, k: &kernel::CrossEntropy<'_>) -> Result<()> {
    let kernel::CrossEntropy { scores, loss, stats } = *k;
    let terms = Terms::<T>::of("cross_entropy", scores)?;
    let (xs, stats) = (&terms.x, stats.map(Rows::<T>::of));
    let (out, reduction) = (Span::<T>::of(loss), scores.spec.reduction);
    // Some rows a task, by their number alone; a sum for each task.
    let batch = (TASK / xs.width).max(xs.count.div_ceil(SUMS)).max(1);
    let mut sums = [0f64; SUMS];
    let own = Span::over(&mut sums);
    exec.run::<T>(
        xs.count.div_ceil(batch),
        xs.count * xs.width * 12,
        #[inline(always)]
        |task| {
            let mut sum = 0.0;
            for r in task * batch..((task + 1) * batch).min(xs.count) {
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
                let loss = terms.loss(r, base);
                if reduction == LossReduction::None {
                    out.set(r, T::of(loss));
                }
                sum += loss;
            }
            own.set(task, sum);
        },
    );
    if reduction != LossReduction::None {
        out.set(0, T::of(sums.iter().sum::<f64>() / terms.count));
    }
    Ok(())
}

/// out = g (softmax mass - w q) / count.
pub(crate) fn cross_entropy_grad(exec: &Exec, k: &kernel::CrossEntropyGrad<'_>) -> Result<()> {
    for_float!("cross_entropy_grad", k.scores.logits.dtype(), T => cross_entropy_grad_of::<T>(exec, k))?
}

fn cross_entropy_grad_of<T: Float>(exec: &Exec, k: &kernel::CrossEntropyGrad<'_>) -> Result<()> {
    let kernel::CrossEntropyGrad { scores, stats, g, out } = *k;
    let terms = Terms::<T>::of("cross_entropy_grad", scores)?;
    let (xs, outs, stats) = (&terms.x, Rows::<T>::of(out), Rows::<T>::of(stats));
    let upstream = upstream::<T>(g, scores.spec, terms.count);
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        10,
        #[inline(always)]
        |r| {
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
        },
    );
    Ok(())
}

/// out = -g w / count at the target, else 0.
pub(crate) fn nll_loss_grad(exec: &Exec, k: &kernel::NllLossGrad<'_>) -> Result<()> {
    for_float!("nll_loss_grad", k.out.dtype(), T => nll_loss_grad_of::<T>(exec, k))?
}

fn nll_loss_grad_of<T: Float>(exec: &Exec, k: &kernel::NllLossGrad<'_>) -> Result<()> {
    let kernel::NllLossGrad { target, weight, g, spec, out } = *k;
    // Log-probabilities aren't read: `out` stands in for them.
    let scores = ClassScores { logits: out, target, weight, spec };

    let terms = Terms::<T>::of("nll_loss_grad", scores)?;
    let (outs, upstream) = (Rows::<T>::of(out), upstream::<T>(g, scores.spec, terms.count));
    for_each_row::<T>(
        exec,
        outs.count,
        outs.width,
        1,
        #[inline(always)]
        |r| {
            outs.row(r).fill(T::ZERO);
            if let Ok(Some(t)) = terms.class(r) {
                outs.row(r).set(t, -(upstream(r) * terms.of_class(t)));
            }
        },
    );
    Ok(())
}

/// out = g (1 - smoothing) w ((m - logits) + log) / count.
pub(crate) fn target_grad(exec: &Exec, k: &kernel::CrossEntropyTargetGrad<'_>) -> Result<()> {
    for_float!("cross_entropy_target_grad", k.logits.dtype(), T => target_grad_of::<T>(exec, k))?
}

fn target_grad_of<T: Float>(exec: &Exec, k: &kernel::CrossEntropyTargetGrad<'_>) -> Result<()> {
    let kernel::CrossEntropyTargetGrad { logits, weight, stats, g, spec, out } = *k;
    // The target isn't read: the logits stand in for it.
    let scores = ClassScores { logits, target: logits, weight, spec };

    let terms = Terms::<T>::of("cross_entropy_target_grad", scores)?;
    let (xs, outs, stats) = (&terms.x, Rows::<T>::of(out), Rows::<T>::of(stats));
    let upstream = upstream::<T>(g, scores.spec, terms.count);
    for_each_row::<T>(
        exec,
        xs.count,
        xs.width,
        4,
        #[inline(always)]
        |r| {
            let (x, o, scale) = (xs.row(r), outs.row(r), upstream(r) * terms.keep);
            let base = Base::read(&stats, r).finite();
            for i in (0..o.len()).step_by(BLOCK) {
                let (v, w) = (x.load::<BLOCK>(i, T::ZERO), terms.weights(i));
                // No share of these would count.
                let none = lanes!(j => terms.keep * w[j] == T::ZERO);
                o.store(i, lanes!(j => if none[j] { T::ZERO } else { scale * w[j] * base.surprise(v[j]) }));
            }
        },
    );
    Ok(())
}

/// out_c = the sum over rows of g q_c ((m - x_c) + log) / count; and where the count is a sum of weights, less what a
/// weight takes from the mean by being in it. Class weights are seldom learned: one thread.
pub(crate) fn weight_grad(k: &kernel::CrossEntropyWeightGrad<'_>) -> Result<()> {
    for_float!("cross_entropy_weight_grad", k.scores.logits.dtype(), T => weight_grad_of::<T>(k))?
}

fn weight_grad_of<T: Float>(k: &kernel::CrossEntropyWeightGrad<'_>) -> Result<()> {
    let kernel::CrossEntropyWeightGrad { scores, stats, g, out } = *k;
    let terms = Terms::<T>::of("cross_entropy_weight_grad", scores)?;
    let (stats, upstream) = (stats.map(Rows::<T>::of), upstream::<T>(g, scores.spec, terms.count));
    let classes = terms.x.width;
    // Of some classes: the sums, and the rows that each is the target of.
    let strip = |first: usize, end: usize| {
        let (mut sums, mut rows) = ([0f64; STRIP], [0f64; STRIP]);
        for r in 0..terms.x.count {
            let Ok(class) = terms.class(r) else { continue };
            let (x, scale) = (terms.x.row(r), upstream(r).wide());
            let base = stats.as_ref().map_or(Base::NONE, |stats| Base::read(stats, r).finite());
            for i in (first..end).step_by(BLOCK) {
                let q = terms.shares(r, i);
                for c in i..end.min(i + BLOCK) {
                    let own = if class == Some(c) { terms.keep } else { T::ZERO };
                    let q = (q[c - i] + own).wide();
                    // Of what has no share nothing counts, were it infinite.
                    sums[c - first] += if q == 0.0 { 0.0 } else { scale * q * base.surprise_wide(x.get(c)) };
                }
            }
            if let Some(t) = class.filter(|t| (first..end).contains(t)) {
                rows[t - first] += 1.0;
            }
        }
        (sums, rows)
    };
    let strips = || (0..classes).step_by(STRIP).map(|first| (first, classes.min(first + STRIP)));
    let weighed = |(first, end): (usize, usize)| {
        let (sums, _) = strip(first, end);
        let counts = (first..end).filter(|&c| terms.of_class(c) != T::ZERO);
        counts.map(|c| terms.of_class(c).wide() * sums[c - first]).sum::<f64>()
    };
    let mean: f64 = match scores.spec.reduction {
        LossReduction::Mean => strips().map(weighed).sum::<f64>() / terms.count,
        _ => 0.0,
    };
    let outs = Span::<T>::of(out);
    for (first, end) in strips() {
        let (sums, rows) = strip(first, end);
        for c in first..end {
            let (sum, rows) = (sums[c - first], rows[c - first]);
            outs.set(c, T::of(if rows > 0.0 { sum - mean * rows } else { sum }));
        }
    }
    Ok(())
}
