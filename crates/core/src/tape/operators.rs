//! `+ - * /` and unary `-` on values and numbers. They borrow, as ops do, and give a `Result`: `(&a + &b)? * 2.0`.

use super::Var;
use crate::Result;
use std::ops::{Add, Div, Mul, Neg, Sub};

macro_rules! between_values {
    ($($trait:ident, $method:ident);*) => {$(
        impl $trait for &Var {
            type Output = Result<Var>;
            fn $method(self, other: &Var) -> Result<Var> {
                Var::$method(self, other)
            }
        }
    )*};
}
between_values!(Add, add; Sub, sub; Mul, mul; Div, div);

macro_rules! with_a_number {
    ($($trait:ident, $method:ident, $by:expr);*) => {$(
        impl $trait<f64> for &Var {
            type Output = Result<Var>;
            fn $method(self, number: f64) -> Result<Var> {
                $by(self, number)
            }
        }
    )*};
}
with_a_number!(
    Add, add, Var::shift;
    Sub, sub, |x: &Var, c: f64| x.shift(-c);
    Mul, mul, Var::scale;
    Div, div, |x: &Var, c: f64| x.scale(1.0 / c)
);

impl Neg for &Var {
    type Output = Result<Var>;
    fn neg(self) -> Result<Var> {
        Var::neg(self)
    }
}
