//! Fill, and copy between any layouts and dtypes: kernels/copy.cu.

use crate::argument::{TensorArg, blocks};
use crate::device::{Gpu, Launch, Parameters};
use retape_core::{DType, Result, Tensor, kernel};

const THREADS: usize = 256;

#[derive(Clone, Copy)]
#[repr(C)]
struct Fill {
    out: TensorArg,
    value: f64,
}
// SAFETY: the fields of `Fill` in kernels/copy.cu.
unsafe impl Parameters for Fill {}

#[derive(Clone, Copy)]
#[repr(C)]
struct Copy {
    x: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `Copy` in kernels/copy.cu.
unsafe impl Parameters for Copy {}

pub(crate) fn fill(gpu: &Gpu, k: &kernel::Fill<'_>) -> Result<()> {
    let kernel::Fill { value, out } = *k;
    let [out_arg] = TensorArg::elementwise(gpu, "fill", [out])?;
    if value.to_bits() == 0 && out.is_contiguous() {
        return gpu.fill_bytes(out_arg.data as usize, 0, out.len() * out.dtype().size());
    }
    let launch = Launch { kernel: "fill", grid: blocks(out.len(), THREADS), block: THREADS as u32, shared: 0 };
    gpu.launch(launch, &Fill { out: out_arg, value })
}

pub(crate) fn copy(gpu: &Gpu, k: &kernel::Copy<'_>) -> Result<()> {
    let kernel::Copy { x, out } = *k;
    let [x_arg, out_arg] = TensorArg::elementwise(gpu, "copy", [x, out])?;
    let size = x.dtype().size();
    let same = x.dtype() == out.dtype();
    if same && x.is_contiguous() && out.is_contiguous() {
        return gpu.copy_bytes(x_arg.data as usize, out_arg.data as usize, out.len() * size);
    }
    if same {
        return copy_elements(gpu, x_arg, out_arg, out);
    }
    let single = |dtype: DType| dtype.is_float() && dtype != DType::F64;
    let packs = single(x.dtype()) && single(out.dtype()) && x_arg.is_packable() && out_arg.is_packable();
    let (kernel, each) = if packs { ("copy_packs", 8) } else { ("copy_convert", 1) };
    let grid = blocks(out.len(), THREADS * each);
    gpu.launch(Launch { kernel, grid, block: THREADS as u32, shared: 0 }, &Copy { x: x_arg, out: out_arg })
}

/// Moves the elements of one shape and dtype, that of `out`, whatever their strides.
pub(crate) fn copy_elements(gpu: &Gpu, x: TensorArg, out_arg: TensorArg, out: &Tensor) -> Result<()> {
    let kernel = ["copy_1", "copy_2", "copy_4", "copy_8"][out.dtype().size().trailing_zeros() as usize];
    let grid = blocks(out.len(), THREADS);
    gpu.launch(Launch { kernel, grid, block: THREADS as u32, shared: 0 }, &Copy { x, out: out_arg })
}
