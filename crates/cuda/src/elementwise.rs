//! Elementwise functions and their gradients: kernels/elementwise.cu, where the functions have these numbers.

use crate::argument::{TensorArg, blocks};
use crate::device::{Gpu, Launch, Parameters};
use crate::map::{Function, map};
use retape_core::kernel::{self, BinaryFn, ClampInput, TernaryFn, UnaryFn};
use retape_core::{DType, Error, Result, Tensor};

fn unary_function(f: UnaryFn) -> Function {
    match f {
        UnaryFn::Neg => Function::new(0),
        UnaryFn::Scale(c) => Function::with(1, c, 0.0),
        UnaryFn::Shift(c) => Function::with(2, c, 0.0),
        UnaryFn::Exp => Function::new(3),
        UnaryFn::Log => Function::new(4),
        UnaryFn::Sqrt => Function::new(5),
        UnaryFn::Rsqrt => Function::new(6),
        UnaryFn::Reciprocal => Function::new(7),
        UnaryFn::Square => Function::new(8),
        UnaryFn::Abs => Function::new(9),
        UnaryFn::Tanh => Function::new(10),
        UnaryFn::Sigmoid => Function::new(11),
        UnaryFn::Relu => Function::new(12),
        UnaryFn::Silu => Function::new(13),
        UnaryFn::Gelu => Function::new(14),
        UnaryFn::GeluTanh => Function::new(15),
        UnaryFn::Sin => Function::new(16),
        UnaryFn::Cos => Function::new(17),
        UnaryFn::Log1p => Function::new(18),
        UnaryFn::Expm1 => Function::new(19),
        UnaryFn::Erf => Function::new(20),
        UnaryFn::Softplus { beta, threshold } => Function::with(21, beta, threshold),
        UnaryFn::LogSigmoid => Function::new(22),
        UnaryFn::LeakyRelu(slope) => Function::with(23, slope, 0.0),
        UnaryFn::Elu(alpha) => Function::with(24, alpha, 0.0),
        UnaryFn::Clamp { low, high } => Function::with(25, low, high),
        UnaryFn::Pow(exponent) => Function::with(26, exponent, exponent - 1.0),
        UnaryFn::PowBase(base) => Function::with(27, base, base.ln()),
    }
}

pub(crate) fn unary(gpu: &Gpu, k: &kernel::Unary<'_>) -> Result<()> {
    map(gpu, "unary", unary_function(k.f), [Some(k.x)], k.out)
}

pub(crate) fn unary_grad(gpu: &Gpu, k: &kernel::UnaryGrad<'_>) -> Result<()> {
    let kernel::UnaryGrad { f, saved, g, out } = *k;
    match f {
        UnaryFn::Neg | UnaryFn::Scale(_) => unary(gpu, &kernel::Unary { f, x: g, out }),
        UnaryFn::Shift(_) => unary(gpu, &kernel::Unary { f: UnaryFn::Scale(1.0), x: g, out }),
        _ => map(gpu, "unary_grad", unary_function(f), [Some(g), Some(saved)], out),
    }
}

pub(crate) fn binary(gpu: &Gpu, k: &kernel::Binary<'_>) -> Result<()> {
    let number = match k.f {
        BinaryFn::Add => 0,
        BinaryFn::Sub => 1,
        BinaryFn::Mul => 2,
        BinaryFn::Div => 3,
        BinaryFn::Maximum => 4,
        BinaryFn::Minimum => 5,
        BinaryFn::Pow => 6,
    };
    map(gpu, "binary", Function::new(number), [Some(k.a), Some(k.b)], k.out)
}

pub(crate) fn extremum_grad(gpu: &Gpu, k: &kernel::ExtremumGrad<'_>) -> Result<()> {
    let sign = match k.f {
        BinaryFn::Maximum => 1.0,
        BinaryFn::Minimum => -1.0,
        _ => {
            let reason = format!("{:?} is not an extremum", k.f);
            return Err(Error::Unsupported { kernel: "extremum_grad", device: gpu.name().into(), reason });
        }
    };
    map(gpu, "extremum_grad", Function::with(0, sign, 0.0), [Some(k.a), Some(k.b), Some(k.g)], k.out)
}

pub(crate) fn ternary(gpu: &Gpu, k: &kernel::Ternary<'_>) -> Result<()> {
    let function = match k.f {
        TernaryFn::Lerp => Function::new(0),
        TernaryFn::Addcmul(value) => Function::with(1, value, 0.0),
        TernaryFn::Addcdiv(value) => Function::with(2, value, 0.0),
        TernaryFn::PowGradBase => Function::new(3),
        TernaryFn::PowGradExponent => Function::new(4),
        TernaryFn::DivGradDivisor => Function::new(5),
    };
    map(gpu, "ternary", function, [Some(k.a), Some(k.b), Some(k.c)], k.out)
}

pub(crate) fn clamp_grad(gpu: &Gpu, k: &kernel::ClampGrad<'_>) -> Result<()> {
    let number = match k.by {
        ClampInput::X => 0,
        ClampInput::Low => 1,
        ClampInput::High => 2,
    };
    let there = |bound: Option<&Tensor>| f64::from(bound.is_some());
    let function = Function::with(number, there(k.low), there(k.high));
    map(gpu, "clamp_grad", function, [Some(k.x), k.low, k.high, Some(k.g)], k.out)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Select {
    condition: TensorArg,
    a: TensorArg,
    b: TensorArg,
    out: TensorArg,
}
// SAFETY: the fields of `Select` in kernels/elementwise.cu.
unsafe impl Parameters for Select {}

pub(crate) fn select(gpu: &Gpu, k: &kernel::Select<'_>) -> Result<()> {
    let kernel::Select { cond: condition, a, b, out } = *k;
    if !matches!(condition.dtype(), DType::Bool | DType::U8) {
        let reason = format!("a condition of {} is neither bool nor u8", condition.dtype());
        return Err(Error::Unsupported { kernel: "select", device: gpu.name().into(), reason });
    }
    let [condition, a, b, out_arg] = TensorArg::elementwise(gpu, "select", [condition, a, b, out])?;
    let kernel = ["select_1", "select_2", "select_4", "select_8"][out.dtype().size().trailing_zeros() as usize];
    let grid = blocks(out.len(), 256);
    gpu.launch(Launch { kernel, grid, block: 256, shared: 0 }, &Select { condition, a, b, out: out_arg })
}
