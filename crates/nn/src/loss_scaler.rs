//! Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018), for models that compute in f16.
//!
//! Gradients of a loss are small, and f16 holds nothing below 2^-24. So backward starts at a large `scale` instead of
//! 1, every gradient is that many times as large, and the optimizer's step divides by it. Where a gradient then isn't
//! finite, the step is skipped and the scale halves; after [`INTERVAL`](LossScaler::INTERVAL) good steps in a row it
//! doubles. The scale is a power of two, so scaling rounds nothing. bf16 has the exponents of f32 and needs none of
//! this.

use crate::{AdamW, Clip, Error, Parameter, Result, clip_grad_norm};
use retape_core::{BackwardOptions, DType, Gradients, Tape, Var};
use serde::{Deserialize, Serialize};

/// The scale and how long it has been good. It is part of a run's state: saved and read again, the run goes on with the
/// same bits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScaler {
    /// What the loss is multiplied by, a power of two.
    scale: f64,
    /// Steps in a row without an infinity or NaN since the scale changed.
    good: u32,
}

impl Default for LossScaler {
    fn default() -> LossScaler {
        LossScaler { scale: 65536.0, good: 0 }
    }
}

impl LossScaler {
    /// Good steps after which the scale doubles.
    pub const INTERVAL: u32 = 1000;
    /// The scale never grows beyond this: f32 gradients are to stay finite.
    pub const MAX: f64 = 16_777_216.0;

    /// What the gradients of [`backward`](LossScaler::backward) are multiplied by.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The gradients of a scalar loss times the scale. Consumes the tape, as [`Tape::backward`] does.
    pub fn backward(&self, tape: &Tape, loss: &Var) -> Result<Gradients> {
        // f16 itself doesn't hold the usual scales.
        let wide = if loss.dtype() == DType::F16 { &loss.clone().cast(DType::F32)? } else { loss };
        Ok(tape.backward_with(wide, BackwardOptions::scaled(self.scale))?)
    }

    /// Clips the norm of the unscaled gradients to `max_norm` (infinite: only measures it) and takes the optimizer's
    /// step. Where a gradient isn't finite nothing is updated, the scale halves, and the result is `None`; at scale 1
    /// that is an error, since it isn't the scale's fault.
    pub fn step(
        &mut self,
        optimizer: &mut AdamW,
        gradients: &Gradients,
        parameters: &[Parameter],
        max_norm: f64,
    ) -> Result<Option<Clip>> {
        match clip_grad_norm(gradients, parameters, max_norm * self.scale) {
            Ok(clip) => {
                optimizer.step(gradients, clip.scale / self.scale)?;
                let norm = clip.norm / self.scale;
                self.good = self.good.saturating_add(1);
                if self.good >= LossScaler::INTERVAL {
                    *self = LossScaler { scale: (2.0 * self.scale).min(LossScaler::MAX), good: 0 };
                }
                Ok(Some(Clip { norm, scale: clip.scale }))
            }
            Err(Error::NonFiniteNorm { .. }) if self.scale > 1.0 => {
                *self = LossScaler { scale: self.scale / 2.0, good: 0 };
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
