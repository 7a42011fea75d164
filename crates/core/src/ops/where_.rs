//! where: y = a where cond else b. The gradient follows the choice: da = g where cond else 0, db the rest.

use super::*;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = a where cond (bool) else b, with broadcasting. Inputs: cond, a, b.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Where;

impl OpRule for Where {
    fn name(&self) -> &'static str {
        "where"
    }

    fn formula(&self) -> &'static str {
        "y = a where cond, else b"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3, inputs)?;
        if inputs[0].dtype != DType::Bool {
            return Err(format!("the condition must be bool, got {}", inputs[0].dtype));
        }
        let dtype = one_float_dtype(&inputs[1..])?;
        broadcast_shapes(&inputs[1].shape, &inputs[2].shape)
            .and_then(|s| broadcast_shapes(&s, &inputs[0].shape))
            .map(|shape| one(Spec::new(shape, dtype)))
            .ok_or_else(|| "the shapes don't broadcast; aligned at the last dimension, sizes must agree or be 1".into())
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let shape = outputs[0].shape();
        let (cond, a, b) = (inputs[0].expand(shape)?, inputs[1].expand(shape)?, inputs[2].expand(shape)?);
        exec.run(kernel::Select { cond: &cond, a: &a, b: &b, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(0)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let cond = cx.saved(Slot::In(0))?.expand(g.shape())?;
        let zero = cx.exec(1).workspace(&[], g.dtype())?;
        cx.exec(1).run(kernel::Fill { value: 0.0, out: &zero })?;
        let zero = zero.expand(g.shape())?;
        for (input, a, b) in [(1, &g, &zero), (2, &zero, &g)] {
            if cx.needs(input) {
                let exec = cx.exec(input);
                let out = exec.empty(g.shape(), g.dtype())?;
                exec.run(kernel::Select { cond: &cond, a, b, out: &out })?;
                let grad = exec.sum_to(out, &cx.input(input).shape)?;
                cx.set(input, grad);
            }
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let cond = |shape: &[usize]| {
            let n: usize = shape.iter().product();
            SampleInput::new(shape, SampleValues::Bools((0..n).map(|i| i % 3 == 0).collect()))
        };
        let x = SampleInput::random;
        let s = |name, c, a, b| Sample::smooth(name, Where, [c, a, b]);
        vec![
            s("ordinary", cond(&[3, 5]), x(1, &[3, 5]), x(2, &[3, 5])),
            s("rank 0", cond(&[]), x(1, &[]), x(2, &[])),
            s("mask broadcast", cond(&[4, 4]), x(1, &[2, 1, 4, 4]), x(2, &[])),
            s("strided", cond(&[4, 6]), x(1, &[4, 6]).lying(SampleMemory::Transposed), x(2, &[6])),
            s("zero-sized", cond(&[0]), x(1, &[0]), x(2, &[1])),
            Sample::kink(
                "far out",
                Where,
                [
                    cond(&[5]),
                    SampleInput::floats(&[5], &[6e4, f64::NAN, f64::INFINITY, -6e4, 1e9]),
                    SampleInput::floats(&[5], &[f64::NAN, -6e4, f64::NEG_INFINITY, f64::INFINITY, 1e-8]),
                ],
            ),
        ]
    }
}

impl Var {
    /// `self` where `cond` (bool) is true, else `other`, with broadcasting. Operands of different dtypes are promoted
    /// to the widest float; so beside a float, scalars (and tensors) of any dtype will do. Backward reads the
    /// condition.
    pub fn where_(self, cond: impl Into<Var>, other: impl Into<Var>) -> Result<Var> {
        cond.into().apply(Where, binary::promoted(smallvec![self, other.into()])?)
    }

    /// x with `value` where `mask` (bool) is true. Backward reads the mask.
    pub fn masked_fill(self, mask: impl Into<Var>, value: f64) -> Result<Var> {
        self.tape().settle_operands(); // before the number is allocated, as before an op's result
        let value = Tensor::full(&self.tape().device(), &[], self.dtype(), value)?;
        let value = self.tape().constant(&value)?;
        self.masked_fill_with(mask, value)
    }

    /// x with the one number of `value`, which may take a gradient, where `mask` (bool) is true. Backward reads the
    /// mask.
    pub fn masked_fill_with(self, mask: impl Into<Var>, value: impl Into<Var>) -> Result<Var> {
        let value = value.into();
        if !value.shape().is_empty() {
            return Err(self.invalid("masked_fill", format!("the value must be a scalar, got {:?}", value.shape())));
        }
        value.where_(mask, self)
    }
}
