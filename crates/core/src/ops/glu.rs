//! Gated linear unit (Dauphin et al. 2017): y = a s(b) for the halves a, b of x along a dimension, s the logistic
//! function. da = g s(b), db = g a s(b) (1 - s(b)). s(b) is computed again instead of saved: x alone is read.

use super::*;
use crate::kernel::UnaryFn;
use crate::tape::Var;

/// The first half of a dimension, gated by the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Glu {
    /// The dimension.
    pub dim: usize,
}

impl Glu {
    fn halves(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let half = x.shape()[self.dim] / 2;
        Ok((x.narrow(self.dim, 0, half)?, x.narrow(self.dim, half, half)?))
    }
}

/// out = a s(b), in one kernel: s is the derivative of softplus.
fn gated(exec: &Exec<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    let f = UnaryFn::Softplus { beta: 1.0, threshold: f64::INFINITY };
    exec.run(kernel::UnaryGrad { f, saved: b, g: a, out })
}

impl OpRule for Glu {
    fn name(&self) -> &'static str {
        "glu"
    }

    fn formula(&self) -> &'static str {
        "y = a sigmoid(b), a and b the halves of x"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let mut shape = inputs[0].shape.clone();
        if self.dim >= shape.len() || !shape[self.dim].is_multiple_of(2) {
            return Err(format!("needs a dimension {} of an even size", self.dim));
        }
        shape[self.dim] /= 2;
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let ((a, b), out) = (self.halves(&inputs[0])?, &outputs[0]);
        gated(exec, &a, &b, out)
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(0)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let x = cx.saved(Slot::In(0))?;
        let out = exec.empty_like(cx.input(0))?;
        let ((a, b), (da, db)) = (self.halves(&x)?, self.halves(&out)?);
        let gate = exec.workspace(g.shape(), g.dtype().computed_in())?;
        let part = exec.workspace(g.shape(), g.dtype().computed_in())?;
        gated(&exec, &g, &b, &part)?;
        exec.run(kernel::Copy { x: &part, out: &da })?;
        exec.run(kernel::Unary { f: UnaryFn::Sigmoid, x: &b, out: &gate })?;
        exec.run(kernel::Binary { f: BinaryFn::Mul, a: &g, b: &a, out: &part })?;
        exec.run(kernel::UnaryGrad { f: UnaryFn::Sigmoid, saved: &gate, g: &part, out: &part })?;
        exec.run(kernel::Copy { x: &part, out: &db })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, dim, input| Sample::smooth(name, Glu { dim }, [input]);
        let far = [3.0, -2.0, 1.0, 1e3, -1e3, 0.0];
        vec![
            s("last", 1, x(1, &[3, 6])),
            s("first", 0, x(2, &[4, 3])),
            s("rank 5", 2, x(3, &[2, 1, 4, 2, 1])),
            s("transposed", 1, x(4, &[4, 6]).lying(Transposed)),
            s("narrowed", 0, x(5, &[4, 37]).lying(Narrowed)),
            s("expanded", 1, x(6, &[4, 6]).lying(Expanded)),
            s("zero-sized", 1, x(7, &[2, 0, 3])),
            Sample::kink("extreme", Glu { dim: 0 }, [SampleInput::floats(&[6], &far)]),
            Sample::kink("far out", Glu { dim: 0 }, [SampleInput::floats(&[6], &[6e4, -6e4, 1e4, 6e4, -6e4, -30.0])]),
        ]
    }
}

impl Var {
    /// The first half of dimension `dim` times the logistic function of the second. Backward reads this.
    pub fn glu(self, dim: isize) -> Result<Var> {
        let dim = self.dim("glu", dim)?;
        self.apply(Glu { dim }, [])
    }
}
