//! Where ops run their kernels.

use super::Spec;
use crate::kernel::{self, BinaryFn, ReduceFn};
use crate::layout::Shape;
use crate::{DType, Device, Kernel, MemoryKind, Result, Tensor};
use std::cell::Cell;
use std::time::Instant;

/// Time in kernels, of one tape.
#[derive(Debug, Default)]
pub(crate) struct KernelClock {
    nanos: Cell<u64>,
    /// Wait for each kernel, on a device that only queues them: its own time counts, not that of queueing it.
    waits: bool,
}

impl KernelClock {
    pub(crate) fn new(waits: bool) -> KernelClock {
        KernelClock { nanos: Cell::new(0), waits }
    }

    pub(crate) fn nanos(&self) -> u64 {
        self.nanos.get()
    }
}

/// Where kernels of an op run: the device, what new tensors are counted as, and a clock.
#[derive(Debug)]
pub struct Exec<'a> {
    device: &'a Device,
    kind: MemoryKind,
    clock: &'a KernelClock,
}

impl<'a> Exec<'a> {
    pub(crate) fn new(device: &'a Device, kind: MemoryKind, clock: &'a KernelClock) -> Exec<'a> {
        Exec { device, kind, clock }
    }

    /// Runs one kernel.
    pub fn run<'k>(&self, kernel: impl Into<Kernel<'k>>) -> Result<()> {
        let start = Instant::now();
        let mut result = self.device.run(kernel);
        if self.clock.waits {
            result = result.and_then(|()| self.device.synchronize());
        }
        self.clock.nanos.set(self.clock.nanos() + start.elapsed().as_nanos() as u64);
        result
    }

    /// A new tensor with undefined contents.
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::uninit(self.device, shape, dtype, self.kind)
    }

    /// A new tensor of a spec.
    pub fn empty_like(&self, spec: &Spec) -> Result<Tensor> {
        self.empty(&spec.shape, spec.dtype)
    }

    /// A declared workspace.
    pub fn workspace(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::uninit(self.device, shape, dtype, MemoryKind::Workspace)
    }

    /// out += alpha source at the indices: [`kernel::ScatterAdd`] with its workspace.
    pub fn scatter_add(
        &self,
        source: &Tensor,
        indices: &[&Tensor],
        wrap: bool,
        alpha: f64,
        out: &Tensor,
    ) -> Result<()> {
        let order = &self.workspace(&[crate::kernel::meeting(source, indices, out)], DType::I64)?;
        self.run(kernel::ScatterAdd { source, indices, wrap, alpha, order, out })
    }

    /// Where a kernel may write a result of x's shape that replaces x: x itself if nobody else holds it (the kernel
    /// must allow this in-place use), else a new tensor.
    pub fn replace(&self, x: &Tensor) -> Result<Tensor> {
        if !x.is_sole_owner() {
            return self.empty(x.shape(), x.dtype());
        }
        x.storage().set_open(true);
        Ok(x.clone())
    }

    /// A contiguous version of x, copied only if needed.
    pub fn contiguous(&self, x: Tensor) -> Result<Tensor> {
        if x.is_contiguous() {
            return Ok(x);
        }
        let out = self.empty(x.shape(), x.dtype())?;
        self.run(kernel::Copy { x: &x, out: &out })?;
        Ok(out)
    }

    /// x with another shape: a view, or a copy where the strides force one.
    pub fn reshape(&self, x: Tensor, shape: &[usize]) -> Result<Tensor> {
        if let Some(view) = x.view_as(shape)? {
            return Ok(view);
        }
        let copy = self.contiguous(x)?;
        Ok(copy.view_as(shape)?.expect("a contiguous tensor can always be viewed with another shape"))
    }

    /// Where to put together, in several kernels, what goes to `out`: `out` itself, or where that would round in
    /// between, an f32 workspace of its shape. Ends with [`put`](Exec::put).
    pub fn assemble(&self, out: &Tensor) -> Result<Tensor> {
        let dtype = out.dtype().computed_in();
        if dtype == out.dtype() { Ok(out.clone()) } else { self.workspace(out.shape(), dtype) }
    }

    /// Moves what was put together to `out`, rounding it once.
    pub fn put(&self, assembled: &Tensor, out: &Tensor) -> Result<()> {
        if assembled.dtype() == out.dtype() { Ok(()) } else { self.run(kernel::Copy { x: assembled, out }) }
    }

    /// Where to write the terms of an input's gradient, of this shape and dtype. Where the input was repeated, they are
    /// not rounded before [`sum_terms`](Exec::sum_terms) adds them: they lie in a workspace of `DType::computed_in`.
    pub fn terms(&self, terms: &Spec, input: &Spec) -> Result<Tensor> {
        match terms.shape == input.shape {
            true => self.empty_like(terms),
            false => self.workspace(&terms.shape, terms.dtype.computed_in()),
        }
    }

    /// The gradient of an input that was repeated: sums [`terms`](Exec::terms), and rounds once.
    pub fn sum_terms(&self, terms: Tensor, input: &Spec) -> Result<Tensor> {
        self.sum_as(terms, &input.shape, input.dtype)
    }

    /// The gradient of a broadcast: sums g over the dimensions in which `shape` was repeated.
    pub fn sum_to(&self, g: Tensor, shape: &[usize]) -> Result<Tensor> {
        let dtype = g.dtype();
        self.sum_as(g, shape, dtype)
    }

    fn sum_as(&self, g: Tensor, shape: &[usize], dtype: DType) -> Result<Tensor> {
        if g.shape() == shape {
            return Ok(g);
        }
        let broadcasts = crate::layout::broadcast_shapes(shape, g.shape()).is_some_and(|s| s[..] == *g.shape());
        if !broadcasts {
            return Err(crate::Error::tensor("sum_to", format!("{shape:?} is not what {:?} repeats", g.shape())));
        }
        let lead = g.rank() - shape.len();
        let kept: Shape = (0..g.rank()).map(|d| if d < lead { 1 } else { shape[d - lead] }).collect();
        let out = self.empty(&kept, dtype)?;
        self.run(kernel::Reduce { f: ReduceFn::Sum, x: &g, out: &out })?;
        self.reshape(out, shape)
    }

    /// a += b, in the storage of whichever of the two nobody else holds, else in a new tensor.
    pub fn accumulate(&self, a: Tensor, b: Tensor) -> Result<Tensor> {
        // Addition commutes bit for bit, so which buffer is reused doesn't show in the numbers.
        let (first, second) = if !a.is_sole_owner() && b.is_sole_owner() { (b, a) } else { (a, b) };
        let out = self.replace(&first)?;
        self.run(kernel::Binary { f: BinaryFn::Add, a: &first, b: &second, out: &out })?;
        Ok(out)
    }

    /// part += g, where `part` is a view with distinct elements of a tensor that is not g's.
    pub fn add_to(&self, part: &Tensor, g: &Tensor) -> Result<()> {
        if part.is_contiguous() {
            return self.run(kernel::Binary { f: BinaryFn::Add, a: part, b: g, out: part });
        }
        // Kernels write contiguous results, but for copies.
        let in_place = g.is_sole_owner() && g.dtype() == part.dtype();
        let sum = if in_place { g.clone() } else { self.workspace(part.shape(), part.dtype())? };
        self.run(kernel::Binary { f: BinaryFn::Add, a: g, b: part, out: &sum })?;
        self.run(kernel::Copy { x: &sum, out: part })
    }
}
