//! Views: the output shares the input's storage. They cost nothing, save nothing, and have no mark of their own: a
//! view's handles, reads and marks are those of the value that owns the storage.
//!
//! Gradients: reshape and permute undo themselves; expand sums over what it repeated; narrow puts g into zeros; split
//! joins the gradients of its parts, zeros where a part has none.

use super::*;
use crate::layout::{Layout, dimension, element_count};
use crate::tape::Var;

/// Runs the view function on a spec, so that `infer` and `view` reject the same inputs with the same words.
fn viewed(inputs: &[Spec], view: impl FnOnce(&Layout) -> Result<Layout>) -> Result<Outputs, String> {
    takes(1, inputs)?;
    let input = &inputs[0];
    match view(&Layout::contiguous(&input.shape)) {
        Ok(layout) => Ok(one(Spec::new(layout.shape, input.dtype))),
        Err(error) => Err(error.to_string()),
    }
}

macro_rules! is_view {
    () => {
        fn forward(&self, _: &Exec<'_>, _: &[Tensor], _: &[Tensor]) -> Result<()> {
            Ok(()) // the engine calls `view` instead
        }
        fn saves(&self, _: &[bool]) -> Saves {
            saves([])
        }
        fn cost(&self, _: &[Spec], _: &[Output]) -> Cost {
            Cost::default()
        }
    };
}

/// The same elements with another shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reshape {
    /// The new shape, of as many elements.
    pub shape: Shape,
}

impl Rule for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| Ok(l.reshape(&self.shape)?.expect("a contiguous layout always reshapes")))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        // `Var::reshape` copies first where the strides don't allow a view.
        let view = x.view_as(&self.shape).and_then(|v| {
            v.ok_or_else(|| crate::Error::tensor("reshape", "these strides need a copy; call `contiguous` first"))
        });
        Some(view.map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let grad = cx.exec(0).reshape(g, &cx.input(0).shape)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, shape: &[usize], input| Sample::smooth(name, Reshape { shape: shape.into() }, [input]);
        vec![
            s("merge", &[6, 4], x(1, &[2, 3, 4])),
            s("split", &[2, 1, 3, 4], x(2, &[6, 4])),
            s("scalar", &[], x(3, &[1, 1])),
            s("narrowed rows", &[2, 2, 3], x(4, &[2, 6]).lying(SampleMemory::Narrowed)),
            s("zero-sized", &[0, 5], x(5, &[2, 0, 3])),
        ]
    }
}

/// The dimensions in another order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permute {
    /// `order[i]` is the input's dimension that becomes dimension i.
    pub order: Shape,
}

impl Rule for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.permute(&self.order))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(x.permute(&self.order).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let mut inverse: Shape = SmallVec::from_elem(0, self.order.len());
        for (i, &d) in self.order.iter().enumerate() {
            inverse[d] = i;
        }
        let grad = cx.grad0().permute(&inverse)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, order: &[usize], input| Sample::smooth(name, Permute { order: order.into() }, [input]);
        vec![
            s("transpose", &[1, 0], x(1, &[3, 4])),
            s("cycle", &[2, 0, 1], x(2, &[2, 3, 4])),
            s("rank 0", &[], x(3, &[])),
            s("narrowed", &[1, 0], x(4, &[3, 4]).lying(SampleMemory::Narrowed)),
            s("zero-sized", &[1, 0], x(5, &[0, 3])),
        ]
    }
}

/// Repeats dimensions of size 1 and adds leading ones, without copying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expand {
    /// The new shape.
    pub shape: Shape,
}

impl Rule for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.expand(&self.shape))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(x.expand(&self.shape).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let g = cx.grad0();
        let grad = cx.exec(0).sum_to(g, &cx.input(0).shape)?;
        cx.set(0, grad);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, shape: &[usize], input| Sample::smooth(name, Expand { shape: shape.into() }, [input]);
        vec![
            s("rows", &[4, 3], x(1, &[1, 3])),
            s("leading", &[2, 4, 3], x(2, &[3])),
            s("both", &[2, 3, 4], x(3, &[3, 1])),
            s("from a scalar", &[2, 2], x(4, &[])),
            s("to nothing", &[0, 3], x(5, &[1, 3])),
            s("unchanged", &[2, 3], x(6, &[2, 3])),
        ]
    }
}

/// A run of elements of one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Narrow {
    /// The dimension.
    pub dim: usize,
    /// Its first element.
    pub start: usize,
    /// How many.
    pub len: usize,
}

impl Rule for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        viewed(inputs, |l| l.narrow(self.dim, self.start, self.len))
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(x.narrow(self.dim, self.start, self.len).map(|v| smallvec![v]))
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let (exec, g) = (cx.exec(0), cx.grad0());
        let out = exec.empty_like(cx.input(0))?;
        exec.run(Kernel::Fill { value: 0.0, out: &out })?;
        exec.run(Kernel::Copy { x: &g, out: &out.narrow(self.dim, self.start, self.len)? })?;
        cx.set(0, out);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, dim, start, len, input| Sample::smooth(name, Narrow { dim, start, len }, [input]);
        vec![
            s("rows", 0, 1, 2, x(1, &[4, 3])),
            s("columns", 1, 2, 3, x(2, &[4, 6])),
            s("middle", 1, 0, 1, x(3, &[2, 3, 4])),
            s("nothing", 0, 4, 0, x(4, &[4, 3])),
            s("transposed", 1, 1, 2, x(5, &[4, 6]).lying(SampleMemory::Transposed)),
        ]
    }
}

