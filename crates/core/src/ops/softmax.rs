//! Softmax over the last dimension: y_i = e^(x_i) / sum_j e^(x_j). With dy_i/dx_j = y_i (1[i=j] - y_j):
//! dx = y (g - sum(g y)). A row of only -inf (nothing to attend to) gives zeros, and zero gradients.

use super::*;
use crate::tape::Var;

/// y = softmax(x) over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Softmax;

impl Rule for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
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
        exec.run(Kernel::Softmax { x: &inputs[0], out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::Out(0)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let y = cx.saved(Slot::Out(0))?;
        let out = exec.replace(&g)?;
        exec.run(Kernel::SoftmaxGrad { y: &y, g: &g, out: &out })?;
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
        ]
    }
}

impl Var {
    /// Softmax over the last dimension. Backward reads the output.
    pub fn softmax(&self) -> Result<Var> {
        self.apply(Softmax, &[])
    }
}
