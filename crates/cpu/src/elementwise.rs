//! Elementwise kernels, in blocks of 64 elements that are loaded, computed and stored: safe in place, and vectorised.

use crate::exec::{Baseline, Exec};
use crate::halves::Cell;
use crate::math::Float;
use crate::view::{BLOCK, Nest, Span, for_float, lanes, unsupported};
use retape_core::kernel::{self, BinaryFn, ClampInput, TernaryFn, UnaryFn};
use retape_core::{DType, Error, Result, Tensor};

/// Costs of one element in plain additions, for the choice to go parallel.
const CHEAP: usize = 1;
const TRANSCENDENTAL: usize = 8;

/// out = f(x).
#[inline(always)]
fn map1<T: Float>(exec: &Exec, cost: usize, x: &Tensor, out: &Tensor, f: impl Fn(T) -> T + Sync) {
    let (xs, outs) = (Span::<T>::of(x), Span::<T>::of(out));
    Nest::new([out, x]).for_each_run::<T>(
        exec,
        cost,
        #[inline(always)]
        |run| {
            let (o, x) = (run.of(0, outs), run.of(1, xs));
            for i in (0..run.len).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, T::ZERO);
                o.store(i, lanes!(j => f(v[j])));
            }
        },
    );
}

/// out = f(a, b).
#[inline(always)]
fn map2<T: Float>(exec: &Exec, cost: usize, a: &Tensor, b: &Tensor, out: &Tensor, f: impl Fn(T, T) -> T + Sync) {
    let (xs, ys, outs) = (Span::<T>::of(a), Span::<T>::of(b), Span::<T>::of(out));
    Nest::new([out, a, b]).for_each_run::<T>(
        exec,
        cost,
        #[inline(always)]
        |run| {
            let (o, a, b) = (run.of(0, outs), run.of(1, xs), run.of(2, ys));
            for i in (0..run.len).step_by(BLOCK) {
                let (u, v) = (a.load::<BLOCK>(i, T::ZERO), b.load::<BLOCK>(i, T::ZERO));
                o.store(i, lanes!(j => f(u[j], v[j])));
            }
        },
    );
}

/// out = f(a, b, c).
#[inline(always)]
fn map3<T: Float>(exec: &Exec, cost: usize, [a, b, c]: [&Tensor; 3], out: &Tensor, f: impl Fn(T, T, T) -> T + Sync) {
    let (xs, ys, zs, outs) = (Span::<T>::of(a), Span::<T>::of(b), Span::<T>::of(c), Span::<T>::of(out));
    Nest::new([out, a, b, c]).for_each_run::<T>(
        exec,
        cost,
        #[inline(always)]
        |run| {
            let (o, a, b, c) = (run.of(0, outs), run.of(1, xs), run.of(2, ys), run.of(3, zs));
            for i in (0..run.len).step_by(BLOCK) {
                let (u, v) = (a.load::<BLOCK>(i, T::ZERO), b.load::<BLOCK>(i, T::ZERO));
                let w = c.load::<BLOCK>(i, T::ZERO);
                o.store(i, lanes!(j => f(u[j], v[j], w[j])));
            }
        },
    );
}

/// gelu's tanh form as x sigmoid(2u): (sigmoid(2u), 2u') with u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
fn gelu_tanh_parts<T: Float>(x: T) -> (T, T) {
    let c = T::of(2.0 * (2.0 / std::f64::consts::PI).sqrt());
    let a = T::of(0.044715);
    let square = x * x;
    ((c * x * a.mul_add(square, T::ONE)).sigmoid(), c * (T::of(3.0) * a).mul_add(square, T::ONE))
}

/// out = f(x).
pub(crate) fn unary(exec: &Exec, k: &kernel::Unary<'_>) -> Result<()> {
    for_float!("unary", k.x.dtype(), T => unary_of::<T>(exec, k))
}

