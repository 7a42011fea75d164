//! Pooling over windows of x `[N, C, H, W]`.
//!
//! Maximum: each output is the largest element that its window sees (the first of equals) and g goes to that element;
//! where windows overlap, gradients add up. Only the place of the largest is kept, as an integer.
//! Average: each output is the sum divided by a count, and g / count goes to every element; nothing is kept.

use super::*;
use crate::kernel::{PoolDivisor, Window};
use crate::layout::{padded, reach};
use crate::tape::Var;

/// Attributes of pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Size of the window.
    pub kernel: [usize; 2],
    /// Distance of windows.
    pub stride: [usize; 2],
    /// Padding on both sides, at most half of the kernel.
    pub padding: [usize; 2],
    /// Distance of the window's elements; averages take 1.
    pub dilation: [usize; 2],
    /// Whether a last window that reaches beyond the padding counts, if it begins within the input or the padding
    /// before.
    pub ceil: bool,
}

/// The longest window: its places are walked one by one.
const LONGEST: usize = i32::MAX as usize;

impl Pool {
    /// Windows side by side, no padding.
    pub fn new(kernel: [usize; 2]) -> Pool {
        Pool { kernel, stride: kernel, padding: [0; 2], dilation: [1; 2], ceil: false }
    }

    fn window(&self) -> Window {
        Window { kernel: self.kernel, stride: self.stride, before: self.padding, dilation: self.dilation }
    }

    fn output(&self, x: &Spec) -> Result<Shape, String> {
        let x = &x.shape;
        if x.len() != 4 || x[1..].contains(&0) {
            return Err("needs x [N, C, H, W] or [C, H, W], none but N empty".into());
        }
        let all = [self.kernel, self.stride, self.dilation];
        if all.as_flattened().contains(&0) {
            return Err("kernel, stride and dilation must be at least 1".into());
        }
        let mut shape = Shape::from_slice(&x[..2]);
        for d in 0..2 {
            let (stride, padding) = (self.stride[d], self.padding[d]);
            let Some(reach) = reach(self.kernel[d], self.dilation[d]).filter(|&n| n <= LONGEST) else {
                let (kernel, dilation) = (self.kernel[d], self.dilation[d]);
                return Err(format!(
                    "a window of {kernel} elements with dilation {dilation} reaches further than {LONGEST}"
                ));
            };
            if padding > reach / 2 {
                return Err(format!("the padding {padding} must be at most half of the kernel's reach of {reach}"));
            }
            let Some(room) = padded(x[2 + d], padding, padding).and_then(|all| all.checked_sub(reach)) else {
                let n = x[2 + d];
                return Err(format!(
                    "dimension {}: a window of {reach} doesn't fit into {n} padded by {padding}",
                    2 + d
                ));
            };
            let mut n = if self.ceil { room.div_ceil(stride) } else { room / stride } + 1;
            // A window that would begin in the padding behind isn't one.
            if self.ceil && (n - 1).checked_mul(stride).is_none_or(|start| start >= x[2 + d] + padding) {
                n -= 1;
            }
            shape.push(n);
        }
        Ok(shape)
    }
}

/// y = the largest of each window. Outputs: y, and where each largest lies in its plane (row-major).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxPool2d {
    /// The windows.
    pub pool: Pool,
    /// Whether the user gets the places, then as i64; else they are a statistic, as i32.
    pub indices: bool,
}

