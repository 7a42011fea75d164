//! Clamp between tensors: y = min(max(x, low), high). The gradient goes to a bound where x lies beyond it, to `high`
//! where the bounds are reversed, and to x where it isn't outside: between the bounds, at one, and where it is NaN.
//! (At bounds that are numbers x has the gradient 0. PyTorch has both conventions.)

use super::*;
use crate::kernel::ClampInput;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = min(max(x, low), high) with broadcasting. Inputs: x, then the bounds that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClampBetween {
    /// Whether there is a lower bound.
    pub low: bool,
    /// Whether there is an upper bound.
    pub high: bool,
}

impl ClampBetween {
    /// What each input is.
    fn roles(&self) -> SmallVec<[ClampInput; 3]> {
        let bounds = [(self.low, ClampInput::Low), (self.high, ClampInput::High)];
        [ClampInput::X].into_iter().chain(bounds.into_iter().filter(|b| b.0).map(|b| b.1)).collect()
    }
}

impl OpRule for ClampBetween {
    fn name(&self) -> &'static str {
        "clamp_between"
    }

    fn formula(&self) -> &'static str {
        "y = min(max(x, low), high), tensors as bounds"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1 + self.low as usize + self.high as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        if inputs.len() == 1 {
            return Err("needs a lower bound, an upper bound, or both".into());
        }
        inputs[1..]
            .iter()
            .try_fold(inputs[0].shape.clone(), |shape, i| broadcast_shapes(&shape, &i.shape))
            .map(|shape| one(Spec::new(shape, dtype)))
            .ok_or_else(|| "the shapes don't broadcast; aligned at the last dimension, sizes must agree or be 1".into())
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let out = &outputs[0];
        let mut x = inputs[0].expand(out.shape())?;
        for (role, bound) in self.roles().iter().zip(inputs).skip(1) {
            let f = if *role == ClampInput::Low { BinaryFn::Maximum } else { BinaryFn::Minimum };
            exec.run(kernel::Binary { f, a: &x, b: &bound.expand(out.shape())?, out })?;
            x = out.clone();
        }
        Ok(())
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        // Which side of a bound x lies on is a matter of exact bits.
        (0..self.roles().len()).map(|i| Save { slot: Slot::In(i), exact: true }).collect()
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (g, roles) = (cx.grad0(), self.roles());
        let mut operands = SmallVec::<[Tensor; 3]>::new();
        for i in 0..roles.len() {
            operands.push(cx.saved(Slot::In(i))?.expand(g.shape())?);
        }
        let operand = |role| roles.iter().position(|&r| r == role).map(|i| &operands[i]);
        for (input, &by) in roles.iter().enumerate() {
            if cx.needs(input) {
                let exec = cx.exec(input);
                let out = exec.empty(g.shape(), g.dtype())?;
                let (low, high) = (operand(ClampInput::Low), operand(ClampInput::High));
                exec.run(kernel::ClampGrad { by, x: &operands[0], low, high, g: &g, out: &out })?;
                let grad = exec.sum_to(out, &cx.input(input).shape)?;
                cx.set(input, grad);
            }
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = |seed, shape: &[usize]| SampleInput::new(shape, SampleValues::Random { seed, range: 2.0 });
        let bound =
            |seed, low, shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed, low, high: low + 0.9 });
        let (low, high) = (|shape: &[usize]| bound(21, -1.0, shape), |shape: &[usize]| bound(22, 0.0, shape));
        let (both, below, above) = (
            ClampBetween { low: true, high: true },
            ClampBetween { low: true, high: false },
            ClampBetween { low: false, high: true },
        );
        let values = |v: [f64; 5]| SampleInput::floats(&[5], &v);
        vec![
            Sample::smooth("ordinary", both, [x(1, &[3, 5]), low(&[3, 5]), high(&[3, 5])]),
            Sample::smooth("lower", below, [x(2, &[3, 5]), low(&[5])]),
            Sample::smooth("upper", above, [x(3, &[3, 5]), high(&[])]),
            Sample::smooth("rank 0", both, [x(4, &[]), low(&[]), high(&[2, 1, 1, 1, 3])]),
            Sample::smooth(
                "strided",
                both,
                [x(5, &[4, 6]).lying(Transposed), low(&[4, 6]).lying(Expanded), high(&[6])],
            ),
            Sample::smooth("zero-sized", both, [x(6, &[0, 3]), low(&[3]), high(&[])]),
            Sample::kink(
                "far out",
                both,
                [
                    values([f64::NEG_INFINITY, f64::NAN, 6e4, -6e4, f64::INFINITY]),
                    values([-6e4, -6e4, -1e9, -1e9, f64::NEG_INFINITY]),
                    values([6e4, 6e4, 1e9, 1e9, f64::INFINITY]),
                ],
            ),
            Sample::kink(
                "at the bounds, and reversed",
                both,
                [
                    values([-1.0, 1.0, 0.0, 5.0, -5.0]),
                    values([-1.0, -1.0, 2.0, 2.0, 2.0]),
                    values([1.0, 1.0, 1.0, 1.0, 1.0]),
                ],
            ),
        ]
    }
}

impl Var {
    /// x limited between tensors, with broadcasting; where low > high, high. Operands of different
    /// dtypes are promoted to the widest float. Backward
    /// reads all of them, exactly.
    pub fn clamp_between(self, low: Option<Var>, high: Option<Var>) -> Result<Var> {
        let op = ClampBetween { low: low.is_some(), high: high.is_some() };
        let operands = [Some(self), low, high].into_iter().flatten();
        let mut operands = binary::promoted(operands.collect())?.into_iter();
        operands.next().expect("self").apply(op, operands)
    }
}