fn unary_of<T: Float>(exec: &Exec, k: &kernel::Unary<'_>) {
    let kernel::Unary { f, x, out } = *k;
    // Where x falls towards -inf, x sigmoid(x) and x Phi(x) go to 0: below these bounds they are 0 to the last bit.
    let (low, gelu_low) = (-T::SATURATED, T::of(-40.0));
    macro_rules! go {
        ($cost:expr, |$x:ident| $y:expr) => {
            map1::<T>(
                exec,
                $cost,
                x,
                out,
                #[inline(always)]
                |$x: T| $y,
            )
        };
    }
    match f {
        UnaryFn::Neg => go!(CHEAP, |x| -x),
        UnaryFn::Scale(c) => {
            let c = T::of(c);
            go!(CHEAP, |x| c * x)
        }
        UnaryFn::Shift(c) => {
            let c = T::of(c);
            go!(CHEAP, |x| x + c)
        }
        UnaryFn::Exp => go!(TRANSCENDENTAL, |x| Float::exp(x)),
        UnaryFn::Log => go!(TRANSCENDENTAL, |x| Float::ln(x)),
        UnaryFn::Sqrt => go!(CHEAP, |x| x.root()),
        UnaryFn::Rsqrt => go!(CHEAP, |x| T::ONE / x.root()),
        UnaryFn::Reciprocal => go!(CHEAP, |x| T::ONE / x),
        UnaryFn::Square => go!(CHEAP, |x| x * x),
        UnaryFn::Abs => go!(CHEAP, |x| x.magnitude()),
        UnaryFn::Tanh => go!(TRANSCENDENTAL, |x| Float::tanh(x)),
        UnaryFn::Sigmoid => go!(TRANSCENDENTAL, |x| x.sigmoid()),
        UnaryFn::Relu => go!(CHEAP, |x| if x < T::ZERO { T::ZERO } else { x }),
        UnaryFn::Silu => go!(TRANSCENDENTAL, |x| x.limit(low, T::INFINITY) * x.sigmoid()),
        UnaryFn::Gelu => go!(TRANSCENDENTAL, |x| x.limit(gelu_low, T::INFINITY) * x.normal_cdf()),
        UnaryFn::GeluTanh => go!(TRANSCENDENTAL, |x| {
            let x = x.limit(gelu_low, T::INFINITY);
            x * gelu_tanh_parts(x).0
        }),
        UnaryFn::Sin => go!(TRANSCENDENTAL, |x| Float::sin(x)),
        UnaryFn::Cos => go!(TRANSCENDENTAL, |x| Float::cos(x)),
        UnaryFn::Log1p => go!(TRANSCENDENTAL, |x| Float::ln_1p(x)),
        UnaryFn::Expm1 => go!(TRANSCENDENTAL, |x| Float::exp_m1(x)),
        UnaryFn::Erf => go!(TRANSCENDENTAL, |x| Float::erf(x)),
        UnaryFn::Softplus { beta, threshold } => {
            let (beta, threshold) = (T::of(beta), T::of(threshold));
            go!(TRANSCENDENTAL, |x| {
                let z = beta * x;
                let y = z.larger(T::ZERO) + Float::ln_1p(Float::exp(-z.magnitude()));
                if z > threshold { x } else { y / beta }
            })
        }
        // -ln(1 + e^-x), with the exponent never positive.
        UnaryFn::LogSigmoid => {
            go!(TRANSCENDENTAL, |x| { x.smaller(T::ZERO) - Float::ln_1p(Float::exp(-x.magnitude())) })
        }
        UnaryFn::LeakyRelu(slope) => {
            let slope = T::of(slope);
            go!(CHEAP, |x| if x > T::ZERO { x } else { slope * x })
        }
        UnaryFn::Elu(alpha) => {
            let alpha = T::of(alpha);
            go!(TRANSCENDENTAL, |x| if x > T::ZERO { x } else { alpha * Float::exp_m1(x) })
        }
        UnaryFn::Clamp { low, high } => {
            let (low, high) = (T::of(low), T::of(high));
            go!(CHEAP, |x| x.limit(low, high))
        }
        UnaryFn::Pow(c) => {
            let c = T::of(c);
            go!(TRANSCENDENTAL, |x| x.power(c))
        }
        UnaryFn::PowBase(c) => {
            let c = T::of(c);
            go!(TRANSCENDENTAL, |x| c.power(x))
        }
    }
}

/// out = g f'(.) with `saved` = y or x, as [`UnaryFn::grad_reads_output`] says.
pub(crate) fn unary_grad(exec: &Exec, k: &kernel::UnaryGrad<'_>) -> Result<()> {
    let kernel::UnaryGrad { f, g, out, .. } = *k;
    match f {
        UnaryFn::Neg | UnaryFn::Scale(_) => return unary(exec, &kernel::Unary { f, x: g, out }),
        UnaryFn::Shift(_) => return unary(exec, &kernel::Unary { f: UnaryFn::Scale(1.0), x: g, out }),
        _ => {}
    }
    for_float!("unary_grad", k.g.dtype(), T => unary_grad_of::<T>(exec, k))
}

