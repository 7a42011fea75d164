//! Causal mask of attention scores `[.., Tq, Tk]`, aligned at the bottom right: query i sees key j where
//! j <= i + Tk - Tq; other scores become -inf. The mask is a function of the position, so nothing is saved: dx = g
//! where the score passed, 0 elsewhere.

use super::*;
use crate::tape::Var;

/// y = x where query i may see key j, else -inf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CausalMask;

impl OpRule for CausalMask {
    fn name(&self) -> &'static str {
        "causal_mask"
    }

    fn formula(&self) -> &'static str {
        "y[i, j] = x[i, j] where j <= i + Tk - Tq, else -inf"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        if inputs[0].shape.len() < 2 {
            return Err("needs scores [.., Tq, Tk]".into());
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        mask(exec, &inputs[0], f64::NEG_INFINITY, &outputs[0])
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.replace(&g)?;
        mask(&exec, &g, 0.0, &out)?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        // -inf has no finite difference: the gradient is checked behind a softmax, and here by its definition.
        let s = |name, input| Sample::kink(name, CausalMask, [input]);
        vec![
            s("square", x(1, &[2, 4, 4])),
            s("more keys", x(2, &[3, 5])),
            s("more queries", x(3, &[5, 3])),
            s("transposed", x(4, &[2, 4, 4]).lying(SampleMemory::Transposed)),
            s("zero-sized", x(5, &[2, 0, 4])),
        ]
    }
}

/// out = x where query i may see key j, else value.
fn mask(exec: &Exec<'_>, x: &Tensor, value: f64, out: &Tensor) -> Result<()> {
    let diagonal = x.shape()[x.rank() - 1] as isize - x.shape()[x.rank() - 2] as isize;
    exec.run(kernel::Triangle { x, upper: false, diagonal, value, out })
}

impl Var {
    /// Scores `[.., Tq, Tk]` with -inf where query i must not see key j (j > i + Tk - Tq). Backward reads nothing.
    pub fn causal_mask(self) -> Result<Var> {
        self.apply(CausalMask, [])
    }
}
