//! Reductions over dimensions. Each function and its derivative stand beside its name in [`ReduceFn`].
//!
//! sum: dx = g repeated. mean = sum / n: dx = g/n repeated. All others read x, and find again what else they need (see
//! [`ReduceFn::in_grad`]) instead of saving it too. amax, amin: g goes to the largest; among equals it is split evenly,
//! so that the gradient's sum is preserved. Which one is the largest is a matter of exact bits, so they (and the norms
//! inf and -inf) read x exactly: lossy formats are refused. var: with m the mean, d sum (x_j - m)^2 / dx_i =
//! 2 (x_i - m), as sum (x_j - m) = 0.

use super::*;
use crate::kernel::UnaryFn;
use crate::layout::dimension;
use crate::tape::Var;

/// Which reduction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reduction {
    /// The mean; NaN of nothing.
    Mean,
    /// One of the kernels'.
    Of(ReduceFn),
}

impl Reduction {
    fn name(self) -> &'static str {
        match self {
            Reduction::Mean => "mean",
            Reduction::Of(ReduceFn::Sum) => "sum",
            Reduction::Of(ReduceFn::Max) => "amax",
            Reduction::Of(ReduceFn::Min) => "amin",
            Reduction::Of(ReduceFn::Prod) => "prod",
            Reduction::Of(ReduceFn::LogSumExp) => "logsumexp",
            Reduction::Of(ReduceFn::Var { .. }) => "var",
            Reduction::Of(ReduceFn::Std { .. }) => "std",
            Reduction::Of(ReduceFn::Norm { .. }) => "vector_norm",
        }
    }

    fn kernel(self) -> ReduceFn {
        match self {
            Reduction::Mean => ReduceFn::Sum,
            Reduction::Of(f) => f,
        }
    }

    /// Has no value for no elements.
    fn needs_elements(self) -> bool {
        match self.kernel() {
            ReduceFn::Max | ReduceFn::Min => true,
            ReduceFn::Norm { ord } => ord < 0.0 || ord == f64::INFINITY,
            _ => false,
        }
    }

    /// Where equal bits decide who gets the gradient.
    fn compares(self) -> bool {
        matches!(self.kernel(), ReduceFn::Max | ReduceFn::Min)
            || matches!(self.kernel(), ReduceFn::Norm { ord } if ord.is_infinite())
    }
}

/// y = reduction of x over `dims` (sorted, without repeats), which keep size 1 or vanish.
#[derive(Debug, Clone, PartialEq)]
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

