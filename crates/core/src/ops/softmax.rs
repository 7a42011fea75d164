//! Softmax over the last dimension: y_i = e^(x_i) / sum_j e^(x_j). With dy_i/dx_j = y_i (1[i=j] - y_j):
//! dx = y (g - sum(g y)). A row of only -inf (nothing to attend to) gives zeros, and zero gradients.
//!
//! Its logarithm, y_i = x_i - ln sum_j e^(x_j): dx = g - e^y sum(g). A row of only -inf stays so, with zero gradients.
//!
//! Over another dimension: the transposed view's last one.

use super::*;
use crate::layout::dimension;
use crate::tape::Var;

/// y = softmax(x) over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax;

impl OpRule for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn formula(&self) -> &'static str {
        "y_i = e^(x_i) / sum_j e^(x_j)"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        if inputs[0].shape.is_empty() {
            return Err("needs a last dimension to normalise over, got a scalar".into());
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Softmax { x: &inputs[0], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::Out(0)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let y = cx.saved(Slot::Out(0))?;
        let out = exec.replace(&g)?;
        exec.run(kernel::SoftmaxGrad { y: &y, g: &g, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        // The largest, the exponentials, their sum, the quotients.
        Cost::elementwise(4, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, input| Sample::smooth(name, Softmax, [input]);
        let inf = f64::NEG_INFINITY;
        let large = [1e8, 1e8, 1e8, -1e9, -1e9, 0.0, -3e37, 6e4, 6e4, -1e4, -1e4, -1e4];
        let masked = SampleInput::floats(&[3, 3], &[0.5, inf, inf, 0.1, -0.7, inf, inf, inf, inf]);
        vec![
            s("ordinary", x(1, &[3, 5])),
            s("rank 1", x(2, &[7])),
            s("rank 5", x(3, &[2, 1, 3, 1, 4])),
            s("one class", x(4, &[3, 1])),
            s("long rows", x(5, &[2, 301])),
            s("transposed", x(6, &[4, 6]).lying(SampleMemory::Transposed)),
            s("narrowed", x(7, &[4, 6]).lying(SampleMemory::Narrowed)),
            s("zero-sized", x(8, &[3, 0])),
            s("no rows", x(9, &[0, 3])),
            Sample::kink("masked rows", Softmax, [masked]),
            Sample::kink("very negative", Softmax, [SampleInput::floats(&[1, 3], &[-1e5, -1e5 + 1.0, -2e5])]),
            Sample::kink("large", Softmax, [SampleInput::floats(&[4, 3], &large)]),
        ]
    }
}

/// y = ln softmax(x) over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSoftmax;

impl OpRule for LogSoftmax {
    fn name(&self) -> &'static str {
        "log_softmax"
    }

    fn formula(&self) -> &'static str {
        "y_i = x_i - ln sum_j e^(x_j)"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        Softmax.infer(inputs)
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::LogSoftmax { x: &inputs[0], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::Out(0)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let y = cx.saved(Slot::Out(0))?;
        let out = exec.replace(&g)?;
        exec.run(kernel::LogSoftmaxGrad { y: &y, g: &g, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(4, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        Softmax::samples().into_iter().map(|s| Sample { op: LogSoftmax.into(), ..s }).collect()
    }
}

impl Var {
    /// Softmax over the last dimension. Backward reads the output.
    pub fn softmax(self) -> Result<Var> {
        self.apply(Softmax, [])
    }
    /// Softmax over dimension `dim`. Backward reads the output.
    pub fn softmax_dim(self, dim: isize) -> Result<Var> {
        self.with_last("softmax", dim, |x| x.apply(Softmax, []))
    }
    /// The softmax's logarithm over dimension `dim`. Backward reads the output.
    pub fn log_softmax(self, dim: isize) -> Result<Var> {
        self.with_last("log_softmax", dim, |x| x.apply(LogSoftmax, []))
    }

    /// f on a view that has `dim` last, viewed back. A scalar counts as a vector of one element.
    fn with_last(self, op: &'static str, dim: isize, f: impl Fn(Var) -> Result<Var>) -> Result<Var> {
        let rank = self.shape().len();
        let found = dimension(dim, rank.max(1)).map_err(|reason| self.invalid(op, reason))?;
        match rank {
            0 => f(self.reshape(&[1])?)?.reshape::<usize>(&[]),
            _ if found + 1 == rank => f(self),
            _ => f(self.transpose(dim, -1)?)?.transpose(dim, -1),
        }
    }
}
