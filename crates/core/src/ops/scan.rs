//! Running sums and products along a dimension.
//!
//! cumsum: y_k = sum over i <= k of x_i, so dx_i = sum over k >= i of g_k. cumprod: dx_i = sum over k >= i of
//! g_k prod over j <= k, j != i of x_j = P_i S_i with P_i the product of all before i, and S_i = g_i + x_(i+1) S_(i+1):
//! one pass each way and no division, so that zeros are exact.

use super::*;
use crate::kernel::ScanFn;
use crate::layout::dimension;
use crate::tape::Var;

/// y = running fold of x along a dimension. f is Sum or Prod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanOp {
    /// Sum or Prod.
    pub f: ScanFn,
    /// The dimension.
    pub dim: usize,
}

impl OpRule for ScanOp {
    fn name(&self) -> &'static str {
        if self.f == ScanFn::Prod { "cumprod" } else { "cumsum" }
    }

    fn formula(&self) -> &'static str {
        match self.f {
            ScanFn::Sum => "y_k = sum of x_i, i <= k",
            ScanFn::SumToEnd => "y_k = sum of x_i, i >= k",
            ScanFn::Prod => "y_k = product of x_i, i <= k",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        one_float_dtype(inputs)?;
        let rank = inputs[0].shape.len();
        if self.dim >= rank || self.f == ScanFn::SumToEnd {
            return Err(format!(
                "scans Sum or Prod along a dimension below {rank}, not {:?} along {}",
                self.f, self.dim
            ));
        }
        Ok(one(inputs[0].clone()))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        exec.run(kernel::Scan { f: self.f, x: &inputs[0], dim: self.dim, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        if self.f == ScanFn::Prod { saves([Slot::In(0)]) } else { saves([]) }
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g, dim) = (cx.exec(0), cx.grad0(), self.dim);
        let out = if self.f == ScanFn::Prod {
            let x = cx.saved(Slot::In(0))?;
            let out = exec.empty(g.shape(), g.dtype())?;
            exec.run(kernel::CumprodGrad { x: &x, g: &g, dim, out: &out })?;
            out
        } else {
            let out = exec.replace(&g)?;
            exec.run(kernel::Scan { f: ScanFn::SumToEnd, x: &g, dim, out: &out })?;
            out
        };
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(1, inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let mut samples = Vec::new();
        for f in [ScanFn::Sum, ScanFn::Prod] {
            let s = |name, dim, input| Sample::smooth(name, ScanOp { f, dim }, [input]);
            samples.extend([
                s("last", 1, x(1, &[3, 5])),
                s("first", 0, x(2, &[3, 5])),
                s("middle", 1, x(3, &[2, 3, 4])),
                s("rank 5", 3, x(4, &[2, 1, 3, 4, 2])),
                s("transposed", 1, x(5, &[4, 6]).lying(Transposed)),
                s("narrowed", 0, x(6, &[5, 37]).lying(Narrowed)),
                s("expanded", 0, x(7, &[4, 5]).lying(Expanded)),
                s("zero-sized", 1, x(8, &[3, 0])),
                s("no rows", 1, x(9, &[0, 3])),
                s("zeros", 0, SampleInput::floats(&[6], &[2.0, 0.0, 3.0, -1.0, 0.0, 5.0])),
            ]);
        }
        samples
    }
}

impl Var {
    /// The running sum along `dim`. Backward reads nothing.
    pub fn cumsum(self, dim: isize) -> Result<Var> {
        self.scan(ScanFn::Sum, dim)
    }
    /// The running product along `dim`; the gradient is exact with zeros. Backward reads x.
    pub fn cumprod(self, dim: isize) -> Result<Var> {
        self.scan(ScanFn::Prod, dim)
    }

    fn scan(self, f: ScanFn, dim: isize) -> Result<Var> {
        let rank = self.shape().len();
        let dim = dimension(dim, rank.max(1)).map_err(|reason| self.invalid(ScanOp { f, dim: 0 }.name(), reason))?;
        match rank {
            0 => self.reshape(&[1])?.scan(f, 0)?.reshape::<usize>(&[]),
            _ => self.apply(ScanOp { f, dim }, []),
        }
    }
}
