//! Fingerprints of dropped values, for `Verify::Bits`.

use crate::{Result, Tensor};
use std::hash::{DefaultHasher, Hasher};

/// A hash of all bits, and one byte per element (the element's bytes xored together), which any single flipped bit
/// changes: enough to name the first differing element. Lies on the host, outside the meter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    hash: u64,
    folds: Vec<u8>,
}

impl Fingerprint {
    pub fn of(tensor: &Tensor) -> Result<Fingerprint> {
        let bytes = tensor.to_bytes()?;
        let mut hasher = DefaultHasher::new();
        hasher.write(&bytes);
        let folds = bytes.chunks_exact(tensor.dtype().size()).map(|e| e.iter().fold(0, |a, b| a ^ b)).collect();
        Ok(Fingerprint { hash: hasher.finish(), folds })
    }

    /// The first element in which the tensor differs from the one that this was taken of.
    pub fn first_difference(&self, tensor: &Tensor) -> Result<Option<usize>> {
        let other = Fingerprint::of(tensor)?;
        if self.hash == other.hash {
            return Ok(None);
        }
        // Several flips in one element may cancel in its byte; then at least the value is named.
        Ok(Some(self.folds.iter().zip(&other.folds).position(|(a, b)| a != b).unwrap_or(0)))
    }
}
