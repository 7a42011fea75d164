//! Tensors: shared storage and a view on it.

use crate::device::{Device, Storage};
use crate::kernel;
use crate::layout::{Layout, Shape, element_count};
use crate::{DType, Element, Error, MemoryKind, Result};
use std::fmt;
use std::sync::{Arc, Weak};

/// An n-dimensional array on a device. Clones and views share its storage.
///
/// A tensor from [`uninit`](Tensor::uninit) or [`full`](Tensor::full) is open: [`Device::run`] may write it. Once it is
/// [`sealed`](Tensor::sealed) or given to a tape, its numbers no longer change while anyone else holds it. Tensors
/// from host values, casts and copies, and those that a tape hands out, are sealed from the start.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    layout: Layout,
    dtype: DType,
}

impl Tensor {
    /// A contiguous tensor whose contents are undefined until a kernel fills it. Kernels may write it until it is
    /// [`sealed`](Tensor::sealed), or a tape is given it.
    pub fn uninit(device: &Device, shape: &[usize], dtype: DType, kind: MemoryKind) -> Result<Tensor> {
        let storage = Arc::new(device.allocate(bytes_of(shape, dtype)?, kind)?);
        Ok(Tensor { storage, layout: Layout::contiguous(shape), dtype })
    }

    /// This tensor, whose numbers are what they shall be: from now on no kernel writes it while others hold it.
    pub fn sealed(self) -> Tensor {
        self.storage.set_open(false);
        self
    }

    /// A tensor from host values in row-major order, counted as [`MemoryKind::Input`]. On the meta device the values
    /// are dropped.
    pub fn from_slice<T: Element>(device: &Device, shape: &[usize], values: &[T]) -> Result<Tensor> {
        if element_count(shape)? != values.len() {
            return Err(Error::tensor(
                "from_slice",
                format!("{} values given for shape {shape:?}, which needs {}", values.len(), element_count(shape)?),
            ));
        }
        Tensor::from_bytes(device, shape, T::DTYPE, &T::to_bytes(values))
    }

    /// A tensor from the bytes of its elements in row-major order and the machine's byte order. A bool is the byte 0
    /// or 1; another is an error.
    pub fn from_bytes(device: &Device, shape: &[usize], dtype: DType, bytes: &[u8]) -> Result<Tensor> {
        let needed = bytes_of(shape, dtype)?;
        if needed != bytes.len() {
            let reason = format!("{} bytes given, {dtype}{shape:?} needs {needed}", bytes.len());
            return Err(Error::tensor("from_bytes", reason));
        }
        if dtype == DType::Bool
            && let Some(at) = bytes.iter().position(|&byte| byte > 1)
        {
            let reason = format!("a bool is the byte 0 or 1, that at position {at} is {}; cast a u8 tensor", bytes[at]);
            return Err(Error::tensor("from_bytes", reason));
        }
        let mut storage = device.allocate(needed, MemoryKind::Input)?;
        storage.upload(bytes)?;
        Ok(Tensor { storage: Arc::new(storage), layout: Layout::contiguous(shape), dtype }.sealed())
    }

    /// A tensor filled with one value. Kernels may write it, as one from [`uninit`](Tensor::uninit).
    pub fn full(device: &Device, shape: &[usize], dtype: DType, value: f64) -> Result<Tensor> {
        let tensor = Tensor::uninit(device, shape, dtype, MemoryKind::Input)?;
        device.run(kernel::Fill { value, out: &tensor })?;
        Ok(tensor)
    }

