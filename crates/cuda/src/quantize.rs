//! Int8 by groups: kernels/quantize.cu.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters};
use crate::random::Stream;
use retape_core::{DType, Result, kernel};

const THREADS: usize = 256;
const PACK: usize = 8;
/// The longest group that lanes of a warp hold, a pack each.
const LONGEST: usize = 32 * PACK;
/// Packs that a thread of a block holds.
const HELD: usize = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct Quantize {
    x: TensorArg,
    q: TensorArg,
    scales: TensorArg,
    rows: i64,
    groups: i64,
    group: i64,
    stream: Stream,
    by_chance: i32,
    lanes: i32,
    packs: i32,
    bytes: i32,
}
// SAFETY: the fields of `Quantize` in kernels/quantize.cu.
unsafe impl Parameters for Quantize {}

#[derive(Clone, Copy)]
#[repr(C)]
struct Dequantize {
    q: TensorArg,
    scales: TensorArg,
    out: TensorArg,
    rows: i64,
    group: i64,
    packs: i64,
}
// SAFETY: the fields of `Dequantize` in kernels/quantize.cu.
unsafe impl Parameters for Dequantize {}

pub(crate) fn quantize(gpu: &Gpu, k: &kernel::Quantize<'_>) -> Result<()> {
    let kernel::Quantize { x, group, rounding, q, scales } = *k;
    if x.is_empty() {
        return Ok(());
    }
    let [x_arg, q_arg, scales_arg] = TensorArg::merged(gpu, "quantize", [x, q, scales], 1)?;
    let width = last(&x_arg);
    let (rows, group) = (x.len() / width, group.min(width));
    let groups = width.div_ceil(group);
    let lanes = group.div_ceil(PACK).next_power_of_two().min(32);
    let parameters = Quantize {
        x: x_arg,
        q: q_arg,
        scales: scales_arg,
        rows: rows as i64,
        groups: groups as i64,
        group: group as i64,
        stream: rounding.map_or(Stream::default(), Stream::from),
        by_chance: rounding.is_some().into(),
        lanes: lanes as i32,
        packs: (in_packs(&x_arg, x.dtype(), 16) && (groups == 1 || group.is_multiple_of(PACK))).into(),
        bytes: (in_packs(&q_arg, q.dtype(), 8) && (groups == 1 || group.is_multiple_of(PACK))).into(),
    };
    if group <= LONGEST {
        let kernel = kernel_for("quantize", x);
        let grid = blocks(rows * groups, THREADS / lanes);
        return gpu.launch(Launch { kernel: &kernel, grid, block: THREADS as u32, shared: 0 }, &parameters);
    }
    let kernel = kernel_for("quantize_block", x);
    let block = group.div_ceil(PACK * HELD).next_multiple_of(32).min(THREADS) as u32;
    let shared = 32 * if x.dtype() == DType::F64 { 8 } else { 4 };
    gpu.launch(Launch { kernel: &kernel, grid: blocks(rows * groups, 1), block, shared }, &parameters)
}

pub(crate) fn dequantize(gpu: &Gpu, k: &kernel::Dequantize<'_>) -> Result<()> {
    let kernel::Dequantize { q, scales, group, out } = *k;
    if out.is_empty() {
        return Ok(());
    }
    let [out_arg, q_arg, scales_arg] = TensorArg::merged(gpu, "dequantize", [out, q, scales], 1)?;
    let width = last(&out_arg);
    let rows = out.len() / width;
    let packs = in_packs(&q_arg, q.dtype(), 8) && in_packs(&out_arg, out.dtype(), 16);
    let one_scale = group >= width || group.is_multiple_of(PACK);
    let parameters = Dequantize {
        q: q_arg,
        scales: scales_arg,
        out: out_arg,
        rows: rows as i64,
        group: group as i64,
        packs: (packs && one_scale).into(),
    };
    let kernel = kernel_for("dequantize", out);
    let grid = blocks(rows * width.div_ceil(PACK), THREADS);
    gpu.launch(Launch { kernel: &kernel, grid, block: THREADS as u32, shared: 0 }, &parameters)
}

/// The length of a row.
fn last(arg: &TensorArg) -> usize {
    arg.shape[arg.rank as usize - 1] as usize
}

/// True where packs from the start of each row on may be loaded or stored, `bytes` aligned.
fn in_packs(arg: &TensorArg, dtype: DType, bytes: i64) -> bool {
    let last = arg.rank as usize - 1;
    let whole = |stride: &i64| stride * dtype.size() as i64 % bytes == 0;
    let together = arg.strides[last] == 1 || arg.shape[last] == 1;
    together && arg.data.is_multiple_of(bytes as u64) && arg.strides[..last].iter().all(whole)
}
