//! Convolution (cross-correlation, as usual) of x `[N, C, H, W]` with a weight `[O, C / groups, kh, kw]`, as a matrix
//! product: the columns X of a sample are what the window sees at each place (im2col, `[C kh kw, places]`), and for
//! each group y = W X + bias.
//!
//! So dW = the sum over samples of g X^T; dbias = the sum of g over samples and places; dX = W^T g, and dx adds every
//! column's element to where it came from (col2im, the transpose of im2col). Columns are made some samples at a time,
//! in a workspace that the meter counts.

use super::*;
use crate::kernel::Window;
use crate::layout::{padded, reach};
use crate::tape::Var;

/// Elements of the columns made at a time, unless one sample has more.
const COLUMNS: usize = 1 << 20;

/// y = x * weight + bias. Inputs: x, weight, and bias `[O]` where flagged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv2d {
    /// Distance of places, per dimension.
    pub stride: [usize; 2],
    /// Zeros before and behind, per dimension.
    pub padding: [[usize; 2]; 2],
    /// Distance of the weight's elements, per dimension.
    pub dilation: [usize; 2],
    /// Input and output channels are cut into this many groups, each by itself.
    pub groups: usize,
    /// Whether there is a bias.
    pub bias: bool,
}

impl Conv2d {
    fn window(&self, weight: &[usize]) -> Window {
        Window {
            kernel: [weight[2], weight[3]],
            stride: self.stride,
            before: self.padding.map(|p| p[0]),
            dilation: self.dilation,
        }
    }

    /// `[.., O, ..]` or `[O, ..]` cut into groups at dimension `dim`, all that follows flattened.
    fn grouped(&self, exec: &Exec<'_>, t: Tensor, dim: usize) -> Result<Tensor> {
        let shape = t.shape();
        let mut cut: Shape = shape[..dim].into();
        cut.extend([self.groups, shape[dim] / self.groups, shape[dim + 1..].iter().product()]);
        exec.reshape(t, &cut)
    }

