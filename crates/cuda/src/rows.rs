//! Kernels that work row by row: how many threads share a row, and whether they may load packs. See kernels/rows.cuh.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::Launch;
use retape_core::{DType, Tensor};

/// Elements of a row that one warp handles by itself.
const WARP_WIDTH: usize = 32 * PACK * HELD;
/// Threads of a block in which each warp has a row.
pub(crate) const WARPS: usize = 128;
/// Most threads that share a row.
const TEAM: usize = 256;
/// Packs that a thread keeps in registers: HELD in kernels/rows.cuh.
const HELD: usize = 4;
/// Elements of a pack.
pub(crate) const PACK: usize = 8;
/// Shared memory that `Team::fold` needs.
pub(crate) const FOLD_BYTES: u32 = 256;

/// The twin of `RowPlan` in kernels/rows.cuh.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RowPlan {
    pub rows: i64,
    pub width: i64,
    pub team: i32,
    pub packs: i32,
    pub interleaved: i32,
    pub padding: i32,
}

/// Rows of a tensor, and elements of each; a scalar is one row of one.
pub(crate) fn extent(x: &Tensor) -> (usize, usize) {
    let width = x.shape().last().copied().unwrap_or(1);
    (x.shape().iter().rev().skip(1).product(), width)
}

/// Threads that share a row of this width: the width alone decides, as the order of sums follows from it.
pub(crate) fn team(width: usize) -> usize {
    if width <= WARP_WIDTH {
        return 32;
    }
    width.div_ceil(PACK * HELD).next_multiple_of(32).min(TEAM)
}

impl RowPlan {
    /// For rows of these operands (absent ones don't count).
    pub fn new(rows: usize, width: usize, operands: &[&TensorArg]) -> RowPlan {
        let interleaved = !width.is_multiple_of(PACK);
        let packs = !interleaved && operands.iter().all(|arg| has_packed_rows(arg));
        RowPlan {
            rows: rows as i64,
            width: width as i64,
            team: team(width) as i32,
            packs: packs.into(),
            interleaved: interleaved.into(),
            padding: 0,
        }
    }

    /// The kernel for these rows: `base_wide_f32` where they don't fit into a team's registers.
    pub fn kernel(&self, base: &str, tensor: &Tensor) -> String {
        let wide = self.width as usize > self.team as usize * PACK * HELD && tensor.dtype() != DType::F64;
        kernel_for(&format!("{base}{}", if wide { "_wide" } else { "" }), tensor)
    }

    /// A launch with a team for each row.
    pub fn launch<'a>(&self, kernel: &'a str) -> Launch<'a> {
        let (team, rows) = (self.team as usize, self.rows as usize);
        let (block, each) = if team == 32 { (WARPS, WARPS / 32) } else { (team, 1) };
        Launch { kernel, grid: blocks(rows, each), block: block as u32, shared: FOLD_BYTES }
    }
}

/// True where every row of the last dimension lies together and starts on 16 bytes.
pub(crate) fn has_packed_rows(arg: &TensorArg) -> bool {
    let Some(last) = (arg.rank as usize).checked_sub(1).filter(|_| arg.rank > 0) else { return true };
    let bytes = size(arg.dtype) as i64;
    let aligned = |d: usize| arg.shape[d] <= 1 || arg.strides[d] * bytes % 16 == 0;
    (arg.shape[last] <= 1 || arg.strides[last] == 1) && arg.data.is_multiple_of(16) && (0..last).all(aligned)
}

/// Bytes of an element, by the number of its dtype.
fn size(code: i32) -> usize {
    [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool][code as usize]
        .size()
}
