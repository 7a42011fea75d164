//! Repeat: x laid side by side `times` along each dimension. The gradient is the sum of g over the repeats.

use super::*;
use crate::layout::Extent;
use crate::tape::Var;

/// x laid side by side along each dimension, new leading ones included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repeat {
    /// How often, for each dimension of the output.
    pub times: Shape,
}

impl Repeat {
    /// x's shape as `[1, n]` for each dimension of the output, and that with the repeats `[times, n]`.
    fn pairs(&self, x: &[usize]) -> (Shape, Shape) {
        let lead = self.times.len() - x.len();
        let size = |d: usize| d.checked_sub(lead).map_or(1, |d| x[d]);
        let pairs =
            |times: &dyn Fn(usize) -> usize| (0..self.times.len()).flat_map(|d| [times(d), size(d)]).collect::<Shape>();
        (pairs(&|_| 1), pairs(&|d| self.times[d]))
    }
}

impl OpRule for Repeat {
    fn name(&self) -> &'static str {
        "repeat"
    }

    fn formula(&self) -> &'static str {
        "y = x, x, .. along each dimension"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let x = &inputs[0].shape;
        if self.times.len() < x.len() {
            return Err(format!("{:?} has a number for fewer dimensions than the {} there are", self.times, x.len()));
        }
        let sizes = self.pairs(x).1;
        let shape = sizes.chunks(2).map(|pair| pair[0].checked_mul(pair[1])).collect::<Option<Shape>>();
        let shape = shape.ok_or("more elements than 63 bits can count")?;
        Ok(one(Spec::new(shape, inputs[0].dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (once, repeated) = self.pairs(inputs[0].shape());
        let x = exec.reshape(inputs[0].clone(), &once)?.expand(&repeated)?;
        exec.run(kernel::Copy { x: &x, out: &exec.reshape(outputs[0].clone(), &repeated)? })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let (once, repeated) = self.pairs(&cx.input(0).shape);
        let sum = exec.sum_to(exec.reshape(g, &repeated)?, &once)?;
        let grad = exec.reshape(sum, &cx.input(0).shape)?;
        cx.set(0, grad);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, times: &[usize], input| Sample::smooth(name, Repeat { times: times.into() }, [input]);
        vec![
            s("both", &[2, 3], x(1, &[3, 2])),
            s("leading", &[2, 1, 3], x(2, &[4])),
            s("once", &[1, 1], x(3, &[2, 3])),
            s("scalar", &[2], x(4, &[])),
            s("rank 0", &[], x(5, &[])),
            s("rank 5", &[1, 2, 1, 3, 2], x(6, &[2, 1, 2, 1, 2])),
            s("transposed", &[2, 2], x(7, &[4, 6]).lying(Transposed)),
            s("narrowed", &[1, 2], x(8, &[3, 5]).lying(Narrowed)),
            s("expanded", &[3, 1], x(9, &[4, 5]).lying(Expanded)),
            s("never", &[0, 2], x(10, &[3, 2])),
            s("zero-sized", &[2, 2], x(11, &[0, 3])),
        ]
    }
}

impl Var {
    /// This laid side by side `times[d]` times along each dimension; a copy (see [`expand`](Var::expand) for a view).
    /// More numbers than dimensions add leading ones. Backward reads nothing.
    pub fn repeat<N: Extent>(self, times: &[N]) -> Result<Var> {
        let count = |n: &N| {
            usize::try_from(n.get())
                .map_err(|_| self.invalid("repeat", format!("{} repeats; needs 0 or more", n.get())))
        };
        let times = times.iter().map(count).collect::<Result<_>>()?;
        self.apply(Repeat { times }, [])
    }
}