    /// Calls `f` on each piece of the batch with a workspace for its columns, `[n, C, kh, kw, H', W']` and the same as
    /// matrices `[n, groups, C kh kw / groups, places]`.
    fn pieces(
        &self,
        exec: &Exec<'_>,
        (x, weight, y): (&[usize], &[usize], &[usize]),
        dtype: DType,
        mut f: impl FnMut(usize, usize, &Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let sample = [x[1], weight[2], weight[3], y[2], y[3]];
        let (rows, places) = (weight[1] * weight[2] * weight[3], y[2] * y[3]);
        let together = (COLUMNS / self.groups.saturating_mul(rows).saturating_mul(places).max(1)).clamp(1, x[0].max(1));
        for from in (0..x[0]).step_by(together) {
            let n = together.min(x[0] - from);
            let mut shape: Shape = Shape::from_slice(&[n]);
            shape.extend(sample);
            let columns = exec.workspace(&shape, dtype)?;
            let matrices = exec.reshape(columns.clone(), &[n, self.groups, rows, places])?;
            f(from, n, &columns, &matrices)?;
        }
        Ok(())
    }
}

impl OpRule for Conv2d {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn formula(&self) -> &'static str {
        "y = w * x + bias (cross-correlation of windows)"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(2 + self.bias as usize, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let (x, w) = (&inputs[0].shape, &inputs[1].shape);
        if x.len() != 4 || w.len() != 4 {
            return Err("needs x [N, C, H, W] and a weight [O, C / groups, kh, kw]".into());
        }
        if self.stride.contains(&0) || self.dilation.contains(&0) || self.groups == 0 {
            return Err(format!(
                "stride {:?}, dilation {:?} and groups {} must be at least 1",
                self.stride, self.dilation, self.groups
            ));
        }
        if !w[0].is_multiple_of(self.groups) || w[0] == 0 || x[1] != w[1] * self.groups || x[1] == 0 {
            return Err(format!(
                "with {} groups, x of {} channels needs a weight [O, C / groups, kh, kw] with O a multiple of the \
                 groups",
                self.groups, x[1]
            ));
        }
        if self.bias && inputs[2].shape[..] != [w[0]] {
            return Err(format!("the bias must be [{}], got {:?}", w[0], inputs[2].shape));
        }
        let mut shape = Shape::from_slice(&[x[0], w[0]]);
        for d in 0..2 {
            let (x, w, dilation, [before, behind]) = (x[2 + d], w[2 + d], self.dilation[d], self.padding[d]);
            let room = padded(x, before, behind).zip(reach(w, dilation)).and_then(|(all, w)| all.checked_sub(w));
            let Some(room) = room else {
                return Err(format!(
                    "dimension {}: the kernel of {w} elements with dilation {dilation} doesn't fit into {x} and the \
                     padding of {before} and {behind}",
                    2 + d
                ));
            };
            shape.push(room / self.stride[d] + 1);
        }
        Ok(one(Spec::new(shape, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (x, weight, y) = (&inputs[0], &inputs[1], &outputs[0]);
        if self.bias {
            let column = exec.reshape(inputs[2].clone(), &[1, weight.shape()[0], 1, 1])?;
            exec.run(kernel::Copy { x: &column.expand(y.shape())?, out: y })?;
        }
        let (w, out) = (self.grouped(exec, weight.clone(), 0)?, self.grouped(exec, y.clone(), 1)?);
        let window = self.window(weight.shape());
        self.pieces(exec, (x.shape(), weight.shape(), y.shape()), y.dtype(), |from, n, columns, matrices| {
            exec.run(kernel::Im2col { x: &x.narrow(0, from, n)?, window, out: columns })?;
            let a = w.expand(&[n, self.groups, w.shape()[1], w.shape()[2]])?;
            let out = out.narrow(0, from, n)?;
            exec.run(kernel::Matmul { a: &a, b: matrices, alpha: 1.0, accumulate: self.bias, out: &out })
        })
    }

    fn saves(&self, needs: &[bool]) -> Saves {
        factors(needs)
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let (x_shape, w_shape, y_shape) = (&cx.input(0).shape, &cx.input(1).shape, Shape::from_slice(g.shape()));
        let shapes = (&x_shape[..], &w_shape[..], &y_shape[..]);
        let window = self.window(w_shape);
        if self.bias && cx.needs(2) {
            let exec = cx.exec(2);
            let sum = exec.sum_to(g.clone(), &[1, w_shape[0], 1, 1])?;
            cx.set(2, exec.reshape(sum, &[w_shape[0]])?);
        }
        let matrices_of_g = self.grouped(&cx.exec(0), g, 1)?;
        if cx.needs(1) {
            let exec = cx.exec(1);
            let (x, dw) = (cx.saved(Slot::In(0))?, exec.empty_like(cx.input(1))?);
            let sum = exec.assemble(&dw)?;
            let out = self.grouped(&exec, sum.clone(), 0)?;
            self.pieces(&exec, shapes, dw.dtype(), |from, n, columns, matrices| {
                exec.run(kernel::Im2col { x: &x.narrow(0, from, n)?, window, out: columns })?;
                for i in 0..n {
                    // Sample by sample, in order: the sum doesn't depend on how many columns were made at a time.
                    let sample = |t: &Tensor, i| exec.reshape(t.narrow(0, i, 1)?, &t.shape()[1..]);
                    let (a, b) = (sample(&matrices_of_g, from + i)?, sample(matrices, i)?.transpose(1, 2)?);
                    exec.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: from + i > 0, out: &out })?;
                }
                Ok(())
            })?;
            drop(x);
            if x_shape[0] == 0 {
                exec.run(kernel::Fill { value: 0.0, out: &sum })?;
            }
            exec.put(&sum, &dw)?;
            drop((out, sum));
            cx.set(1, dw);
        }
        if cx.needs(0) {
            let exec = cx.exec(0);
            let w = self.grouped(&exec, cx.saved(Slot::In(1))?, 0)?.transpose(1, 2)?;
            let dx = exec.empty_like(cx.input(0))?;
            self.pieces(&exec, shapes, dx.dtype().computed_in(), |from, n, columns, matrices| {
                let a = w.expand(&[n, self.groups, w.shape()[1], w.shape()[2]])?;
                let b = matrices_of_g.narrow(0, from, n)?;
                exec.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: matrices })?;
                exec.run(kernel::Col2im { cols: columns, window, out: &dx.narrow(0, from, n)? })
            })?;
            cx.set(0, dx);
        }
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        let per_output = inputs[1].shape[1..].iter().product::<usize>();
        Cost { flops: Cost::times(&[2, outputs[0].spec.len(), per_output]), traffic: Cost::touched(inputs, outputs) }
    }

