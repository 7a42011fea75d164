//! How a tape is set up, and how it runs backward.

use crate::Policy;
use std::rc::Rc;

/// Whether replays are checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// No.
    #[default]
    Off,
    /// Fingerprint each dropped value in forward and compare its replay:
    /// [`Error::ReplayDiffers`](crate::Error::ReplayDiffers) names the op, the path and the first differing element.
    /// Behind a lossy value a replay differs by design; there, the replays of later passes are compared with the first
    /// one's. Costs host memory and time.
    Bits,
}

/// What a store does with a number that its format can't hold: an infinity, a NaN, or one beyond its range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// [`Error::NonFinite`](crate::Error::NonFinite), which names the value.
    #[default]
    Error,
    /// Keep the value in full precision and count it in
    /// [`Stats::full_precision_fallbacks`](crate::Stats::full_precision_fallbacks). Such a value is outside the promise
    /// that a dry run predicts the peak.
    KeepFull,
}

/// How a tape is set up.
#[derive(Debug, Clone, Default)]
pub struct TapeOptions {
    /// Decides marks where neither the value nor a scope does.
    pub policy: Option<Rc<dyn Policy>>,
    /// Seed of every random op. Each training step needs another one, or dropout repeats its mask. Without a seed,
    /// random ops are [`Error::Unseeded`](crate::Error::Unseeded); the meta device draws no numbers and needs none.
    pub seed: Option<u64>,
    /// Whether replays are checked.
    pub verify: Verify,
    /// What a store does with numbers that its format can't hold.
    pub non_finite: NonFinite,
    /// Measure the error of each lossy store for the ledger (costs an unpacking and host time).
    pub measure_quantization: bool,
    /// Record time per path, see [`Stats::by_path`](crate::Stats::by_path).
    pub profile: bool,
}

/// How a backward pass runs, see [`Tape::backward_with`](crate::Tape::backward_with).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackwardOptions {
    /// Keep the tape: any number of passes and further recording may follow, and the same loss gives the same bits.
    /// Otherwise the pass consumes the tape: what it stores is freed as backward passes, and later use is
    /// [`Error::TapeConsumed`](crate::Error::TapeConsumed).
    pub retain_graph: bool,
    /// Record the gradients, so that they have gradients of their own. Not supported yet:
    /// [`Error::SecondOrder`](crate::Error::SecondOrder), and the tape stays as it was. What may do instead: the first
    /// derivative written with ops, and differentiated; or differences of two `grad`s.
    pub create_graph: bool,
    /// Makes every gradient `scale` times as large: backward starts at `scale` instead of 1, rounded to the loss's
    /// dtype. For losses whose gradients are too small for the dtype of what lies before; whoever takes the gradients
    /// divides by it. It takes no memory more. [`backward_from`](crate::Tape::backward_from) refuses any but 1.
    pub scale: f64,
}

impl BackwardOptions {
    /// A pass that keeps the tape.
    pub const RETAIN: BackwardOptions = BackwardOptions { retain_graph: true, create_graph: false, scale: 1.0 };

    /// A pass that consumes the tape and starts at `scale`.
    pub fn scaled(scale: f64) -> BackwardOptions {
        BackwardOptions { scale, ..BackwardOptions::default() }
    }
}

/// Consumes the tape, and starts at 1.
impl Default for BackwardOptions {
    fn default() -> BackwardOptions {
        BackwardOptions { retain_graph: false, create_graph: false, scale: 1.0 }
    }
}
