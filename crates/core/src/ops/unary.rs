//! Elementwise ops of one input: y = f(x), dx = g f'(x). Each function and its derivative stand beside its name in
//! [`Unary`]; whether the derivative is written with x or with y decides what is saved.

use super::*;
use crate::kernel::Unary;
use crate::tape::Var;

/// y = f(x), elementwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnaryOp(pub Unary);

impl Rule for UnaryOp {
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
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        Ok(one(inputs[0].clone()))
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
        ] {
            samples.extend(Sample::of_one_input(UnaryOp(f), anywhere));
        }
        for f in [Unary::Log, Unary::Sqrt, Unary::Rsqrt, Unary::Reciprocal] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
        }
        // Away from the kink they are smooth; at it the derivative is 0 by definition.
        for f in [Unary::Abs, Unary::Relu] {
            samples.extend(Sample::of_one_input(UnaryOp(f), positive));
            samples.push(Sample::kink("at the kink", UnaryOp(f), [SampleInput::floats(&[3], &[-1.0, 0.0, 2.0])]));
        }
        for f in [Unary::Tanh, Unary::Sigmoid, Unary::Silu, Unary::Gelu, Unary::GeluTanh, Unary::Relu] {
            let far = [-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4];
            samples.push(Sample::kink("extreme", UnaryOp(f), [SampleInput::floats(&[7], &far)]));
        }
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
            pub fn $name(&self) -> Result<Var> {
                self.apply(UnaryOp(Unary::$f), &[])
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
}

impl Var {
    /// c x. Backward reads nothing.
    pub fn scale(&self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Scale(c)), &[])
    }
    /// x + c. Backward reads nothing.
    pub fn shift(&self, c: f64) -> Result<Var> {
        self.apply(UnaryOp(Unary::Shift(c)), &[])
    }
}
