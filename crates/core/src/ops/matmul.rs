//! Matrix products.
//!
//! y = a b gives da = g b^T and db = a^T g, each summed over the batch dimensions in which its operand was repeated.
//! A linear layer y = x W + c over flattened rows of x: dW = x^T g, dc = the sum of g's rows, dx = g W^T. The weight's
//! gradient comes first, so that the saved x is gone before dx is allocated.
//! y = beta c + alpha a b: dc = beta g (summed over what c was repeated in), da and db as of a product, times alpha.

use super::*;
use crate::kernel::UnaryFn;
use crate::layout::broadcast_shapes;
use crate::tape::Var;

/// y = a b: `[.., m, k] x [.., k, n] -> [.., m, n]`, batch dimensions broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matmul;

impl OpRule for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn formula(&self) -> &'static str {
        "y = a b, batches broadcast"
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
        product(exec, &inputs[0], &inputs[1], 1.0, &outputs[0])
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        product_saves(needs, 0)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        product_backward(cx, g, 0, 1.0)
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let k = inputs[0].shape.last().copied().unwrap_or(1);
        Cost { flops: Cost::times(&[2, outputs[0].spec.len(), k]), traffic: Cost::touched(inputs, outputs) }
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
fn product(exec: &Exec<'_>, a: &Tensor, b: &Tensor, alpha: f64, out: &Tensor) -> Result<()> {
    let batch = &out.shape()[..out.rank() - 2];
    let (a, b) = (in_batch(a, batch)?, in_batch(b, batch)?);
    exec.run(kernel::Matmul { a: &a, b: &b, alpha, accumulate: false, out })
}

/// alpha a b in these batch dimensions: the terms of a factor's gradient, see [`Exec::terms`].
fn factor_terms(exec: &Exec<'_>, a: &Tensor, b: &Tensor, alpha: f64, batch: &[usize], factor: &Spec) -> Result<Tensor> {
    let mut shape: Shape = batch.into();
    shape.extend([a.shape()[a.rank() - 2], b.shape()[b.rank() - 1]]);
    let terms = exec.terms(&Spec::new(shape, a.dtype()), factor)?;
    product(exec, a, b, alpha, &terms)?;
    Ok(terms)
}

/// What the gradients of the operands `first` and `first + 1` of a product read: each the other one.
fn product_saves(needs: &[bool], first: usize) -> Saves {
    let (a, b) = (first, first + 1);
    saves([(needs[b], Slot::In(a)), (needs[a], Slot::In(b))].into_iter().filter(|s| s.0).map(|s| s.1))
}

/// Sets the gradients of the operands `first` and `first + 1` of alpha a b.
fn product_backward(cx: &mut Backward<'_>, g: Tensor, first: usize, alpha: f64) -> Result<()> {
    let batch = &g.shape()[..g.rank() - 2];
    let (ia, ib) = (first, first + 1);
    if cx.needs(ib) {
        let a = cx.saved(Slot::In(ia))?;
        let (exec, factor) = (cx.exec(ib), cx.input(ib));
        let terms = factor_terms(&exec, &a.transpose(a.rank() - 2, a.rank() - 1)?, &g, alpha, batch, factor)?;
        drop(a);
        cx.set(ib, exec.sum_terms(terms, factor)?);
    }
    if cx.needs(ia) {
        let b = cx.saved(Slot::In(ib))?;
        let (exec, factor) = (cx.exec(ia), cx.input(ia));
        let terms = factor_terms(&exec, &g, &b.transpose(b.rank() - 2, b.rank() - 1)?, alpha, batch, factor)?;
        drop(b);
        cx.set(ia, exec.sum_terms(terms, factor)?);
    }
    Ok(())
}

fn in_batch(x: &Tensor, batch: &[usize]) -> Result<Tensor> {
    let mut shape: Shape = batch.into();
    shape.extend_from_slice(&x.shape()[x.rank() - 2..]);
    x.expand(&shape)
}

/// y = beta c + alpha a b with c broadcast to the product; with beta = 0, c isn't read. Inputs: c, a, b.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddMatmul {
    /// Factor on the addend.
    pub beta: f64,
    /// Factor on the product.
    pub alpha: f64,
    /// A product of batches, `[batch, m, k] x [batch, k, n]`, instead of matrices.
    pub batched: bool,
}

