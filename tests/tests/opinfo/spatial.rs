//! Convolutions and pooling.

use crate::call::{Call, one, wrong};
use retape_core::kernel::PoolDivisor;
use retape_core::ops::conv::{Conv, Padding};
use retape_core::ops::pool::Pool;
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

/// A number for each of `D` dimensions; one number stands for all, an empty list for nothing.
fn each<const D: usize>(list: Option<Vec<usize>>) -> Result<Option<[usize; D]>> {
    match list.as_deref() {
        None | Some([]) => Ok(None),
        Some([n]) => Ok(Some([*n; D])),
        Some(list) => list.try_into().map(Some).map_err(|_| wrong("a number for each dimension", &list.into())),
    }
}

fn conv<const D: usize>(a: &Call) -> Result<Conv<D>> {
    let padding = match a.raw((4, "padding")).and_then(|p| p.as_str()) {
        Some("same") => Padding::Same,
        Some("valid") => Padding::Zeros([0; D]),
        Some(other) => return Err(wrong("padding `same`, `valid` or numbers", &other.into())),
        None => Padding::Zeros(each(a.sizes((4, "padding"))?)?.unwrap_or([0; D])),
    };
    Ok(Conv {
        stride: each(a.sizes((3, "stride"))?)?.unwrap_or([1; D]),
        padding,
        dilation: each(a.sizes((5, "dilation"))?)?.unwrap_or([1; D]),
        groups: a.sizes((6, "groups"))?.map_or(1, |g| g[0]),
    })
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let pool = |padding: usize, dilation: Option<usize>, ceil: usize| -> Result<Pool> {
        let kernel = each(a.sizes((1, "kernel_size"))?)?.ok_or_else(|| wrong("a kernel size", &().into()))?;
        let dilation = match dilation {
            Some(at) => each(a.sizes((at, "dilation"))?)?.unwrap_or([1; 2]),
            None => [1; 2],
        };
        Ok(Pool {
            kernel,
            stride: each(a.sizes((2, "stride"))?)?.unwrap_or(kernel),
            padding: each(a.sizes((padding, "padding"))?)?.unwrap_or([0; 2]),
            dilation,
            ceil: a.flag((ceil, "ceil_mode"))?,
        })
    };
    match op {
        "conv1d" => one(a.var(0)?.conv1d(&a.var((1, "weight"))?, a.opt_var((2, "bias"))?.clone(), conv(a)?)),
        "conv2d" => one(a.var(0)?.conv2d(&a.var((1, "weight"))?, a.opt_var((2, "bias"))?.clone(), conv(a)?)),
        "max_pool2d" => match a.flag("return_indices")? {
            true => a.var(0)?.max_pool2d_with_indices(pool(3, Some(4), 5)?).map(|(y, indices)| Some(vec![y, indices])),
            false => one(a.var(0)?.max_pool2d(pool(3, Some(4), 5)?)),
        },
        "avg_pool2d" => {
            let padded = a.raw((5, "count_include_pad")).is_none_or(|v| v == true);
            let divisor = match a.int((6, "divisor_override"))? {
                Some(n) => PoolDivisor::Fixed(n),
                None if padded => PoolDivisor::Padded,
                None => PoolDivisor::Inside,
            };
            one(a.var(0)?.avg_pool2d(pool(3, None, 4)?, divisor))
        }
        _ => Ok(None),
    }
}
