//! Ways of storing a saved value: a file each, which says all about it. The tape, the ledger, the planner, rules, files
//! and pages know [`StorageFormat`] and [`Mark::FORMATS`] only. `docs/adding-a-storage-format.md` says how to add one.

mod bf16;
mod full;
mod int8;

use crate::kernel::RandomStream;
use crate::ops::{Exec, Spec};
use crate::{Error, Mark, Result, Tensor};
pub use bf16::Bf16;
pub use full::Full;
pub use int8::{Int8Spec, Rounding};
use smallvec::SmallVec;
use std::fmt::Debug;

impl Mark {
    /// A mark for each way of storing a value, with its usual arguments; what is exact first. A new way is a file,
    /// and a line here.
    pub const FORMATS: [Mark; 3] = [Mark::Keep, Mark::Int8(Int8Spec::DEFAULT), Mark::Bf16];

    /// How a value with this mark is stored; none where it is recomputed.
    pub fn format(&self) -> Option<&dyn StorageFormat> {
        match self {
            Mark::Recompute => None,
            Mark::Keep => Some(&Full),
            Mark::Int8(spec) => Some(spec),
            Mark::Bf16 => Some(&Bf16),
        }
    }

    /// Whether a value of this spec is stored in another form than its own: as it is where it is 16-bit already, say.
    pub(crate) fn packs(&self, spec: &Spec) -> bool {
        self.bytes(spec).is_some()
    }

    /// The bytes that a value of this spec takes where this mark packs it; `None` where it is kept as it is or
    /// recomputed.
    pub fn bytes(&self, spec: &Spec) -> Option<u64> {
        self.format()?.bytes(spec)
    }

    /// Whether a value with this mark may come back with other bits.
    pub fn is_lossy(&self) -> bool {
        self.format().is_some_and(StorageFormat::is_lossy)
    }
}

/// A way of storing a saved value, as a [`Mark`] names it.
pub trait StorageFormat: Debug {
    /// The mark's name in ledgers, rules, files and on the command line: `int8`.
    fn name(&self) -> &'static str;

    /// What pages say of a value that is stored so: `saved as int8`.
    fn about(&self) -> &'static str;

    /// The code of the lint for a value that it is skipped for, because an op reads it exactly.
    fn skip_lint(&self) -> &'static str;

    /// Whether a value may come back with other bits. Then nothing that must be exact is stored so, and what is
    /// replayed from it counts as tainted.
    fn is_lossy(&self) -> bool;

    /// Arguments as rules and files write them, `("group", "32")`; none where all are the usual ones.
    fn arguments(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// The mark with another argument, or what would be right.
    fn with(&self, argument: &str, _value: &str) -> Result<Mark, String> {
        Err(format!("`{}` takes no arguments; leave out `{argument}`", self.name()))
    }

    /// Why a value can't be stored with these arguments, where none can.
    fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }

    /// What draws random numbers in it, where anything does: then the tape needs a seed.
    fn randomness(&self) -> Option<&'static str> {
        None
    }

    /// The bytes that it takes of a value: those of the tensors that [`pack`](StorageFormat::pack) makes. `None` where
    /// the value is stored as it is, because the format packs nothing, or no element would take fewer bytes.
    fn bytes(&self, spec: &Spec) -> Option<u64>;

    /// Stores a tensor. `stream` is there for a format with [`randomness`](StorageFormat::randomness).
    ///
    /// # Errors
    /// [`Error::NonFinite`] without names, which the caller adds, where the format can't hold a number of the
    /// tensor.
    fn pack(&self, exec: &Exec<'_>, tensor: &Tensor, stream: Option<RandomStream>) -> Result<PackedParts>;

    /// A new tensor of `spec` from what [`pack`](StorageFormat::pack) has stored.
    fn unpack(&self, exec: &Exec<'_>, parts: &[Tensor], spec: &Spec) -> Result<Tensor>;

    /// How far each element of a row (the last dimension) may be from what was stored, in exact arithmetic.
    fn error_bounds(&self, row: &[f64]) -> Vec<f64>;
}

/// The tensors that hold a packed value.
pub type PackedParts = SmallVec<[Tensor; 2]>;

/// A value stored by a format that packs.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    mark: Mark,
    parts: PackedParts,
    /// Of the original.
    spec: Spec,
}

impl Packed {
    /// Stores a tensor as its mark says.
    ///
    /// # Errors
    /// [`Error::NonFinite`], [`Error::MarkNotAllowed`] and [`Error::Unseeded`], to which the caller adds the value's
    /// names; and those of allocating and of kernels.
    pub fn new(mark: Mark, exec: &Exec<'_>, tensor: &Tensor, stream: Option<RandomStream>) -> Result<Packed> {
        let format = mark.format().unwrap_or(&Full);
        format.check().map_err(|reason| {
            let (path, reason) = (String::new(), reason.into());
            Error::MarkNotAllowed { mark: mark.name(), path, op: "", reason }
        })?;
        if let (Some(what), None) = (format.randomness(), stream) {
            return Err(Error::Unseeded { what, path: String::new() });
        }
        Ok(Packed { mark, parts: format.pack(exec, tensor, stream)?, spec: Spec::of(tensor) })
    }

    /// The tensor, or what the format has left of it.
    pub fn unpack(&self, exec: &Exec<'_>) -> Result<Tensor> {
        self.mark.format().unwrap_or(&Full).unpack(exec, &self.parts, &self.spec)
    }

    pub fn mark(&self) -> Mark {
        self.mark
    }

    pub fn parts(&self) -> &[Tensor] {
        &self.parts
    }

    /// Bytes that the tape stores.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.storage_bytes() as u64).sum()
    }

    /// Bytes that packing reads and writes; the same for unpacking. A look at what the format can't hold isn't counted.
    pub fn traffic(&self) -> u64 {
        self.spec.bytes() + self.bytes()
    }
}
