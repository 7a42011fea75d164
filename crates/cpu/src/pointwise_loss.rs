//! Elementwise losses and their derivatives, as [`Loss`] gives them.

use crate::exec::Exec;
use crate::math::Float;
use crate::view::{BLOCK, Nest, Span, for_float, lanes};
use retape_core::Result;
use retape_core::kernel::{self, LossFn};

/// out = an expression in the elements of the named tensors.
macro_rules! map {
    ($exec:expr, $t:ty, $out:expr, |$($name:ident),+| $value:expr) => {{
        let out = Span::<$t>::of($out);
        let spans = [$(Span::<$t>::of($name)),+];
        Nest::new([$out, $($name),+]).for_each_run::<$t>($exec, COST, #[inline(always)] |run| {
            let o = run.of(0, out);
            let mut k = 0;
            $(k += 1; let $name = run.of(k, spans[k - 1]);)+
            for i in (0..run.len).step_by(BLOCK) {
                $(let $name = $name.load::<BLOCK>(i, <$t>::ONE);)+
                o.store(i, lanes!(j => { $(let $name = $name[j];)+ $value }));
            }
        });
    }};
}

/// Time of one element in plain additions.
const COST: usize = 4;

/// ln(1 + e^x), without overflow or cancellation.
#[inline(always)]
fn softplus<T: Float>(x: T) -> T {
    x.larger(T::ZERO) + beyond(x)
}

/// -1, 0 or 1 as d; NaN stays.
#[inline(always)]
fn sign<T: Float>(d: T) -> T {
    if d > T::ZERO {
        T::ONE
    } else if d < T::ZERO {
        -T::ONE
    } else {
        d * T::ZERO
    }
}

/// ln(1 + e^-|x|): what softplus has beyond max(x, 0).
#[inline(always)]
fn beyond<T: Float>(x: T) -> T {
    Float::ln_1p(Float::exp(-x.magnitude()))
}

/// share x, 0 where there is no share, were x infinite.
#[inline(always)]
fn part<T: Float>(share: T, x: T) -> T {
    if share == T::ZERO { T::ZERO } else { share * x }
}

/// t ln t, 0 at 0.
#[inline(always)]
fn entropy<T: Float>(t: T) -> T {
    if t == T::ZERO { T::ZERO } else { t * Float::ln(t) }
}

/// out = f(x, t).
pub(crate) fn loss(exec: &Exec, k: &kernel::Loss<'_>) -> Result<()> {
    for_float!("loss", k.x.dtype(), T => loss_of::<T>(exec, k))
}

fn loss_of<T: Float>(exec: &Exec, k: &kernel::Loss<'_>) {
    let kernel::Loss { f, x, target: t, weight, out } = *k;
    let (one, half) = (T::ONE, T::of(0.5));
    match (f, weight) {
        (LossFn::Squared, _) => map!(exec, T, out, |x, t| (x - t) * (x - t)),
        (LossFn::Absolute, _) => map!(exec, T, out, |x, t| (x - t).magnitude()),
        (LossFn::SmoothL1(beta), _) => {
            let beta = T::of(beta);
            map!(exec, T, out, |x, t| {
                let d = (x - t).magnitude();
                if d < beta { half * d * (d / beta) } else { d - half * beta }
            })
        }
        (LossFn::Huber(delta), _) => {
            let delta = T::of(delta);
            map!(exec, T, out, |x, t| {
                let d = (x - t).magnitude();
                if d <= delta { half * d * d } else { delta * (d - half * delta) }
            })
        }
        (LossFn::KlDivergence, _) => map!(exec, T, out, |x, t| entropy(t) - part(t, x)),
        (LossFn::KlDivergenceLog, _) => map!(exec, T, out, |x, t| part(Float::exp(t), t - x)),
        // max(x, 0) and max(-x, 0) apart, so that a sure and right x cancels nothing.
        (LossFn::BinaryLogits, None) => {
            map!(exec, T, out, |x, t| part(if x > T::ZERO { one - t } else { -t }, x) + beyond(x))
        }
        (LossFn::BinaryLogits, Some(w)) => {
            map!(exec, T, out, |x, t, w| part(if x > T::ZERO { one - t } else { -(w * t) }, x)
                + ((w - one) * t + one) * beyond(x))
        }
    }
}

/// out = g times the derivative by operand `by`.
pub(crate) fn loss_grad(exec: &Exec, k: &kernel::LossGrad<'_>) -> Result<()> {
    for_float!("loss_grad", k.g.dtype(), T => loss_grad_of::<T>(exec, k))
}

fn loss_grad_of<T: Float>(exec: &Exec, k: &kernel::LossGrad<'_>) {
    let kernel::LossGrad { f, by, x, target: t, weight, g, out } = *k;
    let one = T::ONE;
    // By the target it is the opposite, where the loss is a function of x - t.
    let toward = if by == 0 { one } else { -one };
    match (f, by, weight) {
        // Twice the product, as twice x - t may be out of range where the product isn't.
        (LossFn::Squared, ..) => map!(exec, T, out, |x, t, g| {
            let once = g * toward * (x - t);
            once + once
        }),
        (LossFn::Absolute, ..) => map!(exec, T, out, |x, t, g| g * toward * sign(x - t)),
        (LossFn::SmoothL1(beta), ..) => {
            let beta = T::of(beta);
            map!(exec, T, out, |x, t, g| g * toward * ((x - t) / beta).limit(-one, one))
        }
        (LossFn::Huber(delta), ..) => {
            let delta = T::of(delta);
            map!(exec, T, out, |x, t, g| g * toward * (x - t).limit(-delta, delta))
        }
        (LossFn::KlDivergence, 0, _) => map!(exec, T, out, |t, g| -g * t),
        (LossFn::KlDivergence, ..) => map!(exec, T, out, |x, t, g| g * (Float::ln(t) + one - x)),
        (LossFn::KlDivergenceLog, 0, _) => map!(exec, T, out, |t, g| -g * Float::exp(t)),
        (LossFn::KlDivergenceLog, ..) => map!(exec, T, out, |x, t, g| g * Float::exp(t) * (t - x + one)),
        (LossFn::BinaryLogits, 0, None) => {
            map!(exec, T, out, |x, t, g| g * ((one - t) * x.sigmoid() - t * (-x).sigmoid()))
        }
        (LossFn::BinaryLogits, 0, Some(w)) => {
            map!(exec, T, out, |x, t, w, g| g * ((one - t) * x.sigmoid() - w * t * (-x).sigmoid()))
        }
        // (w - 1) softplus(-x) - x, with -x of the softplus and of the rest together.
        (LossFn::BinaryLogits, 1, Some(w)) => {
            map!(exec, T, out, |x, w, g| g * ((w - one) * beyond(x) - part(if x > T::ZERO { one } else { w }, x)))
        }
        (LossFn::BinaryLogits, 1, None) => map!(exec, T, out, |x, g| -g * x),
        (LossFn::BinaryLogits, ..) => map!(exec, T, out, |x, t, g| g * part(t, softplus(-x))),
    }
}
