//! Random numbers and dropout: kernels/random.cu.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Result, Tensor};

const THREADS: usize = 256;
/// Elements of a thread (Normal: 2).
const PACK: usize = 8;

/// `RandomStream` in kernels/philox.cuh.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Stream {
    pub seed: u64,
    pub counter: u64,
}

impl From<RandomStream> for Stream {
    fn from(stream: RandomStream) -> Stream {
        Stream { seed: stream.seed, counter: stream.counter }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Random {
    x: TensorArg,
    out: TensorArg,
    stream: Stream,
    threshold: u64,
    factor: f64,
    drop: i32,
    packs: i32,
}
// SAFETY: the fields of `Random` in kernels/random.cu.
unsafe impl Parameters for Random {}

impl Random {
    fn new(gpu: &Gpu, kernel: &'static str, stream: RandomStream, out: &Tensor) -> Result<Random> {
        let [out] = TensorArg::elementwise(gpu, kernel, [out])?;
        let packs = out.is_packable().into();
        Ok(Random { x: TensorArg::ABSENT, out, stream: stream.into(), threshold: 0, factor: 1.0, drop: 0, packs })
    }
}

/// Uniform numbers in [0, 1), with all the bits that the dtype holds.
pub(crate) fn uniform(gpu: &Gpu, k: &kernel::Uniform<'_>) -> Result<()> {
    let kernel::Uniform { stream, out } = *k;
    let drop = match out.dtype() {
        DType::F64 => 0,
        DType::F16 => 32 - 11,
        DType::BF16 => 32 - 8,
        _ => 8,
    };
    let random = Random { drop, ..Random::new(gpu, "uniform", stream, out)? };
    let kernel = kernel_for("uniform", out);
    let grid = blocks(out.len(), THREADS * PACK);
    gpu.launch(Launch { kernel: &kernel, grid, block: THREADS as u32, shared: 0 }, &random)
}

/// Normal numbers of standard deviation `std`.
pub(crate) fn normal(gpu: &Gpu, k: &kernel::Normal<'_>) -> Result<()> {
    let kernel::Normal { stream, std, out } = *k;
    let random = Random { factor: std, ..Random::new(gpu, "normal", stream, out)? };
    let grid = blocks(out.len(), THREADS * 2);
    gpu.launch(Launch { kernel: "normal", grid, block: THREADS as u32, shared: 0 }, &random)
}

pub(crate) fn dropout(gpu: &Gpu, k: &kernel::Dropout<'_>) -> Result<()> {
    let kernel::Dropout { x, p, stream, out } = *k;
    let [x_arg, out_arg] = TensorArg::elementwise(gpu, "dropout", [x, out])?;
    let random = Random {
        x: x_arg,
        out: out_arg,
        stream: stream.into(),
        threshold: RandomStream::threshold(p),
        factor: 1.0 / (1.0 - p),
        drop: 0,
        packs: (x_arg.is_packable() && out_arg.is_packable()).into(),
    };
    let kernel = kernel_for("dropout", x);
    let grid = blocks(out.len(), THREADS * PACK);
    gpu.launch(Launch { kernel: &kernel, grid, block: THREADS as u32, shared: 0 }, &random)
}
