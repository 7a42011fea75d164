//! Reductions over dimensions.
//!
//! sum: dx = g repeated. mean = sum / n: dx = g/n repeated. max: g goes to the largest; among equals it is split
//! evenly, so that the gradient's sum is preserved. Which one is the largest is a matter of exact bits, so max reads x
//! exactly (int8 is refused), and finds the largest again instead of saving it too.

use super::*;
use crate::kernel::Unary;
use crate::layout::dimension;
use crate::tape::Var;

/// Which reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum; 0 of nothing.
    Sum,
    /// The mean; NaN of nothing.
    Mean,
    /// The largest; of nothing an error.
    Max,
}

/// y = reduction of x over `dims` (sorted, without repeats), which keep size 1 or vanish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReduceOp {
    /// Which reduction.
    pub f: Reduction,
    /// The dimensions to reduce.
    pub dims: SmallVec<[usize; 4]>,
    /// Whether they stay, with size 1.
    pub keepdim: bool,
}

impl ReduceOp {
    /// The shape with size 1 in the reduced dimensions.
    fn kept(&self, x: &[usize]) -> Shape {
        x.iter().enumerate().map(|(d, &n)| if self.dims.contains(&d) { 1 } else { n }).collect()
    }
    fn count(&self, x: &[usize]) -> usize {
        self.dims.iter().map(|&d| x[d]).product()
    }
}

impl Rule for ReduceOp {
    fn name(&self) -> &'static str {
        self.f.name()
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let x = &inputs[0].shape;
        if let Some(d) = self.dims.iter().find(|&&d| d >= x.len()) {
            return Err(format!("dimension {d} is not in a tensor of rank {}", x.len()));
        }
        if !self.dims.is_sorted_by(|a, b| a < b) {
            return Err(format!("the dimensions must be in order and without repeats, got {:?}", self.dims));
        }
        if self.f == Reduction::Max && self.count(x) == 0 {
            return Err("the largest of no elements is not defined; reduce a dimension that isn't empty".into());
        }
        let kept = self.kept(x);
        let shape =
            if self.keepdim { kept } else { (0..x.len()).filter(|d| !self.dims.contains(d)).map(|d| x[d]).collect() };
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let x = &inputs[0];
        let f = if self.f == Reduction::Max { Reduce::Max } else { Reduce::Sum };
        let out = exec.reshape(outputs[0].clone(), &self.kept(x.shape()))?;
        exec.run(Kernel::Reduce { f, x, out: &out })?;
        if self.f == Reduction::Mean {
            let f = Unary::Scale(1.0 / self.count(x.shape()) as f64);
            exec.run(Kernel::Unary { f, x: &out, out: &out })?;
        }
        Ok(())
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        match self.f {
            Reduction::Max => smallvec![Save { slot: Slot::In(0), exact: true }],
            Reduction::Sum | Reduction::Mean => saves([]),
        }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, shape) = (cx.exec(0), &cx.input(0).shape);
        let kept = self.kept(shape);
        let mut g = exec.reshape(cx.grad0(), &kept)?;
        let grad = match self.f {
            Reduction::Sum => g.expand(shape)?,
            Reduction::Mean => {
                // Scaled before it is repeated, while it is small.
                let out = exec.replace(&g)?;
                let f = Unary::Scale(1.0 / self.count(shape) as f64);
                exec.run(Kernel::Unary { f, x: &g, out: &out })?;
                g = out;
                g.expand(shape)?
            }
            Reduction::Max => {
                let x = cx.saved(Slot::In(0))?;
                let y = exec.workspace(&kept, x.dtype())?;
                exec.run(Kernel::Reduce { f: Reduce::Max, x: &x, out: &y })?;
                let out = exec.empty(shape, g.dtype())?;
                exec.run(Kernel::MaxGrad { x: &x, y: &y, g: &g, out: &out })?;
                out
            }
        };
        cx.set(0, grad);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost { flops: inputs[0].len() as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let op = |f, dims: &[usize], keepdim| ReduceOp { f, dims: dims.into(), keepdim };
        let x = SampleInput::random;
        let mut samples = Vec::new();
        for f in [Reduction::Sum, Reduction::Mean, Reduction::Max] {
            let s = |name, dims: &[usize], keep, input| Sample::smooth(name, op(f, dims, keep), [input]);
            samples.extend([
                s("last", &[1], false, x(1, &[3, 5])),
                s("first", &[0], true, x(2, &[3, 5])),
                s("all", &[0, 1, 2], false, x(3, &[2, 3, 4])),
                s("middle", &[1], false, x(4, &[2, 3, 4])),
                s("outer two", &[0, 2], true, x(5, &[2, 3, 4])),
                s("none", &[], false, x(6, &[2, 3])),
                s("rank 0", &[], false, x(7, &[])),
                s("transposed", &[1], false, x(8, &[4, 6]).lying(Transposed)),
                s("narrowed", &[0], false, x(9, &[5, 37]).lying(Narrowed)),
                s("zero rows", &[1], false, x(11, &[0, 3])),
            ]);
        }
        samples.push(Sample::smooth("sum of nothing", op(Reduction::Sum, &[1], false), [x(1, &[3, 0])]));
        let ties = SampleInput::floats(&[2, 3], &[1.0, 3.0, 3.0, 2.0, 2.0, 2.0]);
        samples.push(Sample::kink("ties", op(Reduction::Max, &[1], false), [ties]));
        samples.push(Sample::kink("expanded", op(Reduction::Max, &[0], false), [x(2, &[3, 4]).lying(Expanded)]));
        samples.push(Sample::smooth("expanded", op(Reduction::Sum, &[0], false), [x(2, &[3, 4]).lying(Expanded)]));
        samples
    }
}

impl Var {
    fn reduce(&self, f: Reduction, dims: &[isize], keepdim: bool) -> Result<Var> {
        let rank = self.shape().len();
        let mut found: SmallVec<[usize; 4]> = SmallVec::new();
        for &d in dims {
            let d = dimension(d, rank).map_err(|reason| self.invalid(f.name(), reason))?;
            if found.contains(&d) {
                return Err(self.invalid(f.name(), format!("dimension {d} is named twice in {dims:?}")));
            }
            found.push(d);
        }
        found.sort_unstable();
        self.apply(ReduceOp { f, dims: found, keepdim }, &[])
    }

    /// The sum over all dimensions: a scalar. Backward reads nothing.
    pub fn sum(&self) -> Result<Var> {
        self.sum_dims(&(0..self.shape().len() as isize).collect::<Vec<_>>(), false)
    }
    /// The sum over `dims` (negative counts from the end). Backward reads nothing.
    pub fn sum_dims(&self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Sum, dims, keepdim)
    }
    /// The mean over all dimensions: a scalar. Backward reads nothing.
    pub fn mean(&self) -> Result<Var> {
        self.mean_dims(&(0..self.shape().len() as isize).collect::<Vec<_>>(), false)
    }
    /// The mean over `dims`. Backward reads nothing.
    pub fn mean_dims(&self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Mean, dims, keepdim)
    }
    /// The largest over `dims`; ties share the gradient evenly. Backward reads x, exactly.
    pub fn amax(&self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Max, dims, keepdim)
    }
}

impl Reduction {
    fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
            Reduction::Max => "max",
        }
    }
}