fn unary_grad_of<T: Float>(exec: &Exec, k: &kernel::UnaryGrad<'_>) {
    let kernel::UnaryGrad { f, saved, g, out } = *k;
    let (one, half) = (T::ONE, T::of(0.5));
    let (low, high) = (-T::SATURATED, T::SATURATED);
    macro_rules! go {
        ($cost:expr, |$g:ident, $v:ident| $y:expr) => {
            map2::<T>(
                exec,
                $cost,
                g,
                saved,
                out,
                #[inline(always)]
                |$g: T, $v: T| $y,
            )
        };
    }
    match f {
        UnaryFn::Neg | UnaryFn::Scale(_) | UnaryFn::Shift(_) => unreachable!("returned above"),
        UnaryFn::Exp => go!(CHEAP, |g, y| g * y),
        UnaryFn::Log => go!(CHEAP, |g, x| g / x),
        UnaryFn::Sqrt => go!(CHEAP, |g, y| g * half / y),
        // From g on, as y^3, y^2 and 2x may be out of range where the product isn't.
        UnaryFn::Rsqrt => go!(CHEAP, |g, y| -half * (g * y * y * y)),
        UnaryFn::Reciprocal => go!(CHEAP, |g, y| -(g * y * y)),
        UnaryFn::Square => go!(CHEAP, |g, x| {
            let part = g * x;
            part + part
        }),
        UnaryFn::Abs => go!(CHEAP, |g, x| if x > T::ZERO {
            g
        } else if x < T::ZERO {
            -g
        } else {
            T::ZERO
        }),
        UnaryFn::Tanh => go!(CHEAP, |g, y| g * (one - y) * (one + y)),
        UnaryFn::Sigmoid => go!(CHEAP, |g, y| g * (y * (one - y))),
        UnaryFn::Relu => go!(CHEAP, |g, x| if x <= T::ZERO { T::ZERO } else { g }),
        UnaryFn::Silu => go!(TRANSCENDENTAL, |g, x| {
            let x = x.limit(low, high);
            let s = x.sigmoid();
            g * (x * s).mul_add(one - s, s)
        }),
        UnaryFn::Gelu => go!(TRANSCENDENTAL, |g, x| {
            let x = x.limit(T::of(-40.0), T::of(40.0));
            let density = Float::exp(-half * x * x) * T::of(0.398_942_280_401_432_7);
            g * x.mul_add(density, x.normal_cdf())
        }),
        UnaryFn::GeluTanh => go!(TRANSCENDENTAL, |g, x| {
            let x = x.limit(T::of(-40.0), T::of(40.0));
            let (s, slope) = gelu_tanh_parts(x);
            g * (x * s * slope).mul_add(one - s, s)
        }),
        UnaryFn::Sin => go!(TRANSCENDENTAL, |g, x| g * Float::cos(x)),
        UnaryFn::Cos => go!(TRANSCENDENTAL, |g, x| -(g * Float::sin(x))),
        UnaryFn::Log1p => go!(CHEAP, |g, x| g / (one + x)),
        UnaryFn::Expm1 => go!(CHEAP, |g, y| g * (y + one)),
        UnaryFn::Erf => {
            let c = T::of(std::f64::consts::FRAC_2_SQRT_PI);
            go!(TRANSCENDENTAL, |g, x| g * (c * Float::exp(-x * x)))
        }
        UnaryFn::Softplus { beta, threshold } => {
            let (beta, threshold) = (T::of(beta), T::of(threshold));
            go!(TRANSCENDENTAL, |g, x| {
                let z = beta * x;
                if z > threshold { g } else { g * z.sigmoid() }
            })
        }
        UnaryFn::LogSigmoid => go!(TRANSCENDENTAL, |g, x| g * (-x).sigmoid()),
        UnaryFn::LeakyRelu(slope) => {
            let slope = T::of(slope);
            go!(CHEAP, |g, x| if x > T::ZERO { g } else { g * slope })
        }
        UnaryFn::Elu(alpha) => {
            let alpha = T::of(alpha);
            go!(TRANSCENDENTAL, |g, x| if x > T::ZERO { g } else { g * (alpha * Float::exp(x)) })
        }
        UnaryFn::Clamp { low, high } => {
            let (has_low, has_high) = (low != f64::NEG_INFINITY, high != f64::INFINITY);
            let (low, high) = (T::of(low), T::of(high));
            go!(CHEAP, |g, x| if (has_low && x <= low) || (has_high && x >= high) { T::ZERO } else { g })
        }
        UnaryFn::Pow(c) => {
            let (c, less) = (T::of(c), T::of(c - 1.0));
            go!(TRANSCENDENTAL, |g, x| if c == T::ZERO { T::ZERO } else { g * c * x.power(less) })
        }
        UnaryFn::PowBase(c) => {
            let (zero, log) = (c == 0.0, T::of(c.ln()));
            go!(CHEAP, |g, y| if zero && y < T::INFINITY { T::ZERO } else { g * (y * log) })
        }
    }
}

