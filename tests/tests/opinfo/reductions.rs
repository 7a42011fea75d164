//! Reductions, scans and softmax.

use crate::call::{Call, one};
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    // torch computes in the dtype asked for: the input is cast first.
    let x = || {
        let x = a.var(0)?;
        match a.dtype("dtype")? {
            Some(dtype) if dtype != x.dtype() => x.cast(dtype),
            _ => Ok(x),
        }
    };
    let dims = || Ok::<_, retape_core::Error>(a.dims((1, "dim"))?.unwrap_or_default());
    let dim = || Ok::<_, retape_core::Error>(a.int((1, "dim"))?.unwrap_or(-1) as isize);
    let keepdim = || a.flag((2, "keepdim"));
    let correction = || {
        Ok::<_, retape_core::Error>(match a.raw("unbiased") {
            Some(_) => a.flag("unbiased")? as u8 as f64,
            None => a.float("correction")?.unwrap_or(1.0),
        })
    };
    one(match op {
        "sum" => x()?.sum_dims(&dims()?, keepdim()?),
        "mean" => x()?.mean_dims(&dims()?, keepdim()?),
        "amax" => x()?.amax(&dims()?, keepdim()?),
        "amin" => x()?.amin(&dims()?, keepdim()?),
        "prod" => x()?.prod(&dims()?, keepdim()?),
        "logsumexp" => x()?.logsumexp(&dims()?, keepdim()?),
        "var" => x()?.var(&dims()?, correction()?, keepdim()?),
        "std" => x()?.std(&dims()?, correction()?, keepdim()?),
        "vector_norm" => {
            let (ord, dims) = (a.float((1, "ord"))?.unwrap_or(2.0), a.dims((2, "dim"))?.unwrap_or_default());
            x()?.vector_norm(ord, &dims, a.flag((3, "keepdim"))?)
        }
        "max.reduction_with_dim" => {
            let (values, indices) = x()?.max_dim(dim()?, keepdim()?)?;
            return Ok(Some(vec![values, indices]));
        }
        "cumsum" => x()?.cumsum(dim()?),
        "cumprod" => x()?.cumprod(dim()?),
        "softmax" => x()?.softmax_dim(dim()?),
        "log_softmax" => x()?.log_softmax(dim()?),
        _ => return Ok(None),
    })
}
