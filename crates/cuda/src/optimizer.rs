//! AdamW: kernels/optimizer.cu.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use retape_core::Result;
use retape_core::kernel::{self, AdamWConfig};

const THREADS: usize = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct AdamW {
    p: TensorArg,
    g: TensorArg,
    m: TensorArg,
    v: TensorArg,
    grad_scale: f64,
    shrink: f64,
    beta1: f64,
    rest1: f64,
    beta2: f64,
    rest2: f64,
    rate: f64,
    root: f64,
    eps: f64,
    packs: i64,
}
// SAFETY: the fields of `AdamW` in kernels/optimizer.cu.
unsafe impl Parameters for AdamW {}

/// One step in place on p, m and v.
pub(crate) fn adamw(gpu: &Gpu, k: &kernel::AdamW<'_>) -> Result<()> {
    let AdamWConfig { lr, beta1, beta2, eps, weight_decay } = k.config;
    let correction = |beta: f64| 1.0 - beta.powf(k.step as f64);
    let args = TensorArg::elementwise(gpu, "adamw", [k.p, k.g, k.m, k.v])?;
    let packs = args.iter().all(TensorArg::is_packable);
    let [p, g, m, v] = args;
    let parameters = AdamW {
        p,
        g,
        m,
        v,
        grad_scale: k.grad_scale,
        shrink: 1.0 - lr * weight_decay,
        beta1,
        rest1: 1.0 - beta1,
        beta2,
        rest2: 1.0 - beta2,
        rate: lr / correction(beta1),
        root: 1.0 / correction(beta2).sqrt(),
        eps,
        packs: packs.into(),
    };
    let kernel = kernel_for("adamw", k.p);
    let grid = blocks(k.p.len(), THREADS * if packs { 8 } else { 1 });
    gpu.launch(Launch { kernel: &kernel, grid, block: THREADS as u32, shared: 0 }, &parameters)
}