    /// The elements in row-major order, copied to the host. Views are read through their strides.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::WrongDType { actual: self.dtype, asked: T::DTYPE });
        }
        Ok(T::from_bytes(&self.to_bytes()?))
    }

    /// The bytes of the elements in row-major order.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.has_numbers()?;
        if self.is_empty() {
            return Ok(Vec::new()); // its offset may lie past the storage's end
        }
        let source = self.contiguous(MemoryKind::Workspace)?;
        let mut bytes = vec![0u8; source.len() * self.dtype.size()];
        source.storage.download(source.layout.offset * self.dtype.size(), &mut bytes)?;
        Ok(bytes)
    }

    /// The elements as `f64`, whatever the dtype.
    pub fn to_f64_vec(&self) -> Result<Vec<f64>> {
        self.has_numbers()?; // before the cast takes memory
        match self.dtype {
            DType::F64 => self.to_vec::<f64>(),
            _ => self.cast(DType::F64, MemoryKind::Workspace)?.to_vec::<f64>(),
        }
    }

    /// Fails on the meta device.
    fn has_numbers(&self) -> Result<()> {
        if self.device().computes() {
            return Ok(());
        }
        Err(Error::NoNumbers { what: format!("reading a tensor {}{:?}", self.dtype, self.shape()) })
    }

    /// The one element of a tensor of one element, as `f64`.
    pub fn item(&self) -> Result<f64> {
        if self.len() != 1 {
            return Err(Error::tensor(
                "item",
                format!("needs a tensor of one element, this one is {}{:?}", self.dtype, self.shape()),
            ));
        }
        Ok(self.to_f64_vec()?[0])
    }

    /// The sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape
    }
    /// Shape, strides and offset.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.layout.rank()
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.layout.len()
    }
    /// True where a dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.layout.is_empty()
    }
    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// The device.
    pub fn device(&self) -> &Device {
        self.storage.device()
    }
    /// The storage that it views.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }
    /// Requested bytes of the storage that it views (a view of a part counts the whole).
    pub fn storage_bytes(&self) -> usize {
        self.storage.bytes()
    }
    /// True where both view the same storage.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }
    /// True where the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }
    /// True where nobody else holds the storage and this tensor covers all of it in order: it may be overwritten.
    pub fn is_sole_owner(&self) -> bool {
        Arc::strong_count(&self.storage) == 1 && self.covers_storage()
    }
    /// How many tensors hold the storage.
    pub(crate) fn holders(&self) -> usize {
        Arc::strong_count(&self.storage)
    }
    /// The storage without holding it.
    pub(crate) fn weak_storage(&self) -> Weak<Storage> {
        Arc::downgrade(&self.storage)
    }
    /// What it takes to make a tensor like this one, storage of its own included.
    pub(crate) fn template(&self) -> Template {
        let (bytes, kind) = (self.storage_bytes(), self.storage.kind());
        Template { layout: self.layout.clone(), dtype: self.dtype, bytes, kind }
    }
    /// True where this tensor covers all of its storage in order.
    pub(crate) fn covers_storage(&self) -> bool {
        self.is_contiguous() && self.len() * self.dtype.size() == self.storage.bytes()
    }

    /// A tensor that lies in another storage as this one does in its own.
    pub(crate) fn in_storage(&self, storage: Arc<Storage>) -> Tensor {
        Tensor { storage, layout: self.layout.clone(), dtype: self.dtype }
    }

    pub(crate) fn with_layout(&self, layout: Layout) -> Tensor {
        Tensor { storage: self.storage.clone(), layout, dtype: self.dtype }
    }

    /// A view with another shape, or `None` where the strides force a copy.
    pub fn view_as(&self, shape: &[usize]) -> Result<Option<Tensor>> {
        Ok(self.layout.reshape(shape)?.map(|l| self.with_layout(l)))
    }
    /// A view with the dimensions in another order.
    pub fn permute(&self, order: &[usize]) -> Result<Tensor> {
        Ok(self.with_layout(self.layout.permute(order)?))
    }
    /// A view with two dimensions exchanged.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor> {
        let mut order: Shape = (0..self.rank()).collect();
        if a >= order.len() || b >= order.len() {
            return Err(Error::tensor("transpose", format!("dimensions {a} and {b} of {:?}", self.shape())));
        }
        order.swap(a, b);
        self.permute(&order)
    }
    /// A view broadcast to `shape`.
    pub fn expand(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(self.with_layout(self.layout.expand(shape)?))
    }
    /// A view of a part of one dimension.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Tensor> {
        Ok(self.with_layout(self.layout.narrow(dim, start, len)?))
    }
    /// A view of `len` elements of one dimension, `step` apart.
    pub fn slice(&self, dim: usize, start: usize, len: usize, step: usize) -> Result<Tensor> {
        Ok(self.with_layout(self.layout.slice(dim, start, len, step)?))
    }

    /// A view of the storage with any strides, from element `offset` of the storage: what no other view can express,
    /// like overlapping windows.
    pub fn as_strided(&self, shape: &[usize], strides: &[usize], offset: usize) -> Result<Tensor> {
        element_count(shape)?;
        let mut layout = Layout { shape: shape.into(), strides: strides.into(), offset };
        let last = shape
            .iter()
            .zip(strides)
            .try_fold(offset, |at, (&n, &s)| at.checked_add(n.max(1).checked_sub(1)?.checked_mul(s)?));
        let elements = self.storage.bytes() / self.dtype.size();
        if shape.len() != strides.len() || !layout.is_empty() && last.is_none_or(|last| last >= elements) {
            let reason = format!(
                "{shape:?} with strides {strides:?} from {offset} isn't inside a storage of {elements} elements"
            );
            return Err(Error::tensor("as_strided", reason));
        }
        if layout.is_empty() {
            layout = Layout::contiguous(shape); // the strides of no elements may be anything
        }
        Ok(self.with_layout(layout))
    }

    /// This tensor if contiguous, else a contiguous copy.
    pub fn contiguous(&self, kind: MemoryKind) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.copy(kind) }
    }
    /// A contiguous copy in storage of its own.
    pub fn copy(&self, kind: MemoryKind) -> Result<Tensor> {
        self.cast(self.dtype, kind)
    }
    /// A contiguous copy with another dtype. To a float: the nearest one, of two the even one, in one rounding from any
    /// dtype, i64 too; beyond the largest it is infinite. From a float to an integer: towards zero, the nearest end of
    /// the range beyond it, 0 for NaN. Between integers: the low bits (two's complement). To bool: whether it isn't 0
    /// (NaN isn't).
    pub fn cast(&self, dtype: DType, kind: MemoryKind) -> Result<Tensor> {
        let out = Tensor::uninit(self.device(), self.shape(), dtype, kind)?;
        self.device().run(kernel::Copy { x: self, out: &out })?;
        Ok(out.sealed())
    }
}

