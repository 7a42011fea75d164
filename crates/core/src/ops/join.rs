//! Concatenation along a dimension. The gradient of each input is its run of g, a view.

use super::*;
use crate::tape::Var;

/// The inputs one after the other along `dim`. An input of shape `[0]` goes with any others and adds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cat {
    /// The dimension.
    pub dim: usize,
}

impl Cat {
    /// The size of an input along the dimension.
    fn len(&self, shape: &[usize]) -> usize {
        if shape == [0] { 0 } else { shape[self.dim] }
    }
}

impl OpRule for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn formula(&self) -> &'static str {
        "y = x_1, x_2, .. along a dimension"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        let first = inputs.iter().find(|i| i.shape[..] != [0]).unwrap_or(&inputs[0]);
        if self.dim >= first.shape.len() {
            return Err(format!("there is no dimension {} to join", self.dim));
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for input in inputs {
            let fits = input.shape[..] == [0]
                || input.shape.len() == shape.len()
                    && (0..shape.len()).all(|d| d == self.dim || input.shape[d] == shape[d]);
            if input.dtype != first.dtype || !fits {
                return Err(format!("the inputs must agree in dtype and in every dimension but {}", self.dim));
            }
            shape[self.dim] = shape[self.dim]
                .checked_add(self.len(&input.shape))
                .ok_or_else(|| format!("dimension {} becomes longer than 64 bits can count", self.dim))?;
        }
        Ok(one(Spec::new(shape, first.dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let mut start = 0;
        for x in inputs {
            let len = self.len(x.shape());
            if len > 0 {
                exec.run(kernel::Copy { x, out: &outputs[0].narrow(self.dim, start, len)? })?;
            }
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
            let len = self.len(&cx.input(input).shape);
            if cx.needs(input) {
                let part = g.narrow(self.dim, start, len)?;
                // An empty part may have another rank than g.
                let grad = if len == 0 { cx.exec(input).reshape(part, &cx.input(input).shape)? } else { part };
                cx.set(input, grad);
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
            s("an empty part of rank 1", 1, vec![x(7, &[0]), x(8, &[2, 3])]),
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
    pub fn cat(self, others: impl IntoIterator<Item = Var>, dim: isize) -> Result<Var> {
        Var::concat(std::iter::once(self).chain(others), dim)
    }

    /// The values one after the other along `dim` (negative counts from the end). Empty ones of shape `[0]` go with any
    /// others and add nothing. Backward reads nothing.
    pub fn concat(values: impl IntoIterator<Item = Var>, dim: isize) -> Result<Var> {
        let mut values: Vec<Var> = values.into_iter().collect();
        let Some(counts) = values.iter().find(|v| v.shape()[..] != [0]).or(values.first()) else {
            return Err(crate::Error::tensor("cat", "needs at least one value to join"));
        };
        let dim = counts.dim("cat", dim)?;
        let others = values.split_off(1);
        values.remove(0).apply(Cat { dim }, others)
    }

    /// The values, of one shape, one after the other along a new dimension `dim` (negative counts from behind the
    /// last).
    pub fn stack(values: impl IntoIterator<Item = Var>, dim: isize) -> Result<Var> {
        let values: Vec<Var> = values.into_iter().collect();
        let Some(first) = values.first() else {
            return Err(crate::Error::tensor("stack", "needs at least one value to join"));
        };
        let shape = first.shape();
        if let Some(other) = values.iter().find(|v| v.shape() != shape) {
            return Err(first.invalid("stack", format!("the values must have one shape, got also {:?}", other.shape())));
        }
        let rows: Vec<Var> = values.into_iter().map(|v| v.unsqueeze(dim)).collect::<Result<_>>()?;
        let dim = if dim < 0 { dim + shape.len() as isize + 1 } else { dim };
        Var::concat(rows, dim)
    }
}
