//! Indices are looked at before they are used: kernels/indices.cu. The host waits for the answer.

use crate::argument::TensorArg;
use crate::device::{Gpu, Launch, Parameters};
use crate::rows::FOLD_BYTES;
use retape_core::{DType, Element, Error, Result, Tensor};

const THREADS: usize = 256;
/// Most blocks; each tells of one position.
const BLOCKS: usize = 256;
/// Bytes of workspace for what the blocks tell.
pub(crate) const CHECK_BYTES: usize = BLOCKS * 8;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CheckIndices {
    indices: TensorArg,
    low: i64,
    end: i64,
    ignore: i64,
    ignores: i32,
    padding: i32,
    bad: u64,
}
// SAFETY: the fields of `CheckIndices` in kernels/indices.cu.
unsafe impl Parameters for CheckIndices {}

/// An index that isn't allowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bad {
    pub index: i64,
    /// In row-major order.
    pub position: usize,
}

/// Which integers are allowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowed {
    pub low: i64,
    /// One past the largest.
    pub end: i64,
    /// Allowed besides.
    pub ignore: Option<i64>,
}

/// The first of the indices that isn't allowed. `scratch` is the address of CHECK_BYTES of workspace, free again
/// afterwards.
pub(crate) fn find_bad(
    gpu: &Gpu,
    kernel: &'static str,
    indices: &Tensor,
    allowed: Allowed,
    scratch: usize,
) -> Result<Option<Bad>> {
    if !matches!(indices.dtype(), DType::I64 | DType::I32) {
        let reason = format!("no kernel for {}", indices.dtype());
        return Err(Error::Unsupported { kernel, device: gpu.name().into(), reason });
    }
    if indices.is_empty() {
        return Ok(None);
    }
    let grid = indices.len().div_ceil(THREADS).min(BLOCKS);
    let Allowed { low, end, ignore } = allowed;
    let p = CheckIndices {
        indices: TensorArg::flat(gpu, kernel, indices)?,
        low,
        end,
        ignore: ignore.unwrap_or(0),
        ignores: ignore.is_some().into(),
        padding: 0,
        bad: scratch as u64,
    };
    let launch =
        Launch { kernel: "check_indices", grid: [grid as u32, 1, 1], block: THREADS as u32, shared: FOLD_BYTES };
    gpu.launch(launch, &p)?;
    let mut bytes = vec![0; grid * 8];
    gpu.download(scratch, &mut bytes)?;
    let Some(position) = i64::from_bytes(&bytes).into_iter().min().filter(|&p| p != i64::MAX) else { return Ok(None) };
    let mut rest = position as usize;
    let (shape, strides) = (indices.shape(), &indices.layout().strides);
    let mut offset = indices.layout().offset;
    for d in (0..shape.len()).rev() {
        offset += rest % shape[d] * strides[d];
        rest /= shape[d];
    }
    let size = indices.dtype().size();
    let mut bytes = vec![0; size];
    gpu.download(indices.storage().address() + offset * size, &mut bytes)?;
    let index = if size == 8 { i64::from_bytes(&bytes)[0] } else { i32::from_bytes(&bytes)[0].into() };
    Ok(Some(Bad { index, position: position as usize }))
}
