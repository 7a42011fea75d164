//! Elementwise ops of one input: y = f(x), dx = g f'(x). Each function and its derivative stand beside its name in
//! [`Unary`]; whether the derivative is written with x or with y decides what is saved.

use super::*;
use crate::kernel::UnaryFn;
use crate::tape::Var;

/// y = f(x), elementwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnaryOp(pub UnaryFn);

impl OpRule for UnaryOp {
    fn name(&self) -> &'static str {
        match self.0 {
            UnaryFn::Neg => "neg",
            UnaryFn::Scale(_) => "scale",
            UnaryFn::Shift(_) => "shift",
            UnaryFn::Exp => "exp",
            UnaryFn::Log => "log",
            UnaryFn::Sqrt => "sqrt",
            UnaryFn::Rsqrt => "rsqrt",
            UnaryFn::Reciprocal => "reciprocal",
            UnaryFn::Square => "square",
            UnaryFn::Abs => "abs",
            UnaryFn::Tanh => "tanh",
            UnaryFn::Sigmoid => "sigmoid",
            UnaryFn::Relu => "relu",
            UnaryFn::Silu => "silu",
            UnaryFn::Gelu => "gelu",
            UnaryFn::GeluTanh => "gelu_tanh",
            UnaryFn::Sin => "sin",
            UnaryFn::Cos => "cos",
            UnaryFn::Log1p => "log1p",
            UnaryFn::Expm1 => "expm1",
            UnaryFn::Erf => "erf",
            UnaryFn::Softplus { .. } => "softplus",
            UnaryFn::LogSigmoid => "logsigmoid",
            UnaryFn::LeakyRelu(_) => "leaky_relu",
            UnaryFn::Elu(_) => "elu",
            UnaryFn::Clamp { .. } => "clamp",
            UnaryFn::Pow(_) => "pow_scalar",
            UnaryFn::PowBase(_) => "scalar_pow",
        }
    }

    fn formula(&self) -> &'static str {
        match self.0 {
            UnaryFn::Neg => "-x",
            UnaryFn::Scale(_) => "c x",
            UnaryFn::Shift(_) => "x + c",
            UnaryFn::Exp => "e^x",
            UnaryFn::Log => "ln x",
            UnaryFn::Sqrt => "sqrt(x)",
            UnaryFn::Rsqrt => "1 / sqrt(x)",
            UnaryFn::Reciprocal => "1 / x",
            UnaryFn::Square => "x^2",
            UnaryFn::Abs => "|x|",
            UnaryFn::Tanh => "tanh(x)",
            UnaryFn::Sigmoid => "1 / (1 + e^-x)",
            UnaryFn::Relu => "max(x, 0)",
            UnaryFn::Silu => "x sigmoid(x)",
            UnaryFn::Gelu => "x Phi(x)",
            UnaryFn::GeluTanh => "0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))",
            UnaryFn::Sin => "sin(x)",
            UnaryFn::Cos => "cos(x)",
            UnaryFn::Log1p => "ln(1 + x)",
            UnaryFn::Expm1 => "e^x - 1",
            UnaryFn::Erf => "erf(x)",
            UnaryFn::Softplus { .. } => "ln(1 + e^(beta x)) / beta, x past the threshold",
            UnaryFn::LogSigmoid => "-ln(1 + e^-x)",
            UnaryFn::LeakyRelu(_) => "x where x > 0, else slope x",
            UnaryFn::Elu(_) => "x where x > 0, else alpha (e^x - 1)",
            UnaryFn::Clamp { .. } => "min(max(x, low), high)",
            UnaryFn::Pow(_) => "x^c",
            UnaryFn::PowBase(_) => "base^x",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        match self.0 {
            UnaryFn::Clamp { low, high } if low.is_nan() || high.is_nan() => {
                Err("a bound is NaN; give a number, or an infinity for no bound".into())
            }
            UnaryFn::Softplus { beta, .. } if !beta.is_finite() || rounds_to_zero(beta, dtype) => {
                Err(format!("beta must be finite and not 0 in {}, got {beta}", dtype.computed_in()))
            }
            _ => Ok(one(inputs[0].clone())),
        }
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Unary { f: self.0, x: &inputs[0], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        if self.0.is_affine() { saves([]) } else { saves([self.slot()]) }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        // An affine function's derivative reads nothing; the kernel ignores the operand.
        let saved = if self.0.is_affine() { None } else { Some(cx.saved(self.slot())?) };
        let out = exec.replace(&g)?;
        exec.run(kernel::UnaryGrad { f: self.0, saved: saved.as_ref().unwrap_or(&g), g: &g, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let anywhere = |seed| SampleValues::Random { seed, range: 2.0 };
        let positive = |seed| SampleValues::Between { seed, low: 0.3, high: 3.0 };
        // Large for 16 bits, tiny, and no numbers.
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let far = [-inf, -6e4, -1e4, -300.0, -30.0, -1e-4, 0.0, 6e-8, 1e-4, 30.0, 40.0, 1e4, 6e4, inf, nan];
        let far = |f| Sample::kink("far out", UnaryOp(f), [SampleInput::floats(&[15], &far)]);
        let mut samples = Vec::new();
        for f in [
            UnaryFn::Neg,
            UnaryFn::Scale(-1.5),
            UnaryFn::Shift(0.75),
            UnaryFn::Exp,
            UnaryFn::Square,
            UnaryFn::Tanh,
            UnaryFn::Sigmoid,
            UnaryFn::Silu,
            UnaryFn::Gelu,
            UnaryFn::GeluTanh,
            UnaryFn::Sin,
            UnaryFn::Cos,
            UnaryFn::Expm1,
            UnaryFn::Erf,
            UnaryFn::Softplus { beta: 1.5, threshold: 20.0 },
            UnaryFn::LogSigmoid,
            UnaryFn::PowBase(1.7),
        ] {
            samples.extend(Sample::of_one_input(UnaryOp(f), anywhere));
            samples.push(far(f));
        }
        for f in [UnaryFn::Log, UnaryFn::Sqrt, UnaryFn::Rsqrt, UnaryFn::Reciprocal, UnaryFn::Log1p, UnaryFn::Pow(2.3)] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
            samples.push(far(f));
        }
        // Away from the kink they are smooth; at it the derivative is 0 by definition.
        let clamp = UnaryFn::Clamp { low: 0.0, high: 4.0 };
        for f in [UnaryFn::Abs, UnaryFn::Relu, UnaryFn::LeakyRelu(0.1), UnaryFn::Elu(0.7), clamp] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
            samples.push(Sample::kink("at the kink", UnaryOp(f), [SampleInput::floats(&[3], &[-1.0, 0.0, 2.0])]));
            samples.push(far(f));
        }
        samples.push(far(UnaryFn::Softplus { beta: 1.0, threshold: 1e3 }));
        for f in [UnaryFn::Pow(0.0), UnaryFn::Pow(1.0), UnaryFn::Pow(2.0), UnaryFn::Pow(3.0), UnaryFn::PowBase(0.0)] {
            let inputs = [SampleInput::floats(&[4], &[-2.0, 0.0, 0.5, 3.0])];
            samples.push(Sample::kink("zero and negative bases", UnaryOp(f), inputs));
        }
        let bent = UnaryOp(UnaryFn::Softplus { beta: 3.0, threshold: 0.2 });
        samples.push(Sample::kink("past the threshold", bent, [SampleInput::floats(&[3], &[-1.0, 0.0, 100.0])]));
        samples
    }
}

