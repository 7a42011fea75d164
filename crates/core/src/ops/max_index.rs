//! The largest along a dimension, and where it stands: `y = x[k]`, k the first index of the largest. The gradient
//! goes to that one element, as if k were given: ties aren't shared (unlike amax), because y names one of them.

use super::*;
use crate::layout::dimension;
use crate::tape::Var;

/// (largest, its first index as i64) along a dimension, which keeps size 1 or vanishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxIndex {
    /// The dimension.
    pub dim: usize,
    /// Whether it stays, with size 1.
    pub keepdim: bool,
}

impl MaxIndex {
    fn kept(&self, x: &[usize]) -> Shape {
        let mut shape: Shape = x.into();
        shape[self.dim] = 1;
        shape
    }
}

impl OpRule for MaxIndex {
    fn name(&self) -> &'static str {
        "max"
    }

    fn formula(&self) -> &'static str {
        "`y = x[k]`, k the first index of the largest; and k"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let x = &inputs[0].shape;
        match x.get(self.dim) {
            None => return Err(format!("dimension {} is not in a tensor of rank {}", self.dim, x.len())),
            Some(0) => {
                return Err("the largest of no elements is not defined; take a dimension that isn't empty".into());
            }
            Some(_) => {}
        }
        let mut shape = self.kept(x);
        if !self.keepdim {
            shape.remove(self.dim);
        }
        Ok(smallvec![Output::new(shape.clone(), dtype), Output::new(shape, DType::I64)])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (x, kept) = (&inputs[0], self.kept(inputs[0].shape()));
        let values = exec.reshape(outputs[0].clone(), &kept)?;
        let indices = exec.reshape(outputs[1].clone(), &kept)?;
        exec.run(kernel::MaxIndex { x, dim: self.dim, values: &values, indices: &indices })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::Out(1)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let exec = cx.exec(0);
        let kept = self.kept(&cx.input(0).shape);
        let g = exec.reshape(cx.grad0(), &kept)?;
        let indices = exec.reshape(cx.saved(Slot::Out(1))?, &kept)?;
        let out = exec.empty_like(cx.input(0))?;
        exec.run(kernel::MaxIndexGrad { indices: &indices, g: &g, dim: self.dim, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: inputs[0].len() as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let op = |dim, keepdim| MaxIndex { dim, keepdim };
        let s = |name, dim, keepdim, input| Sample::smooth(name, op(dim, keepdim), [input]);
        vec![
            s("last", 1, false, x(1, &[3, 5])),
            s("first", 0, true, x(2, &[3, 5])),
            s("middle", 1, false, x(3, &[2, 3, 4])),
            s("rank 5", 3, true, x(4, &[2, 1, 3, 4, 2])),
            s("transposed", 1, false, x(5, &[4, 6]).lying(Transposed)),
            s("narrowed", 0, false, x(6, &[5, 37]).lying(Narrowed)),
            s("zero rows", 1, false, x(7, &[0, 3])),
            Sample::kink("ties", op(0, false), [x(8, &[3, 4]).lying(Expanded)]),
        ]
    }
}

impl Var {
    /// The largest along `dim` and its index (i64, the first of equals, to which the gradient goes). Backward reads the
    /// indices.
    pub fn max_dim(self, dim: isize, keepdim: bool) -> Result<(Var, Var)> {
        let rank = self.shape().len();
        let found = dimension(dim, rank.max(1)).map_err(|reason| self.invalid("max", reason))?;
        if rank == 0 {
            let (y, k) = self.reshape(&[1])?.max_dim(0, false)?;
            return Ok((y, k));
        }
        let mut outputs = self.apply_all(MaxIndex { dim: found, keepdim }, [])?.into_iter();
        Ok((outputs.next().expect("values"), outputs.next().expect("indices")))
    }
}
