//! Elementwise ops.

use crate::call::{Call, one, wrong};
use retape_core::{DType, Result, Tensor, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

/// The second operand of a binary op.
enum Operand {
    Tensor(Var),
    Number(f64),
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let x = || a.var(0);
    let other = || match a.opt_var(1) {
        Ok(Some(y)) => Ok(Operand::Tensor(y)),
        _ => Ok(Operand::Number(a.float(1)?.unwrap_or(f64::NAN))),
    };
    one(match op {
        "abs" => x()?.abs(),
        "cos" => x()?.cos(),
        "erf" => x()?.erf(),
        "exp" => x()?.exp(),
        "expm1" => x()?.expm1(),
        "log" => x()?.log(),
        "log1p" => x()?.log1p(),
        "logsigmoid" => x()?.logsigmoid(),
        "neg" => x()?.neg(),
        "reciprocal" => x()?.reciprocal(),
        "relu" => x()?.relu(),
        "rsqrt" => x()?.rsqrt(),
        "sigmoid" => x()?.sigmoid(),
        "silu" => x()?.silu(),
        "sin" => x()?.sin(),
        "sqrt" => x()?.sqrt(),
        "square" => x()?.square(),
        "tanh" => x()?.tanh(),
        "gelu" => match a.text("approximate")?.unwrap_or("none") {
            "none" => x()?.gelu(),
            "tanh" => x()?.gelu_tanh(),
            other => Err(wrong("`none` or `tanh`", &other.into())),
        },
        "elu" => x()?.elu(a.float((1, "alpha"))?.unwrap_or(1.0)),
        "leaky_relu" => x()?.leaky_relu(a.float((1, "negative_slope"))?.unwrap_or(0.01)),
        "softplus" => x()?.softplus(a.float((1, "beta"))?.unwrap_or(1.0), a.float((2, "threshold"))?.unwrap_or(20.0)),
        "clamp" => {
            let number = |place: (usize, &'static str)| {
                Ok(a.opt_var(place).is_err().then(|| a.float(place)).transpose()?.flatten())
            };
            match (number((1, "min"))?, number((2, "max"))?) {
                (None, None) => x()?.clamp_between(a.opt_var((1, "min"))?, a.opt_var((2, "max"))?),
                (low, high) => x()?.clamp(low.unwrap_or(f64::NEG_INFINITY), high.unwrap_or(f64::INFINITY)),
            }
        }
        "add" | "sub" => {
            let alpha = a.float("alpha")?.unwrap_or(1.0) * if op == "add" { 1.0 } else { -1.0 };
            match other()? {
                Operand::Number(c) => x()?.shift(alpha * c),
                Operand::Tensor(y) if alpha == 1.0 => x()?.add(&y),
                Operand::Tensor(y) if alpha == -1.0 => x()?.sub(&y),
                Operand::Tensor(y) => x()?.add_scaled(&y, alpha),
            }
        }
        "mul" => match other()? {
            Operand::Number(c) => x()?.scale(c),
            Operand::Tensor(y) => x()?.mul(&y),
        },
        "div" => match other()? {
            Operand::Number(c) => x()?.scale(1.0 / c),
            Operand::Tensor(y) => x()?.div(&y),
        },
        "pow" => match (a.opt_var(0), other()?) {
            (Ok(Some(x)), Operand::Number(c)) => x.pow_scalar(c),
            (Ok(Some(x)), Operand::Tensor(y)) => x.pow(&y),
            (_, Operand::Tensor(y)) => y.scalar_pow(a.float(0)?.unwrap_or(f64::NAN)),
            _ => Err(wrong("a tensor as base or exponent", &"two numbers".into())),
        },
        "maximum" => x()?.maximum(&a.var(1)?),
        "minimum" => x()?.minimum(&a.var(1)?),
        "lerp" => match a.opt_var((2, "weight")) {
            Ok(Some(weight)) => x()?.lerp(&a.var(1)?, &weight),
            _ => x()?.lerp_scalar(&a.var(1)?, a.float((2, "weight"))?.unwrap_or(f64::NAN)),
        },
        "addcmul" => x()?.addcmul(&a.var(1)?, &a.var(2)?, a.float("value")?.unwrap_or(1.0)),
        "addcdiv" => x()?.addcdiv(&a.var(1)?, &a.var(2)?, a.float("value")?.unwrap_or(1.0)),
        "masked_fill" => match a.opt_var((2, "value")) {
            Ok(Some(value)) => x()?.masked_fill_with(&a.var(1)?, &value),
            _ => x()?.masked_fill(&a.var(1)?, a.float((2, "value"))?.unwrap_or(f64::NAN)),
        },
        "where" => {
            // torch's method: (x, cond, other). A number takes the other's dtype; two numbers are f32.
            let tensor = |i: usize| a.opt_var(i).ok().flatten();
            let dtype = tensor(0).or(tensor(2)).map_or(DType::F32, |t| t.dtype());
            let operand = |i: usize| match tensor(i) {
                Some(x) => Ok(x),
                None => {
                    let value = a.float(i)?.unwrap_or(f64::NAN);
                    a.tape.constant(&Tensor::full(&a.tape.device(), &[], dtype, value)?)
                }
            };
            operand(0)?.where_(&a.var(1)?, &operand(2)?)
        }
        _ => return Ok(None),
    })
}