impl UnaryOp {
    fn slot(&self) -> Slot {
        if self.0.grad_reads_output() { Slot::Out(0) } else { Slot::In(0) }
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident => $f:ident),* $(,)?) => {
        impl Var {
            $($(#[$doc])*
            #[allow(clippy::should_implement_trait)] // the trait is there too, in tape/operators.rs
            pub fn $name(self) -> Result<Var> {
                self.apply(UnaryOp(UnaryFn::$f), [])
            })*
        }
    };
}

methods! {
    /// -x, elementwise, like all in this list.
    neg => Neg,
    /// e^x. Backward reads the output.
    exp => Exp,
    /// Natural logarithm. Backward reads x.
    log => Log,
    /// Square root. Backward reads the output.
    sqrt => Sqrt,
    /// 1 / sqrt(x). Backward reads the output.
    rsqrt => Rsqrt,
    /// 1 / x. Backward reads the output.
    reciprocal => Reciprocal,
    /// x^2. Backward reads x.
    square => Square,
    /// |x|; the gradient at 0 is 0. Backward reads x.
    abs => Abs,
    /// Hyperbolic tangent. Backward reads the output.
    tanh => Tanh,
    /// 1 / (1 + e^-x). Backward reads the output.
    sigmoid => Sigmoid,
    /// max(x, 0); the gradient at 0 is 0. Backward reads x.
    relu => Relu,
    /// x sigmoid(x). Backward reads x.
    silu => Silu,
    /// GELU, exact: x Phi(x). Backward reads x.
    gelu => Gelu,
    /// GELU in its tanh form, as GPT-2 uses it. Backward reads x.
    gelu_tanh => GeluTanh,
    /// Sine. Backward reads x.
    sin => Sin,
    /// Cosine. Backward reads x.
    cos => Cos,
    /// ln(1 + x), exact near 0. Backward reads x.
    log1p => Log1p,
    /// e^x - 1, exact near 0. Backward reads the output.
    expm1 => Expm1,
    /// The error function. Backward reads x.
    erf => Erf,
    /// ln sigmoid(x), without overflow. Backward reads x.
    logsigmoid => LogSigmoid,
}

impl Var {
    /// c x. Backward reads nothing.
    pub fn scale(self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Scale(c)), [])
    }
    /// x + c. Backward reads nothing.
    pub fn shift(self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Shift(c)), [])
    }
    /// ln(1 + e^(beta x)) / beta, and x itself where beta x > threshold (usually 1 and 20). Backward reads x.
    pub fn softplus(self, beta: f64, threshold: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Softplus { beta, threshold }), [])
    }
    /// x where x > 0, else `slope` x (usually 0.01); the gradient at 0 is the slope. Backward reads x.
    pub fn leaky_relu(self, slope: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::LeakyRelu(slope)), [])
    }
    /// x where x > 0, else alpha (e^x - 1) (alpha usually 1); the gradient at NaN is NaN. Backward reads x.
    pub fn elu(self, alpha: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Elu(alpha)), [])
    }
    /// x limited to [low, high]; an infinite bound is none. The gradient at a bound is 0, NaN passes it. Backward reads x.
    pub fn clamp(self, low: f64, high: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Clamp { low, high }), [])
    }
    /// x^c. Backward reads x.
    pub fn pow_scalar(self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::Pow(c)), [])
    }
    /// base^x. Backward reads the output.
    pub fn scalar_pow(self, base: f64) -> Result<Var> {
        self.apply(UnaryOp(UnaryFn::PowBase(base)), [])
    }
}
