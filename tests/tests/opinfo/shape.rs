//! Views, joins and rearrangements.

use crate::call::{Call, one, wrong};
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let dim = |position: usize, default: isize| Ok(a.int((position, "dim"))?.map_or(default, |d| d as isize));
    let ints = |place: (usize, &'static str)| Ok(a.ints(place)?.unwrap_or_default());
    let int = |place: (usize, &'static str)| a.int(place)?.ok_or_else(|| wrong("an integer", &().into()));
    match op {
        "transpose" => one(a.var(0)?.transpose(int((1, "dim0"))? as isize, int((2, "dim1"))? as isize)),
        "permute" => one(a.var(0)?.permute(&ints((1, "dims"))?)),
        "reshape" => one(a.var(0)?.reshape(&ints((1, "shape"))?)),
        "expand" => one(a.var(0)?.expand(&ints((1, "size"))?)),
        "narrow" => {
            let (x, dim, len) = (a.var(0)?, dim(1, 0)?, int((3, "length"))?);
            match a.int((2, "start")) {
                Ok(start) => one(x.narrow(dim, start.unwrap_or(0), len)),
                Err(_) => one(x.narrow_at(dim, &a.var((2, "start"))?, len)),
            }
        }
        "cat" => one(Var::concat(a.vars(0)?, dim(1, 0)?)),
        "stack" => one(Var::stack(a.vars(0)?, dim(1, 0)?)),
        "split" => {
            let (x, dim, place) = (a.var(0)?, dim(2, 0)?, (1, "split_size_or_sections"));
            let sizes = a.sizes(place)?.unwrap_or_default();
            let list = a.raw(place).is_some_and(|v| v.is_array());
            if list { x.split(dim, &sizes) } else { x.split_every(dim, sizes[0]) }.map(Some)
        }
        "chunk" => a.var(0)?.chunk(int((1, "chunks"))? as usize, dim(2, 0)?).map(Some),
        "squeeze" => match a.dims((1, "dim"))? {
            Some(dims) => one(a.var(0)?.squeeze_dims(&dims)),
            None => one(a.var(0)?.squeeze()),
        },
        "unsqueeze" => one(a.var(0)?.unsqueeze(dim(1, 0)?)),
        "select" => one(a.var(0)?.select(dim(1, 0)?, int((2, "index"))?)),
        "unbind" => a.var(0)?.unbind(dim(1, 0)?).map(Some),
        "flatten" => {
            let (start, end) = (a.int((1, "start_dim"))?, a.int((2, "end_dim"))?);
            one(a.var(0)?.flatten(start.unwrap_or(0) as isize, end.unwrap_or(-1) as isize))
        }
        "repeat" => one(a.var(0)?.repeat(&ints((1, "repeats"))?)),
        "flip" => one(a.var(0)?.flip(&a.dims((1, "dims"))?.unwrap_or_default())),
        "roll" => {
            let (x, shifts) = (a.var(0)?, a.dims((1, "shifts"))?.unwrap_or_default());
            match (a.dims((2, "dims"))?, &shifts[..]) {
                (None, &[shift]) => one(x.roll(shift)),
                (dims, _) => one(x.roll_dims(&shifts, &dims.unwrap_or_default())),
            }
        }
        "pad.constant" => match a.text((2, "mode"))? {
            None | Some("constant") => {
                one(a.var(0)?.pad(&a.dims((1, "pad"))?.unwrap_or_default(), a.float((3, "value"))?.unwrap_or(0.0)))
            }
            Some(mode) => Err(wrong("the mode `constant`", &mode.into())),
        },
        "tril" => one(a.var(0)?.tril(a.int((1, "diagonal"))?.unwrap_or(0) as isize)),
        "triu" => one(a.var(0)?.triu(a.int((1, "diagonal"))?.unwrap_or(0) as isize)),
        "glu" => one(a.var(0)?.glu(dim(1, -1)?)),
        _ => Ok(None),
    }
}
