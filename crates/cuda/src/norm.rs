//! Layer norm and RMS norm: kernels/norm.cu.
//!
//! The gradients of weight and bias take 2 f64 for each column and piece of rows in the workspace; rows are cut only
//! for a number of blocks, so that is at most 2 MiB, or 16 bytes for each column.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use crate::rows::{PACK, RowPlan, extent};
use retape_core::{Result, Tensor, kernel};

/// Threads of a block that sums columns.
const THREADS: usize = 256;
/// Fewest rows of a piece.
const ROWS: usize = 64;
/// Blocks that rows are cut for: some for each multiprocessor of a large GPU.
const BLOCKS: usize = 512;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LayerNorm {
    plan: RowPlan,
    x: TensorArg,
    weight: TensorArg,
    bias: TensorArg,
    out: TensorArg,
    mean: TensorArg,
    rstd: TensorArg,
    eps: f64,
}
// SAFETY: the fields of `LayerNorm` in kernels/norm.cu.
unsafe impl Parameters for LayerNorm {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LayerNormGrad {
    plan: RowPlan,
    x: TensorArg,
    weight: TensorArg,
    mean: TensorArg,
    rstd: TensorArg,
    g: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `LayerNormGrad` in kernels/norm.cu.
unsafe impl Parameters for LayerNormGrad {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LayerNormParamGrad {
    plan: RowPlan,
    x: TensorArg,
    mean: TensorArg,
    rstd: TensorArg,
    g: TensorArg,
    parts: u64,
    piece: i64,
    pieces: i64,
    together: i64,
    lanes: i32,
    padding: i32,
}
// SAFETY: the fields of `LayerNormParamGrad` in kernels/norm.cu.
unsafe impl Parameters for LayerNormParamGrad {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LayerNormParamSum {
    dweight: TensorArg,
    dbias: TensorArg,
    parts: u64,
    width: i64,
    pieces: i64,
}
// SAFETY: the fields of `LayerNormParamSum` in kernels/norm.cu.
unsafe impl Parameters for LayerNormParamSum {}

/// A number for each row.
fn numbers(gpu: &Gpu, kernel: &'static str, tensor: Option<&Tensor>) -> Result<TensorArg> {
    tensor.map_or(Ok(TensorArg::ABSENT), |tensor| TensorArg::flat(gpu, kernel, tensor))
}

pub(crate) fn layer_norm(gpu: &Gpu, k: &kernel::LayerNorm<'_>) -> Result<()> {
    let name = "layer_norm";
    let [x, out] = [TensorArg::rows(gpu, name, k.x)?, TensorArg::rows(gpu, name, k.out)?];
    let [weight, bias] = [TensorArg::rows(gpu, name, k.weight)?, TensorArg::rows(gpu, name, k.bias)?];
    let (rows, width) = extent(k.x);
    let plan = RowPlan::new(rows, width, &[&x, &out, &weight, &bias]);
    let (mean, rstd) = (numbers(gpu, name, k.mean)?, numbers(gpu, name, Some(k.rstd))?);
    let p = LayerNorm { plan, x, weight, bias, out, mean, rstd, eps: k.eps };
    gpu.launch(plan.launch(&plan.kernel(name, k.x)), &p)
}

pub(crate) fn layer_norm_grad(gpu: &Gpu, k: &kernel::LayerNormGrad<'_>) -> Result<()> {
    let name = "layer_norm_grad";
    let [x, g, out] = [k.x, k.g, k.out].map(|tensor| TensorArg::rows(gpu, name, tensor));
    let (x, g, out, weight) = (x?, g?, out?, TensorArg::rows(gpu, name, k.weight)?);
    let (rows, width) = extent(k.x);
    let plan = RowPlan::new(rows, width, &[&x, &g, &out, &weight]);
    let (mean, rstd) = (numbers(gpu, name, k.mean)?, numbers(gpu, name, Some(k.rstd))?);
    let p = LayerNormGrad { plan, x, weight, mean, rstd, g, out };
    gpu.launch(plan.launch(&plan.kernel(name, k.x)), &p)
}

pub(crate) fn layer_norm_param_grad(gpu: &Gpu, k: &kernel::LayerNormParamGrad<'_>) -> Result<()> {
    let name = "layer_norm_param_grad";
    let (rows, width) = extent(k.x);
    let (x, g) = (TensorArg::rows(gpu, name, k.x)?, TensorArg::rows(gpu, name, k.g)?);
    // Each thread has its own columns, a pack of them: fewer than 32 lanes may lie along a row.
    let plan = RowPlan { interleaved: 0, ..RowPlan::new(rows, width, &[&x, &g]) };
    let lanes = width.div_ceil(PACK).next_power_of_two().min(32);
    let strips = width.div_ceil(lanes * PACK);
    let wanted = (BLOCKS / strips.max(1)).max(1);
    let piece = rows.div_ceil(wanted).max(ROWS);
    let pieces = rows.div_ceil(piece);
    let workspace = gpu.workspace(pieces * 2 * width * 8)?;
    let parts = workspace.address() as u64;
    let (mean, rstd) = (numbers(gpu, name, k.mean)?, numbers(gpu, name, Some(k.rstd))?);
    let together = k.mean.map_or(1, |mean| mean.layout().repeats()) as i64;
    let (piece, pieces, lanes) = (piece as i64, pieces as i64, lanes as i32);
    let p = LayerNormParamGrad { plan, x, mean, rstd, g, parts, piece, pieces, together, lanes, padding: 0 };
    let kernel = kernel_for(name, k.x);
    let shared = (THREADS * 2 * PACK * 8) as u32;
    gpu.launch(
        Launch { kernel: &kernel, grid: blocks(strips * pieces as usize, 1), block: THREADS as u32, shared },
        &p,
    )?;
    let (dweight, dbias) = (numbers(gpu, name, k.dweight)?, numbers(gpu, name, k.dbias)?);
    let kernel = kernel_for("layer_norm_param_sum", k.x);
    let launch =
        Launch { kernel: &kernel, grid: blocks(2 * width, 32), block: THREADS as u32, shared: (THREADS * 8) as u32 };
    gpu.launch(launch, &LayerNormParamSum { dweight, dbias, parts, width: width as i64, pieces })
}
