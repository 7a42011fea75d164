//! Softmax, its logarithm, their gradients, and triangles: kernels/softmax.cu.

use crate::argument::{TensorArg, kernel_for};
use crate::device::{Gpu, Parameters};
use crate::rows::{RowPlan, extent};
use retape_core::{Result, Tensor, kernel};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Softmax {
    plan: RowPlan,
    x: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `Softmax` in kernels/softmax.cu.
unsafe impl Parameters for Softmax {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SoftmaxGrad {
    plan: RowPlan,
    y: TensorArg,
    g: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `SoftmaxGrad` in kernels/softmax.cu.
unsafe impl Parameters for SoftmaxGrad {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Triangle {
    plan: RowPlan,
    x: TensorArg,
    out: TensorArg,
    height: i64,
    diagonal: i64,
    value: f64,
    upper: i32,
    padding: i32,
}
// SAFETY: the fields of `Triangle` in kernels/softmax.cu.
unsafe impl Parameters for Triangle {}

/// The rows of some tensors of one shape, and a plan for them.
fn rows<const N: usize>(gpu: &Gpu, kernel: &'static str, tensors: [&Tensor; N]) -> Result<([TensorArg; N], RowPlan)> {
    let args = TensorArg::merged(gpu, kernel, tensors, 1)?;
    let (count, width) = extent(tensors[0]);
    Ok((args, RowPlan::new(count, width, &args.each_ref())))
}

pub(crate) fn softmax(gpu: &Gpu, k: &kernel::Softmax<'_>) -> Result<()> {
    forward(gpu, "softmax", k.x, k.out)
}

pub(crate) fn log_softmax(gpu: &Gpu, k: &kernel::LogSoftmax<'_>) -> Result<()> {
    forward(gpu, "log_softmax", k.x, k.out)
}

fn forward(gpu: &Gpu, name: &'static str, x: &Tensor, out: &Tensor) -> Result<()> {
    let ([x_arg, out], plan) = rows(gpu, name, [x, out])?;
    gpu.launch(plan.launch(&plan.kernel(name, x)), &Softmax { plan, x: x_arg, out })
}

pub(crate) fn softmax_grad(gpu: &Gpu, k: &kernel::SoftmaxGrad<'_>) -> Result<()> {
    backward(gpu, "softmax_grad", k.y, k.g, k.out)
}

pub(crate) fn log_softmax_grad(gpu: &Gpu, k: &kernel::LogSoftmaxGrad<'_>) -> Result<()> {
    backward(gpu, "log_softmax_grad", k.y, k.g, k.out)
}

fn backward(gpu: &Gpu, name: &'static str, y: &Tensor, g: &Tensor, out: &Tensor) -> Result<()> {
    let ([y_arg, g, out], plan) = rows(gpu, name, [y, g, out])?;
    gpu.launch(plan.launch(&plan.kernel(name, y)), &SoftmaxGrad { plan, y: y_arg, g, out })
}

pub(crate) fn triangle(gpu: &Gpu, k: &kernel::Triangle<'_>) -> Result<()> {
    let kernel::Triangle { x, upper, diagonal, value, out } = *k;
    let ([x_arg, out], plan) = rows(gpu, "triangle", [x, out])?;
    let (height, width) = (x.shape()[x.rank() - 2] as i64, plan.width);
    // A diagonal outside the matrix is as good as any other.
    let diagonal = (diagonal as i64).clamp(-height - 1, width + 1);
    let p = Triangle { plan, x: x_arg, out, height, diagonal, value, upper: upper.into(), padding: 0 };
    gpu.launch(plan.launch(&kernel_for("triangle", x)), &p)
}
