//! Elementwise functions and their gradients: kernels/elementwise.cu, where functions have the numbers of their tables.

use crate::argument::{TensorArg, blocks};
use crate::device::{Gpu, Launch, Parameters};
use crate::map::{Function, map};
use crate::numbers::{self, agree, clamp};
use retape_core::kernel::{self, BinaryFn, ClampInput, TernaryFn, UnaryFn};
use retape_core::{DType, Error, Result, Tensor};

const _: () = assert!(agree(UnaryFn::VARIANTS, numbers::unary::NAMES), "UnaryFn isn't `enum Unary` of elementwise.cu");
const _: () =
    assert!(agree(BinaryFn::VARIANTS, numbers::binary::NAMES), "BinaryFn isn't `enum Binary` of elementwise.cu");
const _: () =
    assert!(agree(TernaryFn::VARIANTS, numbers::ternary::NAMES), "TernaryFn isn't `enum Ternary` of elementwise.cu");

pub(crate) fn unary(gpu: &Gpu, k: &kernel::Unary<'_>) -> Result<()> {
    map(gpu, "unary", Function { number: k.f.number(), constants: k.f.constants() }, [Some(k.x)], k.out)
}

pub(crate) fn unary_grad(gpu: &Gpu, k: &kernel::UnaryGrad<'_>) -> Result<()> {
    let kernel::UnaryGrad { f, saved, g, out } = *k;
    match f {
        UnaryFn::Neg | UnaryFn::Scale(_) => unary(gpu, &kernel::Unary { f, x: g, out }),
        UnaryFn::Shift(_) => unary(gpu, &kernel::Unary { f: UnaryFn::Scale(1.0), x: g, out }),
        _ => map(
            gpu,
            "unary_grad",
            Function { number: f.number(), constants: f.constants() },
            [Some(g), Some(saved)],
            out,
        ),
    }
}

pub(crate) fn binary(gpu: &Gpu, k: &kernel::Binary<'_>) -> Result<()> {
    let function = Function { number: k.f.number(), constants: k.f.constants() };
    map(gpu, "binary", function, [Some(k.a), Some(k.b)], k.out)
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
    let function = Function { number: k.f.number(), constants: k.f.constants() };
    map(gpu, "ternary", function, [Some(k.a), Some(k.b), Some(k.c)], k.out)
}

pub(crate) fn clamp_grad(gpu: &Gpu, k: &kernel::ClampGrad<'_>) -> Result<()> {
    let number = match k.by {
        ClampInput::X => clamp::CLAMP_X,
        ClampInput::Low => clamp::CLAMP_LOW,
        ClampInput::High => clamp::CLAMP_HIGH,
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
