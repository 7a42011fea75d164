//! Where the random numbers of a run come from.

use retape_core::kernel::RandomStream;
use serde::{Deserialize, Serialize};

/// Hands each training step the seed of its tape. It is part of a run's state: saved and read again, the run goes on
/// with the same bits.
///
/// ```
/// use retape_core::{DType, Tape, TapeOptions, Tensor};
/// use retape_nn::Random;
///
/// let device = retape_cpu::device();
/// let x = Tensor::full(&device, &[1000], DType::F32, 1.0)?;
/// let mut random = Random::new(7);
/// let mut step = || {
///     let tape = Tape::with(&device, TapeOptions { seed: Some(random.next_seed()), ..TapeOptions::default() });
///     tape.leaf(&x)?.dropout(0.5)?.tensor()?.to_vec::<f32>()
/// };
/// assert_ne!(step()?, step()?);
/// # Ok::<(), retape_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    seed: u64,
    step: u64,
}

/// Sets the tapes' seeds apart from other numbers that are drawn from the same seed.
const TAPES: u64 = u64::from_be_bytes(*b"tapeseed");

impl Random {
    /// Before the first step.
    pub fn new(seed: u64) -> Random {
        Random::at(seed, 0)
    }

    /// After `step` steps.
    pub fn at(seed: u64, step: u64) -> Random {
        Random { seed, step }
    }

    /// The seed of the run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// How many steps have had their seed.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The seed of the next step's tape, a pure function of (seed, step): Philox, so that seeds and steps that are
    /// close together have nothing in common.
    pub fn next_seed(&mut self) -> u64 {
        let words = RandomStream { seed: self.seed ^ TAPES, counter: self.step }.block(0);
        self.step = self.step.wrapping_add(1);
        u64::from(words[1]) << 32 | u64::from(words[0])
    }
}
