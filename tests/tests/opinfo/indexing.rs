//! Indexing.

use crate::call::{Call, one, wrong};
use retape_core::ops::index::Index;
use retape_core::{Result, Tensor, Var};
use serde_json::Value;

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let dim = || a.int((1, "dim")).map(|d| d.unwrap_or(0) as isize);
    match op {
        "getitem" => getitem(a),
        "index_select" => one(a.var(0)?.index_select(dim()?, &a.var(2)?)),
        "index_add" => {
            let alpha = a.float("alpha")?.unwrap_or(1.0);
            one(a.var(0)?.index_add(dim()?, &a.var(2)?, &a.var(3)?, alpha))
        }
        "gather" => one(a.var(0)?.gather(dim()?, &a.var(2)?)),
        "scatter_add" => one(a.var(0)?.scatter_add(dim()?, &a.var(2)?, &a.var(3)?)),
        "take_along_dim" => one(a.var(0)?.take_along_dim(&a.var(1)?, a.int((2, "dim"))?.map(|d| d as isize))),
        "embedding" => match a.int((2, "padding_idx"))? {
            Some(padding) => one(a.var(0)?.embedding_padded(&a.var(1)?, padding as isize)),
            None => one(a.var(0)?.embedding(&a.var(1)?)),
        },
        _ => Ok(None),
    }
}

fn getitem(a: &Call) -> Result<Option<Vec<Var>>> {
    let raw = a.raw(1).ok_or_else(|| wrong("an index", &Value::Null))?;
    let places = raw.as_array().map_or_else(|| vec![raw], |tuple| tuple.iter().collect());
    let tensors: Vec<Option<Var>> = places.iter().map(|place| tensor(a, place)).collect::<Result<_>>()?;
    let mut indices: Vec<Index> = Vec::new();
    for (place, tensor) in places.iter().zip(&tensors) {
        let bound = |i: usize| place["slice"][i].as_i64().map(|n| n as isize);
        indices.push(match (place, tensor) {
            (_, Some(tensor)) => Index::Tensor(tensor),
            (Value::Null, _) => Index::NewAxis,
            (Value::Number(n), _) => Index::At(n.as_i64().ok_or_else(|| wrong("an integer", place))? as isize),
            (Value::Object(o), _) if o.contains_key("ellipsis") => Index::Ellipsis,
            (Value::Object(o), _) if o.contains_key("slice") => {
                Index::Slice { start: bound(0), stop: bound(1), step: bound(2).unwrap_or(1) }
            }
            _ => return Err(wrong("an index", place)),
        });
    }
    one(a.var(0)?.index(&indices))
}

/// The index tensor that a place stands for, if it does: a tensor of the case, a list of integers or of truth values.
fn tensor(a: &Call, place: &Value) -> Result<Option<Var>> {
    if place.get("t").is_some() {
        return a.of(place).map(Some);
    }
    let (device, list) = (a.tape.device(), place.get("list").and_then(Value::as_array));
    let Some(list) = list else {
        return match place {
            Value::Bool(all) => a.tape.constant(&Tensor::from_slice(&device, &[], &[*all])?).map(Some),
            _ => Ok(None),
        };
    };
    let truths: Option<Vec<bool>> = list.iter().map(Value::as_bool).collect();
    let tensor = match (truths, list.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>()) {
        (Some(truths), _) if !list.is_empty() => Tensor::from_slice(&device, &[list.len()], &truths)?,
        (_, Some(integers)) => Tensor::from_slice(&device, &[list.len()], &integers)?,
        _ => return Err(wrong("a list of integers or truth values", place)),
    };
    a.tape.constant(&tensor).map(Some)
}
