//! Cross-entropy of class scores, the loss of log-probabilities, and their gradients.

use super::check::{Check, Operands, Primitive, operands};
use crate::{Result, Tensor};

/// How a loss comes from the losses of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum LossReduction {
    /// Each by itself.
    None,
    /// Their sum.
    Sum,
    /// Their sum divided by what counts: see [`CrossEntropySpec`].
    Mean,
}

/// Cross-entropy of class scores: with q the target distribution of a row, (1 - smoothing) p + smoothing / classes
/// where p is the given distribution or all on the target class, and class weights w (1 if absent), the loss of a row
/// is sum over c of w_c q_c (-ln p_c), p the softmax: a class without a share counts 0, were its score -inf. A row of
/// only -inf has the loss inf and gradients 0. Rows whose target is `ignore` have loss 0. The mean divides by the sum
/// of the targets' weights over rows that count; with distributions as targets by the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CrossEntropySpec {
    /// The class index of rows that don't count.
    pub ignore: i64,
    /// What is returned.
    pub reduction: LossReduction,
    /// Share of the target that is spread evenly over all classes (Szegedy et al. 2016).
    pub smoothing: f64,
}

/// The mean, -100 ignored, no smoothing.
impl Default for CrossEntropySpec {
    fn default() -> CrossEntropySpec {
        CrossEntropySpec { ignore: -100, reduction: LossReduction::Mean, smoothing: 0.0 }
    }
}

/// Scores of classes, and what they are compared with. Rows are the scores of one thing.
#[derive(Debug, Clone, Copy)]
pub struct ClassScores<'a> {
    /// `[.., classes]`: logits, or log-probabilities where a kernel goes without statistics.
    pub logits: &'a Tensor,
    /// Class indices `[..]` (i64 or i32) or distributions `[.., classes]`. A class that is neither there nor ignored is
    /// an InvalidValue error.
    pub target: &'a Tensor,
    /// `[classes]`; 1 if absent.
    pub weight: Option<&'a Tensor>,
    /// Which cross-entropy.
    pub spec: CrossEntropySpec,
}

impl<'a> ClassScores<'a> {
    /// The scores' rows.
    fn rows(&self) -> &'a [usize] {
        rows(self.logits)
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check_scores(check, self.logits, Some(self.target), self.weight)
    }
}

/// Loss `[]`, or `[..]` unreduced (a mean over nothing is NaN).
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy<'a> {
    /// What is compared.
    pub scores: ClassScores<'a>,
    /// Written.
    pub loss: &'a Tensor,
    /// Written: `[.., 2]`, for every row its largest logit m and log = ln sum e^(x - m), so that ln p = (x - m) - log;
    /// (-inf, 0) of a row of only -inf. (Their sum in one number would lose the second where logits are large.) Without
    /// `stats` the logits are log-probabilities.
    pub stats: Option<&'a Tensor>,
}

impl<'a> Primitive<'a> for CrossEntropy<'a> {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self.scores => logits: Read Float, target: Read IndexOrFloat, weight: Read Float;
            self => loss: Write Float, stats: Write Statistic
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        self.scores.check(check)?;
        check_loss(check, "loss", self.loss, self.scores.logits, self.scores.spec)?;
        self.stats.map_or(Ok(()), |stats| check.row_stats(stats, self.scores.rows()))
    }
}

/// Gradient by the logits: out = g (softmax sum(w q) - w q) / count with softmax = exp((logits - m) - log), 0 in
/// ignored rows (all rows 0 if every one is ignored) and in those of only -inf.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyGrad<'a> {
    /// What was compared. The logits may be `out`.
    pub scores: ClassScores<'a>,
    /// As [`CrossEntropy`] wrote it.
    pub stats: &'a Tensor,
    /// Gradient by the loss, of its shape.
    pub g: &'a Tensor,
    /// Written: of the logits' shape, any strides.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for CrossEntropyGrad<'a> {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self.scores => logits: ReadInPlace Float, target: Read IndexOrFloat, weight: Read Float;
            self => stats: Read Statistic, g: Read Float, out: WriteStrided Float
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let ClassScores { logits, spec, .. } = self.scores;
        self.scores.check(check)?;
        check_loss(check, "g", self.g, logits, spec)?;
        check.shape("out", self.out, logits.shape())?;
        check.row_stats(self.stats, self.scores.rows())
    }
}

