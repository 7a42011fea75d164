//! Elementwise losses of a prediction x and a target t, broadcast as in [`BinaryOp`](super::binary::BinaryOp). Each
//! formula and its derivatives stand beside its name in [`LossFn`]: all are functions of d = x - t (so dt = -dx), but
//! for the Kullback-Leibler divergence and the binary cross-entropy, which are not symmetric.
//!
//! The unreduced loss is an op, its mean or sum are ops that save nothing; so x and t are all that is kept, and the
//! unreduced loss lives only until it is reduced.

use super::*;
use crate::kernel::{LossFn, LossReduction};
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = f(x, t), elementwise with broadcasting. Inputs: x, t, and with `weight` (of `BinaryLogits` alone) the weight of
/// the positives, which must broadcast to x's and t's common shape.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossOp {
    /// Which loss.
    pub f: LossFn,
    /// Whether there is a weight of the positives.
    pub weight: bool,
}

impl OpRule for LossOp {
    fn name(&self) -> &'static str {
        match self.f {
            LossFn::Squared => "mse_loss",
            LossFn::Absolute => "l1_loss",
            LossFn::SmoothL1(_) => "smooth_l1_loss",
            LossFn::Huber(_) => "huber_loss",
            LossFn::KlDivergence | LossFn::KlDivergenceLog => "kl_div",
            LossFn::BinaryLogits => "binary_cross_entropy_with_logits",
        }
    }

    fn formula(&self) -> &'static str {
        match self.f {
            LossFn::Squared => "(x - t)^2",
            LossFn::Absolute => "|x - t|",
            LossFn::SmoothL1(_) => "d^2 / (2 beta) where |d| < beta, else |d| - beta / 2; d = x - t",
            LossFn::Huber(_) => "d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2); d = x - t",
            LossFn::KlDivergence => "t (ln t - x)",
            LossFn::KlDivergenceLog => "e^t (t - x)",
            LossFn::BinaryLogits => "max(x, 0) - x t + ln(1 + e^-|x|)",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2 + self.weight as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        if let LossFn::SmoothL1(width) | LossFn::Huber(width) = self.f
            && (width.is_nan() || width <= 0.0 || rounds_to_zero(width, dtype))
        {
            let computed = dtype.computed_in();
            return Err(format!("the width of the quadratic part must be above 0 in {computed}, got {width}"));
        }
        let Some(shape) = broadcast_shapes(&inputs[0].shape, &inputs[1].shape) else {
            return Err("prediction and target don't broadcast; give them one shape".into());
        };
        match inputs.get(2) {
            Some(w) if broadcast_shapes(&w.shape, &shape).as_ref() != Some(&shape) => {
                Err(format!("the weight of the positives {:?} doesn't broadcast to {shape:?}", w.shape))
            }
            _ => Ok(one(Spec::new(shape, dtype))),
        }
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let repeated = |i: usize| inputs[i].expand(outputs[0].shape());
        let weight = if self.weight { Some(repeated(2)?) } else { None };
        let (x, target) = (&repeated(0)?, &repeated(1)?);
        exec.run(kernel::Loss { f: self.f, x, target, weight: weight.as_ref(), out: &outputs[0] })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        match self.f {
            // By a log-probability x, neither divergence reads x.
            LossFn::KlDivergence | LossFn::KlDivergenceLog if !needs[1] => saves([Slot::In(1)]),
            _ => saves((0..2 + self.weight as usize).map(Slot::In)),
        }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let divergence = matches!(self.f, LossFn::KlDivergence | LossFn::KlDivergenceLog);
        let reads = |cx: &mut Backward<'_>, slot| cx.saved(slot)?.expand(g.shape());
        let target = reads(cx, Slot::In(1))?;
        let x = if divergence && !cx.needs(1) { target.clone() } else { reads(cx, Slot::In(0))? };
        let weight = if self.weight { Some(reads(cx, Slot::In(2))?) } else { None };
        for by in 0..2 + self.weight as usize {
            if cx.needs(by) {
                let exec = cx.exec(by);
                let out = exec.terms(&Spec::of(&g), cx.input(by))?;
                let (x, target, weight) = (&x, &target, weight.as_ref());
                exec.run(kernel::LossGrad { f: self.f, by, x, target, weight, g: &g, out: &out })?;
                let grad = exec.sum_terms(out, cx.input(by))?;
                cx.set(by, grad);
            }
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(2, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let mut samples = Vec::new();
        for f in [
            LossFn::Squared,
            LossFn::Absolute,
            LossFn::SmoothL1(0.5),
            LossFn::Huber(0.5),
            LossFn::KlDivergence,
            LossFn::KlDivergenceLog,
            LossFn::BinaryLogits,
        ] {
            // x - t lies in (0.1, 0.45) or (0.55, 1.9), away from 0 and from the width.
            let x =
                |seed, shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed, low: 0.5, high: 0.7 });
            let near =
                |seed, shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed, low: 0.25, high: 0.4 });
            let far =
                |seed, shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed, low: 1.3, high: 2.0 });
            let op = LossOp { f, weight: false };
            let s = |name, a, b| Sample::smooth(name, op, [a, b]);
            samples.extend([
                s("near", x(1, &[3, 5]), near(2, &[3, 5])),
                s("far", x(3, &[3, 5]), far(4, &[3, 5])),
                s("rank 0", x(5, &[]), far(6, &[])),
                s("rank 5", x(7, &[2, 1, 3, 1, 2]), near(8, &[2, 1, 3, 1, 2])),
                s("broadcast", x(9, &[3, 1]), near(10, &[1, 4])),
                s("a scalar's target", x(11, &[2, 3]), near(12, &[])),
                s("strided", x(13, &[4, 6]).lying(Transposed), near(14, &[4, 6]).lying(Narrowed)),
                s("expanded", x(15, &[4, 6]).lying(Expanded), far(16, &[4, 6])),
                s("zero-sized", x(17, &[2, 0, 3]), near(18, &[2, 0, 3])),
            ]);
            if f == LossFn::BinaryLogits {
                let op = LossOp { f, weight: true };
                samples.extend([
                    Sample::smooth("weighted", op, [x(1, &[3, 5]), near(2, &[3, 5]), far(3, &[5])]),
                    Sample::smooth("weighted, broadcast", op, [x(4, &[3, 1]), near(5, &[1, 4]), far(6, &[])]),
                ]);
                let extreme = || SampleInput::floats(&[4], &[-1e4, -100.0, 100.0, 1e4]);
                samples.push(Sample::kink("extreme", LossOp { f, weight: false }, [extreme(), near(7, &[4])]));
                // Sure and right, or sure and wrong, or masked.
                let sure = SampleInput::floats(&[8], &[-1e9, 20.0, -20.0, 1e9, -1e9, 20.0, f64::NEG_INFINITY, -20.0]);
                let targets = SampleInput::floats(&[8], &[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]);
                samples.push(Sample::kink("sure", LossOp { f, weight: false }, [sure.clone(), targets.clone()]));
                samples.push(Sample::kink("sure, weighted", op, [sure, targets, far(8, &[8])]));
            } else if matches!(f, LossFn::KlDivergence | LossFn::KlDivergenceLog) {
                let masked = SampleInput::floats(&[4], &[-0.5, f64::NEG_INFINITY, -1e4, -0.25]);
                let none = if f == LossFn::KlDivergence { 0.0 } else { f64::NEG_INFINITY };
                let target = SampleInput::floats(&[4], &[0.5, none, 0.25, none]);
                samples.push(Sample::kink("masked", op, [masked, target]));
            } else {
                let at = |values: [f64; 3]| SampleInput::floats(&[3], &values);
                samples.push(Sample::kink("at the kinks", op, [at([1.0, 1.0, 1.0]), at([1.0, 0.5, 1.5])]));
            }
        }
        samples
    }
}

