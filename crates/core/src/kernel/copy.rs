//! Filling and copying.

use super::check::{Operands, Primitive, operands};
use crate::Tensor;

/// out = value, any dtype (converted as a cast of f64, see [`Tensor::cast`]).
#[derive(Debug, Clone, Copy)]
pub struct Fill<'a> {
    /// What every element becomes.
    pub value: f64,
    /// Written.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Fill<'a> {
    fn name(&self) -> &'static str {
        "fill"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => out: Write Any]
    }
}

/// out = x, any pair of dtypes (see [`Tensor::cast`]).
#[derive(Debug, Clone, Copy)]
pub struct Copy<'a> {
    /// Of out's shape.
    pub x: &'a Tensor,
    /// May be a strided view with distinct elements.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for Copy<'a> {
    fn name(&self) -> &'static str {
        "copy"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => x: Read Any, out: WriteStrided Any]
    }
}
