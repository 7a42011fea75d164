//! Elementwise ops of three inputs with broadcasting; operands of different dtypes are promoted to the widest float.
//!
//! With upstream gradient g, before summing over broadcast dimensions:
//! lerp (y = a + c (b - a)): da = g (1 - c), db = g c, dc = g (b - a);
//! addcmul (y = a + v b c): da = g, db = g v c, dc = g v b;
//! addcdiv (y = a + v b / c): da = g, db = g v / c, dc = -g v b / c^2.

use super::*;
use crate::kernel::{TernaryFn, UnaryFn};
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = f(a, b, c), elementwise with broadcasting. f is Lerp, Addcmul or Addcdiv.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TernaryOp(pub TernaryFn);

impl OpRule for TernaryOp {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn formula(&self) -> &'static str {
        self.0.formula()
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3, inputs)?;
        if matches!(self.0, TernaryFn::PowGradBase | TernaryFn::PowGradExponent | TernaryFn::DivGradDivisor) {
            return Err("this function is a gradient and has none of its own; use pow or div".into());
        }
        let dtype = one_float_dtype(inputs)?;
        broadcast_shapes(&inputs[0].shape, &inputs[1].shape)
            .and_then(|s| broadcast_shapes(&s, &inputs[2].shape))
            .map(|shape| one(Spec::new(shape, dtype)))
            .ok_or_else(|| "the shapes don't broadcast; aligned at the last dimension, sizes must agree or be 1".into())
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let shape = outputs[0].shape();
        let (a, b, c) = (inputs[0].expand(shape)?, inputs[1].expand(shape)?, inputs[2].expand(shape)?);
        exec.run(kernel::Ternary { f: self.0, a: &a, b: &b, c: &c, out: &outputs[0] })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let reads = match self.0 {
            TernaryFn::Lerp => [needs[2], needs[2], needs[0] || needs[1]],
            TernaryFn::Addcmul(_) => [false, needs[2], needs[1]],
            _ => [false, needs[2], needs[1] || needs[2]],
        };
        saves((0..3).filter(|&i| reads[i]).map(Slot::In))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let shape: Shape = g.shape().into();
        let mut operands: [Option<Tensor>; 3] = Default::default();
        for save in self.saves(&[0, 1, 2].map(|i| cx.needs(i))) {
            let Slot::In(i) = save.slot else { unreachable!("only inputs are saved") };
            operands[i] = Some(cx.saved(save.slot)?.expand(&shape)?);
        }
        let [a, b, c] = operands;
        for input in (0..3).rev().filter(|&i| cx.needs(i)).collect::<SmallVec<[usize; 3]>>() {
            let exec = cx.exec(input);
            let operand = |x: &Option<Tensor>| x.clone().expect("declared by saves for this gradient");
            let unary = |f, x: &Tensor, out: &Tensor| exec.run(kernel::Unary { f, x, out });
            let binary = |f, a: &Tensor, b: &Tensor, out: &Tensor| exec.run(kernel::Binary { f, a, b, out });
            if self.0 != TernaryFn::Lerp && input == 0 {
                let grad = exec.sum_to(g.clone(), &cx.input(input).shape)?;
                cx.set(input, grad);
                continue;
            }
            // Rounded to 16 bits once, by the last kernel.
            let out = exec.terms(&Spec::of(&g), cx.input(input))?;
            let wide = || exec.assemble(&out);
            match (self.0, input) {
                (TernaryFn::Lerp, 0) => {
                    let wide = wide()?;
                    unary(UnaryFn::Scale(-1.0), &operand(&c), &wide)?;
                    unary(UnaryFn::Shift(1.0), &wide, &wide)?;
                    binary(BinaryFn::Mul, &wide, &g, &out)?;
                }
                (TernaryFn::Lerp, 1) => binary(BinaryFn::Mul, &g, &operand(&c), &out)?,
                (TernaryFn::Lerp, _) => {
                    let wide = wide()?;
                    binary(BinaryFn::Sub, &operand(&b), &operand(&a), &wide)?;
                    binary(BinaryFn::Mul, &wide, &g, &out)?;
                }
                (TernaryFn::Addcmul(value), _) => {
                    let wide = wide()?;
                    binary(BinaryFn::Mul, &g, &operand(if input == 1 { &c } else { &b }), &wide)?;
                    unary(UnaryFn::Scale(value), &wide, &out)?;
                }
                (TernaryFn::Addcdiv(value), 1) => {
                    let wide = wide()?;
                    binary(BinaryFn::Div, &g, &operand(&c), &wide)?;
                    unary(UnaryFn::Scale(value), &wide, &out)?;
                }
                (TernaryFn::Addcdiv(value), _) => {
                    let (f, wide) = (TernaryFn::DivGradDivisor, wide()?);
                    exec.run(kernel::Ternary { f, a: &operand(&b), b: &operand(&c), c: &g, out: &wide })?;
                    unary(UnaryFn::Scale(value), &wide, &out)?;
                }
                _ => unreachable!("infer takes no other function"),
            }
            let grad = exec.sum_terms(out, cx.input(input))?;
            cx.set(input, grad);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(3, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let mut samples = Vec::new();
        for f in [TernaryFn::Lerp, TernaryFn::Addcmul(1.5), TernaryFn::Addcdiv(-0.5)] {
            let x = SampleInput::random;
            // Away from 0, so that quotients stay tame.
            let c = |shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed: 9, low: 0.4, high: 2.0 });
            let s = |name, a, b, c| Sample::smooth(name, TernaryOp(f), [a, b, c]);
            samples.extend([
                s("ordinary", x(1, &[3, 5]), x(2, &[3, 5]), c(&[3, 5])),
                s("rank 0", x(1, &[]), x(2, &[]), c(&[])),
                s("broadcast", x(1, &[3, 1]), x(2, &[2, 1, 4]), c(&[])),
                s("rank 5", x(1, &[2, 1, 3, 1, 2]), x(2, &[2]), c(&[1, 2, 1, 2, 1])),
                s("strided", x(1, &[4, 6]).lying(Transposed), x(2, &[4, 6]).lying(Narrowed), c(&[6])),
                s("expanded", x(1, &[4, 6]).lying(Expanded), x(2, &[4, 6]), c(&[4, 6]).lying(Expanded)),
                s("zero-sized", x(1, &[2, 0, 3]), x(2, &[3]), c(&[1, 1])),
            ]);
            let (a, b, c) = ([6e4, -6e4, 6e4, 1e-4], [-6e4, 6e4, 6e4, 6e4], [0.5, 0.25, 1.0, 0.75]);
            let inputs = [a, b, c].map(|v| SampleInput::floats(&[4], &v));
            samples.push(Sample::kink("far out", TernaryOp(f), inputs));
            let inputs = [
                SampleInput::floats(&[4], &a),
                SampleInput::floats(&[3, 1], &b[1..]),
                SampleInput::floats(&[], &c[..1]),
            ];
            samples.push(Sample::kink("far out, broadcast", TernaryOp(f), inputs));
        }
        samples
    }
}

impl Var {
    fn ternary(self, f: TernaryFn, b: impl Into<Var>, c: impl Into<Var>) -> Result<Var> {
        let mut operands = binary::promoted(smallvec![self, b.into(), c.into()])?.into_iter();
        operands.next().expect("self").apply(TernaryOp(f), operands)
    }

    /// a + weight (end - a), from `self` to `end`. Backward reads the weight (for the ends' gradients) and both ends
    /// (for the weight's).
    pub fn lerp(self, end: impl Into<Var>, weight: impl Into<Var>) -> Result<Var> {
        self.ternary(TernaryFn::Lerp, end, weight)
    }
    /// a + value b c. Backward reads b and c, each if the other needs a gradient.
    pub fn addcmul(self, b: impl Into<Var>, c: impl Into<Var>, value: f64) -> Result<Var> {
        self.ternary(TernaryFn::Addcmul(value), b, c)
    }
    /// a + value b / c. Backward reads c, and b if c needs a gradient.
    pub fn addcdiv(self, b: impl Into<Var>, c: impl Into<Var>, value: f64) -> Result<Var> {
        self.ternary(TernaryFn::Addcdiv(value), b, c)
    }
}