/// out = f(a, b).
pub(crate) fn binary(exec: &Exec, k: &kernel::Binary<'_>) -> Result<()> {
    for_float!("binary", k.a.dtype(), T => binary_of::<T>(exec, k))
}

fn binary_of<T: Float>(exec: &Exec, k: &kernel::Binary<'_>) {
    let kernel::Binary { f, a, b, out } = *k;
    macro_rules! go {
        (|$a:ident, $b:ident| $y:expr) => {
            map2::<T>(
                exec,
                CHEAP,
                a,
                b,
                out,
                #[inline(always)]
                |$a: T, $b: T| $y,
            )
        };
    }
    match f {
        BinaryFn::Add => go!(|a, b| a + b),
        BinaryFn::Sub => go!(|a, b| a - b),
        BinaryFn::Mul => go!(|a, b| a * b),
        BinaryFn::Div => go!(|a, b| a / b),
        BinaryFn::Maximum => go!(|a, b| a.larger(b)),
        BinaryFn::Minimum => go!(|a, b| a.smaller(b)),
        BinaryFn::Pow => map2::<T>(
            exec,
            TRANSCENDENTAL,
            a,
            b,
            out,
            #[inline(always)]
            |a: T, b: T| a.power(b),
        ),
    }
}

/// out = f(a, b, c).
pub(crate) fn ternary(exec: &Exec, k: &kernel::Ternary<'_>) -> Result<()> {
    for_float!("ternary", k.out.dtype(), T => ternary_of::<T>(exec, k))
}

fn ternary_of<T: Float>(exec: &Exec, k: &kernel::Ternary<'_>) {
    let (f, operands, out) = (k.f, [k.a, k.b, k.c], k.out);
    macro_rules! go {
        ($cost:expr, |$a:ident, $b:ident, $c:ident| $y:expr) => {
            map3::<T>(
                exec,
                $cost,
                operands,
                out,
                #[inline(always)]
                |$a: T, $b: T, $c: T| $y,
            )
        };
    }
    match f {
        TernaryFn::Lerp => go!(CHEAP, |a, b, c| {
            let (half, rest) = (T::of(0.5), T::ONE - c);
            let step = b * half - a * half;
            let (forth, back) = (c * step, rest * step);
            if c.magnitude() < half { a + (forth + forth) } else { b - (back + back) }
        }),
        TernaryFn::Addcmul(value) => {
            let value = T::of(value);
            go!(CHEAP, |a, b, c| a + value * b * c)
        }
        TernaryFn::Addcdiv(value) => {
            let value = T::of(value);
            go!(CHEAP, |a, b, c| a + value * b / c)
        }
        TernaryFn::PowGradBase => {
            go!(TRANSCENDENTAL, |a, b, g| { if b == T::ZERO { T::ZERO } else { g * b * a.power(b - T::ONE) } })
        }
        TernaryFn::PowGradExponent => go!(TRANSCENDENTAL, |a, b, g| {
            if a == T::ZERO && b >= T::ZERO { T::ZERO } else { g * (a.power(b) * Float::ln(a)) }
        }),
        TernaryFn::DivGradDivisor => go!(CHEAP, |a, b, g| -(g * (a / b)) / b),
    }
}

/// out = g where the gradient of min(max(x, low), high) goes to `by`, else 0.
pub(crate) fn clamp_grad(exec: &Exec, k: &kernel::ClampGrad<'_>) -> Result<()> {
    for_float!("clamp_grad", k.x.dtype(), T => clamp_grad_of::<T>(exec, k))
}

