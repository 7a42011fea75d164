//! Typed access to tensors: the one place where a raw address becomes elements.
//!
//! A [`Span`] is a run of elements that other spans may overlap: elements go in and out by value, in blocks, and are
//! never borrowed. So a kernel may write the very tensor it reads, and LLVM needs no overlap checks to vectorise. A
//! span of f32 may lie in memory as bf16 or f16 (see [`crate::halves`]). A [`Rows`] is a tensor seen as rows along its
//! last dimension; a [`Nest`] is several tensors of one shape walked together.
//!
//! What makes this sound is the same everywhere: core has checked a kernel's operands (see [`retape_core::Launch`]),
//! keeps their storage alive and lets no other kernel write it meanwhile; and a kernel's parallel tasks write disjoint
//! elements that no other task reads.

use crate::exec::{Baseline, Exec, Target};
use crate::halves::{Cell, Half};
use retape_core::layout::{Layout, Shape, Strides};
use retape_core::{Buffer, DType, Error, Result, Tensor};

/// Elements that elementwise and row kernels handle at a time: eight AVX-512 registers of f32.
pub(crate) const BLOCK: usize = 64;

/// A block whose lane `j` is the expression: a loop compiled where it stands, unlike a call of `array::map`, which the
/// SIMD dispatch wouldn't reach.
macro_rules! lanes {
    ($j:ident => $value:expr) => {{
        let mut block = [Default::default(); $crate::view::BLOCK];
        for $j in 0..$crate::view::BLOCK {
            block[$j] = $value;
        }
        block
    }};
}
pub(crate) use lanes;

/// Elements of one task of an elementwise kernel.
const TASK: usize = 16 * 1024;

/// A run of `len` elements `stride` apart; possibly overlapped by others.
#[derive(Debug)]
pub(crate) struct Span<T> {
    ptr: *mut T,
    len: usize,
    /// Distance of elements, with their format of 16 bits above [`FORMAT`]: so 1 means Ts side by side, and loops over
    /// blocks have one thing to ask of each operand.
    step: usize,
}

/// Where a step's format begins: 0 (as they are), 1 (bf16), 2 (f16).
const FORMAT: u32 = usize::BITS - 2;