impl OpRule for ReduceOp {
    fn name(&self) -> &'static str {
        self.f.name()
    }

    fn formula(&self) -> &'static str {
        match self.f {
            Reduction::Mean => "sum(x) / n",
            Reduction::Of(ReduceFn::Sum) => "sum(x)",
            Reduction::Of(ReduceFn::Max) => "max(x)",
            Reduction::Of(ReduceFn::Min) => "min(x)",
            Reduction::Of(ReduceFn::Prod) => "product of x",
            Reduction::Of(ReduceFn::LogSumExp) => "ln sum(e^x)",
            Reduction::Of(ReduceFn::Var { .. }) => "sum((x - mean)^2) / (n - correction)",
            Reduction::Of(ReduceFn::Std { .. }) => "sqrt(var)",
            Reduction::Of(ReduceFn::Norm { .. }) => "sum(|x|^ord)^(1 / ord)",
        }
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
        if self.f.needs_elements() && self.count(x) == 0 {
            return Err(format!(
                "{} of no elements is not defined; reduce a dimension that isn't empty",
                self.f.name()
            ));
        }
        if matches!(self.f.kernel(), ReduceFn::Norm { ord } if ord.is_nan()) {
            return Err("the norm's order is NaN; give a number or an infinity".into());
        }
        let kept = self.kept(x);
        let shape =
            if self.keepdim { kept } else { (0..x.len()).filter(|d| !self.dims.contains(d)).map(|d| x[d]).collect() };
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let x = &inputs[0];
        let out = exec.reshape(outputs[0].clone(), &self.kept(x.shape()))?;
        if self.f != Reduction::Mean {
            return exec.run(kernel::Reduce { f: self.f.kernel(), x, out: &out });
        }
        let (sum, f) = (exec.assemble(&out)?, UnaryFn::Scale(1.0 / self.count(x.shape()) as f64));
        exec.run(kernel::Reduce { f: ReduceFn::Sum, x, out: &sum })?;
        exec.run(kernel::Unary { f, x: &sum, out: &out })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        match self.f.kernel() {
            ReduceFn::Sum => saves([]),
            _ => smallvec![Save { slot: Slot::In(0), exact: self.f.compares() }],
        }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, shape) = (cx.exec(0), &cx.input(0).shape);
        let kept = self.kept(shape);
        let mut g = exec.reshape(cx.grad0(), &kept)?;
        let grad = match self.f {
            Reduction::Of(ReduceFn::Sum) => g.expand(shape)?,
            Reduction::Mean => {
                // Scaled before it is repeated, while it is small.
                let out = exec.replace(&g)?;
                let f = UnaryFn::Scale(1.0 / self.count(shape) as f64);
                exec.run(kernel::Unary { f, x: &g, out: &out })?;
                g = out;
                g.expand(shape)?
            }
            Reduction::Of(f) => {
                let x = cx.saved(Slot::In(0))?;
                let y = exec.workspace(&kept, x.dtype().computed_in())?;
                exec.run(kernel::Reduce { f: f.in_grad(), x: &x, out: &y })?;
                let out = exec.empty(shape, g.dtype())?;
                exec.run(kernel::ReduceGrad { f, x: &x, y: &y, g: &g, out: &out })?;
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
        let norm = |ord| Reduction::Of(ReduceFn::Norm { ord });
        for f in [
            Reduction::Mean,
            Reduction::Of(ReduceFn::Sum),
            Reduction::Of(ReduceFn::Max),
            Reduction::Of(ReduceFn::Min),
            Reduction::Of(ReduceFn::Prod),
            Reduction::Of(ReduceFn::LogSumExp),
            Reduction::Of(ReduceFn::Var { correction: 0.5 }),
            Reduction::Of(ReduceFn::Std { correction: 0.0 }),
            norm(2.0),
            norm(3.5),
            norm(f64::INFINITY),
        ] {
            // The deviation and magnitude of one element have a kink at 0, and their groups must be of two and more.
            let single = matches!(f.kernel(), ReduceFn::Var { .. } | ReduceFn::Std { .. });
            let s = |name, dims: &[usize], keep, input| Sample::smooth(name, op(f, dims, keep), [input]);
            samples.extend([
                s("last", &[1], false, x(1, &[3, 5])),
                s("first", &[0], true, x(2, &[3, 5])),
                s("all", &[0, 1, 2], false, x(3, &[2, 3, 4])),
                s("middle", &[1], false, x(4, &[2, 3, 4])),
                s("outer two", &[0, 2], true, x(5, &[2, 3, 4])),
                s("rank 5", &[1, 4], true, x(6, &[2, 2, 1, 3, 2])),
                s("transposed", &[1], false, x(8, &[4, 6]).lying(Transposed)),
                s("narrowed", &[0], false, x(9, &[5, 37]).lying(Narrowed)),
                s("zero rows", &[1], false, x(11, &[0, 3])),
            ]);
            if !single {
                samples.extend([s("none", &[], false, x(6, &[2, 3])), s("rank 0", &[], false, x(7, &[]))]);
            }
            if !f.needs_elements() {
                samples.push(Sample::kink("nothing to reduce", op(f, &[1], false), [x(1, &[3, 0])]));
            }
            let expanded = op(f, &[0], false);
            samples.push(if f.compares() || matches!(f.kernel(), ReduceFn::Std { .. }) {
                Sample::kink("expanded", expanded, [x(2, &[3, 4]).lying(Expanded)])
            } else {
                Sample::smooth("expanded", expanded, [x(2, &[3, 4]).lying(Expanded)])
            });
        }
        let positive = SampleInput::new(&[3, 5], SampleValues::Between { seed: 12, low: 0.4, high: 2.0 });
        samples.push(Sample::smooth("negative order", op(norm(-1.0), &[1], true), [positive]));
        let ties = SampleInput::floats(&[2, 3], &[1.0, 3.0, 3.0, 2.0, 2.0, 2.0]);
        for f in [Reduction::Of(ReduceFn::Max), Reduction::Of(ReduceFn::Min), norm(f64::INFINITY)] {
            samples.push(Sample::kink("ties", op(f, &[1], false), [ties.clone()]));
        }
        let zeros = SampleInput::floats(&[4, 3], &[1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, -1.0, 2.0, 0.5]);
        let product = op(Reduction::Of(ReduceFn::Prod), &[1], false);
        samples.push(Sample::smooth("zeros", product, [zeros.clone()]));
        for ord in [0.0, 1.0, 2.0, 0.5, 3.0] {
            samples.push(Sample::kink("zeros", op(norm(ord), &[1], false), [zeros.clone()]));
        }
        let constant = SampleInput::floats(&[2, 2], &[1.0, 1.0, 0.0, 2.0]);
        let std = op(Reduction::Of(ReduceFn::Std { correction: 1.0 }), &[1], false);
        samples.push(Sample::kink("no deviation", std, [constant]));
        let inf = f64::NEG_INFINITY;
        let rows = |values: &[f64]| SampleInput::floats(&[values.len() / 4, 4], values);
        let scores = rows(&[
            1e8,
            1e8,
            1e8,
            1e8,
            -1e4,
            -1e4,
            -1e4,
            -1e4,
            1e9,
            1e9,
            -1e9,
            0.0,
            inf,
            inf,
            inf,
            inf,
            0.5,
            inf,
            0.25,
            inf,
            f32::MIN as f64,
            6e4,
            6e4,
            0.0,
        ]);
        for f in [ReduceFn::LogSumExp, ReduceFn::Max] {
            samples.push(Sample::kink("large and masked", op(Reduction::Of(f), &[1], false), [scores.clone()]));
        }
        let far =
            rows(&[1e19, -2e19, 3e19, 1e19, 1e-25, 3e-25, -2e-25, 0.0, 6e4, -6e4, 5e4, 1.0, 2e36, 2e36, -2e36, 1e36]);
        let deviation = Reduction::Of(ReduceFn::Std { correction: 1.0 });
        for f in [deviation, norm(2.0), norm(1.0), norm(3.5), norm(0.5), norm(-1.0), norm(f64::INFINITY)] {
            samples.push(Sample::kink("large and tiny", op(f, &[1], false), [far.clone()]));
        }
        samples
    }
}

