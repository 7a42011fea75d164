//! Elementwise ops of two inputs with broadcasting (aligned at the last dimension, a size of 1 repeats).
//!
//! With upstream gradient g, before summing over broadcast dimensions:
//! add: da = g, db = g; sub: db = -g; mul: da = g b, db = g a; div (y = a/b): da = g/b, db = -g a / b^2;
//! maximum, minimum: g goes to the winner, half to each on a tie; pow (y = a^b): da = g b a^(b-1), 0 where b = 0, and
//! db = g a^b ln a, 0 where a = 0 and b >= 0 (there y is constant in b).

use super::*;
use crate::kernel::{TernaryFn, UnaryFn, binary_functions};
use crate::layout::broadcast_shapes;
use crate::tape::Var;
use std::ops::Range;

/// y = f(a, b), elementwise with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BinaryOp(pub BinaryFn);

impl OpRule for BinaryOp {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn formula(&self) -> &'static str {
        self.0.formula()
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        match broadcast_shapes(&inputs[0].shape, &inputs[1].shape) {
            Some(shape) => Ok(one(Spec::new(shape, dtype))),
            None => Err("the shapes don't broadcast; aligned at the last dimension, sizes must agree or be 1".into()),
        }
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let shape = outputs[0].shape();
        let (a, b) = (inputs[0].expand(shape)?, inputs[1].expand(shape)?);
        exec.run(kernel::Binary { f: self.0, a: &a, b: &b, out: &outputs[0] })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        match self.0 {
            BinaryFn::Add | BinaryFn::Sub => saves([]),
            BinaryFn::Mul => factors(needs),
            BinaryFn::Div if !needs[1] => saves([Slot::In(1)]),
            BinaryFn::Div | BinaryFn::Maximum | BinaryFn::Minimum | BinaryFn::Pow => saves([Slot::In(0), Slot::In(1)]),
        }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        match self.0 {
            BinaryFn::Add | BinaryFn::Sub => {
                if cx.needs(0) {
                    let da = cx.exec(0).sum_to(g.clone(), &cx.input(0).shape)?;
                    cx.set(0, da);
                }
                if cx.needs(1) {
                    let exec = cx.exec(1);
                    let mut db = exec.sum_to(g, &cx.input(1).shape)?;
                    if self.0 == BinaryFn::Sub {
                        db = negate(&exec, db)?;
                    }
                    cx.set(1, db);
                }
            }
            BinaryFn::Mul => {
                // The factor that is read for one gradient goes before the other is computed.
                for (input, other) in [(1, 0), (0, 1)] {
                    if cx.needs(input) {
                        let exec = cx.exec(input);
                        let factor = cx.saved(Slot::In(other))?.expand(g.shape())?;
                        let product = exec.terms(&Spec::of(&g), cx.input(input))?;
                        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &g, b: &factor, out: &product })?;
                        drop(factor);
                        let grad = exec.sum_terms(product, cx.input(input))?;
                        cx.set(input, grad);
                    }
                }
            }
            BinaryFn::Div => {
                let b = cx.saved(Slot::In(1))?.expand(g.shape())?;
                if cx.needs(1) {
                    let exec = cx.exec(1);
                    let a = cx.saved(Slot::In(0))?.expand(g.shape())?;
                    let out = exec.terms(&Spec::of(&g), cx.input(1))?;
                    exec.run(kernel::Ternary { f: TernaryFn::DivGradDivisor, a: &a, b: &b, c: &g, out: &out })?;
                    drop(a);
                    let db = exec.sum_terms(out, cx.input(1))?;
                    cx.set(1, db);
                }
                if cx.needs(0) {
                    let exec = cx.exec(0);
                    let out = exec.terms(&Spec::of(&g), cx.input(0))?;
                    exec.run(kernel::Binary { f: BinaryFn::Div, a: &g, b: &b, out: &out })?;
                    let da = exec.sum_terms(out, cx.input(0))?;
                    cx.set(0, da);
                }
            }
            BinaryFn::Maximum | BinaryFn::Minimum => {
                let a = cx.saved(Slot::In(0))?.expand(g.shape())?;
                let b = cx.saved(Slot::In(1))?.expand(g.shape())?;
                for (input, own, other) in [(0, &a, &b), (1, &b, &a)] {
                    if cx.needs(input) {
                        let exec = cx.exec(input);
                        let out = exec.empty(g.shape(), g.dtype())?;
                        exec.run(kernel::ExtremumGrad { f: self.0, a: own, b: other, g: &g, out: &out })?;
                        let grad = exec.sum_to(out, &cx.input(input).shape)?;
                        cx.set(input, grad);
                    }
                }
            }
            BinaryFn::Pow => {
                let a = cx.saved(Slot::In(0))?.expand(g.shape())?;
                let b = cx.saved(Slot::In(1))?.expand(g.shape())?;
                for (input, f) in [(0, TernaryFn::PowGradBase), (1, TernaryFn::PowGradExponent)] {
                    if cx.needs(input) {
                        let exec = cx.exec(input);
                        let out = exec.terms(&Spec::of(&g), cx.input(input))?;
                        exec.run(kernel::Ternary { f, a: &a, b: &b, c: &g, out: &out })?;
                        let grad = exec.sum_terms(out, cx.input(input))?;
                        cx.set(input, grad);
                    }
                }
            }
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let mut samples = Vec::new();
        for f in BinaryFn::ALL.concat() {
            let input = |i: usize, shape: &[usize]| {
                let Range { start: low, end: high } = f.domain()[i].clone();
                SampleInput::new(shape, SampleValues::Between { seed: 11 + i as u64, low, high })
            };
            let (a, b) = (|shape: &[usize]| input(0, shape), |shape: &[usize]| input(1, shape));
            let s = |name, x, y| Sample::smooth(name, BinaryOp(f), [x, y]);
            samples.extend([
                s("ordinary", a(&[3, 5]), b(&[3, 5])),
                s("rank 0", a(&[]), b(&[])),
                s("rank 0 with rank 2", a(&[2, 3]), b(&[])),
                s("row", a(&[4, 3]), b(&[3])),
                s("outer", a(&[3, 1]), b(&[1, 4])),
                s("rank 1 with rank 3", a(&[5]), b(&[2, 3, 5])),
                s("rank 5", a(&[2, 1, 3, 1, 2]), b(&[1, 2, 1, 2, 1])),
                s("strided", a(&[4, 6]).lying(Transposed), b(&[4, 6]).lying(Narrowed)),
                s("expanded", a(&[4, 6]).lying(Expanded), b(&[4, 6])),
                s("zero-sized", a(&[2, 0, 3]), b(&[3])),
                s("broadcast to nothing", a(&[0, 3]), b(&[1, 3])),
            ]);
            let (x, y) = ([6e4, -6e4, 1e4, 3e4, 6e-8, -1e4, 1e-4], [1.5, 6e4, -6e4, 2e4, 1e-4, 6e4, 6e4]);
            let inputs = [SampleInput::floats(&[7], &x), SampleInput::floats(&[7], &y)];
            samples.push(Sample::kink("far out", BinaryOp(f), inputs));
            // Terms of the sums that 16 bits don't hold.
            let inputs = [SampleInput::floats(&[4, 1], &x[..4]), SampleInput::floats(&[7], &y)];
            samples.push(Sample::kink("far out, broadcast", BinaryOp(f), inputs));
        }
        let inputs =
            [[-2.0, -2.0, 0.0, 0.0, 0.0, 3.0], [3.0, 0.0, 0.0, 1.0, 2.5, 0.0]].map(|v| SampleInput::floats(&[6], &v));
        samples.push(Sample::kink("zero and negative bases", BinaryOp(BinaryFn::Pow), inputs));
        let inputs = [[1e-4, 30.0, 250.0, 6e4], [2.0, -2.0, 1.5, -0.25]].map(|v| SampleInput::floats(&[4], &v));
        samples.push(Sample::kink("far out", BinaryOp(BinaryFn::Pow), inputs));
        for f in [BinaryFn::Maximum, BinaryFn::Minimum] {
            let (x, y) = ([1.0, 2.0, 2.0, -1.0], [1.0, 2.0, 3.0, -2.0]);
            let inputs = [SampleInput::floats(&[4], &x), SampleInput::floats(&[4], &y)];
            samples.push(Sample::kink("ties", BinaryOp(f), inputs));
        }
        samples
    }
}

