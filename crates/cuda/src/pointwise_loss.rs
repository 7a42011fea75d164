//! Elementwise losses and their derivatives: kernels/pointwise_loss.cu.

use crate::device::Gpu;
use crate::map::{Function, map};
use crate::numbers;
use retape_core::kernel::LossFn;
use retape_core::{Result, Tensor};

/// Prediction, target, and the weight of the positives.
type Operands<'a> = (&'a Tensor, &'a Tensor, Option<&'a Tensor>);

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

pub(crate) fn loss(gpu: &Gpu, f: LossFn, (x, target, weight): Operands<'_>, out: &Tensor) -> Result<()> {
    let (number, constant) = number(f);
    map(gpu, "loss", Function::with(number, constant, 0.0), [Some(x), Some(target), weight], out)
}

pub(crate) fn loss_grad(
    gpu: &Gpu,
    f: LossFn,
    by: usize,
    (x, target, weight): Operands<'_>,
    g: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let (number, constant) = number(f);
    let operands = [Some(x), Some(target), weight, Some(g)];
    map(gpu, "loss_grad", Function::with(number, constant, by as f64), operands, out)
}
