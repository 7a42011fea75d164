//! Rows of a table.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// out[.., :] = table[ids[..], :]; an id outside the table is an InvalidValue error.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// `[rows, width]`.
    pub table: &'a Tensor,
    /// `[..]`, i64 or i32.
    pub ids: &'a Tensor,
    /// Written: `[.., width]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Embedding<'a> {
    fn name(&self) -> &'static str {
        "embedding"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => table: Read Float, ids: Read Index, out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.rank("table", self.table, 2)?;
        check.joined("out", self.out, self.ids.shape(), &self.table.shape()[1..])
    }
}

/// out = sum of g's rows by id, as [`ScatterAdd`](super::ScatterAdd) sums; rows that no id names are 0.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingGrad<'a> {
    /// `[..]`, i64 or i32.
    pub ids: &'a Tensor,
    /// `[.., width]`.
    pub g: &'a Tensor,
    /// A workspace, i64, with an element for each id.
    pub order: &'a Tensor,
    /// Written; of the table's shape.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for EmbeddingGrad<'a> {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => ids: Read Index, g: Read Float, order: Write Exactly(DType::I64), out: Write Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.rank("out", self.out, 2)?;
        check.shape("order", self.order, &[self.ids.len()])?;
        check.joined("g", self.g, self.ids.shape(), &self.out.shape()[1..])
    }
}