impl OpRule for MaxPool2d {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }

    fn formula(&self) -> &'static str {
        "y = max of the window"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        let shape = self.pool.output(&inputs[0])?;
        if i32::try_from(inputs[0].shape[2] * inputs[0].shape[3]).is_err() {
            return Err("a plane may have at most 2^31 - 1 elements".into());
        }
        let index = match self.indices {
            true => Output::new(shape.clone(), DType::I64),
            false => Output::statistic(shape.clone(), DType::I32),
        };
        Ok(smallvec![Output::new(shape, dtype), index])
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let window = self.pool.window();
        exec.run(kernel::MaxPool { x: &inputs[0], window, out: &outputs[0], index: &outputs[1] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([Slot::Out(1)])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g, index) = (cx.exec(0), cx.grad0(), cx.saved(Slot::Out(1))?);
        let out = exec.empty_like(cx.input(0))?;
        exec.run(kernel::MaxPoolGrad { index: &index, g: &g, window: self.pool.window(), out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(Cost::times(&self.pool.kernel), inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let mut samples = samples_of(|pool| MaxPool2d { pool, indices: false }.into());
        let ties = SampleInput::floats(&[1, 1, 2, 4], &[1.0, 3.0, 3.0, 0.0, 3.0, 2.0, 3.0, 3.0]);
        let op = MaxPool2d { pool: Pool::new([2, 2]), indices: false };
        samples.push(Sample::kink("ties", op, [ties]));
        let indices = MaxPool2d { pool: Pool::new([2, 2]), indices: true };
        samples.push(Sample::smooth("with indices", indices, [SampleInput::random(8, &[2, 2, 4, 5])]));
        let dilation = Pool { dilation: [1, 2], padding: [1, 1], stride: [2, 1], ..Pool::new([3, 2]) };
        let op = MaxPool2d { pool: dilation, indices: false };
        samples.push(Sample::smooth("dilation", op, [SampleInput::random(9, &[2, 2, 4, 5])]));
        samples
    }
}

/// y = the average of each window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AvgPool2d {
    /// The windows.
    pub pool: Pool,
    /// What the sum is divided by.
    pub divisor: PoolDivisor,
}

impl OpRule for AvgPool2d {
    fn name(&self) -> &'static str {
        "avg_pool2d"
    }

    fn formula(&self) -> &'static str {
        "y = sum of the window / count"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let dtype = one_float_dtype(inputs)?;
        if self.divisor == PoolDivisor::Fixed(0) {
            return Err("the divisor must not be 0".into());
        }
        if self.pool.dilation != [1; 2] {
            return Err("an average takes no dilation".into());
        }
        Ok(one(Spec::new(self.pool.output(&inputs[0])?, dtype)))
    }

    fn forward(&self, exec: &Exec<'_>, inputs: &[Tensor], outputs: &[Tensor]) -> Result<()> {
        let (window, divisor) = (self.pool.window(), self.divisor);
        exec.run(kernel::AvgPool { x: &inputs[0], window, divisor, out: &outputs[0] })
    }

    fn saves(&self, _needs: &[bool]) -> Saves {
        saves([])
    }

    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty_like(cx.input(0))?;
        exec.run(kernel::AvgPoolGrad { g: &g, window: self.pool.window(), divisor: self.divisor, out: &out })?;
        cx.set(0, out);
        Ok(())
    }

    fn cost(&self, inputs: &[Spec], outputs: &[Output]) -> Cost {
        Cost::elementwise(Cost::times(&self.pool.kernel), inputs, outputs)
    }

    fn samples() -> Vec<Sample> {
        let divisors = [PoolDivisor::Inside, PoolDivisor::Padded, PoolDivisor::Fixed(-2)];
        divisors.into_iter().flat_map(|divisor| samples_of(|pool| AvgPool2d { pool, divisor }.into())).collect()
    }
}

fn samples_of(op: impl Fn(Pool) -> Op) -> Vec<Sample> {
    use SampleMemory::*;
    let x = SampleInput::random;
    let s = |name, pool, input| Sample::smooth(name, op(pool), [input]);
    let overlapping = Pool { stride: [2, 1], padding: [1, 1], ..Pool::new([3, 2]) };
    vec![
        s("ordinary", Pool::new([2, 2]), x(1, &[2, 3, 4, 6])),
        s("a remainder", Pool::new([2, 3]), x(2, &[1, 2, 5, 7])),
        s("overlapping", overlapping, x(3, &[2, 2, 5, 4])),
        s("ceil", Pool { ceil: true, stride: [2, 3], padding: [1, 0], ..Pool::new([3, 2]) }, x(4, &[1, 2, 6, 7])),
        s("transposed", overlapping, x(5, &[1, 2, 4, 5]).lying(Transposed)),
        s("narrowed", overlapping, x(6, &[1, 2, 4, 5]).lying(Narrowed)),
        s("expanded", overlapping, x(17, &[2, 2, 4, 5]).lying(Expanded)),
        s("no samples", Pool::new([2, 2]), x(8, &[0, 2, 4, 4])),
    ]
}

impl Var {
    /// The images as `[N, C, H, W]`, through `f`, and back to `[C, H, W]` where they were that.
    fn with_images(self, f: impl Fn(Var) -> Result<Vec<Var>>) -> Result<Vec<Var>> {
        let shape = self.shape();
        if shape.len() != 3 {
            return f(self);
        }
        let y = f(self.reshape(&[&[1], &shape[..]].concat())?)?;
        let without_batch = |y: Var| {
            let shape = y.shape();
            y.reshape(&shape[1..])
        };
        y.into_iter().map(without_batch).collect()
    }

    /// The largest of each window of x `[N, C, H, W]` or `[C, H, W]`. Backward reads the places, one i32 an output.
    pub fn max_pool2d(self, pool: Pool) -> Result<Var> {
        Ok(self.with_images(|x| x.apply_all(MaxPool2d { pool, indices: false }, []))?.swap_remove(0))
    }

    /// As [`max_pool2d`](Var::max_pool2d), with the places of the largest in their planes (i64, row-major), which are
    /// then what is kept.
    pub fn max_pool2d_with_indices(self, pool: Pool) -> Result<(Var, Var)> {
        let mut y = self.with_images(|x| x.apply_all(MaxPool2d { pool, indices: true }, []))?;
        let indices = y.pop().expect("two outputs");
        Ok((y.pop().expect("two outputs"), indices))
    }

    /// The average of each window of x `[N, C, H, W]` or `[C, H, W]`. Backward reads nothing.
    pub fn avg_pool2d(self, pool: Pool, divisor: PoolDivisor) -> Result<Var> {
        Ok(self.with_images(|x| x.apply_all(AvgPool2d { pool, divisor }, []))?.swap_remove(0))
    }
}
