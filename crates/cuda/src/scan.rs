//! Running folds along a dimension, and gradients of products: kernels/scan.cu.
//!
//! Gradients of products take 8 bytes for every 32 elements of a line in the workspace.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use crate::indexing::{line_team, others};
use crate::numbers;
use retape_core::kernel::{self, ScanFn};
use retape_core::{Result, Tensor};

const THREADS: usize = 256;
/// Elements of a line that a warp takes at a time: TILE in kernels/scan.cu.
const TILE: usize = 32;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Scan {
    x_others: TensorArg,
    x_line: TensorArg,
    out_others: TensorArg,
    out_line: TensorArg,
    lines: i64,
    length: i64,
    fold: i32,
    team: i32,
}
// SAFETY: the fields of `Scan` in kernels/scan.cu.
unsafe impl Parameters for Scan {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct ProductGrad {
    x_lines: TensorArg,
    x_line: TensorArg,
    g_lines: TensorArg,
    g_line: TensorArg,
    out_lines: TensorArg,
    out_line: TensorArg,
    carries: u64,
    lines: i64,
    length: i64,
    whole: i32,
    padding: i32,
}
// SAFETY: the fields of `ProductGrad` in kernels/scan.cu.
unsafe impl Parameters for ProductGrad {}

fn launch(kernel: &str, lines: usize, team: usize) -> Launch<'_> {
    Launch { kernel, grid: blocks(lines * team, THREADS), block: THREADS as u32, shared: 0 }
}

pub(crate) fn scan(gpu: &Gpu, k: &kernel::Scan<'_>) -> Result<()> {
    let kernel::Scan { f, x, dim, out } = *k;
    if x.is_empty() {
        return Ok(());
    }
    let arg = |tensor, dims: &[usize]| TensorArg::of_dims(gpu, "scan", tensor, dims);
    let (across, length, team) = (others(x, dim), x.shape()[dim], line_team(x, dim));
    let lines = x.len() / length;
    let fold = match f {
        ScanFn::Sum => numbers::scan::SUM,
        ScanFn::SumToEnd => numbers::scan::SUM_TO_END,
        ScanFn::Prod => numbers::scan::PROD,
    };
    let p = Scan {
        x_others: arg(x, &across)?,
        x_line: arg(x, &[dim])?,
        out_others: arg(out, &across)?,
        out_line: arg(out, &[dim])?,
        lines: lines as i64,
        length: length as i64,
        fold,
        team: team as i32,
    };
    gpu.launch(launch(&kernel_for("scan", x), lines, team), &p)
}

pub(crate) fn cumprod_grad(gpu: &Gpu, k: &kernel::CumprodGrad<'_>) -> Result<()> {
    product_grad(gpu, "cumprod_grad", k.x, k.g, (&others(k.x, k.dim), &[k.dim]), false, k.out)
}

/// The gradient of the running product, or of the `whole` one, over the dimensions `along`; then g has size 1 in these.
pub(crate) fn product_grad(
    gpu: &Gpu,
    name: &'static str,
    x: &Tensor,
    g: &Tensor,
    (across, along): (&[usize], &[usize]),
    whole: bool,
    out: &Tensor,
) -> Result<()> {
    if x.is_empty() {
        return Ok(());
    }
    let arg = |tensor, dims: &[usize]| TensorArg::of_dims(gpu, name, tensor, dims);
    let length: usize = along.iter().map(|&d| x.shape()[d]).product();
    let lines = x.len() / length;
    let workspace = gpu.workspace(lines * length.div_ceil(TILE) * 8)?;
    let p = ProductGrad {
        x_lines: arg(x, across)?,
        x_line: arg(x, along)?,
        g_lines: arg(g, across)?,
        g_line: arg(g, along)?,
        out_lines: arg(out, across)?,
        out_line: arg(out, along)?,
        carries: workspace.address() as u64,
        lines: lines as i64,
        length: length as i64,
        whole: whole.into(),
        padding: 0,
    };
    gpu.launch(launch(&kernel_for("product_grad", x), lines, 32), &p)
}