/// Gradient by log-probabilities of class indices: out = -g w / count at the target, 0 elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct NllLossGrad<'a> {
    /// Class indices `[..]`, i64 or i32.
    pub target: &'a Tensor,
    /// `[classes]`; 1 if absent.
    pub weight: Option<&'a Tensor>,
    /// Gradient by the loss, of its shape.
    pub g: &'a Tensor,
    /// Which cross-entropy.
    pub spec: CrossEntropySpec,
    /// Written: `[.., classes]`, any strides.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for NllLossGrad<'a> {
    fn name(&self) -> &'static str {
        "nll_loss_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![self => target: Read Index, weight: Read Float, g: Read Float, out: WriteStrided Float]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check_scores(check, self.out, Some(self.target), self.weight)?;
        check_loss(check, "g", self.g, self.out, self.spec)
    }
}

/// Gradient by target distributions: out = g (1 - smoothing) w ((m - logits) + log) / count.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyTargetGrad<'a> {
    /// `[.., classes]`.
    pub logits: &'a Tensor,
    /// `[classes]`; 1 if absent.
    pub weight: Option<&'a Tensor>,
    /// As [`CrossEntropy`] wrote it.
    pub stats: &'a Tensor,
    /// Gradient by the loss, of its shape.
    pub g: &'a Tensor,
    /// Which cross-entropy.
    pub spec: CrossEntropySpec,
    /// Written: of the logits' shape, any strides.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for CrossEntropyTargetGrad<'a> {
    fn name(&self) -> &'static str {
        "cross_entropy_target_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self => logits: Read Float, weight: Read Float, stats: Read Statistic, g: Read Float,
            out: WriteStrided Float
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check_scores(check, self.logits, None, self.weight)?;
        check_loss(check, "g", self.g, self.logits, self.spec)?;
        check.shape("out", self.out, self.logits.shape())?;
        check.row_stats(self.stats, rows(self.logits))
    }
}

/// Gradient by the class weights, the mean's divisor included.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropyWeightGrad<'a> {
    /// What was compared, with a weight.
    pub scores: ClassScores<'a>,
    /// As in [`CrossEntropy`].
    pub stats: Option<&'a Tensor>,
    /// Gradient by the loss, of its shape.
    pub g: &'a Tensor,
    /// Written: `[classes]`.
    pub out: &'a Tensor,
}

impl<'a> Primitive<'a> for CrossEntropyWeightGrad<'a> {
    fn name(&self) -> &'static str {
        "cross_entropy_weight_grad"
    }
    fn operands(&self) -> Operands<'a> {
        operands![
            self.scores => logits: Read Float, target: Read IndexOrFloat, weight: Read Float;
            self => stats: Read Statistic, g: Read Float, out: Write Float
        ]
    }
    fn check(&self, check: &Check<'_>) -> Result<()> {
        let ClassScores { logits, weight, spec, .. } = self.scores;
        self.scores.check(check)?;
        check_loss(check, "g", self.g, logits, spec)?;
        let weight = weight.ok_or_else(|| check.wrong("there is no weight to derive by".into()))?;
        check.shape("out", self.out, weight.shape())?;
        self.stats.map_or(Ok(()), |stats| check.row_stats(stats, self.scores.rows()))
    }
}

/// The shape of what has one number for each row; there is a dimension of classes.
fn rows(logits: &Tensor) -> &[usize] {
    &logits.shape()[..logits.rank() - 1]
}

fn check_scores(check: &Check<'_>, logits: &Tensor, target: Option<&Tensor>, weight: Option<&Tensor>) -> Result<()> {
    let Some((&classes, rows)) = logits.shape().split_last().filter(|(classes, _)| **classes > 0) else {
        return Err(check.wrong(format!("needs at least one class, got {:?}", logits.shape())));
    };
    if let Some(target) = target {
        let right = if target.dtype().is_float() { logits.shape() } else { rows };
        check.shape("target", target, right)?;
    }
    weight.map_or(Ok(()), |w| check.shape("weight", w, &[classes]))
}

/// Fails unless a tensor has the shape of the loss.
fn check_loss(check: &Check<'_>, name: &str, loss: &Tensor, logits: &Tensor, spec: CrossEntropySpec) -> Result<()> {
    check.shape(name, loss, if spec.reduction == LossReduction::None { rows(logits) } else { &[] })
}
