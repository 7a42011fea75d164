//! Roll: `y[i] = x[(i - shift) mod n]` along some dimensions. The gradient is g, rolled back.

use super::*;
use crate::tape::Var;

/// Dimensions shifted cyclically.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roll {
    /// (dimension, shift) with shifts below the dimension's size (0 where that is 0).
    pub shifts: SmallVec<[(usize, usize); 2]>,
}

impl OpRule for Roll {
    fn name(&self) -> &'static str {
        "roll"
    }

    fn formula(&self) -> &'static str {
        "y[i] = x[(i - shift) mod n]"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let x = &inputs[0].shape;
        if self.shifts.iter().any(|&(d, shift)| d >= x.len() || shift >= x[d].max(1)) {
            return Err(format!("the (dimension, shift) {:?} must be within the shape", self.shifts));
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        copy_rolled(exec, &inputs[0], &outputs[0], &self.shifts)
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty_like(cx.input(0))?;
        let back: SmallVec<[(usize, usize); 2]> =
            self.shifts.iter().map(|&(d, shift)| (d, if shift == 0 { 0 } else { g.shape()[d] - shift })).collect();
        copy_rolled(&exec, &g, &out, &back)?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: 0, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, shifts: &[(usize, usize)], input| Sample::smooth(name, Roll { shifts: shifts.into() }, [input]);
        vec![
            s("last", &[(1, 2)], x(1, &[3, 5])),
            s("two", &[(0, 1), (1, 4)], x(2, &[3, 5])),
            s("rank 5", &[(2, 2), (3, 0), (4, 1)], x(3, &[2, 1, 3, 2, 2])),
            s("none of rank 0", &[], x(4, &[])),
            s("transposed", &[(1, 5)], x(5, &[4, 6]).lying(Transposed)),
            s("narrowed", &[(0, 2), (1, 30)], x(6, &[3, 37]).lying(Narrowed)),
            s("expanded", &[(1, 1)], x(7, &[4, 5]).lying(Expanded)),
            s("zero-sized", &[(0, 1), (1, 0)], x(8, &[2, 0, 3])),
        ]
    }
}

/// out = x shifted, block by block: each shift cuts a dimension in two.
fn copy_rolled(exec: &Exec<'_>, x: &Tensor, out: &Tensor, shifts: &[(usize, usize)]) -> Result<()> {
    match *shifts {
        [] => exec.run(kernel::Copy { x, out }),
        [(_, 0), ref rest @ ..] => copy_rolled(exec, x, out, rest),
        [(d, shift), ref rest @ ..] => {
            let kept = x.shape()[d] - shift;
            copy_rolled(exec, &x.narrow(d, 0, kept)?, &out.narrow(d, shift, kept)?, rest)?;
            copy_rolled(exec, &x.narrow(d, kept, shift)?, &out.narrow(d, 0, shift)?, rest)
        }
    }
}

impl Var {
    /// The elements shifted cyclically by `shifts[i]` places along `dims[i]` (negative counts from the end; negative
    /// shifts go towards the front): a copy. Backward reads nothing.
    pub fn roll_dims(self, shifts: &[isize], dims: &[isize]) -> Result<Var> {
        if shifts.len() != dims.len() || shifts.is_empty() {
            let (s, d) = (shifts.len(), dims.len());
            return Err(self.invalid("roll", format!("needs one shift for each dimension, got {s} for {d}")));
        }
        let shape = self.shape();
        let mut places: SmallVec<[(usize, usize); 2]> = SmallVec::new();
        for (&shift, &d) in shifts.iter().zip(dims) {
            let d = self.dim("roll", d)?;
            let n = shape[d].max(1);
            let shift = shift.rem_euclid(n as isize) as usize;
            match places.iter_mut().find(|(named, _)| *named == d) {
                Some((_, sum)) => *sum = (*sum + shift) % n,
                None => places.push((d, shift)),
            }
        }
        self.apply(Roll { shifts: places }, [])
    }

    /// The elements in row-major order shifted cyclically by `shift` places: a copy. Backward reads nothing.
    pub fn roll(self, shift: isize) -> Result<Var> {
        let shape = self.shape();
        self.flatten(0, -1)?.roll_dims(&[shift], &[0])?.reshape(&shape)
    }
}