impl OpRule for AddMatmul {
    fn name(&self) -> &'static str {
        if self.batched { "baddbmm" } else { "addmm" }
    }

    fn formula(&self) -> &'static str {
        "y = beta c + alpha a b"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(3, inputs)?;
        one_float_dtype(inputs)?;
        strict(&inputs[1].shape, &inputs[2].shape, if self.batched { 3 } else { 2 })?;
        let product = Matmul.infer(&inputs[1..])?;
        let (c, y) = (&inputs[0].shape, &product[0].spec.shape);
        if broadcast_shapes(c, y).is_none_or(|s| s != *y) {
            return Err(format!("the addend {c:?} can't be broadcast to the product {y:?}"));
        }
        Ok(product)
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (c, a, b, out) = (&inputs[0], &inputs[1], &inputs[2], &outputs[0]);
        if self.beta == 0.0 {
            return exec.run(kernel::Matmul { a, b, alpha: self.alpha, accumulate: false, out });
        }
        let sum = exec.assemble(out)?;
        exec.run(kernel::Unary { f: UnaryFn::Scale(self.beta), x: &c.expand(out.shape())?, out: &sum })?;
        exec.run(kernel::Matmul { a, b, alpha: self.alpha, accumulate: true, out: &sum })?;
        exec.put(&sum, out)
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        product_saves(needs, 1)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        if cx.needs(0) {
            let exec = cx.exec(0);
            let sum = exec.sum_to(g.clone(), &cx.input(0).shape)?;
            let out = exec.replace(&sum)?;
            exec.run(kernel::Unary { f: UnaryFn::Scale(self.beta), x: &sum, out: &out })?;
            cx.set(0, out);
        }
        product_backward(cx, g, 1, self.alpha)
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Matmul.cost(&inputs[1..], outputs)
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let mut samples = Vec::new();
        for batched in [false, true] {
            let of = |shape: [usize; 2]| if batched { vec![2, shape[0], shape[1]] } else { shape.to_vec() };
            let m = |seed, rows, columns| x(seed, &of([rows, columns]));
            let s = |name, beta, alpha, inputs: [SampleInput; 3]| {
                Sample::smooth(name, AddMatmul { beta, alpha, batched }, inputs)
            };
            samples.extend([
                s("ordinary", 1.0, 1.0, [m(1, 3, 5), m(2, 3, 4), m(3, 4, 5)]),
                s("factors", -0.5, 2.0, [m(4, 3, 5), m(5, 3, 4), m(6, 4, 5)]),
                s("no addend", 0.0, 1.0, [m(7, 3, 5), m(8, 3, 4), m(9, 4, 5)]),
                s("row", 0.3, 1.0, [x(10, &[5]), m(11, 3, 4), m(12, 4, 5)]),
                s("scalar", 2.0, 0.5, [x(13, &[]), m(14, 3, 4), m(15, 4, 5)]),
                s("strided", 1.0, 0.5, [m(16, 6, 4), m(17, 6, 3).lying(Transposed), m(18, 3, 4).lying(Narrowed)]),
                s("expanded", 1.0, 1.0, [m(19, 3, 5).lying(Expanded), m(20, 3, 4).lying(Expanded), m(21, 4, 5)]),
                s("nothing to sum", 0.5, 1.0, [m(22, 3, 5), m(23, 3, 0), m(24, 0, 5)]),
                s("no rows", 1.0, 1.0, [m(25, 0, 5), m(26, 0, 4), m(27, 4, 5)]),
            ]);
        }
        samples
    }
}