fn clamp_grad_of<T: Float>(exec: &Exec, k: &kernel::ClampGrad<'_>) {
    let kernel::ClampGrad { by, x, low, high, g, out } = *k;
    let (has_low, has_high) = (low.is_some(), high.is_some());
    // x stands in for a bound that isn't there.
    let (low, high) = (low.unwrap_or(x), high.unwrap_or(x));

    let [xs, ls, hs, gs, outs] = [x, low, high, g, out].map(Span::<T>::of);
    Nest::new([out, x, low, high, g]).for_each_run::<T>(
        exec,
        CHEAP,
        #[inline(always)]
        |run| {
            let (o, x, l, h) = (run.of(0, outs), run.of(1, xs), run.of(2, ls), run.of(3, hs));
            let g = run.of(4, gs);
            for i in (0..run.len).step_by(BLOCK) {
                let [x, l, h, g] = [x, l, h, g].map(
                    #[inline(always)]
                    |s| s.load::<BLOCK>(i, T::ZERO),
                );
                o.store(
                    i,
                    lanes!(j => {
                        let own = match by {
                            ClampInput::X => !((has_low && x[j] < l[j]) || (has_high && x[j] > h[j])),
                            ClampInput::Low => x[j] < l[j] && (!has_high || l[j] < h[j]),
                            ClampInput::High => x[j] > h[j] || (has_low && h[j] < l[j]),
                        };
                        if own { g[j] } else { T::ZERO }
                    }),
                );
            }
        },
    );
}

/// out = g where a wins or either is NaN, g/2 on a tie, else 0.
pub(crate) fn extremum_grad(exec: &Exec, k: &kernel::ExtremumGrad<'_>) -> Result<()> {
    for_float!("extremum_grad", k.a.dtype(), T => extremum_grad_of::<T>(exec, k))?
}

fn extremum_grad_of<T: Float>(exec: &Exec, k: &kernel::ExtremumGrad<'_>) -> Result<()> {
    let kernel::ExtremumGrad { f, a, b, g, out } = *k;
    let sign = match f {
        BinaryFn::Maximum => 1.0,
        BinaryFn::Minimum => -1.0,
        _ => {
            let reason = format!("{f:?} is not an extremum");
            return Err(Error::Unsupported { kernel: "extremum_grad", device: "cpu".into(), reason });
        }
    };

    let (sign, half) = (T::of(sign), T::of(0.5));
    let (xs, ys, gs, outs) = (Span::<T>::of(a), Span::<T>::of(b), Span::<T>::of(g), Span::<T>::of(out));
    Nest::new([out, a, b, g]).for_each_run::<T>(
        exec,
        CHEAP,
        #[inline(always)]
        |run| {
            let (o, a, b, g) = (run.of(0, outs), run.of(1, xs), run.of(2, ys), run.of(3, gs));
            for i in (0..run.len).step_by(BLOCK) {
                let (u, v) = (a.load::<BLOCK>(i, T::ZERO), b.load::<BLOCK>(i, T::ZERO));
                let w = g.load::<BLOCK>(i, T::ZERO);
                o.store(
                    i,
                    lanes!(j => {
                        let (u, v) = (sign * u[j], sign * v[j]);
                        if u == v { half * w[j] } else if u < v { T::ZERO } else { w[j] }
                    }),
                );
            }
        },
    );
    Ok(())
}

/// out = a where cond else b, for elements of any type by their size.
pub(crate) fn select(exec: &Exec, k: &kernel::Select<'_>) -> Result<()> {
    fn of_size<T: Cell + Send + Sync>(exec: &Exec, k: &kernel::Select<'_>) {
        let kernel::Select { cond, a, b, out } = *k;
        let (conds, xs, ys, outs) = (Span::<u8>::of(cond), Span::<T>::of(a), Span::<T>::of(b), Span::<T>::of(out));
        Nest::new([out, cond, a, b]).for_each_run::<Baseline>(
            exec,
            CHEAP,
            #[inline(always)]
            |run| {
                let (o, c, a, b) = (run.of(0, outs), run.of(1, conds), run.of(2, xs), run.of(3, ys));
                for i in (0..run.len).step_by(BLOCK) {
                    let c = c.load::<BLOCK>(i, 0);
                    let (u, v) = (a.load::<BLOCK>(i, T::default()), b.load::<BLOCK>(i, T::default()));
                    o.store(i, lanes!(j => if c[j] != 0 { u[j] } else { v[j] }));
                }
            },
        );
    }
    if !matches!(k.cond.dtype(), DType::Bool | DType::U8) {
        return Err(unsupported("select", k.cond.dtype()));
    }
    match k.out.dtype().size() {
        1 => of_size::<u8>(exec, k),
        2 => of_size::<u16>(exec, k),
        4 => of_size::<u32>(exec, k),
        _ => of_size::<u64>(exec, k),
    }
    Ok(())
}
