//! Elementwise losses and their derivatives: kernels/pointwise_loss.cu, where the losses have these numbers.

use crate::device::Gpu;
use crate::map::{Function, map};
use retape_core::kernel::LossFn;
use retape_core::{Result, Tensor};

/// Prediction, target, and the weight of the positives.
type Operands<'a> = (&'a Tensor, &'a Tensor, Option<&'a Tensor>);

fn number(f: LossFn) -> (i32, f64) {
    match f {
        LossFn::Squared => (0, 0.0),
        LossFn::Absolute => (1, 0.0),
        LossFn::SmoothL1(beta) => (2, beta),
        LossFn::Huber(delta) => (3, delta),
        LossFn::KlDivergence => (4, 0.0),
        LossFn::KlDivergenceLog => (5, 0.0),
        LossFn::BinaryLogits => (6, 0.0),
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
