//! Elementwise kernels at the ends of every float dtype against their definitions in f64: subnormal and largest numbers,
//! zeros, infinities, NaN, and what saturates.

use crate::floats;
use half::{bf16, f16};
use retape_core::kernel::{self, BinaryFn, LossFn, TernaryFn, UnaryFn};
use retape_core::{DType, Device, Kernel, MemoryKind, Tensor};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const F32_MOST: f64 = f32::MAX as f64;

/// Numbers of every size, of both signs.
fn numbers() -> Vec<f64> {
    let sizes = [
        0.0,
        1e-45,
        1e-41,
        1.2e-38,
        1e-30,
        1e-20,
        1e-12,
        1e-7,
        1e-4,
        0.25,
        0.5,
        1.0,
        1.5,
        2.0,
        3.0,
        10.0,
        20.0,
        30.0,
        80.0,
        88.0,
        89.0,
        104.0,
        200.0,
        1e4,
        6e4,
        65504.0,
        1e9,
        1e15,
        1e19,
        1e25,
        1e30,
        3e38,
        F32_MOST,
        f64::INFINITY,
    ];
    sizes.into_iter().flat_map(|x| [x, -x]).chain([f64::NAN]).collect()
}

/// Fewer, for pairs.
fn some_numbers() -> Vec<f64> {
    let sizes =
        [0.0, 1e-45, 1e-30, 1e-12, 0.25, 1.0, 1.5, 2.0, 30.0, 6e4, 65504.0, 1e9, 1e19, 3e38, F32_MOST, f64::INFINITY];
    sizes.into_iter().flat_map(|x| [x, -x]).chain([f64::NAN]).collect()
}

fn cotangents(dtype: DType) -> [f64; 4] {
    if dtype == DType::F16 { [1.0, -2.5, 1e-4, 6e4] } else { [1.0, -2.5, 1e-30, 1e30] }
}

fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::BF16 => f64::from(bf16::from_f64(x)),
        _ => f64::from(f16::from_f64(x)),
    }
}

/// One number against the exact one: equal when rounded, or within the arithmetic's error and `absolute`.
fn check(faults: &mut Vec<String>, what: &dyn Fn() -> String, dtype: DType, got: f64, want: f64, absolute: f64) {
    if got == rounded(want, dtype) || got.is_nan() && want.is_nan() {
        return;
    }
    // What underflows in f32 is 0; one unit of the least numbers.
    let (relative, tiny, most) = match dtype {
        DType::F64 => (1e-12, 1e-300, f64::MAX),
        DType::F32 => (4e-6, 2e-38, F32_MOST),
        DType::BF16 => (4.1e-3, 2e-38, f64::from(bf16::MAX)),
        _ => (5e-4, 6e-8, f64::from(f16::MAX)),
    };
    let allowed = relative * want.abs() + tiny + absolute;
    let near = got.is_finite() && (got - want).abs() <= allowed;
    // At the largest number rounding decides.
    let edge = got.is_infinite() && got.signum() == want.signum() && want.abs() >= most * (1.0 - 2.0 * relative);
    if !(near || edge) {
        faults.push(format!("{dtype} {}: {got:e}, should be {want:e}", what()));
    }
}

/// Runs a kernel of operands of one length, each rounded to the dtype: its numbers, and those that the operands were.
fn run<const N: usize>(
    device: &Device,
    dtype: DType,
    operands: [&[f64]; N],
    kernel: impl for<'a> Fn(&'a [Tensor; N], &'a Tensor) -> Kernel<'a>,
) -> (Vec<f64>, [Vec<f64>; N]) {
    let tensors = operands.map(|values| floats(device, &[values.len()], values, dtype));
    let out = Tensor::uninit(device, tensors[0].shape(), dtype, MemoryKind::Input).unwrap();
    device.run(kernel(&tensors, &out)).unwrap();
    (out.to_f64_vec().unwrap(), tensors.map(|t| t.to_f64_vec().unwrap()))
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
fn value(f: UnaryFn, x: f64) -> f64 {
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
    }
}

/// f'(x), of y where the gradient reads it.
fn slope(f: UnaryFn, x: f64) -> f64 {
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
    }
}

