//! A named tensor that training changes.

use crate::{Error, Result};
use retape_core::{DType, Device, Mark, MemoryKind, ParameterId, Tape, Tensor, Var};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A parameter: a shared cell with a tensor. Clones share the cell, so a tied weight is one parameter in two layers,
/// and its gradients add up. Its bytes are counted as [`MemoryKind::Parameter`].
///
/// An update replaces the cell's tensor, or overwrites it where nobody else holds its storage: a tape that recorded
/// the old tensor never sees the new numbers.
#[derive(Debug, Clone)]
pub struct Parameter(Arc<Cell>);

#[derive(Debug)]
struct Cell {
    id: ParameterId,
    name: String,
    tensor: RwLock<Tensor>,
    requires_grad: AtomicBool,
    replacements: AtomicU64,
}

impl Parameter {
    /// A parameter that needs a gradient. A view, or a tensor whose storage somebody else holds, is copied first:
    /// its storage must be its own to be counted and updated.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Result<Parameter> {
        let tensor = own(tensor)?;
        Ok(Parameter(Arc::new(Cell {
            id: ParameterId::unique(),
            name: name.into(),
            tensor: RwLock::new(tensor),
            requires_grad: AtomicBool::new(true),
            replacements: AtomicU64::new(0),
        })))
    }

    /// The name, as in a checkpoint.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What tapes and gradients know it by; no other parameter of this process ever has it.
    pub fn id(&self) -> ParameterId {
        self.0.id
    }

    /// The tensor as it is now. While it is held, an update makes a copy.
    pub fn tensor(&self) -> Tensor {
        self.read().clone()
    }

    /// The shape.
    pub fn shape(&self) -> Vec<usize> {
        self.read().shape().to_vec()
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.read().dtype()
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.read().device().clone()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.read().len()
    }

    /// True where a dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether backward computes its gradient.
    pub fn requires_grad(&self) -> bool {
        self.0.requires_grad.load(Ordering::Relaxed)
    }

    /// Freezes it (`false`) or lets it train. Tapes that have recorded it keep what they have.
    pub fn set_requires_grad(&self, requires_grad: bool) {
        self.0.requires_grad.store(requires_grad, Ordering::Relaxed);
    }

    /// Its leaf on a tape: the same one however often it is asked for.
    pub fn var(&self, tape: &Tape) -> Result<Var> {
        Ok(tape.parameter(self.id(), &self.read(), self.requires_grad())?)
    }

    /// Its leaf cast to `dtype` where it has another: one more op at the scope that is open. For what backward doesn't
    /// read, as a bias.
    pub fn var_as(&self, tape: &Tape, dtype: DType) -> Result<Var> {
        let var = self.var(tape)?;
        if var.dtype() == dtype { Ok(var) } else { Ok(var.cast(dtype)?) }
    }

    /// As [`var_as`](Parameter::var_as), for what backward reads, as a weight: the cast is marked `Recompute`, whatever
    /// the policy says, and backward casts again instead of holding the weights a second time.
    pub fn weight_as(&self, tape: &Tape, dtype: DType) -> Result<Var> {
        let leaf = self.var(tape)?;
        if leaf.dtype() == dtype {
            return Ok(leaf);
        }
        // In time under every policy: a mark comes before the leaf, which the cast was given, settles.
        let cast = leaf.cast(dtype)?;
        match cast.set_mark(Mark::Recompute) {
            // In `no_grad` the cast is a constant, which has no op to replay.
            Err(retape_core::Error::MarkNotAllowed { .. }) => {}
            marked => marked?,
        }
        Ok(cast)
    }

    /// Replaces the tensor by one of the same shape, dtype and device.
    pub fn set(&self, tensor: Tensor) -> Result<()> {
        let mut current = self.write();
        if tensor.shape() != current.shape() || tensor.dtype() != current.dtype() || tensor.device() != current.device()
        {
            let describe = |t: &Tensor| format!("{}{:?} on {}", t.dtype(), t.shape(), t.device().name());
            return Err(Error::WrongReplacement {
                name: self.name().into(),
                expected: describe(&current),
                found: describe(&tensor),
            });
        }
        *current = own(tensor)?;
        self.0.replacements.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How often [`set`](Parameter::set) has replaced the tensor.
    pub(crate) fn replacements(&self) -> u64 {
        self.0.replacements.load(Ordering::Relaxed)
    }

    /// Calls `write` with the tensor, which nobody else holds: what `write` overwrites is seen by this parameter only.
    /// Copies the tensor first where somebody else holds it.
    pub(crate) fn with_unique<R>(&self, write: impl FnOnce(&Tensor) -> Result<R>) -> Result<R> {
        let mut tensor = self.write();
        if !tensor.is_sole_owner() {
            *tensor = tensor.copy(MemoryKind::Parameter)?;
        }
        write(&tensor)
    }

    fn read(&self) -> RwLockReadGuard<'_, Tensor> {
        // The cell holds a whole tensor at every instruction, so a poisoned lock is still usable.
        self.0.tensor.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tensor> {
        self.0.tensor.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The tensor in storage of its own, counted as a parameter.
pub(crate) fn own(tensor: Tensor) -> Result<Tensor> {
    if tensor.is_sole_owner() {
        tensor.storage().set_kind(MemoryKind::Parameter);
        return Ok(tensor.sealed());
    }
    Ok(tensor.copy(MemoryKind::Parameter)?)
}
