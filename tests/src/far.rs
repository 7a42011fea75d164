//! Elementwise kernels at the ends of every float dtype against their definitions in f64: subnormal and largest
//! numbers, zeros, infinities, NaN, and what saturates.

use crate::floats;
use crate::functions::{loss, slope, value, value_of_two};
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

/// What is wrong with functions of one number and their gradients, for gradients from 1e-30 to 1e30.
pub fn unary_functions(device: &Device) -> Vec<String> {
    let mut faults = Vec::new();
    for (dtype, f) in DTYPES.iter().flat_map(|&dtype| UnaryFn::ALL.concat().into_iter().map(move |f| (dtype, f))) {
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
        for f in BinaryFn::ALL.concat() {
            let (y, [a, b]) = run(device, dtype, [&a, &b], |[a, b], out| kernel::Binary { f, a, b, out }.into());
            for ((&a, &b), &y) in a.iter().zip(&b).zip(&y) {
                check(&mut faults, &|| format!("{f:?} of {a:e}, {b:e}"), dtype, y, value_of_two(f, a, b), 0.0);
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
