//! Cross-entropy of logits z over classes. With q the target distribution of a row (all on the target class t, or
//! given; mixed with the even one by label smoothing), class weights w, m the row's largest logit and log = ln sum
//! exp(z - m): s_c = -ln softmax_c = (m - z_c) + log, and loss = sum over c of w_c q_c s_c, or s_t where there are
//! neither weights nor smoothing.
//!
//! As ds_c/dz = softmax(z) - 1 at c: dz_c = g (softmax_c sum(w q) - w_c q_c) / count, 0 in ignored rows; dp_c = g (1 -
//! smoothing) w_c s_c / count; dw_c = the sum over rows of g q_c s_c / count, and through the count itself.
//! softmax(z) = exp((z - m) - log), so only the logits, the targets and two numbers a row are kept: m + log in one
//! number would lose log where logits are large. The gradient overwrites the logits where nobody else holds them:
//! there is no second tensor of their size. The mean divides by what counts: the weights of the targets that are not
//! ignored. With every target ignored it is NaN and the gradients are 0.
//!
//! [`NllLoss`] is the same of log-probabilities: s_c = -x_c, so dx = -g w_t / count at the target.

use super::*;
use crate::kernel::{ClassScores, CrossEntropySpec, LossReduction};
use crate::layout::dimension;
use crate::tape::Var;

/// The loss of logits whose dimension `dim` are the classes. Inputs: the logits; class indices without that
/// dimension, or distributions of the logits' shape; with `weight` one number a class. Outputs: the loss, `[]` or a
/// number a row, and of each row its largest logit and the logarithm of the sum of exponentials relative to it, `[..,
/// 2]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Ignored class, reduction, smoothing.
    pub spec: CrossEntropySpec,
    /// The classes' dimension.
    pub dim: usize,
    /// Whether the classes are weighed.
    pub weight: bool,
    /// Whether the loss of bf16 and f16 logits is f32 instead of theirs.
    pub wide: bool,
}

/// The shape of the rows, or what is wrong with the inputs.
fn rows(inputs: &[Spec], dim: usize, distributions: bool) -> Result<Shape, String> {
    let (x, target) = (&inputs[0].shape, &inputs[1]);
    if dim >= x.len() || x[dim] == 0 {
        return Err(format!("needs at least one class in dimension {dim}"));
    }
    let mut rows = x.clone();
    rows.remove(dim);
    match target.dtype {
        DType::I64 | DType::I32 if target.shape == rows => {}
        DType::I64 | DType::I32 => {
            return Err(format!("class indices must have the shape {rows:?}, that of the rows"));
        }
        dtype if distributions && dtype == inputs[0].dtype && target.shape == *x => {}
        _ if distributions => {
            return Err(
                "targets must be class indices (i64 or i32), or distributions of the logits' shape and dtype".into()
            );
        }
        _ => return Err("targets must be class indices of dtype i64 or i32".into()),
    }
    match inputs.get(2) {
        Some(w) if w.shape[..] != [x[dim]] || w.dtype != inputs[0].dtype => {
            Err(format!("the class weights must be {}[{}]", inputs[0].dtype, x[dim]))
        }
        _ => Ok(rows),
    }
}

fn loss_shape(spec: &CrossEntropySpec, rows: &Shape) -> Shape {
    if spec.reduction == LossReduction::None { rows.clone() } else { Shape::new() }
}

/// x with the classes last.
fn classes_last(x: &Tensor, dim: usize) -> Result<Tensor> {
    let order: SmallVec<[usize; 6]> = (0..x.rank()).filter(|&d| d != dim).chain([dim]).collect();
    x.permute(&order)
}

impl CrossEntropy {
    /// Distributions have the logits' rank, indices one less.
    fn target(&self, logits: &Spec, target: Tensor) -> Result<Tensor> {
        if target.rank() == logits.shape.len() { classes_last(&target, self.dim) } else { Ok(target) }
    }
}