/// Bytes of a contiguous tensor, or why no memory can hold it.
fn bytes_of(shape: &[usize], dtype: DType) -> Result<usize> {
    let bytes = element_count(shape)?.checked_mul(dtype.size());
    bytes.ok_or_else(|| Error::tensor("shape", format!("{dtype}{shape:?} has more bytes than 64 bits can count")))
}

/// A tensor's description, without its memory.
#[derive(Debug)]
pub(crate) struct Template {
    layout: Layout,
    dtype: DType,
    bytes: usize,
    kind: MemoryKind,
}

impl Template {
    /// A tensor of this description with undefined contents.
    pub fn make(&self, device: &Device) -> Result<Tensor> {
        let storage = Arc::new(device.allocate(self.bytes, self.kind)?);
        Ok(Tensor { storage, layout: self.layout.clone(), dtype: self.dtype })
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}{:?} on {})", self.dtype, self.shape(), self.device().name())
    }
}

/// The numbers, nested by dimension; of a long dimension the first and last three. Takes the formatter's precision.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_f64_vec() {
            Ok(values) => show(f, &values, self.shape(), 0)?,
            Err(_) => write!(f, "(no numbers)")?,
        }
        write!(f, " {}{:?}", self.dtype, self.shape())
    }
}

/// Writes one dimension of row-major values and what is inside it.
fn show(f: &mut fmt::Formatter<'_>, values: &[f64], shape: &[usize], depth: usize) -> fmt::Result {
    let Some((&len, inner)) = shape.split_first() else {
        return match f.precision() {
            Some(precision) => write!(f, "{:.precision$}", values[0]),
            None => write!(f, "{}", values[0]),
        };
    };
    let step: usize = inner.iter().product();
    let gap = if inner.is_empty() { " ".to_string() } else { format!("\n{}", " ".repeat(depth + 1)) };
    write!(f, "[")?;
    // Recursion by rank, of which there are few.
    for i in 0..len {
        if len > 7 && i == 3 {
            write!(f, "...,{gap}")?;
        }
        if len > 7 && (3..len - 3).contains(&i) {
            continue;
        }
        show(f, &values[i * step..(i + 1) * step], inner, depth + 1)?;
        if i + 1 < len {
            write!(f, ",{gap}")?;
        }
    }
    write!(f, "]")
}