    fn samples() -> Vec<Sample> {
        use SampleMemory::*;
        let x = SampleInput::random;
        let plain = Conv2d { stride: [1; 2], padding: [[0; 2]; 2], dilation: [1; 2], groups: 1, bias: true };
        let s = |name, op: Conv2d, input: SampleInput, w: [usize; 4]| {
            let mut inputs = vec![input, x(20, &w)];
            inputs.extend(op.bias.then(|| x(21, &w[..1])));
            Sample::smooth(name, op, inputs)
        };
        let padding = [[2, 1], [0, 1]];
        vec![
            s("ordinary", plain, x(1, &[2, 3, 5, 4]), [4, 3, 3, 2]),
            s("no bias", Conv2d { bias: false, ..plain }, x(2, &[2, 3, 4, 4]), [2, 3, 2, 2]),
            s("one by one", plain, x(3, &[2, 3, 4, 4]), [2, 3, 1, 1]),
            // The stride leaves a remainder: the last row and column are seen by no window, their gradient is 0.
            s("stride with a remainder", Conv2d { stride: [3, 2], ..plain }, x(4, &[1, 2, 6, 6]), [2, 2, 2, 3]),
            s("padding", Conv2d { padding, ..plain }, x(5, &[2, 2, 3, 3]), [3, 2, 2, 3]),
            s("dilation", Conv2d { dilation: [2, 3], padding, ..plain }, x(6, &[1, 2, 4, 5]), [2, 2, 3, 2]),
            s("groups", Conv2d { groups: 2, stride: [2, 1], ..plain }, x(7, &[2, 4, 5, 4]), [6, 2, 3, 2]),
            s("depthwise", Conv2d { groups: 3, padding, ..plain }, x(8, &[2, 3, 4, 4]), [3, 1, 2, 2]),
            s("transposed", plain, x(9, &[2, 2, 5, 4]).lying(Transposed), [3, 2, 2, 2]),
            s("narrowed", plain, x(10, &[2, 2, 5, 4]).lying(Narrowed), [3, 2, 2, 2]),
            s("expanded", plain, x(11, &[2, 2, 5, 4]).lying(Expanded), [3, 2, 2, 2]),
            s("no samples", plain, x(12, &[0, 2, 4, 4]), [3, 2, 2, 2]),
        ]
    }
}

/// Padding of a convolution over `D` dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding<const D: usize> {
    /// This number of zeros on both sides of each dimension; all 0 is PyTorch's `valid`.
    Zeros([usize; D]),
    /// The number with which the output has the input's size, the odd one behind; for stride 1.
    Same,
}

/// Attributes of a convolution over `D` dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the usual names
pub struct Conv<const D: usize> {
    pub stride: [usize; D],
    pub padding: Padding<D>,
    pub dilation: [usize; D],
    pub groups: usize,
}

/// Stride 1, no padding, no dilation, one group.
impl<const D: usize> Default for Conv<D> {
    fn default() -> Conv<D> {
        Conv { stride: [1; D], padding: Padding::Zeros([0; D]), dilation: [1; D], groups: 1 }
    }
}

impl Var {
    /// Convolution of x `[N, C, H, W]` or `[C, H, W]` with a weight `[O, C / groups, kh, kw]` and a bias `[O]`.
    /// Backward reads x (for the weight's gradient) and the weight (for x's).
    pub fn conv2d(self, weight: impl Into<Var>, bias: Option<Var>, conv: Conv<2>) -> Result<Var> {
        let weight = weight.into();
        let (shape, w) = (self.shape(), weight.shape());
        if shape.len() == 3 {
            let y = self.reshape(&[&[1], &shape[..]].concat())?.conv2d(weight, bias, conv)?;
            let shape = y.shape();
            return y.reshape(&shape[1..]);
        }
        let mut padding = [[0; 2]; 2];
        for d in 0..2 {
            padding[d] = match conv.padding {
                Padding::Zeros(p) => [p[d]; 2],
                Padding::Same if conv.stride[d] != 1 => {
                    return Err(self.invalid("conv2d", "padding `same` needs stride 1; give the padding as numbers"));
                }
                Padding::Same => {
                    let total = conv.dilation[d].saturating_mul(w.get(2 + d).copied().unwrap_or(1).saturating_sub(1));
                    [total / 2, total - total / 2]
                }
            };
        }
        let Conv { stride, dilation, groups, .. } = conv;
        let op = Conv2d { stride, padding, dilation, groups, bias: bias.is_some() };
        self.apply(op, std::iter::once(weight).chain(bias))
    }

    /// Convolution of x `[N, C, L]` or `[C, L]` with a weight `[O, C / groups, k]`: [`conv2d`](Var::conv2d) of height
    /// 1.
    pub fn conv1d(self, weight: impl Into<Var>, bias: Option<Var>, conv: Conv<1>) -> Result<Var> {
        let weight = weight.into();
        let (x, w) = (self.shape(), weight.shape());
        if !matches!(x.len(), 2 | 3) || w.len() != 3 {
            let reason = format!("needs x [N, C, L] or [C, L] and a weight [O, C / groups, k], got {w:?}");
            return Err(self.invalid("conv1d", reason));
        }
        let flat = |v: Var, shape: &[usize]| {
            let (last, lead) = shape.split_last().expect("rank 2 or 3");
            v.reshape(&[lead, &[1, *last]].concat())
        };
        let padding = match conv.padding {
            Padding::Zeros([p]) => Padding::Zeros([0, p]),
            Padding::Same => Padding::Same,
        };
        let conv = Conv { stride: [1, conv.stride[0]], padding, dilation: [1, conv.dilation[0]], groups: conv.groups };
        let y = flat(self, &x)?.conv2d(flat(weight, &w)?, bias, conv)?;
        let mut shape = y.shape();
        shape.remove(shape.len() - 2);
        y.reshape(&shape)
    }
}
