//! Concatenation along a dimension. The gradient of each input is its run of g, a view.

use super::*;
use crate::layout::dimension;
use crate::tape::Var;

/// The inputs one after the other along `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cat {
    /// The dimension.
    pub dim: usize,
}

impl Rule for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        let first = &inputs[0];
        if self.dim >= first.shape.len() {
            return Err(format!("there is no dimension {} to join", self.dim));
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for input in inputs {
            let same = input.dtype == first.dtype
                && input.shape.len() == shape.len()
                && (0..shape.len()).all(|d| d == self.dim || input.shape[d] == shape[d]);
            if !same {
                return Err(format!("the inputs must agree in dtype and in every dimension but {}", self.dim));
            }
            shape[self.dim] = shape[self.dim]
                .checked_add(input.shape[self.dim])
                .ok_or_else(|| format!("dimension {} becomes longer than 64 bits can count", self.dim))?;
        }
        Ok(one(Spec::new(shape, first.dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let mut start = 0;
        for x in inputs {
            let len = x.shape()[self.dim];
            exec.run(Kernel::Copy { x, out: &outputs[0].narrow(self.dim, start, len)? })?;
            start += len;
        }
        Ok(())
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let mut start = 0;
        for input in 0..cx.needs.len() {
            let len = cx.input(input).shape[self.dim];
            if cx.needs(input) {
                cx.set(input, g.narrow(self.dim, start, len)?);
            }
            start += len;
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, dim, inputs: Vec<SampleInput>| Sample::smooth(name, Cat { dim }, inputs);
        vec![
            s("rows", 0, vec![x(1, &[2, 3]), x(2, &[1, 3])]),
            s("columns", 1, vec![x(3, &[2, 3]), x(4, &[2, 1]), x(5, &[2, 2])]),
            s("one", 0, vec![x(6, &[3])]),
            s("an empty part", 1, vec![x(7, &[2, 3]), x(8, &[2, 0])]),
            s(
                "strided",
                1,
                vec![x(9, &[4, 6]).lying(Transposed), x(10, &[4, 6]).lying(Narrowed), x(11, &[4, 2]).lying(Expanded)],
            ),
        ]
    }
}

impl Var {
    /// This and the others, one after the other along `dim` (negative counts from the end). Backward reads nothing.
    pub fn cat(&self, others: &[&Var], dim: isize) -> Result<Var> {
        let dim = dimension(dim, self.shape().len()).map_err(|reason| self.invalid("cat", reason))?;
        self.apply(Cat { dim }, others)
    }
}