/// Why two operands aren't matrices (rank 2) or batches of one size (rank 3), if so.
fn strict(a: &[usize], b: &[usize], rank: usize) -> Result<(), String> {
    if a.len() != rank || b.len() != rank || a[..rank - 2] != b[..rank - 2] {
        let wanted = if rank == 2 { "[m, k] and [k, n]" } else { "[batch, m, k] and [batch, k, n]" };
        return Err(format!("needs {wanted}, got {a:?} and {b:?}"));
    }
    Ok(())
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

impl OpRule for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn formula(&self) -> &'static str {
        "y = x W + bias, or x W^T + bias"
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
            exec.run(kernel::Copy { x: &inputs[2].expand(out.shape())?, out: &out })?;
        }
        exec.run(kernel::Matmul { a: &x, b: &self.weight(&inputs[1])?, alpha: 1.0, accumulate: self.bias, out: &out })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        factors(needs)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = rows(&cx.exec(0), cx.grad0())?;
        if cx.needs(1) {
            let exec = cx.exec(1);
            let x = rows(&exec, cx.saved(Slot::In(0))?)?;
            let out = exec.empty_like(cx.input(1))?;
            let (a, b) = if self.transposed { (g.transpose(0, 1)?, x) } else { (x.transpose(0, 1)?, g.clone()) };
            exec.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out })?;
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
            exec.run(kernel::Matmul { a: &g, b: &w, alpha: 1.0, accumulate: false, out: &flat })?;
            cx.set(0, out);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let k = inputs[0].shape.last().copied().unwrap_or(1);
        Cost { flops: Cost::times(&[2, outputs[0].spec.len(), k]), traffic: Cost::touched(inputs, outputs) }
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
    /// Matrix product `[.., m, k] x [.., k, n] -> [.., m, n]` with broadcast batch dimensions. An operand of rank 1
    /// is a row on the left and a column on the right, and that dimension vanishes. Backward reads each operand whose
    /// partner needs a gradient.
    pub fn matmul(self, other: impl Into<Var>) -> Result<Var> {
        let other = other.into();
        let (row, column) = (self.shape().len() == 1, other.shape().len() == 1);
        if !row && !column {
            return self.apply(Matmul, [other]);
        }
        let a = if row { self.unsqueeze(0)? } else { self };
        let b = if column { other.unsqueeze(1)? } else { other };
        let y = a.apply(Matmul, [b])?;
        let mut shape = y.shape();
        let n = shape.len();
        if column {
            shape.remove(n - 1);
        }
        if row {
            shape.remove(n - 2);
        }
        y.reshape(&shape)
    }

    /// Product of two matrices. Backward reads each operand whose partner needs a gradient.
    pub fn mm(self, other: impl Into<Var>) -> Result<Var> {
        let other = other.into();
        strict(&self.shape(), &other.shape(), 2).map_err(|reason| self.invalid("mm", reason))?;
        self.matmul(other)
    }

    /// Products of two batches of matrices. Backward reads each operand whose partner needs a gradient.
    pub fn bmm(self, other: impl Into<Var>) -> Result<Var> {
        let other = other.into();
        strict(&self.shape(), &other.shape(), 3).map_err(|reason| self.invalid("bmm", reason))?;
        self.matmul(other)
    }

    /// beta self + alpha a b for matrices, this broadcast to the product and ignored if beta is 0. Backward reads a
    /// and b.
    pub fn addmm(self, a: impl Into<Var>, b: impl Into<Var>, beta: f64, alpha: f64) -> Result<Var> {
        self.apply(AddMatmul { beta, alpha, batched: false }, [a.into(), b.into()])
    }

    /// As [`addmm`](Var::addmm) for batches of matrices.
    pub fn baddbmm(self, a: impl Into<Var>, b: impl Into<Var>, beta: f64, alpha: f64) -> Result<Var> {
        self.apply(AddMatmul { beta, alpha, batched: true }, [a.into(), b.into()])
    }

    /// The products of all pairs: `[n]` and `[m]` give `[n, m]`. Backward reads both.
    pub fn outer(self, other: impl Into<Var>) -> Result<Var> {
        let other = other.into();
        self.vectors("outer", &other)?;
        self.unsqueeze(1)?.apply(Matmul, [other.unsqueeze(0)?])
    }

    /// The sum of products of two vectors: a scalar. Backward reads both.
    pub fn dot(self, other: impl Into<Var>) -> Result<Var> {
        let other = other.into();
        self.vectors("dot", &other)?;
        self.matmul(other)
    }

    fn vectors(&self, op: &'static str, other: &Var) -> Result<()> {
        match (self.shape().len(), other.shape().len()) {
            (1, 1) => Ok(()),
            (a, b) => Err(self.invalid(op, format!("needs two vectors, got tensors of ranks {a} and {b}"))),
        }
    }

    /// x W + c over the last dimension: `[.., in] -> [.., out]`, W `[in, out]`. Backward reads x (for the weight's
    /// gradient) and W (for x's).
    pub fn linear(self, weight: impl Into<Var>, bias: Option<Var>) -> Result<Var> {
        self.linear_with(weight.into(), bias, false)
    }

    /// x W^T + c: as [`linear`](Var::linear) with W `[out, in]`, as PyTorch's, or for a head tied to an embedding. With
    /// W `[in]` and a scalar c, the last dimension vanishes.
    pub fn linear_transposed(self, weight: impl Into<Var>, bias: Option<Var>) -> Result<Var> {
        let weight = weight.into();
        if weight.shape().len() != 1 {
            return self.linear_with(weight, bias, true);
        }
        let bias = bias.map(|c| c.unsqueeze(0)).transpose()?;
        let y = self.linear_with(weight.unsqueeze(0)?, bias, true)?;
        y.squeeze_dims(&[-1])
    }

    fn linear_with(self, weight: Var, bias: Option<Var>, transposed: bool) -> Result<Var> {
        let op = Linear { transposed, bias: bias.is_some() };
        self.apply(op, std::iter::once(weight).chain(bias))
    }
}
