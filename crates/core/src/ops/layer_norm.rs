//! Layer norm (Ba, Kiros and Hinton 2016) over the last dimension of n elements:
//! xhat = (x - mean) rstd with rstd = 1/sqrt(var + eps), y = xhat weight + bias.
//!
//! With e = g weight: y depends on x directly, through the mean and through the variance. Since sum(xhat) = 0 and
//! sum(xhat^2) = n (up to eps), the three paths add up to
//! dx = rstd (e - mean(e) - xhat mean(e xhat)); dweight = sum over rows of g xhat; dbias = sum over rows of g.
//! The mean and rstd are kept exactly; the output can be recomputed from x.

use super::*;
use crate::tape::Var;

/// y = layer norm of x over the last dimension. Inputs: x, and `weight`, `bias` (each `[n]`) where flagged. Outputs: y,
/// and the statistics mean and rstd of x's shape without the last dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
    /// Whether there is a weight.
    pub weight: bool,
    /// Whether there is a bias.
    pub bias: bool,
}

impl LayerNorm {
    fn bias_input(&self) -> usize {
        1 + self.weight as usize
    }
}

impl OpRule for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn formula(&self) -> &'static str {
        "y = (x - mean) / sqrt(var + eps) weight + bias, by row"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(self.bias_input() + self.bias as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let x = &inputs[0].shape;
        let Some((&n, rows)) = x.split_last() else {
            return Err("needs a last dimension to normalise over, got a scalar".into());
        };
        if let Some(wrong) = inputs[1..].iter().find(|p| p.shape[..] != [n]) {
            return Err(format!("weight and bias must be [{n}], got {:?}", wrong.shape));
        }
        let statistic = || Output::statistic(rows, dtype.computed_in());
        Ok(smallvec![Output::new(x.clone(), dtype), statistic(), statistic()])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::LayerNorm {
            x: &inputs[0],
            weight: self.weight.then(|| &inputs[1]),
            bias: self.bias.then(|| &inputs[self.bias_input()]),
            eps: self.eps,
            out: &outputs[0],
            mean: Some(&outputs[1]),
            rstd: &outputs[2],
        })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let mut slots: SmallVec<[Slot; 4]> = SmallVec::new();
        // The bias's gradient alone reads nothing.
        if needs[0] || (self.weight && needs[1]) {
            slots.extend([Slot::In(0), Slot::Out(1), Slot::Out(2)]);
        }
        if needs[0] && self.weight {
            slots.push(Slot::In(1));
        }
        saves(slots)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let need_weight = self.weight && cx.needs(1);
        let need_bias = self.bias && cx.needs(self.bias_input());
        if !cx.needs(0) && !need_weight {
            if need_bias {
                let input = self.bias_input();
                let grad = cx.exec(input).sum_to(g, &cx.input(input).shape)?;
                cx.set(input, grad);
            }
            return Ok(());
        }
        let (x, mean, rstd) = (cx.saved(Slot::In(0))?, cx.saved(Slot::Out(1))?, cx.saved(Slot::Out(2))?);
        if need_weight || need_bias {
            let grad = |input: usize| cx.exec(input).empty_like(cx.input(input));
            let dweight = need_weight.then(|| grad(1)).transpose()?;
            let dbias = need_bias.then(|| grad(self.bias_input())).transpose()?;
            cx.exec(0).run(kernel::LayerNormParamGrad {
                x: &x,
                mean: Some(&mean),
                rstd: &rstd,
                g: &g,
                dweight: dweight.as_ref(),
                dbias: dbias.as_ref(),
            })?;
            for (input, grad) in [(1, dweight), (self.bias_input(), dbias)] {
                if let Some(grad) = grad {
                    cx.set(input, grad);
                }
            }
        }
        if cx.needs(0) {
            let exec = cx.exec(0);
            let weight = if self.weight { Some(cx.saved(Slot::In(1))?) } else { None };
            let out = exec.replace(&g)?;
            let (weight, mean, rstd) = (weight.as_ref(), Some(&mean), &rstd);
            exec.run(kernel::LayerNormGrad { x: &x, weight, mean, rstd, g: &g, out: &out })?;
            cx.set(0, out);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        // Mean, squared deviations and their sum, the normalised value, weight and bias.
        Cost::elementwise(7, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let full = LayerNorm { eps: 1e-5, weight: true, bias: true };
        let s = |name, input: SampleInput| {
            let n = *input.shape.last().expect("the samples have a last dimension");
            Sample::smooth(name, full, [input, x(20, &[n]), x(21, &[n])])
        };
        let constant = SampleInput::floats(&[2, 4], &[3.0; 8]);
        let far = |values: &[f64]| SampleInput::floats(&[values.len() / 4, 4], values);
        let tiny = far(&[1e-25, 3e-25, -2e-25, 0.0, 1e-20, -1e-20, 3e-20, 2e-20]);
        // Their means round to what is no mean.
        let around = [1e6, 1e6 + 1.0, 1e6 + 2.0, 1e6 + 2.0625, -1e7, -1e7 - 1.0, -1e7, -1e7];
        vec![
            s("ordinary", x(1, &[3, 5])),
            s("rank 1", x(2, &[7])),
            s("rank 5", x(3, &[2, 1, 3, 1, 4])),
            s("long rows", x(4, &[3, 133])),
            s("transposed", x(5, &[4, 6]).lying(Transposed)),
            s("narrowed", x(6, &[4, 6]).lying(Narrowed)),
            s("expanded", x(7, &[4, 6]).lying(Expanded)),
            s("no rows", x(8, &[0, 3])),
            Sample::smooth("plain", LayerNorm { weight: false, bias: false, ..full }, [x(9, &[3, 5])]),
            Sample::smooth("weight only", LayerNorm { bias: false, ..full }, [x(10, &[3, 5]), x(11, &[5])]),
            Sample::smooth("bias only", LayerNorm { weight: false, ..full }, [x(12, &[3, 5]), x(13, &[5])]),
            Sample::kink("constant rows", full, [constant, x(20, &[4]), x(21, &[4])]),
            Sample::kink(
                "large",
                full,
                [far(&[1e19, 5e18, -2e19, 3e19, 1e20, 3e20, -1e20, 0.0]), x(20, &[4]), x(21, &[4])],
            ),
            Sample::kink("ends of f32", full, [far(&[3e38, -3e38, -3e38, 1.0]), x(20, &[4]), x(21, &[4])]),
            Sample::kink("f16's largest", full, [far(&[6e4, 6e4, -6e4, 5e4]), x(20, &[4]), x(21, &[4])]),
            Sample::kink("far from 0", full, [far(&around), x(20, &[4]), x(21, &[4])]),
            Sample::kink("tiny, eps 0", LayerNorm { eps: 0.0, ..full }, [tiny, x(20, &[4]), x(21, &[4])]),
        ]
    }
}

