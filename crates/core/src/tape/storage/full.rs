//! Storing a value as it is.

use super::{PackedParts, StorageFormat};
use crate::kernel::RandomStream;
use crate::ops::{Exec, Spec};
use crate::{Result, Tensor};
use smallvec::smallvec;

/// The tensor itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

impl StorageFormat for Full {
    fn name(&self) -> &'static str {
        "keep"
    }

    fn about(&self) -> &'static str {
        "kept in full"
    }

    fn skip_lint(&self) -> &'static str {
        "keep-skipped"
    }

    fn is_lossy(&self) -> bool {
        false
    }

    /// None: it packs nothing, so the tape keeps the tensor itself.
    fn bytes(&self, _spec: &Spec) -> Option<u64> {
        None
    }

    fn pack(&self, _exec: &Exec<'_>, tensor: &Tensor, _stream: Option<RandomStream>) -> Result<PackedParts> {
        Ok(smallvec![tensor.clone()])
    }

    fn unpack(&self, _exec: &Exec<'_>, parts: &[Tensor], _spec: &Spec) -> Result<Tensor> {
        Ok(parts[0].clone())
    }

    fn error_bounds(&self, row: &[f64]) -> Vec<f64> {
        vec![0.0; row.len()]
    }
}