/// One dimension cut into runs, as several views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The dimension.
    pub dim: usize,
    /// The length of each part; together the whole dimension.
    pub sizes: Shape,
}

impl Split {
    /// (part, start, length) of each part.
    fn parts(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.sizes.iter().enumerate().scan(0, |start, (part, &len)| {
            *start += len;
            Some((part, *start - len, len))
        })
    }
}

impl Rule for Split {
    fn name(&self) -> &'static str {
        "split"
    }
    fn infer(&self, inputs: &[Spec]) -> Result<Outputs, String> {
        takes(1, inputs)?;
        let x = &inputs[0].shape;
        if self.dim >= x.len()
            || self.sizes.is_empty()
            || self.sizes.iter().try_fold(0usize, |n, &len| n.checked_add(len)) != Some(x[self.dim])
        {
            return Err(format!("the sizes {:?} must add up to dimension {}", self.sizes, self.dim));
        }
        let part = |&len: &usize| {
            let mut shape = x.clone();
            shape[self.dim] = len;
            Output::new(shape, inputs[0].dtype)
        };
        Ok(self.sizes.iter().map(part).collect())
    }
    fn view(&self, x: &Tensor) -> Option<Result<SmallVec<[Tensor; 1]>>> {
        Some(self.parts().map(|(_, start, len)| x.narrow(self.dim, start, len)).collect())
    }
    is_view!();
    fn backward(&self, cx: &mut Backward<'_>) -> Result<()> {
        let exec = cx.exec(0);
        let out = exec.empty_like(cx.input(0))?;
        for (part, start, len) in self.parts() {
            let slice = out.narrow(self.dim, start, len)?;
            match cx.grad(part) {
                Some(g) => exec.run(Kernel::Copy { x: &g, out: &slice })?,
                None => {
                    let zero = exec.workspace(&[], out.dtype())?;
                    exec.run(Kernel::Fill { value: 0.0, out: &zero })?;
                    exec.run(Kernel::Copy { x: &zero.expand(slice.shape())?, out: &slice })?;
                }
            }
        }
        cx.set(0, out);
        Ok(())
    }
    fn samples() -> Vec<Sample> {
        let x = SampleInput::random;
        let s = |name, dim, sizes: &[usize], input| Sample::smooth(name, Split { dim, sizes: sizes.into() }, [input]);
        vec![
            s("thirds", 1, &[2, 2, 2], x(1, &[3, 6])),
            s("uneven", 0, &[1, 3], x(2, &[4, 2])),
            s("an empty part", 2, &[0, 3], x(3, &[2, 1, 3])),
            s("one part", 0, &[3], x(4, &[3])),
        ]
    }
}

impl Var {
    /// The same elements with another shape: a view, or a copy first where the strides don't allow one (then op
    /// `contiguous` is recorded too).
    pub fn reshape(&self, shape: &[usize]) -> Result<Var> {
        let op = Reshape { shape: shape.into() };
        let copies = element_count(shape).is_ok_and(|n| n == self.shape().iter().product::<usize>())
            && self.tensor()?.view_as(shape)?.is_none();
        if copies { self.contiguous()?.apply(op, &[]) } else { self.apply(op, &[]) }
    }

    /// A view with the dimensions in another order: `order[i]` becomes dimension i.
    pub fn permute(&self, order: &[usize]) -> Result<Var> {
        self.apply(Permute { order: order.into() }, &[])
    }

    /// A view with two dimensions exchanged (negative counts from the end).
    pub fn transpose(&self, a: isize, b: isize) -> Result<Var> {
        let rank = self.shape().len();
        let find = |d| dimension(d, rank).map_err(|reason| self.invalid("transpose", reason));
        let mut order: Shape = (0..rank).collect();
        order.swap(find(a)?, find(b)?);
        self.permute(&order)
    }

    /// A view with dimensions of size 1 repeated and leading dimensions added.
    pub fn expand(&self, shape: &[usize]) -> Result<Var> {
        self.apply(Expand { shape: shape.into() }, &[])
    }

    /// A view of `len` elements of dimension `dim` from `start`. It holds the whole of what it views.
    pub fn narrow(&self, dim: isize, start: usize, len: usize) -> Result<Var> {
        let dim = dimension(dim, self.shape().len()).map_err(|reason| self.invalid("narrow", reason))?;
        self.apply(Narrow { dim, start, len }, &[])
    }

    /// Views of consecutive runs of dimension `dim`; their lengths add up to it.
    pub fn split(&self, dim: isize, sizes: &[usize]) -> Result<Vec<Var>> {
        let dim = dimension(dim, self.shape().len()).map_err(|reason| self.invalid("split", reason))?;
        self.apply_all(Split { dim, sizes: sizes.into() }, &[])
    }
}