impl Var {
    /// Layer norm over the last dimension `[.., n]`; `weight` and `bias` are `[n]`. Backward reads x, the mean and
    /// rstd, and the weight.
    pub fn layer_norm(self, weight: Option<Var>, bias: Option<Var>, eps: f64) -> Result<Var> {
        let op = LayerNorm { eps, weight: weight.is_some(), bias: bias.is_some() };
        self.apply(op, weight.into_iter().chain(bias))
    }

    /// Layer norm over the last dimensions, those of `normalized_shape`; `weight` and `bias` have this shape.
    pub fn layer_norm_over(
        self,
        normalized_shape: &[usize],
        weight: Option<Var>,
        bias: Option<Var>,
        eps: f64,
    ) -> Result<Var> {
        let shape = self.shape();
        let (x, [weight, bias]) = self.flat_for_norm("layer_norm", normalized_shape, [weight, bias])?;
        x.layer_norm(weight, bias, eps)?.reshape(&shape)
    }

    /// The dimensions of `normalized_shape` as one, here and in the parameters.
    pub(crate) fn flat_for_norm<const P: usize>(
        self,
        op: &'static str,
        normalized_shape: &[usize],
        parameters: [Option<Var>; P],
    ) -> Result<(Var, [Option<Var>; P])> {
        let shape = self.shape();
        if normalized_shape.is_empty() || !shape.ends_with(normalized_shape) {
            let reason = format!("the normalised shape {normalized_shape:?} must be the last dimensions, at least one");
            return Err(self.invalid(op, reason));
        }
        let mut flat = [const { None }; P];
        for (flat, p) in flat.iter_mut().zip(parameters) {
            if let Some(p) = p {
                if p.shape()[..] != *normalized_shape {
                    let reason = format!("weight and bias must be {normalized_shape:?}, got {:?}", p.shape());
                    return Err(self.invalid(op, reason));
                }
                *flat = Some(p.reshape(&[normalized_shape.iter().product::<usize>()])?);
            }
        }
        let mut rows = shape[..shape.len() - normalized_shape.len()].to_vec();
        rows.push(normalized_shape.iter().product());
        Ok((self.reshape(&rows)?, flat))
    }
}
