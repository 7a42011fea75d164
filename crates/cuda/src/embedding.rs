//! Embedding and its gradient: kernels/embedding.cu, and the scatter-add of kernels/indexing.cu.

use crate::argument::{TensorArg, kernel_for};
use crate::copy;
use crate::device::{Gpu, Parameters};
use crate::indexing;
use crate::indices::{self, Allowed, Bad, CHECK_BYTES};
use crate::rows::{RowPlan, extent};
use retape_core::layout::{Shape, Strides};
use retape_core::{Error, Result, Tensor, kernel};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Embedding {
    plan: RowPlan,
    table: TensorArg,
    ids: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `Embedding` in kernels/embedding.cu.
unsafe impl Parameters for Embedding {}

pub(crate) fn embedding(gpu: &Gpu, k: &kernel::Embedding<'_>) -> Result<()> {
    let kernel::Embedding { table, ids, out } = *k;
    let name = "embedding";
    let rows = table.shape()[0];
    let workspace = gpu.workspace(CHECK_BYTES)?;
    let allowed = Allowed { low: 0, end: rows as i64, ignore: None };
    if let Some(Bad { index, position }) = indices::find_bad(gpu, name, ids, allowed, workspace.address())? {
        let reason =
            format!("id {index} at position {position} is outside the table of {rows} rows; allowed are 0..{rows}");
        return Err(Error::InvalidValue { kernel: name, reason });
    }
    let (_, width) = extent(table);
    let [table_arg, out_arg] = [TensorArg::rows(gpu, name, table)?, TensorArg::rows(gpu, name, out)?];
    let plan = RowPlan::new(ids.len(), width, &[&table_arg, &out_arg]);
    let p = Embedding { plan, table: table_arg, ids: TensorArg::flat(gpu, name, ids)?, out: out_arg };
    gpu.launch(plan.launch(&kernel_for(name, table)), &p)
}

/// Ids outside the table, which `embedding` refuses, are left out.
pub(crate) fn embedding_grad(gpu: &Gpu, k: &kernel::EmbeddingGrad<'_>) -> Result<()> {
    let kernel::EmbeddingGrad { ids, g, order, out } = *k;
    copy::fill(gpu, &kernel::Fill { value: 0.0, out })?;
    if g.is_empty() {
        return Ok(());
    }
    // The ids repeat along rows; the table's rows repeat along all of the ids.
    let layout = ids.layout();
    let mut strides = layout.strides.clone();
    strides.push(0);
    let ids = ids.as_strided(g.shape(), &strides, layout.offset)?;
    let (own, mut shape): (_, Shape) = (out.layout(), out.shape()[..1].into());
    shape.extend_from_slice(g.shape());
    let mut strides: Strides = [own.strides[0]].into_iter().collect();
    strides.resize(g.rank(), 0);
    strides.push(own.strides[1]);
    let out = out.as_strided(&shape, &strides, own.offset)?;
    let (indices, out): (&[&Tensor], _) = (&[&ids], &out);
    let entries = kernel::ScatterAdd { source: g, indices, wrap: false, alpha: 1.0, order, out };
    indexing::add_at("embedding_grad", gpu, &entries)
}
