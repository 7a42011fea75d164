//! Columns for convolutions, and pooling: kernels/window.cu.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use crate::numbers;
use retape_core::kernel::{self, PoolDivisor, Window};
use retape_core::{Result, Tensor};

const THREADS: usize = 256;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct WindowArg {
    kernel: [i64; 2],
    stride: [i64; 2],
    before: [i64; 2],
    dilation: [i64; 2],
}

impl WindowArg {
    fn of(w: Window) -> WindowArg {
        let wide = |pair: [usize; 2]| pair.map(|n| n as i64);
        WindowArg { kernel: wide(w.kernel), stride: wide(w.stride), before: wide(w.before), dilation: wide(w.dilation) }
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Columns {
    image: TensorArg,
    columns: TensorArg,
    window: WindowArg,
    out_height: i64,
    out_width: i64,
}
// SAFETY: the fields of `Columns` in kernels/window.cu.
unsafe impl Parameters for Columns {}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Pool {
    image: TensorArg,
    out: TensorArg,
    index: TensorArg,
    window: WindowArg,
    fixed: f64,
    divisor: i32,
    padding: i32,
}
// SAFETY: the fields of `Pool` in kernels/window.cu.
unsafe impl Parameters for Pool {}

fn launch(gpu: &Gpu, name: &str, over: &Tensor, p: &impl Parameters) -> Result<()> {
    let kernel = kernel_for(name, over);
    gpu.launch(Launch { kernel: &kernel, grid: blocks(over.len(), THREADS), block: THREADS as u32, shared: 0 }, p)
}

fn columns(gpu: &Gpu, name: &'static str, image: &Tensor, window: Window, columns: &Tensor) -> Result<Columns> {
    Ok(Columns {
        image: TensorArg::plain(gpu, name, image)?,
        columns: TensorArg::flat(gpu, name, columns)?,
        window: WindowArg::of(window),
        out_height: columns.shape()[4] as i64,
        out_width: columns.shape()[5] as i64,
    })
}

pub(crate) fn im2col(gpu: &Gpu, k: &kernel::Im2col<'_>) -> Result<()> {
    launch(gpu, "im2col", k.out, &columns(gpu, "im2col", k.x, k.window, k.out)?)
}

pub(crate) fn col2im(gpu: &Gpu, k: &kernel::Col2im<'_>) -> Result<()> {
    launch(gpu, "col2im", k.out, &columns(gpu, "col2im", k.out, k.window, k.cols)?)
}

fn pool(
    gpu: &Gpu,
    name: &'static str,
    (image, out, index): (&Tensor, &Tensor, Option<&Tensor>),
    window: Window,
    divisor: PoolDivisor,
) -> Result<Pool> {
    let (divisor, fixed) = match divisor {
        PoolDivisor::Inside => (numbers::divisor::INSIDE, 0.0),
        PoolDivisor::Padded => (numbers::divisor::PADDED, 0.0),
        PoolDivisor::Fixed(n) => (numbers::divisor::FIXED, n as f64),
    };
    let plain = |tensor| TensorArg::plain(gpu, name, tensor);
    let index = TensorArg::optional(gpu, name, index)?;
    Ok(Pool {
        image: plain(image)?,
        out: plain(out)?,
        index,
        window: WindowArg::of(window),
        fixed,
        divisor,
        padding: 0,
    })
}

pub(crate) fn max_pool(gpu: &Gpu, k: &kernel::MaxPool<'_>) -> Result<()> {
    let p = pool(gpu, "max_pool", (k.x, k.out, Some(k.index)), k.window, PoolDivisor::Inside)?;
    launch(gpu, "max_pool", k.out, &p)
}

pub(crate) fn max_pool_grad(gpu: &Gpu, k: &kernel::MaxPoolGrad<'_>) -> Result<()> {
    let p = pool(gpu, "max_pool_grad", (k.out, k.g, Some(k.index)), k.window, PoolDivisor::Inside)?;
    launch(gpu, "max_pool_grad", k.out, &p)
}

pub(crate) fn avg_pool(gpu: &Gpu, k: &kernel::AvgPool<'_>) -> Result<()> {
    launch(gpu, "avg_pool", k.out, &pool(gpu, "avg_pool", (k.x, k.out, None), k.window, k.divisor)?)
}

pub(crate) fn avg_pool_grad(gpu: &Gpu, k: &kernel::AvgPoolGrad<'_>) -> Result<()> {
    launch(gpu, "avg_pool_grad", k.out, &pool(gpu, "avg_pool_grad", (k.out, k.g, None), k.window, k.divisor)?)
}