/// The format as it stands in a step.
fn format(half: Option<Half>) -> usize {
    match half {
        None => 0,
        Some(Half::BF16) => 1 << FORMAT,
        Some(Half::F16) => 2 << FORMAT,
    }
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Span<T> {}

// SAFETY: a span is an address; the module's contract (tasks write disjoint elements) rules out data races.
unsafe impl<T: Send> Send for Span<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Span<T> {}

impl<T: Cell> Span<T> {
    /// All elements from the tensor's first to the last that its layout reaches, in storage order.
    pub fn of(tensor: &Tensor) -> Span<T> {
        let half = if T::WIDENS { Half::of(tensor.dtype()) } else { None };
        let (ptr, step) = (tensor.storage().address() as *mut T, 1 | format(half));
        let whole = Span { ptr, len: tensor.layout().span(), step };
        assert_eq!(whole.size(), tensor.dtype().size(), "elements of {} aren't of this type", tensor.dtype());
        // The offset may lie past the end of an empty tensor's storage: no element is ever touched there.
        Span { ptr: whole.at(tensor.layout().offset), ..whole }
    }

    /// A span over a task's own memory.
    pub fn over(memory: &mut [T]) -> Span<T> {
        Span { ptr: memory.as_mut_ptr(), len: memory.len(), step: 1 }
    }

    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    /// How the elements lie, if not as T.
    #[inline(always)]
    fn half(self) -> Option<Half> {
        match self.step >> FORMAT {
            0 => None,
            _ if !T::WIDENS => None,
            1 => Some(Half::BF16),
            _ => Some(Half::F16),
        }
    }

    /// True where what is written is rounded.
    #[inline(always)]
    pub fn rounds(self) -> bool {
        self.half().is_some()
    }

    /// True where elements are Ts side by side.
    #[inline(always)]
    pub fn is_plain(self) -> bool {
        self.step == 1
    }

    /// Distance of elements.
    #[inline(always)]
    fn stride(self) -> usize {
        if T::WIDENS { self.step & ((1 << FORMAT) - 1) } else { self.step }
    }

    /// This with elements `stride` apart.
    #[inline(always)]
    fn with_stride(self, stride: usize) -> Span<T> {
        let format = if T::WIDENS { self.step & !((1 << FORMAT) - 1) } else { 0 };
        Span { step: stride | format, ..self }
    }

    /// Bytes of an element.
    #[inline(always)]
    fn size(self) -> usize {
        if self.rounds() { 2 } else { size_of::<T>() }
    }

    /// The address `n` elements on.
    #[inline(always)]
    fn at(self, n: usize) -> *mut T {
        self.ptr.wrapping_byte_add(n * self.size())
    }

    /// `len` elements `stride` apart, from element `start` of this span (whose own stride is 1).
    #[inline(always)]
    pub fn part(self, start: usize, len: usize, stride: usize) -> Span<T> {
        debug_assert_eq!(self.stride(), 1);
        assert!(len == 0 || start + (len - 1) * stride < self.len, "a view reaches past its tensor");
        Span { ptr: self.at(start), len, ..self.with_stride(stride) }
    }

    /// `len` elements of this span from `start`.
    #[inline(always)]
    pub fn sub(self, start: usize, len: usize) -> Span<T> {
        assert!(start + len <= self.len);
        Span { ptr: self.at(start * self.stride()), len, ..self }
    }

    /// `len` elements of this span, every `step`-th from `start`.
    #[inline(always)]
    pub fn every(self, start: usize, len: usize, step: usize) -> Span<T> {
        assert!(len == 0 || start + (len - 1) * step < self.len);
        Span { ptr: self.at(start * self.stride()), len, ..self.with_stride(self.stride() * step) }
    }

    #[inline(always)]
    pub fn get(self, i: usize) -> T {
        assert!(i < self.len);
        if let Some(half) = self.half() {
            // SAFETY: as below.
            return T::widen(unsafe { *self.at(i * self.stride()).cast() }, half);
        }
        // SAFETY: inside the span by the check, and the span inside living memory by the module's contract.
        unsafe { *self.ptr.add(i * self.step) }
    }

    #[inline(always)]
    pub fn set(self, i: usize, value: T) {
        assert!(i < self.len);
        if let Some(half) = self.half() {
            // SAFETY: as in `get`.
            return unsafe { *self.at(i * self.stride()).cast() = value.narrow(half) };
        }
        // SAFETY: as in `get`.
        unsafe { *self.ptr.add(i * self.step) = value }
    }

    /// The elements from `i`, up to `N` or the end; `fill` behind the end.
    #[inline(always)]
    pub fn load<const N: usize>(self, i: usize, fill: T) -> [T; N] {
        if self.is_plain() && i + N <= self.len {
            // SAFETY: N elements from i are inside the span, which is contiguous.
            return unsafe { self.ptr.add(i).cast::<[T; N]>().read_unaligned() };
        }
        if self.stride() == 0 && i + N <= self.len {
            return [self.get(i); N];
        }
        let mut block = [fill; N];
        for (j, slot) in block.iter_mut().enumerate().take(self.len.saturating_sub(i)) {
            *slot = self.get(i + j);
        }
        block
    }

    /// Writes the block from `i`, up to the end.
    #[inline(always)]
    pub fn store<const N: usize>(self, i: usize, block: [T; N]) {
        if self.is_plain() && i + N <= self.len {
            // SAFETY: N elements from i are inside the span, which is contiguous.
            return unsafe { self.ptr.add(i).cast::<[T; N]>().write_unaligned(block) };
        }
        for (j, value) in block.into_iter().enumerate().take(self.len.saturating_sub(i)) {
            self.set(i + j, value);
        }
    }

    /// Writes `value` to all of it.
    #[inline(always)]
    pub fn fill(self, value: T) {
        for i in (0..self.len).step_by(BLOCK) {
            self.store(i, [value; BLOCK]);
        }
    }

    /// Copies its number of elements from `source`.
    #[inline(always)]
    pub fn copy_from(self, source: Span<T>) {
        for i in (0..self.len).step_by(BLOCK) {
            self.store(i, source.load::<BLOCK>(i, T::default()));
        }
    }

    /// This span as a slice: only where nothing writes these elements meanwhile.
    #[inline(always)]
    pub fn as_slice<'a>(self) -> &'a [T] {
        assert!(self.is_plain());
        if self.len == 0 {
            return &[];
        }
        // SAFETY: living, initialised memory by the module's contract; the caller reads operands that no task writes.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// This span as a mutable slice: only where these elements belong to the calling task alone.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub fn as_mut_slice<'a>(self) -> &'a mut [T] {
        assert!(self.is_plain());
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: living memory by the module's contract; the caller is the only one to touch its own output rows.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// The address, for libraries.
    #[inline(always)]
    pub fn ptr(self) -> *mut T {
        assert!(!self.rounds());
        self.ptr
    }
}

/// Offset of the `index`-th combination (row-major) of these dimensions.
#[inline]
pub(crate) fn offset_of(mut index: usize, shape: &[usize], strides: &[usize]) -> usize {
    let mut offset = 0;
    for (&n, &s) in shape.iter().zip(strides).rev() {
        offset += index % n * s;
        index /= n;
    }
    offset
}

/// A tensor as rows along its last dimension (a scalar is one row of one element).
#[derive(Debug, Clone)]
pub(crate) struct Rows<T> {
    span: Span<T>,
    outer: (Shape, Strides),
    stride: usize,
    /// Number of rows.
    pub count: usize,
    /// Elements of a row.
    pub width: usize,
}

impl<T: Cell> Rows<T> {
    pub fn of(tensor: &Tensor) -> Rows<T> {
        let Layout { shape, strides, .. } = tensor.layout();
        let last = shape.len().saturating_sub(1);
        let width = shape.last().copied().unwrap_or(1);
        let stride = if width > 1 { strides[last] } else { 1 };
        let outer = merged(&shape[..last], &[&strides[..last]]);
        let count = shape[..last].iter().product();
        Rows { span: Span::of(tensor), outer: (outer.0, outer.1[0].clone()), stride, count, width }
    }

    /// Row `r`.
    #[inline(always)]
    pub fn row(&self, r: usize) -> Span<T> {
        let start = match (&self.outer.0[..], &self.outer.1[..]) {
            (_, &[stride]) => r * stride,
            (shape, strides) => offset_of(r, shape, strides),
        };
        self.span.part(if self.width == 0 { 0 } else { start }, self.width, self.stride)
    }
}

/// Drops dimensions of size 1 and merges neighbours that every operand steps through evenly.
pub(crate) fn merged<const K: usize>(shape: &[usize], strides: &[&[usize]; K]) -> (Shape, [Strides; K]) {
    let mut sizes = Shape::new();
    let mut steps: [Strides; K] = std::array::from_fn(|_| Strides::new());
    for d in 0..shape.len() {
        if shape[d] == 1 {
            continue;
        }
        let joins = !sizes.is_empty() && (0..K).all(|k| *steps[k].last().unwrap() == strides[k][d] * shape[d]);
        if joins {
            *sizes.last_mut().unwrap() *= shape[d];
        } else {
            sizes.push(shape[d]);
        }
        for k in 0..K {
            if joins {
                *steps[k].last_mut().unwrap() = strides[k][d];
            } else {
                steps[k].push(strides[k][d]);
            }
        }
    }
    (sizes, steps)
}

/// `K` tensors of one shape, walked together in row-major order as runs of their innermost (merged) dimension.
#[derive(Debug)]
pub(crate) struct Nest<const K: usize> {
    outer: Shape,
    outer_strides: [Strides; K],
    width: usize,
    strides: [usize; K],
    len: usize,
}

/// `len` elements of each operand, `offsets` into its span and `strides` apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run<const K: usize> {
    offsets: [usize; K],
    strides: [usize; K],
    pub len: usize,
}

impl<const K: usize> Run<K> {
    /// Index of the run's first element in operand `k`'s span.
    #[inline(always)]
    pub fn start(&self, k: usize) -> usize {
        self.offsets[k]
    }

    /// Steps between the run's elements in operand `k`'s span.
    #[inline(always)]
    pub fn stride(&self, k: usize) -> usize {
        self.strides[k]
    }

    /// Operand `k`'s elements.
    #[inline(always)]
    pub fn of<T: Cell>(&self, k: usize, span: Span<T>) -> Span<T> {
        span.part(self.offsets[k], self.len, self.strides[k])
    }
}

impl<const K: usize> Nest<K> {
    pub fn new(tensors: [&Tensor; K]) -> Nest<K> {
        Nest::over(tensors[0].shape(), tensors.map(|t| &t.layout().strides[..]))
    }

    /// Operands of this shape with these strides.
    pub fn over(shape: &[usize], strides: [&[usize]; K]) -> Nest<K> {
        let (mut outer, mut outer_strides) = merged(shape, &strides);
        let width = outer.pop().unwrap_or(1);
        let strides = std::array::from_fn(|k| outer_strides[k].pop().unwrap_or(1));
        Nest { outer, outer_strides, width, strides, len: shape.iter().product() }
    }

    /// Calls `body` on runs that together cover every element once, in parallel. `cost` is the time of one element in
    /// units of a plain addition.
    #[inline(always)]
    pub fn for_each_run<T: Target>(&self, exec: &Exec, cost: usize, body: impl Fn(Run<K>) + Sync) {
        self.for_each_run_in::<T>(exec, TASK, cost, body);
    }

    /// The same in tasks of `size` elements, for bodies that do much for each.
    #[inline(always)]
    pub fn for_each_run_in<T: Target>(&self, exec: &Exec, size: usize, cost: usize, body: impl Fn(Run<K>) + Sync) {
        exec.run::<Baseline>(self.len.div_ceil(size), self.len * cost, |task| {
            self.walk(task * size, self.len.min((task + 1) * size), &|run| exec.compiled::<T, _, _>(&body, run));
        });
    }

    /// Calls `body` on the runs of elements `at .. end`.
    fn walk(&self, mut at: usize, end: usize, body: &dyn Fn(Run<K>)) {
        // Indices of the outer dimensions and the offsets they give; stepped as an odometer.
        let (mut row, mut column) = (at / self.width, at % self.width);
        let mut index: Shape = self.outer.clone();
        for d in (0..index.len()).rev() {
            index[d] = row % self.outer[d];
            row /= self.outer[d];
        }
        let mut bases: [usize; K] =
            std::array::from_fn(|k| index.iter().zip(&self.outer_strides[k]).map(|(i, s)| i * s).sum());
        loop {
            let len = (self.width - column).min(end - at);
            let offsets = std::array::from_fn(|k| bases[k] + column * self.strides[k]);
            body(Run { offsets, strides: self.strides, len });
            at += len;
            if at == end {
                return;
            }
            column = 0;
            for d in (0..index.len()).rev() {
                index[d] += 1;
                if index[d] < self.outer[d] {
                    bases.iter_mut().zip(&self.outer_strides).for_each(|(base, s)| *base += s[d]);
                    break;
                }
                index[d] = 0;
                bases.iter_mut().zip(&self.outer_strides).for_each(|(base, s)| *base -= (self.outer[d] - 1) * s[d]);
            }
        }
    }
}

/// Makes a call with `$t` bound to the Rust type that a float dtype is computed in; `Error::Unsupported` for another
/// dtype. The call is of a generic function, which says the rest.
macro_rules! for_float {
    ($kernel:expr, $dtype:expr, $t:ident => $call:expr) => {
        match $dtype {
            retape_core::DType::F32 | retape_core::DType::BF16 | retape_core::DType::F16 => {
                type $t = f32;
                Ok($call)
            }
            retape_core::DType::F64 => {
                type $t = f64;
                Ok($call)
            }
            other => Err($crate::view::unsupported($kernel, other)),
        }
    };
}
pub(crate) use for_float;

/// The error for a dtype that a kernel doesn't take.
pub(crate) fn unsupported(kernel: &'static str, dtype: DType) -> Error {
    Error::Unsupported { kernel, device: "cpu".into(), reason: format!("no kernel for {dtype}") }
}

/// `len` bytes of a buffer, for copies to and from the host.
pub(crate) fn host_range(what: &'static str, buffer: &Buffer, offset: usize, len: usize) -> Result<Span<u8>> {
    if offset.checked_add(len).is_none_or(|end| end > buffer.bytes()) {
        let reason = format!("{len} bytes at {offset} of a buffer of {} bytes", buffer.bytes());
        return Err(Error::InvalidTensor { what, reason });
    }
    Ok(Span { ptr: (buffer.address() as *mut u8).wrapping_add(offset), len, step: 1 })
}