impl Var {
    fn loss(self, f: LossFn, target: impl Into<Var>, reduction: LossReduction) -> Result<Var> {
        self.apply(LossOp { f, weight: false }, [target.into()])?.reduced(reduction)
    }

    fn reduced(self, reduction: LossReduction) -> Result<Var> {
        match reduction {
            LossReduction::None => Ok(self),
            LossReduction::Sum => self.sum(),
            LossReduction::Mean => self.mean(),
        }
    }

    /// Squared error. Backward reads prediction and target, as for all elementwise losses.
    pub fn mse_loss(self, target: impl Into<Var>, reduction: LossReduction) -> Result<Var> {
        self.loss(LossFn::Squared, target, reduction)
    }

    /// Absolute error; the gradient at 0 is 0.
    pub fn l1_loss(self, target: impl Into<Var>, reduction: LossReduction) -> Result<Var> {
        self.loss(LossFn::Absolute, target, reduction)
    }

    /// Squared error / (2 beta) where the absolute error is below beta, else absolute error - beta/2; with beta 0 the
    /// absolute error.
    pub fn smooth_l1_loss(self, target: impl Into<Var>, beta: f64, reduction: LossReduction) -> Result<Var> {
        self.loss(if beta == 0.0 { LossFn::Absolute } else { LossFn::SmoothL1(beta) }, target, reduction)
    }

    /// Half the squared error up to delta, beyond it delta (absolute error - delta/2).
    pub fn huber_loss(self, target: impl Into<Var>, delta: f64, reduction: LossReduction) -> Result<Var> {
        self.loss(LossFn::Huber(delta), target, reduction)
    }

    /// Kullback-Leibler divergence of log-probabilities (`self`) from probabilities, or from log-probabilities with
    /// `log_target`. Reads only the target where it needs no gradient. PyTorch's `batchmean` is
    /// [`Var::kl_div_batchmean`].
    pub fn kl_div(self, target: impl Into<Var>, log_target: bool, reduction: LossReduction) -> Result<Var> {
        self.loss(if log_target { LossFn::KlDivergenceLog } else { LossFn::KlDivergence }, target, reduction)
    }

    /// The sum of the divergence divided by the size of dimension 0: the mean over a batch.
    pub fn kl_div_batchmean(self, target: impl Into<Var>, log_target: bool) -> Result<Var> {
        let Some(&batch) = self.shape().first() else {
            return Err(self.invalid("kl_div", "batchmean needs a batch dimension, got a scalar"));
        };
        self.kl_div(target, log_target, LossReduction::Sum)?.scale(1.0 / batch as f64)
    }

    /// Binary cross-entropy of logits (`self`) against probabilities, each element weighed by `weight` and the positive
    /// part by `pos_weight`, both broadcast.
    pub fn binary_cross_entropy_with_logits(
        self,
        target: impl Into<Var>,
        weight: Option<Var>,
        pos_weight: Option<Var>,
        reduction: LossReduction,
    ) -> Result<Var> {
        let op = LossOp { f: LossFn::BinaryLogits, weight: pos_weight.is_some() };
        let loss = self.apply(op, std::iter::once(target.into()).chain(pos_weight))?;
        let loss = match weight {
            Some(weight) => loss.mul(weight)?,
            None => loss,
        };
        loss.reduced(reduction)
    }
}
