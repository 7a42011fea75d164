//! Flip: y is x with some dimensions in reverse order, in storage of its own. The gradient is g, flipped again.

use super::*;
use crate::tape::Var;

/// The order of some dimensions reversed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flip {
    /// The dimensions, without repeats.
    pub dims: SmallVec<[usize; 4]>,
}

impl OpRule for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn formula(&self) -> &'static str {
        "y[i] = x[n - 1 - i]"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let rank = inputs[0].shape.len();
        if self.dims.iter().enumerate().any(|(i, d)| *d >= rank || self.dims[..i].contains(d)) {
            return Err(format!("{:?} must name dimensions of a tensor of rank {rank}, each once", self.dims));
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Flip { x: &inputs[0], dims: &self.dims, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty_like(cx.input(0))?;
        exec.run(kernel::Flip { x: &g, dims: &self.dims, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, dims: &[usize], input| Sample::smooth(name, Flip { dims: dims.into() }, [input]);
        vec![
            s("last", &[1], x(1, &[3, 5])),
            s("first", &[0], x(2, &[3, 5])),
            s("all of rank 5", &[4, 2, 0, 1, 3], x(3, &[2, 1, 3, 2, 2])),
            s("none", &[], x(4, &[2, 3])),
            s("rank 0", &[], x(5, &[])),
            s("transposed", &[1], x(6, &[4, 6]).lying(Transposed)),
            s("narrowed", &[0, 1], x(7, &[3, 37]).lying(Narrowed)),
            s("expanded", &[1], x(8, &[4, 5]).lying(Expanded)),
            s("zero-sized", &[0, 1], x(9, &[2, 0, 3])),
        ]
    }
}

impl Var {
    /// The elements of `dims` (negative counts from the end) in reverse order: a copy. Backward reads nothing.
    pub fn flip(self, dims: &[isize]) -> Result<Var> {
        let dims = dims.iter().map(|&d| self.dim("flip", d)).collect::<Result<_>>()?;
        self.apply(Flip { dims }, [])
    }
}
