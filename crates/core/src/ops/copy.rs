//! Copies: into row-major order, and into another dtype. The gradient is g, cast back.

use super::*;
use crate::tape::Var;

/// The same elements in row-major order, in storage of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contiguous;

impl OpRule for Contiguous {
    fn name(&self) -> &'static str {
        "contiguous"
    }
    fn formula(&self) -> &'static str {
        "y = x, in row-major order"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        Ok(one(inputs[0].clone()))
    }
    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Copy { x: &inputs[0], out: &outputs[0] })
    }
    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        cx.set(0, g);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }
    fn samples() -> Vec<Sample> {
        Sample::of_one_input(Contiguous, |seed| SampleValues::Random { seed, range: 1.0 })
    }
}

/// The same elements with another dtype, rounded to nearest even where it holds fewer digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    /// The new dtype.
    pub dtype: DType,
}

impl OpRule for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }
    fn formula(&self) -> &'static str {
        "y = x, as another dtype"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        Ok(one(Spec::new(inputs[0].shape.clone(), self.dtype)))
    }
    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Copy { x: &inputs[0], out: &outputs[0] })
    }
    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty_like(cx.input(0))?;
        exec.run(kernel::Copy { x: &g, out: &out })?;
        cx.set(0, out);
        Ok(())
    }
    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }
    fn samples() -> Vec<Sample> {
        // A cast to fewer digits is a staircase: finite differences of it mean nothing.
        let x = SampleInput::random;
        let s = |name, dtype, input| Sample::kink(name, Cast { dtype }, [input]);
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let far = || SampleInput::floats(&[9], &[6e4, -65504.0, 65519.0, 65520.0, -1e9, 1e-8, inf, -inf, nan]);
        vec![
            Sample::smooth("to f64", Cast { dtype: DType::F64 }, [x(1, &[3, 5])]),
            s("to f32", DType::F32, x(2, &[3, 5])),
            s("to bf16", DType::BF16, x(3, &[4, 6]).lying(SampleMemory::Transposed)),
            s("to f16", DType::F16, x(4, &[])),
            s("zero-sized", DType::BF16, x(5, &[0, 3])),
            s("to bf16, far out", DType::BF16, far()),
            s("to f16, far out", DType::F16, far()),
        ]
    }
}

impl Var {
    /// The same elements in row-major order: a copy, always. Backward reads nothing.
    pub fn contiguous(self) -> Result<Var> {
        self.apply(Contiguous, [])
    }

    /// The same elements with another dtype; carries a gradient from float to float. Backward reads nothing.
    pub fn cast(self, dtype: DType) -> Result<Var> {
        self.apply(Cast { dtype }, [])
    }
}
