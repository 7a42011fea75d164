//! Elementwise ops of one input: y = f(x), dx = g f'(x). Each function and its derivative stand beside its name in
//! [`Unary`]; whether the derivative is written with x or with y decides what is saved.

use super::*;
use crate::kernel::Unary;
use crate::tape::Var;

/// y = f(x), elementwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnaryOp(pub Unary);

impl OpRule for UnaryOp {
    fn name(&self) -> &'static str {
        match self.0 {
            Unary::Neg => "neg",
            Unary::Scale(_) => "scale",
            Unary::Shift(_) => "shift",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Reciprocal => "reciprocal",
            Unary::Square => "square",
            Unary::Abs => "abs",
            Unary::Tanh => "tanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Relu => "relu",
            Unary::Silu => "silu",
            Unary::Gelu => "gelu",
            Unary::GeluTanh => "gelu_tanh",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Log1p => "log1p",
            Unary::Expm1 => "expm1",
            Unary::Erf => "erf",
            Unary::Softplus { .. } => "softplus",
            Unary::LogSigmoid => "logsigmoid",
            Unary::LeakyRelu(_) => "leaky_relu",
            Unary::Elu(_) => "elu",
            Unary::Clamp { .. } => "clamp",
            Unary::Pow(_) => "pow_scalar",
            Unary::PowBase(_) => "scalar_pow",
        }
    }

    fn formula(&self) -> &'static str {
        match self.0 {
            Unary::Neg => "-x",
            Unary::Scale(_) => "c x",
            Unary::Shift(_) => "x + c",
            Unary::Exp => "e^x",
            Unary::Log => "ln x",
            Unary::Sqrt => "sqrt(x)",
            Unary::Rsqrt => "1 / sqrt(x)",
            Unary::Reciprocal => "1 / x",
            Unary::Square => "x^2",
            Unary::Abs => "|x|",
            Unary::Tanh => "tanh(x)",
            Unary::Sigmoid => "1 / (1 + e^-x)",
            Unary::Relu => "max(x, 0)",
            Unary::Silu => "x sigmoid(x)",
            Unary::Gelu => "x Phi(x)",
            Unary::GeluTanh => "0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))",
            Unary::Sin => "sin(x)",
            Unary::Cos => "cos(x)",
            Unary::Log1p => "ln(1 + x)",
            Unary::Expm1 => "e^x - 1",
            Unary::Erf => "erf(x)",
            Unary::Softplus { .. } => "ln(1 + e^(beta x)) / beta, x past the threshold",
            Unary::LogSigmoid => "-ln(1 + e^-x)",
            Unary::LeakyRelu(_) => "x where x > 0, else slope x",
            Unary::Elu(_) => "x where x > 0, else alpha (e^x - 1)",
            Unary::Clamp { .. } => "min(max(x, low), high)",
            Unary::Pow(_) => "x^c",
            Unary::PowBase(_) => "base^x",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        match self.0 {
            Unary::Clamp { low, high } if low.is_nan() || high.is_nan() => {
                Err("a bound is NaN; give a number, or an infinity for no bound".into())
            }
            Unary::Softplus { beta, .. } if !beta.is_finite() || rounds_to_zero(beta, dtype) => {
                Err(format!("beta must be finite and not 0 in {}, got {beta}", dtype.computed_in()))
            }
            _ => Ok(one(inputs[0].clone())),
        }
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(Kernel::Unary { f: self.0, x: &inputs[0], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        if self.0.is_affine() { saves([]) } else { saves([self.slot()]) }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        // An affine function's derivative reads nothing; the kernel ignores the operand.
        let saved = if self.0.is_affine() { None } else { Some(cx.saved(self.slot())?) };
        let out = exec.replace(&g)?;
        exec.run(Kernel::UnaryGrad { f: self.0, saved: saved.as_ref().unwrap_or(&g), g: &g, out: &out })?;
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
            Unary::Neg,
            Unary::Scale(-1.5),
            Unary::Shift(0.75),
            Unary::Exp,
            Unary::Square,
            Unary::Tanh,
            Unary::Sigmoid,
            Unary::Silu,
            Unary::Gelu,
            Unary::GeluTanh,
            Unary::Sin,
            Unary::Cos,
            Unary::Expm1,
            Unary::Erf,
            Unary::Softplus { beta: 1.5, threshold: 20.0 },
            Unary::LogSigmoid,
            Unary::PowBase(1.7),
        ] {
            samples.extend(Sample::of_one_input(UnaryOp(f), anywhere));
            samples.push(far(f));
        }
        for f in [Unary::Log, Unary::Sqrt, Unary::Rsqrt, Unary::Reciprocal, Unary::Log1p, Unary::Pow(2.3)] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
            samples.push(far(f));
        }
        // Away from the kink they are smooth; at it the derivative is 0 by definition.
        let clamp = Unary::Clamp { low: 0.0, high: 4.0 };
        for f in [Unary::Abs, Unary::Relu, Unary::LeakyRelu(0.1), Unary::Elu(0.7), clamp] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
            samples.push(Sample::kink("at the kink", UnaryOp(f), [SampleInput::floats(&[3], &[-1.0, 0.0, 2.0])]));
            samples.push(far(f));
        }
        samples.push(far(Unary::Softplus { beta: 1.0, threshold: 1e3 }));
        for f in [Unary::Pow(0.0), Unary::Pow(1.0), Unary::Pow(2.0), Unary::Pow(3.0), Unary::PowBase(0.0)] {
            let inputs = [SampleInput::floats(&[4], &[-2.0, 0.0, 0.5, 3.0])];
            samples.push(Sample::kink("zero and negative bases", UnaryOp(f), inputs));
        }
        let bent = UnaryOp(Unary::Softplus { beta: 3.0, threshold: 0.2 });
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
                self.apply(UnaryOp(Unary::$f), [])
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
        self.apply(UnaryOp(Unary::Scale(c)), [])
    }
    /// x + c. Backward reads nothing.
    pub fn shift(self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Shift(c)), [])
    }
    /// ln(1 + e^(beta x)) / beta, and x itself where beta x > threshold (usually 1 and 20). Backward reads x.
    pub fn softplus(self, beta: f64, threshold: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Softplus { beta, threshold }), [])
    }
    /// x where x > 0, else `slope` x (usually 0.01); the gradient at 0 is the slope. Backward reads x.
    pub fn leaky_relu(self, slope: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::LeakyRelu(slope)), [])
    }
    /// x where x > 0, else alpha (e^x - 1) (alpha usually 1); the gradient at NaN is NaN. Backward reads x.
    pub fn elu(self, alpha: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Elu(alpha)), [])
    }
    /// x limited to [low, high]; an infinite bound is none. The gradient at a bound is 0, NaN passes it. Backward reads x.
    pub fn clamp(self, low: f64, high: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Clamp { low, high }), [])
    }
    /// x^c. Backward reads x.
    pub fn pow_scalar(self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Pow(c)), [])
    }
    /// base^x. Backward reads the output.
    pub fn scalar_pow(self, base: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::PowBase(base)), [])
    }
}