/// Every function, with constants that all dtypes hold.
const UNARY: [UnaryFn; 41] = [
    UnaryFn::Neg,
    UnaryFn::Scale(1.5),
    UnaryFn::Shift(-0.25),
    UnaryFn::Exp,
    UnaryFn::Log,
    UnaryFn::Sqrt,
    UnaryFn::Rsqrt,
    UnaryFn::Reciprocal,
    UnaryFn::Square,
    UnaryFn::Abs,
    UnaryFn::Tanh,
    UnaryFn::Sigmoid,
    UnaryFn::Relu,
    UnaryFn::Silu,
    UnaryFn::Gelu,
    UnaryFn::GeluTanh,
    UnaryFn::Sin,
    UnaryFn::Cos,
    UnaryFn::Log1p,
    UnaryFn::Expm1,
    UnaryFn::Erf,
    UnaryFn::Softplus { beta: 1.0, threshold: 20.0 },
    UnaryFn::Softplus { beta: 1.5, threshold: 1e4 },
    UnaryFn::Softplus { beta: -0.5, threshold: f64::INFINITY },
    UnaryFn::LogSigmoid,
    UnaryFn::LeakyRelu(0.125),
    UnaryFn::Elu(0.75),
    UnaryFn::Clamp { low: -0.5, high: 2.0 },
    UnaryFn::Clamp { low: f64::NEG_INFINITY, high: 1.0 },
    UnaryFn::Clamp { low: 0.0, high: f64::INFINITY },
    UnaryFn::Pow(0.0),
    UnaryFn::Pow(1.0),
    UnaryFn::Pow(2.0),
    UnaryFn::Pow(3.0),
    UnaryFn::Pow(0.5),
    UnaryFn::Pow(-1.0),
    UnaryFn::Pow(2.5),
    UnaryFn::PowBase(0.0),
    UnaryFn::PowBase(0.5),
    UnaryFn::PowBase(1.5),
    UnaryFn::PowBase(2.0),
];

/// What is wrong with functions of one number and their gradients, for gradients from 1e-30 to 1e30.
pub fn unary_functions(device: &Device) -> Vec<String> {
    let mut faults = Vec::new();
    for (dtype, f) in DTYPES.iter().flat_map(|&dtype| UNARY.map(|f| (dtype, f))) {
        // Of tails that go to 0 the relative error grows.
        let tail = match f {
            UnaryFn::Gelu | UnaryFn::GeluTanh | UnaryFn::Silu => 1e-12,
            _ => 0.0,
        };
        // Slopes below f32's least are 0.
        let flushed = if dtype == DType::F64 { 0.0 } else { 2e-38 };
        let (y, [x]) = run(device, dtype, [&numbers()], |[x], out| kernel::Unary { f, x, out }.into());
        for (&x, &y) in x.iter().zip(&y) {
            check(&mut faults, &|| format!("{f:?} of {x:e}"), dtype, y, value(f, x), tail);
        }
        let saved: Vec<f64> = if f.grad_reads_output() { x.iter().map(|&x| value(f, x)).collect() } else { x };
        for g in cotangents(dtype) {
            let gs = vec![g; saved.len()];
            let (d, [saved, gs]) =
                run(device, dtype, [&saved, &gs], |[saved, g], out| kernel::UnaryGrad { f, saved, g, out }.into());
            for ((&s, &g), &d) in saved.iter().zip(&gs).zip(&d) {
                let slope = slope(f, s);
                // A power that f32 doesn't hold is infinite or 0, whatever it is multiplied by.
                let held = slope == 0.0 || slope.is_infinite() || (1e-37..1e37).contains(&slope.abs());
                if matches!(f, UnaryFn::Pow(_)) && dtype != DType::F64 && !held {
                    continue;
                }
                check(
                    &mut faults,
                    &|| format!("{g:e} times the slope of {f:?} at {s:e}"),
                    dtype,
                    d,
                    g * slope,
                    (tail + flushed) * g.abs(),
                );
            }
        }
    }
    faults
}

fn pairs(of: &[f64], with: &[f64]) -> [Vec<f64>; 2] {
    let pairs = of.iter().flat_map(|&a| with.iter().map(move |&b| (a, b)));
    let (a, b) = pairs.unzip();
    [a, b]
}

