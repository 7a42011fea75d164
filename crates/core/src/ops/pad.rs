//! Pad: x with a constant around it; negative widths cut instead. The gradient is g with the negated widths and zeros.

use super::*;
use crate::tape::Var;

/// A constant before and behind the elements of each dimension.
#[derive(Debug, Clone, PartialEq)]
pub struct Pad {
    /// (before, behind) for each dimension; negative ones cut.
    pub widths: SmallVec<[(isize, isize); 4]>,
    /// The constant.
    pub value: f64,
}

impl OpRule for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn formula(&self) -> &'static str {
        "y = x with a constant around it"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let x = &inputs[0].shape;
        if self.widths.len() != x.len() {
            return Err(format!("needs widths for {} dimensions, got {}", x.len(), self.widths.len()));
        }
        let size = |(&n, &(before, behind)): (&usize, &(isize, isize))| {
            let kept = (n as isize).checked_add(before.min(0))?.checked_add(behind.min(0)).filter(|&n| n >= 0)?;
            kept.checked_add(before.max(0))?.checked_add(behind.max(0)).map(|n| n as usize)
        };
        let shape = x.iter().zip(&self.widths).map(size).collect::<Option<Shape>>();
        let shape = shape.ok_or_else(|| {
            format!(
                "the widths {:?} of {x:?} cut away more than there is, or add more than 63 bits can count",
                self.widths
            )
        })?;
        Ok(one(Spec::new(shape, inputs[0].dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        copy_padded(exec, &inputs[0], &outputs[0], &self.widths, self.value)
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let back: SmallVec<[(isize, isize); 4]> = self.widths.iter().map(|&(a, b)| (-a, -b)).collect();
        let cuts_only = back.iter().all(|&(a, b)| a <= 0 && b <= 0);
        if cuts_only {
            cx.set(0, cut(&g, &back)?);
            return Ok(());
        }
        let sum = cx.sum(0)?;
        if sum.is_new {
            copy_padded(&exec, &g, &sum.tensor, &back, 0.0)
        } else {
            exec.add_to(&cut(&sum.tensor, &self.widths)?, &cut(&g, &back)?)
        }
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, widths: &[(isize, isize)], input| {
            Sample::smooth(name, Pad { widths: widths.into(), value: 0.5 }, [input])
        };
        vec![
            s("around", &[(1, 2), (2, 1)], x(1, &[3, 4])),
            s("cut", &[(-1, 0), (-1, -2)], x(2, &[3, 4])),
            s("both", &[(1, -1), (-2, 2)], x(3, &[3, 4])),
            s("to nothing", &[(-1, -2), (1, 0)], x(4, &[3, 4])),
            s("rank 0", &[], x(5, &[])),
            s("rank 5", &[(0, 1), (1, 0), (0, 0), (0, -1), (1, 1)], x(6, &[2, 1, 2, 3, 2])),
            s("transposed", &[(0, 1), (1, 0)], x(7, &[4, 6]).lying(Transposed)),
            s("narrowed", &[(0, -1), (1, 0)], x(8, &[3, 5]).lying(Narrowed)),
            s("expanded", &[(0, 1), (1, 0)], x(9, &[4, 5]).lying(Expanded)),
            s("zero-sized", &[(1, 0), (1, 1)], x(10, &[0, 3])),
        ]
    }
}

/// The part of x that the negative widths leave.
fn cut(x: &Tensor, widths: &[(isize, isize)]) -> Result<Tensor> {
    widths.iter().enumerate().try_fold(x.clone(), |x, (d, &(before, behind))| {
        let (first, last) = (before.min(0).unsigned_abs(), behind.min(0).unsigned_abs());
        x.narrow(d, first, x.shape()[d] - first - last)
    })
}

/// out = value with x, cut where widths are negative, inside it where they are positive.
fn copy_padded(exec: &Exec<'_>, x: &Tensor, out: &Tensor, widths: &[(isize, isize)], value: f64) -> Result<()> {
    exec.run(kernel::Fill { value, out })?;
    let inside: SmallVec<[(isize, isize); 4]> = widths.iter().map(|&(a, b)| (-a, -b)).collect();
    exec.run(kernel::Copy { x: &cut(x, widths)?, out: &cut(out, &inside)? })
}

impl Var {
    /// This with `value` around it: `widths` are (before, behind) for the last dimension, then the one before it, and
    /// so on, flat as in PyTorch; negative ones cut. Backward reads nothing.
    pub fn pad(self, widths: &[isize], value: f64) -> Result<Var> {
        let rank = self.shape().len();
        if !widths.len().is_multiple_of(2) || widths.len() / 2 > rank {
            let reason = format!("needs two widths for each of at most {rank} dimensions, got {}", widths.len());
            return Err(self.invalid("pad", reason));
        }
        let mut pairs = SmallVec::from_elem((0, 0), rank);
        for (pair, width) in pairs.iter_mut().rev().zip(widths.chunks(2)) {
            *pair = (width[0], width[1]);
        }
        self.apply(Pad { widths: pairs, value }, [])
    }
}
