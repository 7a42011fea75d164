//! The arguments of one golden call.

use retape_core::{DType, Error, Result, Tape, Var};
use serde_json::Value;
use std::collections::BTreeMap;

/// Where an argument stands: by position, by name, or by either.
pub struct Place(Option<usize>, Option<&'static str>);

impl From<usize> for Place {
    fn from(position: usize) -> Place {
        Place(Some(position), None)
    }
}
impl From<&'static str> for Place {
    fn from(name: &'static str) -> Place {
        Place(None, Some(name))
    }
}
impl From<(usize, &'static str)> for Place {
    fn from((position, name): (usize, &'static str)) -> Place {
        Place(Some(position), Some(name))
    }
}

/// One call. Arguments are asked for by place: `a.var(0)`, `a.int("dim")`, `a.flag((2, "keepdim"))`. An argument that
/// is absent or null is `None`; one of another type is an error, as a call that a typed interface can't even express.
pub struct Call<'a> {
    /// The tape, for constants and new leaves.
    pub tape: &'a Tape,
    tensors: &'a BTreeMap<String, Var>,
    args: &'a [Value],
    kwargs: &'a Value,
}

#[allow(dead_code)] // each family uses what it needs
impl<'a> Call<'a> {
    pub fn new(tape: &'a Tape, tensors: &'a BTreeMap<String, Var>, case: &'a Value) -> Call<'a> {
        let args = case["args"].as_array().expect("a case has arguments");
        Call { tape, tensors, args, kwargs: &case["kwargs"] }
    }

    /// The argument as JSON.
    pub fn raw(&self, place: impl Into<Place>) -> Option<&'a Value> {
        let Place(position, name) = place.into();
        let by_position = position.and_then(|p| self.args.get(p));
        by_position.or_else(|| name.and_then(|n| self.kwargs.get(n))).filter(|v| !v.is_null())
    }

    /// How many positional arguments there are.
    pub fn len(&self) -> usize {
        self.args.len()
    }

    fn typed<T>(&self, place: Place, what: &str, f: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.raw(Place(place.0, place.1)) {
            None => Ok(None),
            Some(value) => f(value).map(Some).ok_or_else(|| wrong(what, value)),
        }
    }

    /// A tensor that must be there.
    pub fn var(&self, place: impl Into<Place>) -> Result<Var> {
        self.opt_var(place)?.ok_or_else(|| wrong("a tensor", &Value::Null))
    }
    /// The tensor that a JSON value inside an argument names.
    pub fn of(&self, value: &Value) -> Result<Var> {
        let key = value.get("t").and_then(Value::as_str).ok_or_else(|| wrong("a tensor", value))?;
        Ok(self.tensors[key].clone())
    }
    /// A tensor or nothing.
    pub fn opt_var(&self, place: impl Into<Place>) -> Result<Option<Var>> {
        self.typed(place.into(), "a tensor", |v| Some(self.tensors[v.get("t")?.as_str()?].clone()))
    }
    /// A list of tensors, or one tensor as a list of itself.
    pub fn vars(&self, place: impl Into<Place>) -> Result<Vec<Var>> {
        let one = |v: &Value| Some(self.tensors[v.get("t")?.as_str()?].clone());
        let list = |v: &'a Value| match v.as_array() {
            Some(list) => list.iter().map(one).collect(),
            None => Some(vec![one(v)?]),
        };
        Ok(self.typed(place.into(), "tensors", list)?.unwrap_or_default())
    }
    /// An integer.
    pub fn int(&self, place: impl Into<Place>) -> Result<Option<i64>> {
        self.typed(place.into(), "an integer", Value::as_i64)
    }
    /// A number, infinities and NaN included; a truth value is 0 or 1.
    pub fn float(&self, place: impl Into<Place>) -> Result<Option<f64>> {
        self.typed(place.into(), "a number", number)
    }
    /// A list of integers, or one integer as a list of itself.
    pub fn ints(&self, place: impl Into<Place>) -> Result<Option<Vec<i64>>> {
        self.typed(place.into(), "integers", |v| match v.as_array() {
            Some(list) => list.iter().map(Value::as_i64).collect(),
            None => Some(vec![v.as_i64()?]),
        })
    }
    /// As [`ints`](Call::ints), as dimensions (negative counts from the end).
    pub fn dims(&self, place: impl Into<Place>) -> Result<Option<Vec<isize>>> {
        Ok(self.ints(place)?.map(|list| list.into_iter().map(|d| d as isize).collect()))
    }
    /// As [`ints`](Call::ints), none of them negative.
    pub fn sizes(&self, place: impl Into<Place>) -> Result<Option<Vec<usize>>> {
        let size = |d: i64| usize::try_from(d).map_err(|_| wrong("sizes", &Value::from(d)));
        self.ints(place)?.map(|list| list.into_iter().map(size).collect()).transpose()
    }
    /// A truth value; false where it is absent.
    pub fn flag(&self, place: impl Into<Place>) -> Result<bool> {
        Ok(self.typed(place.into(), "a truth value", Value::as_bool)?.unwrap_or(false))
    }
    /// A word.
    pub fn text(&self, place: impl Into<Place>) -> Result<Option<&'a str>> {
        self.typed(place.into(), "a word", Value::as_str)
    }
    /// An element type.
    pub fn dtype(&self, place: impl Into<Place>) -> Result<Option<DType>> {
        self.typed(place.into(), "a dtype", |v| {
            Some(match v.get("dtype")?.as_str()? {
                "float64" => DType::F64,
                "float32" => DType::F32,
                "int64" => DType::I64,
                "int32" => DType::I32,
                "uint8" => DType::U8,
                "bool" => DType::Bool,
                _ => return None,
            })
        })
    }
}

fn number(v: &Value) -> Option<f64> {
    match v.get("f") {
        Some(text) => text.as_str()?.parse().ok(),
        None => v.as_f64().or(v.as_bool().map(|truth| truth as u8 as f64)),
    }
}

/// The error for an argument that the typed interface has no way to express.
pub fn wrong(wanted: &str, got: &Value) -> Error {
    Error::InvalidTensor { what: "argument", reason: format!("needs {wanted}, got {got}; the interface is typed") }
}

/// The one output of an op.
pub fn one(y: Result<Var>) -> Result<Option<Vec<Var>>> {
    Ok(Some(vec![y?]))
}
