//! One AdamW step (Loshchilov and Hutter 2019), in place.

use crate::exec::Exec;
use crate::math::Float;
use crate::view::{BLOCK, Nest, Span, for_float};
use retape_core::Result;
use retape_core::kernel::{self, AdamWConfig};

/// p -= lr wd p; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
pub(crate) fn adamw(exec: &Exec, k: &kernel::AdamW<'_>) -> Result<()> {
    for_float!("adamw", k.p.dtype(), T => adamw_of::<T>(exec, k))
}

fn adamw_of<T: Float>(exec: &Exec, k: &kernel::AdamW<'_>) {
    let AdamWConfig { lr, beta1, beta2, eps, weight_decay } = k.config;
    let correction = |beta: f64| 1.0 - beta.powf(k.step as f64);

    let spans = [k.p, k.g, k.m, k.v].map(Span::<T>::of);
    let (shrink, scale) = (T::of(1.0 - lr * weight_decay), T::of(k.grad_scale));
    let (b1, c1, b2, c2) = (T::of(beta1), T::of(1.0 - beta1), T::of(beta2), T::of(1.0 - beta2));
    let (rate, root) = (T::of(lr / correction(beta1)), T::of(1.0 / correction(beta2).sqrt()));
    let eps = T::of(eps);
    Nest::new([k.p, k.g, k.m, k.v]).for_each_run::<T>(
        exec,
        4,
        #[inline(always)]
        |run| {
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
        },
    );
}
