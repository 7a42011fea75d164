//! One AdamW step (Loshchilov and Hutter 2019), in place.

use crate::exec::Exec;
use crate::math::Float;
use crate::view::{BLOCK, Nest, Span, for_float};
use retape_core::kernel::AdamWConfig;
use retape_core::{Result, Tensor};

/// Operands of [`adamw`].
#[derive(Debug)]
pub(crate) struct AdamW<'a> {
    pub p: &'a Tensor,
    pub g: &'a Tensor,
    pub m: &'a Tensor,
    pub v: &'a Tensor,
    pub step: u64,
    pub config: AdamWConfig,
    pub grad_scale: f64,
}

/// p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
pub(crate) fn adamw(exec: &Exec, op: AdamW<'_>) -> Result<()> {
    let AdamWConfig { lr, beta1, beta2, eps, weight_decay } = op.config;
    let correction = |beta: f64| 1.0 - beta.powf(op.step as f64);
    for_float!("adamw", op.p.dtype(), T => {
            let spans = [op.p, op.g, op.m, op.v].map(Span::<T>::of);
            let (shrink, scale) = (T::of(1.0 - lr * weight_decay), T::of(op.grad_scale));
            let (b1, c1, b2, c2) = (T::of(beta1), T::of(1.0 - beta1), T::of(beta2), T::of(1.0 - beta2));
            let (rate, root) = (T::of(lr / correction(beta1)), T::of(1.0 / correction(beta2).sqrt()));
            let eps = T::of(eps);
            Nest::new([op.p, op.g, op.m, op.v]).for_each_run::<T>(exec, 4, #[inline(always)] |run| {
                let (ps, gs, ms, vs) = (run.of(0, spans[0]), run.of(1, spans[1]), run.of(2, spans[2]), run.of(3, spans[3]));
                for i in (0..run.len).step_by(BLOCK) {
                    let (mut p, g) = (ps.load::<BLOCK>(i, T::ZERO), gs.load::<BLOCK>(i, T::ZERO));
    let (mut m, mut v) = (ms.load::<BLOCK>(i, T::ZERO), vs.load::<BLOCK>(i, T::ZERO));
                    for j in 0..BLOCK {
                        let g = g[j] * scale;
                        m[j] = b1 * m[j] + c1 * g;
                        v[j] = b2 * v[j] + c2 * (g * g);
                        p[j] = shrink * p[j] - rate * m[j] / (v[j].root() * root + eps);
                    }
                    ps.store(i, p);
                    ms.store(i, m);
                    vs.store(i, v);
                }
            });
        });
    Ok(())
}
