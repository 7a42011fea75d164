//! Elementwise ops of one input: y = f(x), dx = g f'(x). The functions and their derivatives are the table in
//! kernel/functions.rs; whether a derivative is written with x or with y decides what is saved.

use super::*;
use crate::kernel::{UnaryFn, unary_functions};
use crate::tape::Var;
use std::ops::Range;

/// y = f(x), elementwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnaryOp(pub UnaryFn);

impl OpRule for UnaryOp {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn formula(&self) -> &'static str {
        self.0.formula()
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
        // Large for 16 bits, tiny, and no numbers.
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let far = [-inf, -6e4, -1e4, -300.0, -30.0, -1e-4, 0.0, 6e-8, 1e-4, 30.0, 40.0, 1e4, 6e4, inf, nan];
        let far = |f| Sample::kink("far out", UnaryOp(f), [SampleInput::floats(&[15], &far)]);
        let at =
            |name, f, values: &[f64]| Sample::kink(name, UnaryOp(f), [SampleInput::floats(&[values.len()], values)]);
        let mut samples = Vec::new();
        for examples in UnaryFn::ALL {
            let f = examples[0];
            let mut pieces = f.smooth();
            // The widest piece for all samples, one for each of the others.
            pieces.sort_by(|a, b| (a.end - a.start).total_cmp(&(b.end - b.start)));
            let between = |piece: &Range<f64>, seed| SampleValues::Between { seed, low: piece.start, high: piece.end };
            let widest = pieces.pop().expect("a domain is at least one piece");
            samples.extend(Sample::of_one_input(UnaryOp(f), |seed| between(&widest, seed)));
            for piece in &pieces {
                let input = SampleInput::new(&[3, 5], between(piece, 8));
                samples.push(Sample::smooth("beyond a kink", UnaryOp(f), [input]));
            }
            samples.push(far(f));
            for &f in *examples {
                let kinks = f.kinks().into_iter().filter(|kink| kink.is_finite());
                samples.extend(kinks.map(|kink| at("at the kink", f, &[kink - 1.0, kink, kink + 2.0])));
            }
            samples.extend(examples[1..].iter().map(|&f| at("zero and negative numbers", f, &[-2.0, 0.0, 0.5, 3.0])));
        }
        samples.push(far(UnaryFn::Softplus { beta: 1.0, threshold: 1e3 }));
        samples.push(at("past the threshold", UnaryFn::Softplus { beta: 3.0, threshold: 0.2 }, &[-1.0, 0.0, 100.0]));
        samples
    }
}

impl UnaryOp {
    fn slot(&self) -> Slot {
        if self.0.grad_reads_output() { Slot::Out(0) } else { Slot::In(0) }
    }
}

/// What a method's doc says of its gradient.
macro_rules! reads {
    (x) => {
        "Backward reads x."
    };
    (y) => {
        "Backward reads the output."
    };
    (nothing) => {
        "Backward reads nothing."
    };
}

/// A method for each function, with its parameters.
macro_rules! methods {
    (
        $(#[$about:meta])*
        $enum:ident of $domain:ty:
        $(
            $(#[$does:meta])*
            $method:ident: $variant:ident
                $(( $($arg:ident: $type:ty),+ ))?
                $({ $($(#[$says:meta])* $field:ident: $field_type:ty,)+ })?
            => { formula: $formula:literal, derivative: $derivative:literal, saves: $saves:ident, $($rest:tt)* }
        )+
    ) => {
        impl Var {
            $(
                $(#[$does])*
                #[doc = reads!($saves)]
                #[allow(clippy::should_implement_trait)] // the trait is there too, in tape/operators.rs
                pub fn $method(self $($(, $arg: $type)+)? $($(, $field: $field_type)+)?) -> Result<Var> {
                    self.apply(UnaryOp($enum::$variant $(($($arg),+))? $({ $($field),+ })?), [])
                }
            )+
        }
    };
}

unary_functions!(methods);
