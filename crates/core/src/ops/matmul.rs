//! Matrix products.
//!
//! y = a b gives da = g b^T and db = a^T g, each summed over the batch dimensions in which its operand was repeated.
//! A linear layer y = x W + c over flattened rows of x: dW = x^T g, dc = the sum of g's rows, dx = g W^T. The weight's
//! gradient comes first, so that the saved x is gone before dx is allocated.

use super::*;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = a b: `[.., m, k] x [.., k, n] -> [.., m, n]`, batch dimensions broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matmul;

impl Rule for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let (a, b) = (&inputs[0].shape, &inputs[1].shape);
        if a.len() < 2 || b.len() < 2 {
            return Err("both operands need at least two dimensions, [.., m, k] and [.., k, n]".into());
        }
        let ((batch_a, a), (batch_b, b)) = (a.split_at(a.len() - 2), b.split_at(b.len() - 2));
        if a[1] != b[0] {
            return Err(format!("the inner sizes differ: [.., m, k={}] and [.., k={}, n]", a[1], b[0]));
        }
        let Some(mut shape) = broadcast_shapes(batch_a, batch_b) else {
            return Err(format!("the batch dimensions {batch_a:?} and {batch_b:?} don't broadcast"));
        };
        shape.extend([a[0], b[1]]);
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        product(exec, &inputs[0], &inputs[1], &outputs[0])
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        saves([(needs[1], Slot::In(0)), (needs[0], Slot::In(1))].into_iter().filter(|s| s.0).map(|s| s.1))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let batch = &g.shape()[..g.rank() - 2];
        if cx.needs(1) {
            let a = cx.saved(Slot::In(0))?;
            let grad = batched(&cx.exec(1), &a.transpose(a.rank() - 2, a.rank() - 1)?, &g, batch)?;
            drop(a);
            let grad = cx.exec(1).sum_to(grad, &cx.input(1).shape)?;
            cx.set(1, grad);
        }
        if cx.needs(0) {
            let b = cx.saved(Slot::In(1))?;
            let grad = batched(&cx.exec(0), &g, &b.transpose(b.rank() - 2, b.rank() - 1)?, batch)?;
            drop(b);
            let grad = cx.exec(0).sum_to(grad, &cx.input(0).shape)?;
            cx.set(0, grad);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let k = inputs[0].shape.last().copied().unwrap_or(1);
        Cost { flops: 2 * (outputs[0].spec.len() * k) as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let s = |name, a, b| Sample::smooth(name, Matmul, [a, b]);
        vec![
            s("ordinary", x(1, &[3, 4]), x(2, &[4, 5])),
            s("batched", x(3, &[2, 3, 4, 5]), x(4, &[2, 3, 5, 2])),
            s("batch repeated", x(5, &[2, 1, 3, 4]), x(6, &[3, 4, 2])),
            s("matrix in a batch", x(7, &[2, 3, 4]), x(8, &[4, 2])),
            s("transposed", x(9, &[4, 6]).lying(Transposed), x(10, &[6, 4]).lying(Transposed)),
            s("narrowed", x(11, &[3, 5]).lying(Narrowed), x(12, &[5, 3]).lying(Narrowed)),
            s("expanded", x(13, &[2, 3, 4]).lying(Expanded), x(14, &[2, 4, 3])),
            s("row by column", x(15, &[1, 7]), x(16, &[7, 1])),
            s("nothing to sum", x(17, &[3, 0]), x(18, &[0, 2])),
            s("no rows", x(19, &[0, 3]), x(20, &[3, 2])),
            s("no batch", x(21, &[0, 2, 3]), x(22, &[0, 3, 2])),
        ]
    }
}

/// out = a b with a's and b's batch dimensions repeated to out's.
fn product(exec: &Exec<'_>, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    let batch = &out.shape()[..out.rank() - 2];
    let (a, b) = (in_batch(a, batch)?, in_batch(b, batch)?);
    exec.run(Kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out })
}

/// a b in a new tensor with these batch dimensions.
fn batched(exec: &Exec<'_>, a: &Tensor, b: &Tensor, batch: &[usize]) -> Result<Tensor> {
    let mut shape: Shape = batch.into();
    shape.extend([a.shape()[a.rank() - 2], b.shape()[b.rank() - 1]]);
    let out = exec.empty(&shape, a.dtype())?;
    product(exec, a, b, &out)?;
    Ok(out)
}

fn in_batch(x: &Tensor, batch: &[usize]) -> Result<Tensor> {
    let mut shape: Shape = batch.into();
    shape.extend_from_slice(&x.shape()[x.rank() - 2..]);
    x.expand(&shape)
}

/// y = x W (+ c): `[.., in] -> [.., out]`. Inputs: x, W, and c `[out]` with `bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// W is `[out, in]` (PyTorch's Linear) instead of `[in, out]` (GPT-2's Conv1D).
    pub transposed: bool,
    /// Whether there is an addend.
    pub bias: bool,
}

impl Linear {
    /// W as `[in, out]`.
    fn weight(&self, w: &Tensor) -> Result<Tensor> {
        if self.transposed { w.transpose(0, 1) } else { Ok(w.clone()) }
    }
}

