//! Elementwise functions in f64, written from their definitions: what tests hold every backend against. A new row of
//! the table in crates/core/src/kernel/functions.rs comes here, too.

use retape_core::kernel::{BinaryFn, LossFn, UnaryFn};

fn missing(f: impl std::fmt::Debug, what: &str) -> ! {
    panic!("add {f:?} to `{what}` in tests/src/functions.rs, from its definition")
}

fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

fn softplus(x: f64) -> f64 {
    if x.is_nan() { x } else { x.max(0.0) + (-x.abs()).exp().ln_1p() }
}

fn cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// 2u and 2u' of gelu's tanh form.
fn gate(x: f64) -> (f64, f64) {
    let c = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
    (c * x * (1.0 + 0.044715 * x * x), c * (1.0 + 3.0 * 0.044715 * x * x))
}

/// f(x), by its definition and limits.
#[allow(unreachable_patterns)] // a new function comes to the last
pub fn value(f: UnaryFn, x: f64) -> f64 {
    match f {
        UnaryFn::Neg => -x,
        UnaryFn::Scale(c) => c * x,
        UnaryFn::Shift(c) => x + c,
        UnaryFn::Exp => x.exp(),
        UnaryFn::Log => x.ln(),
        UnaryFn::Sqrt => x.sqrt(),
        UnaryFn::Rsqrt => 1.0 / x.sqrt(),
        UnaryFn::Reciprocal => 1.0 / x,
        UnaryFn::Square => x * x,
        UnaryFn::Abs => x.abs(),
        UnaryFn::Tanh => x.tanh(),
        UnaryFn::Sigmoid => sigmoid(x),
        UnaryFn::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                x
            }
        }
        UnaryFn::Silu | UnaryFn::Gelu | UnaryFn::GeluTanh if x < -800.0 => 0.0,
        UnaryFn::Silu => x * sigmoid(x),
        UnaryFn::Gelu => x * cdf(x),
        UnaryFn::GeluTanh => x * sigmoid(gate(x).0),
        UnaryFn::Sin => x.sin(),
        UnaryFn::Cos => x.cos(),
        UnaryFn::Log1p => x.ln_1p(),
        UnaryFn::Expm1 => x.exp_m1(),
        UnaryFn::Erf => libm::erf(x),
        UnaryFn::Softplus { beta, threshold } => {
            if beta * x > threshold {
                x
            } else {
                softplus(beta * x) / beta
            }
        }
        UnaryFn::LogSigmoid => -softplus(-x),
        UnaryFn::LeakyRelu(c) => {
            if x > 0.0 {
                x
            } else {
                c * x
            }
        }
        UnaryFn::Elu(alpha) => {
            if x > 0.0 {
                x
            } else {
                alpha * x.exp_m1()
            }
        }
        UnaryFn::Clamp { low, high } => {
            if x < low {
                low
            } else if x > high {
                high
            } else {
                x
            }
        }
        UnaryFn::Pow(c) => x.powf(c),
        UnaryFn::PowBase(c) => c.powf(x),
        _ => missing(f, "value"),
    }
}

/// f'(x), of y where the gradient reads it.
#[allow(unreachable_patterns)]
pub fn slope(f: UnaryFn, x: f64) -> f64 {
    let y = x;
    match f {
        UnaryFn::Neg => -1.0,
        UnaryFn::Scale(c) => c,
        UnaryFn::Shift(_) => 1.0,
        UnaryFn::Exp => y,
        UnaryFn::Log => 1.0 / x,
        UnaryFn::Sqrt => 0.5 / y,
        UnaryFn::Rsqrt => -0.5 * y * y * y,
        UnaryFn::Reciprocal => -y * y,
        UnaryFn::Square => 2.0 * x,
        UnaryFn::Abs => {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        }
        UnaryFn::Tanh => (1.0 - y) * (1.0 + y),
        UnaryFn::Sigmoid => y * (1.0 - y),
        UnaryFn::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                1.0
            }
        }
        UnaryFn::Silu | UnaryFn::Gelu | UnaryFn::GeluTanh if x.abs() > 800.0 => (x > 0.0) as u8 as f64,
        UnaryFn::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        UnaryFn::Gelu => cdf(x) + x * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt(),
        UnaryFn::GeluTanh => {
            let (z, slope) = gate(x);
            sigmoid(z) * (1.0 + x * sigmoid(-z) * slope)
        }
        UnaryFn::Sin => x.cos(),
        UnaryFn::Cos => -x.sin(),
        UnaryFn::Log1p => 1.0 / (1.0 + x),
        UnaryFn::Expm1 => y + 1.0,
        UnaryFn::Erf => std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp(),
        UnaryFn::Softplus { beta, threshold } => {
            if beta * x > threshold {
                1.0
            } else {
                sigmoid(beta * x)
            }
        }
        UnaryFn::LogSigmoid => sigmoid(-x),
        UnaryFn::LeakyRelu(c) => {
            if x > 0.0 {
                1.0
            } else {
                c
            }
        }
        UnaryFn::Elu(alpha) => {
            if x > 0.0 {
                1.0
            } else {
                alpha * x.exp()
            }
        }
        UnaryFn::Clamp { low, high } => {
            if x <= low && low.is_finite() || x >= high && high.is_finite() {
                0.0
            } else {
                1.0
            }
        }
        UnaryFn::Pow(c) => {
            if c == 0.0 {
                0.0
            } else {
                c * x.powf(c - 1.0)
            }
        }
        UnaryFn::PowBase(c) => {
            if c == 0.0 && y < f64::INFINITY {
                0.0
            } else {
                y * c.ln()
            }
        }
        _ => missing(f, "slope"),
    }
}

/// f(a, b).
#[allow(unreachable_patterns)]
pub fn value_of_two(f: BinaryFn, a: f64, b: f64) -> f64 {
    match f {
        BinaryFn::Add => a + b,
        BinaryFn::Sub => a - b,
        BinaryFn::Mul => a * b,
        BinaryFn::Div => a / b,
        BinaryFn::Maximum | BinaryFn::Minimum if a.is_nan() || b.is_nan() => f64::NAN,
        BinaryFn::Maximum => a.max(b),
        BinaryFn::Minimum => a.min(b),
        BinaryFn::Pow => a.powf(b),
        _ => missing(f, "value_of_two"),
    }
}

/// A loss of x - t, and its gradient by x, by their definitions.
pub fn loss(f: LossFn, x: f64, t: f64) -> (f64, f64) {
    let d = x - t;
    match f {
        LossFn::Squared => (d * d, 2.0 * d),
        LossFn::Absolute => {
            let sign = if d == 0.0 || d.is_nan() { d * 0.0 } else { d.signum() };
            (d.abs(), sign)
        }
        LossFn::SmoothL1(beta) => {
            let value = if d.abs() < beta { d * d / (2.0 * beta) } else { d.abs() - beta / 2.0 };
            let slope = (d / beta).clamp(-1.0, 1.0);
            (value, slope)
        }
        LossFn::Huber(delta) => {
            let value = if d.abs() <= delta { d * d / 2.0 } else { delta * (d.abs() - delta / 2.0) };
            let slope = d.clamp(-delta, delta);
            (value, slope)
        }
        _ => unreachable!("the others have samples"),
    }
}
