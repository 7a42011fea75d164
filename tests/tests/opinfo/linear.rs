//! Products of matrices and vectors.

use crate::call::{Call, one};
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let factor = |name: &'static str| a.float(name).map(|f| f.unwrap_or(1.0));
    match op {
        "matmul" => one(a.var(0)?.matmul(&a.var(1)?)),
        "mm" => one(a.var(0)?.mm(&a.var(1)?)),
        "bmm" => one(a.var(0)?.bmm(&a.var(1)?)),
        "outer" => one(a.var(0)?.outer(&a.var(1)?)),
        "dot" => one(a.var(0)?.dot(&a.var(1)?)),
        "addmm" => one(a.var(0)?.addmm(&a.var(1)?, &a.var(2)?, factor("beta")?, factor("alpha")?)),
        "baddbmm" => one(a.var(0)?.baddbmm(&a.var(1)?, &a.var(2)?, factor("beta")?, factor("alpha")?)),
        "linear" => one(a.var(0)?.linear_transposed(&a.var(1)?, a.opt_var((2, "bias"))?.clone())),
        _ => Ok(None),
    }
}
