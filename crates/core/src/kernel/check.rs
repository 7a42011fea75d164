//! What core checks of every kernel before a backend runs it. Kernels are called by safe code, an op defined outside
//! this crate among it, and backends work on raw memory: nothing that could make them leave an operand gets past this
//! file. What a kernel's operands must be stands with its struct.

use super::Kernel;
use crate::device::{Device, Lock, same_device};
use crate::{DType, Error, Result, Tensor};
use smallvec::SmallVec;

/// A kernel whose operands are checked, and locked until this is dropped. Only core makes one.
#[derive(Debug)]
pub struct Launch<'a> {
    kernel: Kernel<'a>,
    _locks: SmallVec<[Lock<'a>; 8]>,
}

impl<'a> Launch<'a> {
    /// Checks the operands of a kernel for this device, and locks them.
    pub(crate) fn new(kernel: Kernel<'a>, device: &Device) -> Result<Launch<'a>> {
        let primitive = kernel.primitive();
        let check = Check { name: primitive.name(), operands: primitive.operands() };
        let _locks = check.lock()?;
        check.tensors(device)?;
        check.dtypes(device)?;
        primitive.check(&check)?;
        Ok(Launch { kernel, _locks })
    }

    /// The kernel.
    pub fn kernel(&self) -> &Kernel<'a> {
        &self.kernel
    }
}

/// What a kernel does with an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// Reads what may be the very tensor that is written.
    ReadInPlace,
    /// Writes a contiguous tensor.
    Write,
    /// Writes a tensor of any strides with distinct elements.
    WriteStrided,
    /// Writes a tensor of any strides with distinct elements, but for dimensions that repeat.
    WriteRepeated,
}

/// What an operand's elements must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Elements {
    Any,
    /// Those of the output.
    AsOut,
    /// Floats: f64 as all other floats of the kernel, or none of them f64.
    Float,
    /// What the kernel's floats are computed in.
    Statistic,
    Index,
    /// An index or a float.
    IndexOrFloat,
    /// A truth value or a float.
    BoolOrFloat,
    Exactly(DType),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Operand<'a> {
    pub name: &'static str,
    pub tensor: &'a Tensor,
    pub access: Access,
    pub elements: Elements,
}

pub(super) type Operands<'a> = SmallVec<[Operand<'a>; 12]>;

impl Operand<'_> {
    fn is_written(&self) -> bool {
        !matches!(self.access, Access::Read | Access::ReadInPlace)
    }

    /// The first byte that it reaches, and the end.
    fn reach(&self) -> (usize, usize) {
        let (layout, size) = (self.tensor.layout(), self.tensor.dtype().size());
        (layout.offset * size, (layout.offset + layout.span()) * size)
    }
}

/// What core knows of a kernel.
pub(super) trait Primitive<'a> {
    /// Its name, for errors, traces and profiles.
    fn name(&self) -> &'static str;

    /// The operands, and what the kernel does with each. The last of those that are written is the output that
    /// [`Elements::AsOut`] means.
    fn operands(&self) -> Operands<'a>;

    /// Fails unless shapes and attributes are such that a backend stays inside the operands. Without it all operands
    /// have one shape.
    fn check(&self, check: &Check<'_>) -> Result<()> {
        check.alike()
    }
}

/// The operands, each as `name: access elements` behind the struct that has them as fields; those that are absent are
/// left out.
macro_rules! operands {
    ($($of:expr => $($name:ident: $access:ident $elements:expr),*);*) => {{
        #[allow(unused_imports)]
        use $crate::DType;
        use $crate::kernel::check::{Access, Elements::*, Operand, Operands};
        let mut all = Operands::new();
        $($(
            let tensor: Option<&$crate::Tensor> = $of.$name.into();
            let (name, access, elements) = (stringify!($name), Access::$access, $elements);
            all.extend(tensor.map(|tensor| Operand { name, tensor, access, elements }));
        )*)*
        all
    }};
}
pub(super) use operands;

pub(super) struct Check<'a> {
    name: &'static str,
    operands: Operands<'a>,
}

impl<'a> Check<'a> {
    pub fn wrong(&self, reason: String) -> Error {
        Error::tensor(self.name, reason)
    }

    pub fn must(&self, right: bool, reason: impl FnOnce() -> String) -> Result<()> {
        if right { Ok(()) } else { Err(self.wrong(reason())) }
    }

    /// Devices, strides of what is written, what overlaps, and whose the outputs are.
    fn tensors(&self, device: &Device) -> Result<()> {
        for operand in &self.operands {
            same_device(self.name, operand.tensor.device(), device)?;
        }
        for out in self.operands.iter().filter(|o| o.is_written()) {
            let layout = out.tensor.layout();
            let (fits, right) = match out.access {
                Access::WriteStrided => (layout.is_distinct(false), "have distinct elements"),
                Access::WriteRepeated => (layout.is_distinct(true), "have distinct elements but for stride 0"),
                _ => (layout.is_contiguous(), "be contiguous"),
            };
            self.must(fits, || {
                let Operand { name, tensor, .. } = out;
                format!("`{name}` {:?} with strides {:?} must {right}", tensor.shape(), layout.strides)
            })?;
            let mut handles: SmallVec<[&Tensor; 4]> = SmallVec::new();
            for other in self.operands.iter().filter(|o| o.tensor.shares_storage(out.tensor)) {
                if !handles.iter().any(|handle| std::ptr::eq(*handle, other.tensor)) {
                    handles.push(other.tensor);
                }
                let is_itself = other.name == out.name && other.is_written();
                let in_place = other.access == Access::ReadInPlace
                    && other.tensor.layout() == layout
                    && other.tensor.dtype() == out.tensor.dtype();
                let ((from, end), (out_from, out_end)) = (other.reach(), out.reach());
                let apart = end <= out_from || out_end <= from || from == end || out_from == out_end;
                self.must(is_itself || in_place || apart, || {
                    format!("`{}` overlaps `{}`, which it writes; it needs memory of its own", other.name, out.name)
                })?;
            }
            self.must(out.tensor.storage().is_open() || out.tensor.holders() == handles.len(), || {
                format!(
                    "`{}` is a value that others hold, and values don't change; write to a new tensor, or to one that \
                     nobody else holds",
                    out.name
                )
            })?;
        }
        Ok(())
    }

