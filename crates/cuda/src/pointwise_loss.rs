//! Elementwise losses and their derivatives: kernels/pointwise_loss.cu.

use crate::device::Gpu;
use crate::map::{Function, map};
use crate::numbers;
use retape_core::Result;
use retape_core::kernel::{self, LossFn};

fn number(f: LossFn) -> (i32, f64) {
    match f {
        LossFn::Squared => (numbers::loss::SQUARED, 0.0),
        LossFn::Absolute => (numbers::loss::ABSOLUTE, 0.0),
        LossFn::SmoothL1(beta) => (numbers::loss::SMOOTH_L1, beta),
        LossFn::Huber(delta) => (numbers::loss::HUBER, delta),
        LossFn::KlDivergence => (numbers::loss::KL_DIVERGENCE, 0.0),
        LossFn::KlDivergenceLog => (numbers::loss::KL_DIVERGENCE_LOG, 0.0),
        LossFn::BinaryLogits => (numbers::loss::BINARY_LOGITS, 0.0),
    }
}

pub(crate) fn loss(gpu: &Gpu, k: &kernel::Loss<'_>) -> Result<()> {
    let (number, constant) = number(k.f);
    map(gpu, "loss", Function::with(number, constant, 0.0), [Some(k.x), Some(k.target), k.weight], k.out)
}

pub(crate) fn loss_grad(gpu: &Gpu, k: &kernel::LossGrad<'_>) -> Result<()> {
    let (number, constant) = number(k.f);
    let operands = [Some(k.x), Some(k.target), k.weight, Some(k.g)];
    map(gpu, "loss_grad", Function::with(number, constant, k.by as f64), operands, k.out)
}