/// What is wrong with functions of two numbers, the gradient of a quotient by its divisor, and lerp.
pub fn functions_of_more(device: &Device) -> Vec<String> {
    let mut faults = Vec::new();
    let [a, b] = pairs(&some_numbers(), &some_numbers());
    for dtype in DTYPES {
        for f in [
            BinaryFn::Add,
            BinaryFn::Sub,
            BinaryFn::Mul,
            BinaryFn::Div,
            BinaryFn::Maximum,
            BinaryFn::Minimum,
            BinaryFn::Pow,
        ] {
            let (y, [a, b]) = run(device, dtype, [&a, &b], |[a, b], out| kernel::Binary { f, a, b, out }.into());
            for ((&a, &b), &y) in a.iter().zip(&b).zip(&y) {
                let want = match f {
                    BinaryFn::Add => a + b,
                    BinaryFn::Sub => a - b,
                    BinaryFn::Mul => a * b,
                    BinaryFn::Div => a / b,
                    BinaryFn::Maximum | BinaryFn::Minimum if a.is_nan() || b.is_nan() => f64::NAN,
                    BinaryFn::Maximum => a.max(b),
                    BinaryFn::Minimum => a.min(b),
                    BinaryFn::Pow => a.powf(b),
                };
                check(&mut faults, &|| format!("{f:?} of {a:e}, {b:e}"), dtype, y, want, 0.0);
            }
        }
        let g = vec![-2.5; a.len()];
        let f = TernaryFn::DivGradDivisor;
        let (d, [a, b, g]) =
            run(device, dtype, [&a, &b, &g], |[a, b, c], out| kernel::Ternary { f, a, b, c, out }.into());
        for (((&a, &b), &g), &d) in a.iter().zip(&b).zip(&g).zip(&d) {
            let quotient = a / b;
            // A quotient that f32 doesn't hold is infinite or 0.
            if dtype == DType::F64 || quotient == 0.0 || (1e-37..1e37).contains(&quotient.abs()) {
                check(&mut faults, &|| format!("the gradient of {a:e} / {b:e}"), dtype, d, -(g * quotient) / b, 0.0);
            }
        }
        for weight in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let c = vec![weight; a.len()];
            let (y, [a, b, c]) = run(device, dtype, [&a, &b, &c], |[a, b, c], out| {
                kernel::Ternary { f: TernaryFn::Lerp, a, b, c, out }.into()
            });
            for (((&a, &b), &c), &y) in a.iter().zip(&b).zip(&c).zip(&y) {
                if a.is_finite() && b.is_finite() {
                    let want = (1.0 - c) * a + c * b;
                    let rounding = if dtype == DType::F64 { 1e-15 } else { 1e-6 } * a.abs().max(b.abs());
                    check(&mut faults, &|| format!("{a:e} to {b:e} by {c}"), dtype, y, want, rounding);
                }
            }
        }
    }
    faults
}

/// A loss of x - t, and its gradient by x, by their definitions.
fn loss(f: LossFn, x: f64, t: f64) -> (f64, f64) {
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

/// What is wrong with losses of x - t and their gradients.
pub fn losses(device: &Device) -> Vec<String> {
    let mut faults = Vec::new();
    let [x, t] = pairs(&some_numbers(), &some_numbers());
    let losses = [
        LossFn::Squared,
        LossFn::Absolute,
        LossFn::SmoothL1(0.5),
        LossFn::SmoothL1(1e30),
        LossFn::SmoothL1(1e-30),
        LossFn::Huber(0.5),
        LossFn::Huber(1e18),
    ];
    for (dtype, f) in DTYPES.iter().flat_map(|&dtype| losses.map(|f| (dtype, f))) {
        let weight = None;
        let (y, [xs, ts]) =
            run(device, dtype, [&x, &t], |[x, target], out| kernel::Loss { f, x, target, weight, out }.into());
        // A difference that f32 doesn't hold is infinite.
        let held = |x: f64, t: f64| dtype == DType::F64 || !(x - t).is_finite() || (x - t).abs() <= F32_MOST;
        for ((&x, &t), &y) in xs.iter().zip(&ts).zip(&y).filter(|((x, t), _)| held(**x, **t)) {
            check(&mut faults, &|| format!("{f:?} of {x:e}, {t:e}"), dtype, y, loss(f, x, t).0, 0.0);
        }
        for (by, g) in [(0, 1.0), (1, 1.0), (0, -1e-4), (1, 6e4)] {
            let gs = vec![g; x.len()];
            let (d, [_, _, gs]) = run(device, dtype, [&x, &t, &gs], |[x, target, g], out| {
                kernel::LossGrad { f, by, x, target, weight, g, out }.into()
            });
            for (((&x, &t), &g), &d) in xs.iter().zip(&ts).zip(&gs).zip(&d) {
                if held(x, t) {
                    let slope = if by == 0 { loss(f, x, t).1 } else { -loss(f, x, t).1 };
                    let what = || format!("the gradient of {f:?} by {by} at {x:e}, {t:e}");
                    check(&mut faults, &what, dtype, d, g * slope, 0.0);
                }
            }
        }
    }
    faults
}