impl OpRule for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn formula(&self) -> &'static str {
        "sum over c of w_c q_c (ln sum e^z - z_c), reduced"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2 + self.weight as usize, inputs)?;
        let dtype = one_float_dtype(&inputs[..1])?;
        let rows = rows(inputs, self.dim, true)?;
        if !(0.0..=1.0).contains(&self.spec.smoothing) {
            return Err(format!("label smoothing must be in 0..=1, got {}", self.spec.smoothing));
        }
        let of_rows: Shape = rows.iter().copied().chain([2]).collect();
        let stats = Output::statistic(of_rows, dtype.computed_in());
        let dtype = if self.wide { dtype.computed_in() } else { dtype };
        Ok(smallvec![Output::new(loss_shape(&self.spec, &rows), dtype), stats])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let logits = &classes_last(&inputs[0], self.dim)?;
        let target = &self.target(&Spec::of(&inputs[0]), inputs[1].clone())?;
        let scores = ClassScores { logits, target, weight: inputs.get(2), spec: self.spec };
        exec.run(kernel::CrossEntropy { scores, loss: &outputs[0], stats: Some(&outputs[1]) })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let by_weight = self.weight && needs[2];
        let slots = [
            (true, Slot::In(0)),
            (needs[0] || by_weight, Slot::In(1)),
            (self.weight, Slot::In(2)),
            (true, Slot::Out(1)),
        ];
        saves(slots.into_iter().filter(|s| s.0).map(|s| s.1))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (g, spec) = (cx.grad0(), self.spec);
        let (logits, stats) = (cx.saved(Slot::In(0))?, cx.saved(Slot::Out(1))?);
        let weight = if self.weight { Some(cx.saved(Slot::In(2))?) } else { None };
        let (x, weight) = (classes_last(&logits, self.dim)?, weight.as_ref());
        let by_weight = self.weight && cx.needs(2);
        if cx.needs(1) {
            let grad = cx.exec(1).empty_like(cx.input(1))?;
            let out = classes_last(&grad, self.dim)?;
            cx.exec(1).run(kernel::CrossEntropyTargetGrad {
                logits: &x,
                weight,
                stats: &stats,
                g: &g,
                spec,
                out: &out,
            })?;
            cx.set(1, grad);
        }
        if !cx.needs(0) && !by_weight {
            return Ok(());
        }
        let target = cx.saved(Slot::In(1))?;
        let target = &self.target(cx.input(0), target)?;

        if by_weight {
            let out = cx.exec(2).empty_like(cx.input(2))?;
            let scores = ClassScores { logits: &x, target, weight, spec };
            cx.exec(2).run(kernel::CrossEntropyWeightGrad { scores, stats: Some(&stats), g: &g, out: &out })?;
            cx.set(2, out);
        }
        if cx.needs(0) {
            drop(x);
            let grad = cx.exec(0).replace(&logits)?;
            let (logits, out) = (&classes_last(&logits, self.dim)?, &classes_last(&grad, self.dim)?);
            let scores = ClassScores { logits, target, weight, spec };
            cx.exec(0).run(kernel::CrossEntropyGrad { scores, stats: &stats, g: &g, out })?;
            cx.set(0, grad);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: Cost::times(&[3, inputs[0].len()]), traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use LossReduction::*;
        let x = SampleInput::random;
        let t = SampleInput::integers;
        let p = |seed, shape: &[usize]| SampleInput::new(shape, SampleValues::Between { seed, low: 0.1, high: 0.9 });
        let op = |reduction, smoothing, dim, weight| CrossEntropy {
            spec: CrossEntropySpec { reduction, smoothing, ..CrossEntropySpec::default() },
            dim,
            weight,
            wide: false,
        };
        let mean = op(Mean, 0.0, 1, false);
        let s = |name, logits, target| Sample::smooth(name, mean, [logits, target]);
        let far = SampleInput::floats(&[2, 3], &[-1e4, 0.0, 1e4, 300.0, -300.0, 0.0]);
        let mut samples = vec![
            s("ordinary", x(1, &[3, 5]), t(&[3], &[0, 4, 2])),
            s("ignored rows", x(2, &[4, 3]), t(&[4], &[0, -100, 2, -100])),
            Sample::smooth("wide", CrossEntropy { wide: true, ..mean }, [x(2, &[4, 3]), t(&[4], &[0, -100, 2, 1])]),
            s("one class", x(3, &[3, 1]), t(&[3], &[0, 0, 0])),
            s("transposed", x(4, &[4, 6]).lying(SampleMemory::Transposed), t(&[4], &[5, 0, 1, 3])),
            s("expanded", x(4, &[4, 6]).lying(SampleMemory::Expanded), t(&[4], &[5, 0, 1, 3])),
            s("many classes", x(5, &[2, 301]), t(&[2], &[300, 7])),
            s("images", x(5, &[2, 4, 3]), t(&[2, 3], &[3, 0, 1, -100, 2, 2])),
            s("rank 5", x(5, &[2, 3, 1, 2, 1]), t(&[2, 1, 2, 1], &[2, 0, 1, 2])),
            Sample::smooth("one row", op(Mean, 0.0, 0, false), [x(5, &[4]), t(&[], &[2])]),
            Sample::smooth("sum", op(Sum, 0.0, 1, false), [x(6, &[3, 5]), t(&[3], &[0, 4, 2])]),
            Sample::smooth("sum of no rows", op(Sum, 0.0, 1, false), [x(7, &[0, 5]), t(&[0], &[])]),
            Sample::kink("all ignored", mean, [x(8, &[2, 3]), t(&[2], &[-100, -100])]),
            Sample::kink("extreme", mean, [far, t(&[2], &[0, 1])]),
        ];
        // Rows of equal and of saturated logits, masked classes, and a row of nothing but these.
        let (inf, least) = (f64::NEG_INFINITY, -1e18);
        let large = [1e8, 1e8, 1e8, 1e8, -1e4, -1e4, -1e4, -1e4, 1e9, 1e9, -1e9, 0.0, least, 6e4, least, 6e4];
        let masked = [0.5, inf, -1.0, inf, inf, inf, 3e4, inf, 1e8, inf, 1e8, 1e8, -1e9, -1e9, inf, inf];
        let hidden = [0.5, inf, -1.0, inf, inf, inf, inf, inf];
        let far = |values: &[f64]| SampleInput::floats(&[values.len() / 4, 4], values);
        // No share where a logit is -inf.
        let shares = [0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 0.25, 0.0, 0.5, 0.25, 0.75, 0.25, 0.0, 0.0];
        let unweighted = SampleInput::floats(&[4], &[1.0, 0.0, 0.5, 0.0]);
        for smoothing in [0.0, 0.25] {
            let (each, weighted) = (op(None, smoothing, 1, false), op(None, smoothing, 1, true));
            samples.extend([
                Sample::kink("large logits", each, [far(&large), t(&[4], &[2, 0, 1, 3])]),
                Sample::kink("large logits, weighted", weighted, [far(&large), t(&[4], &[2, 0, 1, 3]), p(9, &[4])]),
                Sample::kink("large logits, distributions", each, [far(&large), p(5, &[4, 4])]),
            ]);
        }
        samples.extend([
            Sample::kink("masked classes", op(None, 0.0, 1, false), [far(&masked), t(&[4], &[2, 2, 0, 1])]),
            Sample::kink("masked classes, distributions", op(None, 0.0, 1, false), [far(&masked), far(&shares)]),
            Sample::kink(
                "masked classes without weight",
                op(Mean, 0.0, 1, true),
                [far(&[0.5, inf, -1.0, inf, 1.0, 0.0, inf, 2.0]), t(&[2], &[1, 0]), unweighted.clone()],
            ),
            Sample::kink(
                "masked distributions without weight",
                op(Mean, 0.5, 1, true),
                [far(&hidden[..4]), p(5, &[1, 4]), unweighted],
            ),
            Sample::kink("nothing but masked", op(None, 0.0, 1, false), [far(&hidden), t(&[2], &[0, 3])]),
        ]);
        for reduction in [None, Sum, Mean] {
            let (plain, full) = (op(reduction, 0.1, 1, false), op(reduction, 0.1, 1, true));
            let targets = || t(&[2, 2], &[3, 0, -100, 2]);
            samples.extend([
                Sample::smooth("smoothed", plain, [x(1, &[2, 4, 2]), targets()]),
                Sample::smooth("weighted", full, [x(2, &[2, 4, 2]), targets(), p(3, &[4])]),
                Sample::smooth("distributions", plain, [x(4, &[2, 4, 2]), p(5, &[2, 4, 2])]),
                Sample::smooth("weighted distributions", full, [x(6, &[3, 67]), p(7, &[3, 67]), p(8, &[67])]),
                Sample::smooth(
                    "last dimension",
                    op(reduction, 0.0, 2, true),
                    [x(9, &[2, 2, 4]), targets(), p(9, &[4])],
                ),
            ]);
        }
        samples
    }
}

