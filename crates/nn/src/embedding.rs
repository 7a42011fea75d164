//! Rows of a table by index.

use crate::{Builder, Error, Init, Parameter, Result};
use retape_core::{Role, Scope, Tape, Var};

/// A table `[rows, size]`.
#[derive(Debug, Clone)]
pub struct Embedding {
    scope: Scope,
    /// `[rows, size]`.
    pub weight: Parameter,
}

impl Embedding {
    /// Parameter `weight`, as `init` says.
    pub fn new(builder: &Builder, rows: usize, size: usize, init: Init) -> Result<Embedding> {
        let weight = builder.parameter("weight", &[rows, size], init)?;
        Ok(Embedding { scope: builder.scope().role(Role::Embedding), weight })
    }

    /// The rows named by `ids` (i64 or i32): `[ids.., size]`. An id outside the table is an error.
    pub fn forward(&self, ids: Var) -> Result<Var> {
        ids.within(&self.scope, |ids| Ok(self.weight.var(ids.tape())?.embedding(ids)?))
    }

    /// The first `count` rows, `[count, size]`: a view, for learned positions 0, 1, ..
    pub fn first(&self, tape: &Tape, count: usize) -> Result<Var> {
        tape.within(&self.scope, || {
            let table = self.weight.var(tape)?;
            let rows = table.shape()[0];
            if count > rows {
                return Err(Error::Input {
                    layer: "position embedding",
                    reason: format!("{count} positions asked for, the table `{}` has {rows}", self.weight.name()),
                });
            }
            if count == rows { Ok(table) } else { Ok(table.narrow(0, 0, count)?) }
        })
    }
}