impl Var {
    /// a + alpha b. Backward reads nothing.
    pub fn add_scaled(self, other: impl Into<Var>, alpha: f64) -> Result<Var> {
        self.add(other.into().scale(alpha)?)
    }

    /// a + weight (b - a), as (1 - weight) a + weight b. Backward reads nothing.
    pub fn lerp_scalar(self, end: impl Into<Var>, weight: f64) -> Result<Var> {
        // Exact at both ends, and no difference that could overflow.
        self.scale(1.0 - weight)?.add(end.into().scale(weight)?)
    }
}

/// Operands of different dtypes in one: that of the widest float among those that have dimensions, else among the
/// scalars; f32 for bf16 with f16, neither of which holds the other. Integers and truth values follow. Without a
/// float they stay as they are.
pub(crate) fn promoted(operands: SmallVec<[Var; 3]>) -> Result<SmallVec<[Var; 3]>> {
    let of_rank = |scalar: bool| operands.iter().filter(move |v| v.shape().is_empty() == scalar).map(|v| v.dtype());
    let join = |a: DType, b: DType| if a == b { a } else { a.min(b).computed_in() };
    let widest = |dtypes: &mut dyn Iterator<Item = DType>| dtypes.filter(|d| d.is_float()).reduce(join);
    match widest(&mut of_rank(false)).or(widest(&mut of_rank(true))) {
        Some(dtype) => operands.into_iter().map(|v| if v.dtype() == dtype { Ok(v) } else { v.cast(dtype) }).collect(),
        None => Ok(operands),
    }
}

fn negate(exec: &Exec<'_>, x: Tensor) -> Result<Tensor> {
    let out = exec.replace(&x)?;
    exec.run(kernel::Unary { f: UnaryFn::Neg, x: &x, out: &out })?;
    Ok(out)
}

/// A method for each function.
macro_rules! methods {
    (
        $(#[$about:meta])*
        $enum:ident of $domains:ty:
        $($(#[$does:meta])* $method:ident: $variant:ident => { $($says:tt)* })+
    ) => {
        impl Var {
            $(
                $(#[$does])*
                #[allow(clippy::should_implement_trait)] // the traits are there too, in tape/operators.rs
                pub fn $method(self, other: impl Into<Var>) -> Result<Var> {
                    self.apply(BinaryOp($enum::$variant), [other.into()])
                }
            )+
        }
    };
}

binary_functions!(methods);