impl Var {
    /// Over no dimensions named, over all.
    fn reduce(self, f: Reduction, dims: &[isize], keepdim: bool) -> Result<Var> {
        let rank = self.shape().len();
        let mut found: SmallVec<[usize; 4]> = SmallVec::new();
        for &d in dims {
            if rank == 0 && (d == 0 || d == -1) {
                continue; // a scalar counts as a vector of one element here
            }
            let d = dimension(d, rank).map_err(|reason| self.invalid(f.name(), reason))?;
            if found.contains(&d) {
                return Err(self.invalid(f.name(), format!("dimension {d} is named twice in {dims:?}")));
            }
            found.push(d);
        }
        if dims.is_empty() {
            found.extend(0..rank);
        }
        found.sort_unstable();
        self.apply(ReduceOp { f, dims: found, keepdim }, [])
    }

    /// The sum over all dimensions: a scalar. Backward reads nothing.
    pub fn sum(self) -> Result<Var> {
        self.sum_dims(&[], false)
    }
    /// The sum over `dims` (negative counts from the end; none means all, here and in the reductions below). Backward
    /// reads nothing.
    pub fn sum_dims(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Sum), dims, keepdim)
    }
    /// The mean over all dimensions: a scalar. Backward reads nothing.
    pub fn mean(self) -> Result<Var> {
        self.mean_dims(&[], false)
    }
    /// The mean over `dims`. Backward reads nothing.
    pub fn mean_dims(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Mean, dims, keepdim)
    }
    /// The largest over `dims`; ties share the gradient evenly. Backward reads x, exactly.
    pub fn amax(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Max), dims, keepdim)
    }
    /// The smallest over `dims`; ties share the gradient evenly. Backward reads x, exactly.
    pub fn amin(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Min), dims, keepdim)
    }
    /// The product over `dims`; the gradient is exact with zeros. Backward reads x.
    pub fn prod(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Prod), dims, keepdim)
    }
    /// ln sum e^x over `dims`, without overflow. Backward reads x.
    pub fn logsumexp(self, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::LogSumExp), dims, keepdim)
    }
    /// The variance over `dims`: the sum of squared deviations by n - `correction` (usually 1). Backward reads x.
    pub fn var(self, dims: &[isize], correction: f64, keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Var { correction }), dims, keepdim)
    }
    /// The root of [`var`](Var::var); no gradient where it is 0. Backward reads x.
    pub fn std(self, dims: &[isize], correction: f64, keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Std { correction }), dims, keepdim)
    }
    /// (sum |x|^ord)^(1/ord) over `dims`; ord 0 counts what isn't 0, an infinite one takes the largest or smallest
    /// magnitude. Backward reads x.
    pub fn vector_norm(self, ord: f64, dims: &[isize], keepdim: bool) -> Result<Var> {
        self.reduce(Reduction::Of(ReduceFn::Norm { ord }), dims, keepdim)
    }
    /// x / max(norm of order `ord` over `dim`, eps): by vectors of that norm. An eps that f16 doesn't hold counts as
    /// the smallest number that it holds, so that zeros stay zeros. Backward reads x and the norms.
    pub fn normalize(self, ord: f64, dim: isize, eps: f64) -> Result<Var> {
        let smallest = if self.dtype() == DType::F16 { 2f64.powi(-24) } else { 0.0 };
        let eps = if eps > 0.0 { eps.max(smallest) } else { eps };
        let norm = self.clone().vector_norm(ord, &[dim], true)?.clamp(eps, f64::INFINITY)?;
        self.div(norm)
    }
}
