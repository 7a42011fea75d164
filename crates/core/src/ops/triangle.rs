//! Triangles of matrices `[.., rows, columns]`: tril keeps j - i <= diagonal, triu j - i >= diagonal, the rest
//! becomes 0. What is kept is a function of the position: nothing is saved, and dx = g where x was kept, 0 elsewhere.

use super::*;
use crate::tape::Var;

/// x on one side of a diagonal (which is included), 0 on the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Triangle {
    /// Keep what lies above the diagonal instead of below.
    pub upper: bool,
    /// j - i of the diagonal.
    pub diagonal: isize,
}

impl Triangle {
    fn apply_to(&self, exec: &Exec<'_>, x: &Tensor, out: &Tensor) -> Result<()> {
        exec.run(kernel::Triangle { x, upper: self.upper, diagonal: self.diagonal, value: 0.0, out })
    }
}

impl OpRule for Triangle {
    fn name(&self) -> &'static str {
        if self.upper { "triu" } else { "tril" }
    }

    fn formula(&self) -> &'static str {
        if self.upper { "x[i, j] where j - i >= diagonal, else 0" } else { "x[i, j] where j - i <= diagonal, else 0" }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        if inputs[0].shape.len() < 2 {
            return Err("needs matrices [.., rows, columns]".into());
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        self.apply_to(exec, &inputs[0], &outputs[0])
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.replace(&g)?;
        self.apply_to(&exec, &g, &out)?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let mut samples = Vec::new();
        for upper in [false, true] {
            let s = |name, diagonal, input| Sample::smooth(name, Triangle { upper, diagonal }, [input]);
            samples.extend([
                s("square", 0, x(1, &[4, 4])),
                s("wide", 2, x(2, &[3, 5])),
                s("high", -1, x(3, &[2, 5, 3])),
                s("all or nothing", 9, x(4, &[3, 4])),
                s("nothing or all", -9, x(5, &[3, 4])),
                s("rank 5", 1, x(6, &[2, 1, 2, 3, 3])),
                s("transposed", 0, x(7, &[4, 6]).lying(Transposed)),
                s("narrowed", 1, x(8, &[3, 70]).lying(Narrowed)),
                s("expanded", -1, x(9, &[4, 5]).lying(Expanded)),
                s("zero-sized", 0, x(10, &[2, 0, 3])),
            ]);
        }
        samples
    }
}

impl Var {
    /// `[.., rows, columns]` with 0 above the diagonal j - i = `diagonal`. Backward reads nothing.
    pub fn tril(self, diagonal: isize) -> Result<Var> {
        self.apply(Triangle { upper: false, diagonal }, [])
    }
    /// `[.., rows, columns]` with 0 below the diagonal j - i = `diagonal`. Backward reads nothing.
    pub fn triu(self, diagonal: isize) -> Result<Var> {
        self.apply(Triangle { upper: true, diagonal }, [])
    }
}
