//! Softmax cross-entropy: loss = sum over rows of lse - logits[target], lse = max + ln sum exp(logits - max).
//! The gradient is (softmax - onehot) / count; nothing of the logits' size is held besides its result.

use crate::exec::Exec;
use crate::math::Float;
use crate::softmax::{for_each_row, row_max, sum_exp};
use crate::view::{BLOCK, Rows, Span, for_float, lanes, unsupported};
use retape_core::{DType, Error, Result, Tensor};

/// The integers of an index tensor, widened, in row-major order.
pub(crate) fn integers(kernel: &'static str, tensor: &Tensor) -> Result<Vec<i64>> {
    fn read<T: Copy + Default>(tensor: &Tensor, widen: impl Fn(T) -> i64) -> Vec<i64> {
        let rows = Rows::<T>::of(tensor);
        let values = (0..rows.count).flat_map(|r| {
            let row = rows.row(r);
            (0..row.len()).map(move |i| row.get(i))
        });
        values.map(widen).collect()
    }
    match tensor.dtype() {
        DType::I64 => Ok(read::<i64>(tensor, |v| v)),
        DType::I32 => Ok(read::<i32>(tensor, i64::from)),
        other => Err(unsupported(kernel, other)),
    }
}

/// Each row's target, or `None` where it is `ignore`.
fn targets(kernel: &'static str, target: &Tensor, classes: usize, ignore: i64) -> Result<Vec<Option<usize>>> {
    let check = |(row, id): (usize, i64)| match usize::try_from(id) {
        _ if id == ignore => Ok(None),
        Ok(class) if class < classes => Ok(Some(class)),
        _ => {
            let reason = format!("target {id} in row {row} is neither in 0..{classes} nor the ignored value {ignore}");
            Err(Error::InvalidValue { kernel, reason })
        }
    };
    integers(kernel, target)?.into_iter().enumerate().map(check).collect()
}

/// What each row's loss is divided by.
fn count(targets: &[Option<usize>], mean: bool) -> f64 {
    if mean { targets.iter().flatten().count() as f64 } else { 1.0 }
}

pub(crate) fn cross_entropy(
    exec: &Exec,
    logits: &Tensor,
    target: &Tensor,
    (ignore, mean): (i64, bool),
    loss: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    let targets = targets("cross_entropy", target, logits.shape()[1], ignore)?;
    for_float!("cross_entropy", logits.dtype(), T => {
        let (xs, lses) = (Rows::<T>::of(logits), Span::<T>::of(lse));
        for_each_row::<T>(exec, xs.count, xs.width, 12, #[inline(always)] |r| {
            let x = xs.row(r);
            let max = row_max(x);
            // A row of only -inf, or with +inf: the sum would be NaN, the limit is the maximum itself.
            let finite = max > -T::INFINITY && max < T::INFINITY;
            lses.set(r, if finite { max + Float::ln(sum_exp(x, max)) } else { max });
        });
        let losses = targets.iter().enumerate().filter_map(|(r, t)| t.map(|t| (r, t)));
        let sum: f64 = losses.map(|(r, t)| lses.get(r).wide() - xs.row(r).get(t).wide()).sum();
        Span::<T>::of(loss).set(0, T::of(sum / count(&targets, mean)));
    });
    Ok(())
}

/// Operands of [`cross_entropy_grad`].
#[derive(Debug)]
pub(crate) struct CrossEntropyGrad<'a> {
    pub logits: &'a Tensor,
    pub target: &'a Tensor,
    pub lse: &'a Tensor,
    pub g: &'a Tensor,
    pub ignore: i64,
    pub mean: bool,
    pub out: &'a Tensor,
}

pub(crate) fn cross_entropy_grad(exec: &Exec, op: CrossEntropyGrad<'_>) -> Result<()> {
    let targets = targets("cross_entropy_grad", op.target, op.logits.shape()[1], op.ignore)?;
    for_float!("cross_entropy_grad", op.logits.dtype(), T => {
        let (xs, outs) = (Rows::<T>::of(op.logits), Rows::<T>::of(op.out));
        let (lses, g) = (Rows::<T>::of(op.lse).row(0), Span::<T>::of(op.g).get(0));
        let scale = T::of(g.wide() / count(&targets, op.mean));
        for_each_row::<T>(exec, xs.count, xs.width, 10, #[inline(always)] |r| {
            let (x, o, lse) = (xs.row(r), outs.row(r), lses.get(r));
            let Some(target) = targets[r] else {
                return o.fill(T::ZERO);
            };
            for i in (0..o.len()).step_by(BLOCK) {
                let v = x.load::<BLOCK>(i, T::ZERO);
                o.store(i, lanes!(j => scale * Float::exp(v[j] - lse)));
            }
            o.set(target, o.get(target) - scale);
        });
    });
    Ok(())
}
