//! Elementwise functions and their gradients: kernels/elementwise.cu, where functions have the numbers of their tables.

use crate::argument::{TensorArg, blocks};
use crate::device::{Gpu, Launch, Parameters};
use crate::map::{Function, map};
use crate::numbers::{self, agree, clamp};
use retape_core::kernel::{BinaryFn, ClampInput, TernaryFn, UnaryFn};
use retape_core::{DType, Error, Result, Tensor};

const _: () = assert!(agree(UnaryFn::VARIANTS, numbers::unary::NAMES), "UnaryFn isn't `enum Unary` of elementwise.cu");
const _: () =
    assert!(agree(BinaryFn::VARIANTS, numbers::binary::NAMES), "BinaryFn isn't `enum Binary` of elementwise.cu");
const _: () =
    assert!(agree(TernaryFn::VARIANTS, numbers::ternary::NAMES), "TernaryFn isn't `enum Ternary` of elementwise.cu");

pub(crate) fn unary(gpu: &Gpu, f: UnaryFn, x: &Tensor, out: &Tensor) -> Result<()> {
    map(gpu, "unary", Function { number: f.number(), constants: f.constants() }, [Some(x)], out)
}

pub(crate) fn unary_grad(gpu: &Gpu, f: UnaryFn, saved: &Tensor, g: &Tensor, out: &Tensor) -> Result<()> {
    match f {
        UnaryFn::Neg | UnaryFn::Scale(_) => unary(gpu, f, g, out),
        UnaryFn::Shift(_) => unary(gpu, UnaryFn::Scale(1.0), g, out),
        _ => map(
            gpu,
            "unary_grad",
            Function { number: f.number(), constants: f.constants() },
            [Some(g), Some(saved)],
            out,
        ),
    }
}

pub(crate) fn binary(gpu: &Gpu, f: BinaryFn, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    map(gpu, "binary", Function { number: f.number(), constants: f.constants() }, [Some(a), Some(b)], out)
}

pub(crate) fn extremum_grad(gpu: &Gpu, f: BinaryFn, a: &Tensor, b: &Tensor, g: &Tensor, out: &Tensor) -> Result<()> {
    let sign = match f {
        BinaryFn::Maximum => 1.0,
        BinaryFn::Minimum => -1.0,
        _ => {
            let reason = format!("{f:?} is not an extremum");
            return Err(Error::Unsupported { kernel: "extremum_grad", device: gpu.name().into(), reason });
        }
    };
    map(gpu, "extremum_grad", Function::with(0, sign, 0.0), [Some(a), Some(b), Some(g)], out)
}

pub(crate) fn ternary(gpu: &Gpu, f: TernaryFn, [a, b, c]: [&Tensor; 3], out: &Tensor) -> Result<()> {
    let function = Function { number: f.number(), constants: f.constants() };
    map(gpu, "ternary", function, [Some(a), Some(b), Some(c)], out)
}

pub(crate) fn clamp_grad(
    gpu: &Gpu,
    by: ClampInput,
    x: &Tensor,
    (low, high): (Option<&Tensor>, Option<&Tensor>),
    g: &Tensor,
    out: &Tensor,
) -> Result<()> {
    let number = match by {
        ClampInput::X => clamp::CLAMP_X,
        ClampInput::Low => clamp::CLAMP_LOW,
        ClampInput::High => clamp::CLAMP_HIGH,
    };
    let there = |bound: Option<&Tensor>| f64::from(bound.is_some());
    map(gpu, "clamp_grad", Function::with(number, there(low), there(high)), [Some(x), low, high, Some(g)], out)
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

pub(crate) fn select(gpu: &Gpu, condition: &Tensor, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    if !matches!(condition.dtype(), DType::Bool | DType::U8) {
        let reason = format!("a condition of {} is neither bool nor u8", condition.dtype());
        return Err(Error::Unsupported { kernel: "select", device: gpu.name().into(), reason });
    }
    let [condition, a, b, out_arg] = TensorArg::elementwise(gpu, "select", [condition, a, b, out])?;
    let kernel = ["select_1", "select_2", "select_4", "select_8"][out.dtype().size().trailing_zeros() as usize];
    let grid = blocks(out.len(), 256);
    gpu.launch(Launch { kernel, grid, block: 256, shared: 0 }, &Select { condition, a, b, out: out_arg })
}