    fn dtypes(&self, device: &Device) -> Result<()> {
        let out = self.operands.iter().rfind(|o| o.is_written()).map_or(DType::F32, |o| o.tensor.dtype());
        let float = self.operands.iter().find(|o| o.elements == Elements::Float).map(|o| o.tensor.dtype());
        for Operand { name, tensor, elements, .. } in &self.operands {
            let dtype = tensor.dtype();
            let is_index = matches!(dtype, DType::I64 | DType::I32);
            let goes = |with: DType| (dtype == DType::F64) == (with == DType::F64);
            let of_floats = dtype.is_float() && float.is_none_or(goes);
            let right = match elements {
                Elements::Any => true,
                Elements::AsOut => dtype == out,
                Elements::Float => of_floats,
                Elements::Statistic => float.is_some_and(|float| dtype == float.computed_in()),
                Elements::Index => is_index,
                Elements::IndexOrFloat => is_index || of_floats,
                Elements::BoolOrFloat => dtype == DType::Bool || of_floats,
                Elements::Exactly(exactly) => dtype == *exactly,
            };
            if !right {
                let given: Vec<String> =
                    self.operands.iter().map(|o| format!("{} {}", o.name, o.tensor.dtype())).collect();
                let reason = format!("no kernel for {dtype} as `{name}` (given {})", given.join(", "));
                return Err(Error::Unsupported { kernel: self.name, device: device.name(), reason });
            }
        }
        Ok(())
    }

    /// Locks what is written and what is read.
    fn lock(&self) -> Result<SmallVec<[Lock<'a>; 8]>> {
        let mut locks = SmallVec::new();
        for writes in [true, false] {
            for (i, operand) in self.operands.iter().enumerate().filter(|(_, o)| o.is_written() == writes) {
                let earlier = |(j, other): (usize, &Operand<'a>)| {
                    let is_earlier = if other.is_written() == writes { j < i } else { other.is_written() };
                    is_earlier && other.tensor.shares_storage(operand.tensor)
                };
                if self.operands.iter().enumerate().any(earlier) {
                    continue;
                }
                let busy = || self.wrong(format!("another thread is at work on `{}` at this moment", operand.name));
                locks.push(operand.tensor.storage().lock(writes).ok_or_else(busy)?);
            }
        }
        Ok(locks)
    }

    /// Fails unless a tensor has this shape.
    pub fn shape(&self, name: &str, tensor: &Tensor, right: &[usize]) -> Result<()> {
        self.must(tensor.shape() == right, || format!("`{name}` must be {right:?}, got {:?}", tensor.shape()))
    }

    /// Fails unless all operands have the shape of the first.
    pub fn alike(&self) -> Result<()> {
        let first = self.operands[0].tensor.shape();
        self.operands.iter().try_for_each(|o| self.shape(o.name, o.tensor, first))
    }

    pub fn rank(&self, name: &str, tensor: &Tensor, right: usize) -> Result<()> {
        self.must(tensor.rank() == right, || format!("`{name}` must have rank {right}, got {:?}", tensor.shape()))
    }

    pub fn dim(&self, x: &Tensor, dim: usize) -> Result<()> {
        self.must(dim < x.rank(), || format!("there is no dimension {dim} in {:?}", x.shape()))
    }

    /// Fails unless a tensor is x with size 1 in one dimension.
    pub fn without(&self, name: &str, tensor: &Tensor, x: &[usize], dim: usize) -> Result<()> {
        let right =
            tensor.rank() == x.len() && (0..x.len()).all(|d| tensor.shape()[d] == if d == dim { 1 } else { x[d] });
        self.must(right, || format!("`{name}` must be {x:?} with size 1 in dimension {dim}, got {:?}", tensor.shape()))
    }

    /// Fails unless a tensor is x with size 1 in some dimensions.
    pub fn reduced(&self, name: &str, tensor: &Tensor, x: &[usize]) -> Result<()> {
        let right = tensor.rank() == x.len() && tensor.shape().iter().zip(x).all(|(&t, &n)| t == n || t == 1);
        self.must(right, || format!("`{name}` must be {x:?} with size 1 in what is reduced, got {:?}", tensor.shape()))
    }

    /// Fails unless a tensor holds the two numbers a row from which its weights are rebuilt.
    pub fn row_stats(&self, stats: &Tensor, rows: &[usize]) -> Result<()> {
        self.joined("stats", stats, rows, &[2])
    }

    /// Fails unless `lead` then `tail` is the shape.
    pub fn joined(&self, name: &str, tensor: &Tensor, lead: &[usize], tail: &[usize]) -> Result<()> {
        let shape = tensor.shape();
        let right = shape.len() == lead.len() + tail.len() && shape.starts_with(lead) && shape.ends_with(tail);
        self.must(right, || format!("`{name}` must be {lead:?} followed by {tail:?}, got {shape:?}"))
    }
}
