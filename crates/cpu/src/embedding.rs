//! Embedding: rows of a table by id, and its gradient, which is a scatter-add (see [`crate::indexing`]).

use crate::copy;
use crate::exec::Exec;
use crate::indexing;
use crate::loss::Numbers;
use crate::math::Float;
use crate::softmax::for_each_row;
use crate::view::{Rows, for_float};
use retape_core::layout::{Shape, Strides};
use retape_core::{Error, Result, Tensor, kernel};

fn checked_ids(kernel: &'static str, ids: &Tensor, rows: usize) -> Result<Numbers> {
    let ids = Numbers::of(kernel, ids)?;
    let inside = |id: i64| usize::try_from(id).is_ok_and(|id| id < rows);
    match (0..ids.len()).find(|&at| !inside(ids.get(at))) {
        None => Ok(ids),
        Some(at) => {
            let id = ids.get(at);
            let reason = format!("id {id} at position {at} is outside the table of {rows} rows; allowed are 0..{rows}");
            Err(Error::InvalidValue { kernel, reason })
        }
    }
}

/// out[.., :] = table[ids[..], :]
pub(crate) fn embedding(exec: &Exec, k: &kernel::Embedding<'_>) -> Result<()> {
    for_float!("embedding", k.table.dtype(), T => embedding_of::<T>(exec, k))?
}

fn embedding_of<T: Float>(exec: &Exec, k: &kernel::Embedding<'_>) -> Result<()> {
    let kernel::Embedding { table, ids, out } = *k;
    let ids = checked_ids("embedding", ids, table.shape()[0])?;

    let (tables, outs) = (Rows::<T>::of(table), Rows::<T>::of(out));
    for_each_row::<T>(
        exec,
        ids.len(),
        tables.width,
        1,
        #[inline(always)]
        |r| {
            outs.row(r).copy_from(tables.row(ids.get(r) as usize));
        },
    );
    Ok(())
}

/// out = sum of g's rows by id.
pub(crate) fn embedding_grad(exec: &Exec, k: &kernel::EmbeddingGrad<'_>) -> Result<()> {
    let kernel::EmbeddingGrad { ids, g, order, out } = *k;
    checked_ids("embedding_grad", ids, out.shape()[0])?;
    copy::fill(exec, &kernel::Fill { value: 0.0, out });
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
    indexing::scatter_add(exec, &kernel::ScatterAdd { source: g, indices, wrap: false, alpha: 1.0, order, out })
}
