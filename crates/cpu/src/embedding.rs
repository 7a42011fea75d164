//! Embedding: rows of a table by id, and the scatter-add that is its gradient.

use crate::exec::Exec;
use crate::loss::integers;
use crate::math::Float;
use crate::softmax::for_each_row;
use crate::view::{BLOCK, Rows, Span, for_float, lanes};
use retape_core::{Error, Result, Tensor};

/// Columns of one task of the gradient.
const COLUMNS: usize = BLOCK;

fn checked_ids(kernel: &'static str, ids: &Tensor, rows: usize) -> Result<Vec<usize>> {
    let check = |(at, id): (usize, i64)| {
        usize::try_from(id).ok().filter(|&id| id < rows).ok_or_else(|| Error::InvalidValue {
            kernel,
            reason: format!("id {id} at position {at} is outside the table of {rows} rows; allowed are 0..{rows}"),
        })
    };
    integers(kernel, ids)?.into_iter().enumerate().map(check).collect()
}

/// out[.., :] = table[ids[..], :]
pub(crate) fn embedding(exec: &Exec, table: &Tensor, ids: &Tensor, out: &Tensor) -> Result<()> {
    let ids = checked_ids("embedding", ids, table.shape()[0])?;
    for_float!("embedding", table.dtype(), T => {
        let (tables, outs) = (Rows::<T>::of(table), Rows::<T>::of(out));
        for_each_row::<T>(exec, ids.len(), tables.width, 1, #[inline(always)] |r| {
            outs.row(r).copy_from(tables.row(ids[r]));
        });
    });
    Ok(())
}

/// out = sum of g's rows by id, in the order of ids. A task owns some columns of the table, and adds up one row's after
/// the other.
pub(crate) fn embedding_grad(exec: &Exec, ids: &Tensor, g: &Tensor, out: &Tensor) -> Result<()> {
    let (rows, width) = (out.shape()[0], out.shape()[1]);
    let ids = checked_ids("embedding_grad", ids, rows)?;
    // The places of each id, in their order, one id after the other; id i's end at ends[i].
    let mut places: Vec<usize> = (0..ids.len()).collect();
    places.sort_by_key(|&place| ids[place]);
    let mut ends = vec![0; rows];
    ids.iter().for_each(|&id| ends[id] += 1);
    (1..rows).for_each(|id| ends[id] += ends[id - 1]);
    for_float!("embedding_grad", g.dtype(), T => {
        let (gs, outs) = (Rows::<T>::of(g), Span::<T>::of(out));
        exec.run::<T>(width.div_ceil(COLUMNS), (rows + 2 * ids.len()) * width, #[inline(always)] |task| {
            let (first, len) = (task * COLUMNS, COLUMNS.min(width - task * COLUMNS));
            let mut next = 0;
            for id in 0..rows {
                let mut sum = [T::ZERO; COLUMNS];
                for &place in &places[next..ends[id]] {
                    let g = gs.row(place).load::<COLUMNS>(first, T::ZERO);
                    sum = lanes!(j => sum[j] + g[j]);
                }
                outs.part(id * width + first, len, 1).store(0, sum);
                next = ends[id];
            }
        });
    });
    Ok(())
}