impl Rule for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2 + self.bias as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let (x, w) = (&inputs[0].shape, &inputs[1].shape);
        let layout = if self.transposed { "[out, in]" } else { "[in, out]" };
        if w.len() != 2 || x.is_empty() {
            return Err(format!("needs x [.., in] and a weight {layout}"));
        }
        let (rows, columns) = if self.transposed { (w[1], w[0]) } else { (w[0], w[1]) };
        if x[x.len() - 1] != rows {
            return Err(format!("x ends in {}, but the weight {layout} takes {rows}", x[x.len() - 1]));
        }
        if self.bias && inputs[2].shape[..] != [columns] {
            return Err(format!("the bias must be [{columns}], got {:?}", inputs[2].shape));
        }
        let mut shape = x.clone();
        shape[x.len() - 1] = columns;
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let x = rows(exec, inputs[0].clone())?;
        let out = rows(exec, outputs[0].clone())?;
        if self.bias {
            exec.run(Kernel::Copy { x: &inputs[2].expand(out.shape())?, out: &out })?;
        }
        exec.run(Kernel::Matmul { a: &x, b: &self.weight(&inputs[1])?, alpha: 1.0, accumulate: self.bias, out: &out })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        saves([(needs[1], Slot::In(0)), (needs[0], Slot::In(1))].into_iter().filter(|s| s.0).map(|s| s.1))
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = rows(&cx.exec(0), cx.grad0())?;
        if cx.needs(1) {
            let exec = cx.exec(1);
            let x = rows(&exec, cx.saved(Slot::In(0))?)?;
            let out = exec.empty_like(cx.input(1))?;
            let (a, b) = if self.transposed { (g.transpose(0, 1)?, x) } else { (x.transpose(0, 1)?, g.clone()) };
            exec.run(Kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out })?;
            cx.set(1, out);
        }
        if self.bias && cx.needs(2) {
            let grad = cx.exec(2).sum_to(g.clone(), &cx.input(2).shape)?;
            cx.set(2, grad);
        }
        if cx.needs(0) {
            let exec = cx.exec(0);
            let w = self.weight(&cx.saved(Slot::In(1))?)?.transpose(0, 1)?;
            let out = exec.empty_like(cx.input(0))?;
            let flat = rows(&exec, out.clone())?;
            exec.run(Kernel::Matmul { a: &g, b: &w, alpha: 1.0, accumulate: false, out: &flat })?;
            cx.set(0, out);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let k = inputs[0].shape.last().copied().unwrap_or(1);
        Cost { flops: 2 * (outputs[0].spec.len() * k) as u64, traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let mut samples = Vec::new();
        for transposed in [false, true] {
            let w = |seed, k: usize, n: usize| x(seed, &if transposed { [n, k] } else { [k, n] });
            let (plain, biased) = (Linear { transposed, bias: false }, Linear { transposed, bias: true });
            samples.extend([
                Sample::smooth("ordinary", plain, [x(1, &[3, 4]), w(2, 4, 5)]),
                Sample::smooth("bias", biased, [x(3, &[3, 4]), w(4, 4, 5), x(5, &[5])]),
                Sample::smooth("rank 1", biased, [x(6, &[4]), w(7, 4, 2), x(8, &[2])]),
                Sample::smooth("rank 5", biased, [x(9, &[2, 1, 3, 1, 4]), w(10, 4, 2), x(11, &[2])]),
                Sample::smooth(
                    "strided",
                    biased,
                    [x(12, &[2, 4, 6]).lying(Transposed), w(13, 6, 4).lying(Transposed), x(14, &[4])],
                ),
                Sample::smooth("expanded", plain, [x(15, &[2, 3, 4]).lying(Expanded), w(16, 4, 3)]),
                Sample::smooth("no rows", biased, [x(17, &[0, 4]), w(18, 4, 3), x(19, &[3])]),
                Sample::smooth("nothing to sum", biased, [x(20, &[2, 0]), w(21, 0, 3), x(22, &[3])]),
            ]);
        }
        samples
    }
}

/// x as a matrix: all dimensions but the last flattened.
fn rows(exec: &Exec<'_>, x: Tensor) -> Result<Tensor> {
    let last = x.shape()[x.rank() - 1];
    let rows = x.shape()[..x.rank() - 1].iter().product();
    exec.reshape(x, &[rows, last])
}

impl Var {
    /// Matrix product `[.., m, k] x [.., k, n] -> [.., m, n]` with broadcast batch dimensions. Backward reads each
    /// operand whose partner needs a gradient.
    pub fn matmul(&self, other: &Var) -> Result<Var> {
        self.apply(Matmul, &[other])
    }

    /// x W + c over the last dimension: `[.., in] -> [.., out]`, W `[in, out]`. Backward reads x (for the weight's
    /// gradient) and W (for x's).
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        self.linear_with(weight, bias, false)
    }

    /// x W^T + c: as [`linear`](Var::linear) with W `[out, in]`, for a head tied to an embedding.
    pub fn linear_transposed(&self, weight: &Var, bias: Option<&Var>) -> Result<Var> {
        self.linear_with(weight, bias, true)
    }

    fn linear_with(&self, weight: &Var, bias: Option<&Var>, transposed: bool) -> Result<Var> {
        let op = Linear { transposed, bias: bias.is_some() };
        match bias {
            Some(bias) => self.apply(op, &[weight, bias]),
            None => self.apply(op, &[weight]),
        }
    }
}
