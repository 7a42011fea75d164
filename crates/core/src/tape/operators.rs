//! `+ - * /` and unary `-` on values and numbers. An operand given by value ends there, one given as `&x` stays.
//!
//! Each gives a `Result`, which may stand beside a value in the next operator: `&a * &b + c`. Beside another result
//! or a number it needs a `?`: `(&a * &b)? + &c / d`, `(&a * &b)? * 2.0`.
//!
//! By a number, `x / c` is x times 1 / c, and `c / x` is c times 1 / x: two roundings, where a division has one.

use super::Var;
use crate::Result;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// An operator between operands of two types, each made a value by an expression that may fail.
macro_rules! operator {
    ($trait:ident, $method:ident: $(($a:ident: $left:ty, $b:ident: $right:ty) => $result:expr;)*) => {$(
        impl $trait<$right> for $left {
            type Output = Result<Var>;
            fn $method(self, other: $right) -> Result<Var> {
                let ($a, $b) = (self, other);
                $result
            }
        }
    )*};
}

/// An operator between two values, either of which may be borrowed, or the result of another.
macro_rules! between_values {
    ($($trait:ident, $method:ident);*) => {$(
        operator!($trait, $method:
            (a: Var, b: Var) => Var::$method(a, b);
            (a: Var, b: &Var) => Var::$method(a, b);
            (a: &Var, b: Var) => Var::$method(a.clone(), b);
            (a: &Var, b: &Var) => Var::$method(a.clone(), b);
            (a: Result<Var>, b: Var) => Var::$method(a?, b);
            (a: Result<Var>, b: &Var) => Var::$method(a?, b);
            (a: Var, b: Result<Var>) => Var::$method(a, b?);
            (a: &Var, b: Result<Var>) => Var::$method(a.clone(), b?);
        );
    )*};
}
between_values!(Add, add; Sub, sub; Mul, mul; Div, div);

/// An operator between a value and a number, on either side.
macro_rules! with_a_number {
    ($($trait:ident, $method:ident, $right:expr, $left:expr);* $(;)?) => {$(
        operator!($trait, $method:
            (x: Var, c: f64) => $right(x, c);
            (x: &Var, c: f64) => $right(x.clone(), c);
            (c: f64, x: Var) => $left(c, x);
            (c: f64, x: &Var) => $left(c, x.clone());
        );
    )*};
}
with_a_number!(
    Add, add, Var::shift, |c: f64, x: Var| x.shift(c);
    Sub, sub, |x: Var, c: f64| x.shift(-c), |c: f64, x: Var| x.neg()?.shift(c);
    Mul, mul, Var::scale, |c: f64, x: Var| x.scale(c);
    Div, div, |x: Var, c: f64| x.scale(1.0 / c), |c: f64, x: Var| x.reciprocal()?.scale(c);
);

impl Neg for Var {
    type Output = Result<Var>;
    fn neg(self) -> Result<Var> {
        Var::neg(self)
    }
}

impl Neg for &Var {
    type Output = Result<Var>;
    fn neg(self) -> Result<Var> {
        Var::neg(self.clone())
    }
}
