//! The gradients that a pass gives.

use super::value::ValueKey;
use super::{ParameterId, Var};
use crate::{Error, Result, Tensor};
use std::collections::BTreeMap;

/// The gradients of one backward pass: tensors, not values of a tape. One that is put on a tape with `leaf` starts
/// there, without the history that made it; a gradient of a gradient is [`Error::SecondOrder`], see
/// [`grad_with`](crate::Tape::grad_with).
#[derive(Debug, Default)]
pub struct Gradients {
    /// The tape's id.
    pub(super) tape: u64,
    // Ordered, so that they are freed in the same order on every run.
    pub(super) by_value: BTreeMap<ValueKey, Tensor>,
    pub(super) by_parameter: BTreeMap<ParameterId, Tensor>,
}

impl Gradients {
    /// The gradient of a leaf; `None` where the loss doesn't depend on it, as with a leaf of another tape.
    pub fn of(&self, leaf: &Var) -> Option<&Tensor> {
        self.by_value.get(&leaf.key).filter(|_| self.tape == leaf.tape.0.id)
    }
    /// The gradient of a parameter; `None` where the loss doesn't depend on it.
    pub fn parameter(&self, id: ParameterId) -> Option<&Tensor> {
        self.by_parameter.get(&id)
    }
    /// The relative L2 distance of all gradients together from those of another pass of the same program, the
    /// reference. 0 only where all numbers are equal.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] where the passes don't have gradients of the same leaves.
    pub fn distance(&self, reference: &Gradients) -> Result<f64> {
        let spec = |t: &Tensor| (t.dtype(), t.shape().to_vec());
        let same = self.len() == reference.len()
            && self.by_value.values().zip(reference.by_value.values()).all(|(a, b)| spec(a) == spec(b));
        if !same {
            let reason = "the passes have gradients of different leaves; compare passes of the same program".into();
            return Err(Error::InvalidTensor { what: "distance of gradients", reason });
        }
        let (mut error, mut norm) = (0.0, 0.0);
        for (a, b) in self.by_value.values().zip(reference.by_value.values()) {
            for (a, b) in a.to_f64_vec()?.into_iter().zip(b.to_f64_vec()?) {
                error += (a - b) * (a - b);
                norm += b * b;
            }
        }
        Ok(if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
    }

    /// How many leaves have a gradient.
    pub fn len(&self) -> usize {
        self.by_value.len()
    }
    /// True where no leaf has one.
    pub fn is_empty(&self) -> bool {
        self.by_value.is_empty()
    }
}
