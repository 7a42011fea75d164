//! Cross-entropy of logits z and class indices t: the mean (or sum) over rows of lse(z) - z_t, rows whose target is
//! `ignore` left out. dz = g (softmax(z) - onehot(t)) / count, 0 in ignored rows; softmax(z) = exp(z - lse), so only the
//! logits, the targets and one number a row are kept, and the gradient overwrites the logits where nobody else holds
//! them: there is no second tensor of their size. With every target ignored the mean is NaN and the gradients are 0.

use super::*;
use crate::tape::Var;

/// The loss of logits `[rows, classes]` against targets `[rows]`. Outputs: the loss `[]`, and the log-sum-exp `[rows]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropy {
    /// Rows with this target don't count.
    pub ignore: i64,
    /// Divide by the number of rows that count.
    pub mean: bool,
}

impl Rule for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2, inputs)?;
        let dtype = one_float_dtype(&inputs[..1])?;
        let (logits, target) = (&inputs[0], &inputs[1]);
        if logits.shape.len() != 2 || logits.shape[1] == 0 || !matches!(target.dtype, DType::I64 | DType::I32) {
            return Err(
                "needs logits [rows, classes] with at least one class and targets [rows] of dtype i64 or i32".into()
            );
        }
        if target.shape[..] != logits.shape[..1] {
            return Err(format!("{} rows of logits need as many targets", logits.shape[0]));
        }
        Ok(smallvec![Output::new(Shape::new(), dtype), Output::statistic(&logits.shape[..1], dtype)])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(Kernel::CrossEntropy {
            logits: &inputs[0],
            target: &inputs[1],
            ignore: self.ignore,
            mean: self.mean,
            loss: &outputs[0],
            lse: &outputs[1],
        })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::In(0), Slot::In(1), Slot::Out(1)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let logits = cx.saved(Slot::In(0))?;
        let (target, lse) = (cx.saved(Slot::In(1))?, cx.saved(Slot::Out(1))?);
        let out = exec.replace(&logits)?;
        exec.run(Kernel::CrossEntropyGrad {
            logits: &logits,
            target: &target,
            lse: &lse,
            g: &g,
            ignore: self.ignore,
            mean: self.mean,
            out: &out,
        })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 3 * inputs[0].len() as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let t = SampleInput::integers;
        let mean = CrossEntropy { ignore: -100, mean: true };
        let s = |name, logits, target| Sample::smooth(name, mean, [logits, target]);
        let far = SampleInput::floats(&[2, 3], &[-1e4, 0.0, 1e4, 300.0, -300.0, 0.0]);
        vec![
            s("ordinary", x(1, &[3, 5]), t(&[3], &[0, 4, 2])),
            s("ignored rows", x(2, &[4, 3]), t(&[4], &[0, -100, 2, -100])),
            s("one class", x(3, &[3, 1]), t(&[3], &[0, 0, 0])),
            s("transposed", x(4, &[4, 6]).lying(SampleMemory::Transposed), t(&[4], &[5, 0, 1, 3])),
            s("many classes", x(5, &[2, 301]), t(&[2], &[300, 7])),
            Sample::smooth("sum", CrossEntropy { mean: false, ..mean }, [x(6, &[3, 5]), t(&[3], &[0, 4, 2])]),
            Sample::smooth("sum of no rows", CrossEntropy { mean: false, ..mean }, [x(7, &[0, 5]), t(&[0], &[])]),
            Sample::kink("all ignored", mean, [x(8, &[2, 3]), t(&[2], &[-100, -100])]),
            Sample::kink("extreme", mean, [far, t(&[2], &[0, 1])]),
        ]
    }
}

impl Var {
    /// Mean cross-entropy of logits `[.., classes]` against class indices `[..]`; rows whose target is `ignore` don't
    /// count (-100 is usual). Backward reads the logits, the targets and the log-sum-exp.
    pub fn cross_entropy(&self, target: &Var, ignore: i64) -> Result<Var> {
        self.cross_entropy_with(target, CrossEntropy { ignore, mean: true })
    }

    /// As [`cross_entropy`](Var::cross_entropy), with the sum over rows in place of the mean where asked.
    pub fn cross_entropy_with(&self, target: &Var, op: CrossEntropy) -> Result<Var> {
        let shape = self.shape();
        match shape.split_last() {
            Some((&classes, rows)) if shape.len() != 2 && target.shape()[..] == *rows => {
                let rows: usize = rows.iter().product();
                let logits = self.reshape(&[rows, classes])?;
                logits.apply(op, &[&target.reshape(&[rows])?])
            }
            _ => self.apply(op, &[target]),
        }
    }
}