/// The loss of log-probabilities whose dimension `dim` are the classes, against class indices. Inputs as of
/// [`CrossEntropy`]; `spec.smoothing` is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NllLoss {
    /// Ignored class and reduction.
    pub spec: CrossEntropySpec,
    /// The classes' dimension.
    pub dim: usize,
    /// Whether the classes are weighed.
    pub weight: bool,
}

impl OpRule for NllLoss {
    fn name(&self) -> &'static str {
        "nll_loss"
    }

    fn formula(&self) -> &'static str {
        "-w_t x_t at the target t, reduced"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2 + self.weight as usize, inputs)?;
        let dtype = one_float_dtype(&inputs[..1])?;
        let rows = rows(inputs, self.dim, false)?;
        if self.spec.smoothing != 0.0 {
            return Err("label smoothing belongs to cross_entropy, which takes logits".into());
        }
        Ok(one(Spec::new(loss_shape(&self.spec, &rows), dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let logits = &classes_last(&inputs[0], self.dim)?;
        let scores = ClassScores { logits, target: &inputs[1], weight: inputs.get(2), spec: self.spec };
        exec.run(kernel::CrossEntropy { scores, loss: &outputs[0], stats: None })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        let by_weight = self.weight && needs[2];
        let slots = [(by_weight, Slot::In(0)), (true, Slot::In(1)), (self.weight, Slot::In(2))];
        saves(slots.into_iter().filter(|s| s.0).map(|s| s.1))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (g, spec, target) = (&cx.grad0(), self.spec, &cx.saved(Slot::In(1))?);

        let weight = if self.weight { Some(cx.saved(Slot::In(2))?) } else { None };
        let weight = weight.as_ref();
        if self.weight && cx.needs(2) {
            let logits = &classes_last(&cx.saved(Slot::In(0))?, self.dim)?;
            let out = cx.exec(2).empty_like(cx.input(2))?;
            let scores = ClassScores { logits, target, weight, spec };
            cx.exec(2).run(kernel::CrossEntropyWeightGrad { scores, stats: None, g, out: &out })?;
            cx.set(2, out);
        }
        if cx.needs(0) {
            let grad = cx.exec(0).empty_like(cx.input(0))?;
            let out = &classes_last(&grad, self.dim)?;
            cx.exec(0).run(kernel::NllLossGrad { target, weight, g, spec, out })?;
            cx.set(0, grad);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let (rows, taken) = (inputs[1].len(), Spec::new(inputs[1].shape.clone(), inputs[0].dtype).bytes());
        Cost { flops: Cost::times(&[2, rows]), traffic: taken.saturating_add(Cost::touched(&inputs[1..], outputs)) }
    }

    fn samples() -> Vec<Sample> {
        use LossReduction::*;
        let x = SampleInput::random;
        let t = SampleInput::integers;
        let w = |seed, n: usize| SampleInput::new(&[n], SampleValues::Between { seed, low: 0.1, high: 0.9 });
        let op = |reduction, dim, weight| NllLoss {
            spec: CrossEntropySpec { reduction, ..CrossEntropySpec::default() },
            dim,
            weight,
        };
        let mut samples = vec![
            Sample::smooth("one row", op(Mean, 0, false), [x(1, &[4]), t(&[], &[2])]),
            Sample::smooth("no rows", op(Sum, 1, false), [x(2, &[0, 5]), t(&[0], &[])]),
            Sample::smooth("rank 5", op(Mean, 1, false), [x(3, &[2, 3, 1, 2, 1]), t(&[2, 1, 2, 1], &[2, 0, 1, 2])]),
            Sample::kink("all ignored", op(Mean, 1, false), [x(4, &[2, 3]), t(&[2], &[-100, -100])]),
        ];
        for reduction in [None, Sum, Mean] {
            let (plain, full) = (op(reduction, 1, false), op(reduction, 1, true));
            samples.extend([
                Sample::smooth("ordinary", plain, [x(1, &[3, 5]), t(&[3], &[0, 4, -100])]),
                Sample::smooth("weighted", full, [x(2, &[2, 4, 2]), t(&[2, 2], &[3, 0, -100, 2]), w(3, 4)]),
                Sample::smooth(
                    "strided",
                    plain,
                    [x(4, &[4, 6]).lying(SampleMemory::Transposed), t(&[4], &[5, 0, 1, 3])],
                ),
            ]);
        }
        samples
    }
}

impl Var {
    /// Mean cross-entropy of logits `[.., classes]` against class indices `[..]`; rows whose target is `ignore` don't
    /// count (-100 is usual). The loss of bf16 and f16 logits is f32: no tensor of their size, and it isn't rounded.
    /// Backward reads the logits, the targets and two statistics a row.
    pub fn cross_entropy(self, target: impl Into<Var>, ignore: i64) -> Result<Var> {
        let dim = dimension(-1, self.shape().len()).map_err(|reason| self.invalid("cross_entropy", reason))?;
        let spec = CrossEntropySpec { ignore, ..CrossEntropySpec::default() };
        self.apply(CrossEntropy { spec, dim, weight: false, wide: true }, [target.into()])
    }

    /// Cross-entropy with the classes in dimension `dim` (1 for PyTorch's `[N, C, d1, ..]`), against class indices of
    /// the shape without it or distributions of the logits' shape, with a weight for each class. The loss has the
    /// logits' dtype.
    pub fn cross_entropy_with(
        self,
        target: impl Into<Var>,
        weight: Option<Var>,
        dim: isize,
        spec: CrossEntropySpec,
    ) -> Result<Var> {
        let dim = dimension(dim, self.shape().len()).map_err(|reason| self.invalid("cross_entropy", reason))?;
        let op = CrossEntropy { spec, dim, weight: weight.is_some(), wide: false };
        self.apply(op, std::iter::once(target.into()).chain(weight))
    }

    /// The negative log-likelihood of class indices under log-probabilities (`self`) with the classes in dimension
    /// `dim`. Backward reads the targets and the weights.
    pub fn nll_loss(
        self,
        target: impl Into<Var>,
        weight: Option<Var>,
        dim: isize,
        spec: CrossEntropySpec,
    ) -> Result<Var> {
        let dim = dimension(dim, self.shape().len()).map_err(|reason| self.invalid("nll_loss", reason))?;
        let op = NllLoss { spec, dim, weight: weight.is_some() };
        self.apply(op, std::iter::once(target.into()).chain(weight))
    }
}
