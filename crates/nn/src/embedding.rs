//! Rows of a table by index.

use crate::{Error, Initializer, Parameter, Result};
use retape_core::{Tape, Var};

/// A table `[rows, size]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// `[rows, size]`.
    pub weight: Parameter,
}

impl Embedding {
    /// Parameter `{name}.weight`, normal with standard deviation `std`.
    pub fn new(init: &mut Initializer, name: &str, rows: usize, size: usize, std: f64) -> Result<Embedding> {
        Ok(Embedding { weight: init.normal(format!("{name}.weight"), &[rows, size], std)? })
    }

    /// The rows named by `ids` (i64 or i32): `[ids.., size]`. An id outside the table is an error.
    pub fn forward(&self, ids: &Var) -> Result<Var> {
        Ok(self.weight.var(ids.tape())?.embedding(ids)?)
    }

    /// The first `count` rows, `[count, size]`: a view, for learned positions 0, 1, ..
    pub fn first(&self, tape: &Tape, count: usize) -> Result<Var> {
        let table = self.weight.var(tape)?;
        let rows = table.shape()[0];
        if count > rows {
            return Err(Error::Input {
                layer: "position embedding",
                reason: format!("{count} positions asked for, the table `{}` has {rows}", self.weight.name()),
            });
        }
        if count == rows { Ok(table) } else { Ok(table.narrow(0, 0, count)?) }
    }
}
