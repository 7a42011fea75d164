//! RMS norm (Zhang and Sennrich 2019) over the last dimension of n elements:
//! xhat = x rstd with rstd = 1/sqrt(mean(x^2) + eps), y = xhat weight.
//!
//! With e = g weight: y depends on x directly and through rstd, d rstd/dx = -rstd^2 xhat / n, so
//! dx = rstd (e - xhat mean(e xhat)); dweight = sum over rows of g xhat. Layer norm without the centring, whose kernels
//! it shares. rstd is kept exactly.

use super::*;
use crate::tape::Var;

/// y = RMS norm of x over the last dimension. Inputs: x, and `weight` `[n]` where flagged. Outputs: y, and the
/// statistic rstd of x's shape without the last dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean of squares.
    pub eps: f64,
    /// Whether there is a weight.
    pub weight: bool,
}

impl OpRule for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn formula(&self) -> &'static str {
        "y = x / sqrt(mean(x^2) + eps) weight, by row"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1 + self.weight as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let x = &inputs[0].shape;
        let Some((&n, rows)) = x.split_last() else {
            return Err("needs a last dimension to normalise over, got a scalar".into());
        };
        match inputs.get(1) {
            Some(w) if w.shape[..] != [n] => Err(format!("the weight must be [{n}], got {:?}", w.shape)),
            _ => Ok(smallvec![Output::new(x.clone(), dtype), Output::statistic(rows, dtype.computed_in())]),
        }
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::LayerNorm {
            x: &inputs[0],
            weight: inputs.get(1),
            bias: None,
            eps: self.eps,
            out: &outputs[0],
            mean: None,
            rstd: &outputs[1],
        })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let by_x = self.weight && needs[0];
        saves([Slot::In(0), Slot::Out(1)].into_iter().chain(by_x.then_some(Slot::In(1))))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (g, x, rstd) = (cx.grad0(), cx.saved(Slot::In(0))?, cx.saved(Slot::Out(1))?);
        if self.weight && cx.needs(1) {
            let out = cx.exec(1).empty_like(cx.input(1))?;
            let (dweight, dbias) = (Some(&out), None);
            cx.exec(1).run(kernel::LayerNormParamGrad { x: &x, mean: None, rstd: &rstd, g: &g, dweight, dbias })?;
            cx.set(1, out);
        }
        if cx.needs(0) {
            let exec = cx.exec(0);
            let weight = if self.weight { Some(cx.saved(Slot::In(1))?) } else { None };
            let out = exec.replace(&g)?;
            let (weight, rstd) = (weight.as_ref(), &rstd);
            exec.run(kernel::LayerNormGrad { x: &x, weight, mean: None, rstd, g: &g, out: &out })?;
            cx.set(0, out);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        // Squares and their sum, the normalised value, the weight.
        Cost::elementwise(4, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let full = RmsNorm { eps: 1e-5, weight: true };
        let s = |name, input: SampleInput| {
            let n = *input.shape.last().expect("the samples have a last dimension");
            Sample::smooth(name, full, [input, x(20, &[n])])
        };
        let far = |values: &[f64]| SampleInput::floats(&[values.len() / 4, 4], values);
        vec![
            s("ordinary", x(1, &[3, 5])),
            s("rank 1", x(2, &[7])),
            s("rank 5", x(3, &[2, 1, 3, 1, 4])),
            s("long rows", x(4, &[3, 133])),
            s("transposed", x(5, &[4, 6]).lying(Transposed)),
            s("narrowed", x(6, &[4, 6]).lying(Narrowed)),
            s("expanded", x(7, &[4, 6]).lying(Expanded)),
            s("no rows", x(8, &[0, 3])),
            Sample::smooth("plain", RmsNorm { weight: false, ..full }, [x(9, &[3, 5])]),
            Sample::kink("large", full, [far(&[1e19, 5e18, -2e19, 3e19, 1e20, 3e20, -1e20, 0.0]), x(20, &[4])]),
            Sample::kink("ends of f32", full, [far(&[3e38, -3e38, -3e38, 1.0]), x(20, &[4])]),
            Sample::kink("f16's largest", full, [far(&[6e4, 6e4, -6e4, 5e4]), x(20, &[4])]),
            Sample::kink("tiny, eps 0", RmsNorm { eps: 0.0, ..full }, [far(&[1e-25, 3e-25, -2e-25, 0.0]), x(20, &[4])]),
            Sample::kink("zero rows", full, [SampleInput::floats(&[2, 4], &[0.0; 8]), x(20, &[4])]),
        ]
    }
}

impl Var {
    /// RMS norm over the last dimensions, those of `normalized_shape`, which is also the weight's shape; without `eps`
    /// the machine epsilon of the dtype. Backward reads x, rstd, and the weight.
    pub fn rms_norm(self, normalized_shape: &[usize], weight: Option<Var>, eps: Option<f64>) -> Result<Var> {
        let (shape, dtype) = (self.shape(), self.dtype());
        let (x, [weight]) = self.flat_for_norm("rms_norm", normalized_shape, [weight])?;
        let machine = if dtype == DType::F64 { f64::EPSILON } else { f32::EPSILON as f64 };
        let op = RmsNorm { eps: eps.unwrap_or(machine), weight: weight.is_some() };
        x.apply(op, weight)?.reshape(&shape)
    }
}
