//! Exact accounting of tensor memory, in requested bytes.

use crate::device::unique;
use crate::{Error, Result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a piece of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum MemoryKind {
    /// Model parameters.
    Parameter,
    /// Gradients of leaves.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// Inputs of a step: tokens, targets, constants.
    Input,
    /// Values of forward and gradients of backward that are in use right now.
    Activation,
    /// Values stored in full for backward.
    Saved,
    /// Values stored packed for backward: as int8, as bf16.
    Quantized,
    /// Values replayed or unpacked during backward.
    Recomputed,
    /// Workspace that an op declares.
    Workspace,
}

impl MemoryKind {
    /// Every kind, in the order of their declaration.
    pub const ALL: [MemoryKind; 9] = [
        MemoryKind::Parameter,
        MemoryKind::Gradient,
        MemoryKind::Optimizer,
        MemoryKind::Input,
        MemoryKind::Activation,
        MemoryKind::Saved,
        MemoryKind::Quantized,
        MemoryKind::Recomputed,
        MemoryKind::Workspace,
    ];

    /// Its name, as JSON has it.
    pub const fn name(self) -> &'static str {
        match self {
            MemoryKind::Parameter => "parameter",
            MemoryKind::Gradient => "gradient",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Input => "input",
            MemoryKind::Activation => "activation",
            MemoryKind::Saved => "saved",
            MemoryKind::Quantized => "quantized",
            MemoryKind::Recomputed => "recomputed",
            MemoryKind::Workspace => "workspace",
        }
    }

    /// True for what a step needs beyond parameters, their gradients and optimizer state.
    pub const fn is_step(self) -> bool {
        !matches!(self, MemoryKind::Parameter | MemoryKind::Gradient | MemoryKind::Optimizer)
    }

    pub(crate) fn from_index(index: u8) -> MemoryKind {
        MemoryKind::ALL[index as usize]
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Gauge {
    live: u64,
    peak: u64,
}

impl Gauge {
    fn add(&mut self, bytes: u64) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    /// Bytes that were there all along.
    fn add_from_before(&mut self, bytes: u64) {
        self.live += bytes;
        self.peak += bytes;
    }
}

#[derive(Debug, Default)]
struct State {
    kinds: [Gauge; MemoryKind::ALL.len()],
    total: Gauge,
    step: Gauge,
    limit: Option<u64>,
    fingerprint: u64,
    /// When the peaks and the fingerprint began, by [`unique`].
    since: u64,
    /// What is being done, see [`MemoryMeter::set_moment`].
    moment: Moment,
    peak_moment: Moment,
    allocations: u64,
    log: Option<Vec<MemoryEvent>>,
}

/// What a tape was doing when memory was taken: which node it was running, and what for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Moment {
    /// For what.
    pub phase: Phase,
    /// The node's number in recording order.
    pub node: u64,
}

/// What a node is run for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Its first run.
    #[default]
    Forward,
    /// Its gradient.
    Backward,
    /// A replay of it for backward.
    Replay,
}

/// A change of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEvent {
    /// When.
    pub moment: Moment,
    /// Which piece of memory: a number of its own for each allocation of the device.
    pub allocation: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What it is counted as from now on; `None`: it was given back.
    pub kind: Option<MemoryKind>,
    /// Set where the event only says what the memory holds, and no bytes change.
    pub holds: Option<Contents>,
}

/// What a piece of memory holds, by the number of a value on its tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Contents {
    /// The value: as computed, stored, dequantized or replayed.
    Value(u64),
    /// Its gradient, or a part of the sum that will be.
    Gradient(u64),
}

/// Counts the tensor bytes of one device: live and peak, by [`MemoryKind`] and together, with an optional hard limit.
///
/// *Step bytes* are those of all kinds but parameters, their gradients and optimizer state: what a training step
/// adds. A byte budget bounds their peak; the hard limit bounds everything.
#[derive(Debug, Default)]
pub struct MemoryMeter {
    state: Mutex<State>,
    logging: AtomicBool,
}

impl MemoryMeter {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // The counters are plain numbers, consistent at every instruction; a poisoned lock is still usable.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Fails where `bytes` more would exceed the limit.
    pub(crate) fn check(&self, bytes: u64) -> Result<()> {
        self.state().check(bytes)
    }

    /// Counts an allocation and numbers it. One that stands for an `original` on another device, made before the peaks
    /// began, was there all along: it is part of each peak, and no event of the fingerprint.
    pub(crate) fn charge(&self, original: Option<u64>, bytes: u64, kind: MemoryKind) -> Result<u64> {
        let mut s = self.state();
        s.check(bytes)?;
        if original.is_some_and(|made| made < s.since) {
            s.kinds[kind as usize].add_from_before(bytes);
            s.total.add_from_before(bytes);
            if kind.is_step() {
                s.step.add_from_before(bytes);
            }
        } else {
            s.kinds[kind as usize].add(bytes);
            s.total.add(bytes);
            if kind.is_step() {
                s.add_step(bytes);
            }
            s.note(bytes);
        }
        s.allocations += 1;
        let allocation = s.allocations;
        s.write(allocation, bytes, Some(kind));
        Ok(allocation)
    }

    pub(crate) fn release(&self, allocation: u64, bytes: u64, kind: MemoryKind) {
        let mut s = self.state();
        s.kinds[kind as usize].live -= bytes;
        s.total.live -= bytes;
        if kind.is_step() {
            s.step.live -= bytes;
        }
        s.note(!bytes);
        s.write(allocation, bytes, None);
    }

    pub(crate) fn reclassify(&self, allocation: u64, bytes: u64, from: MemoryKind, to: MemoryKind) {
        let mut s = self.state();
        s.kinds[from as usize].live -= bytes;
        s.kinds[to as usize].add(bytes);
        match (from.is_step(), to.is_step()) {
            (true, false) => s.step.live -= bytes,
            (false, true) => s.add_step(bytes),
            _ => {}
        }
        s.write(allocation, bytes, Some(to));
    }

    /// Notes what is being done, so that the peak's moment and the log's are known.
    pub(crate) fn set_moment(&self, moment: Moment) {
        self.state().moment = moment;
    }

    /// When the step bytes were highest since the last reset.
    pub fn peak_moment(&self) -> Moment {
        self.state().peak_moment
    }

    /// Starts to log every event, or ends it. The meter knows no single pieces, so what is live already isn't listed.
    pub fn set_logging(&self, on: bool) {
        self.state().log = on.then(Vec::new);
        self.logging.store(on, Ordering::Relaxed);
    }

    /// Writes down what a piece of memory holds, where there is a log.
    pub(crate) fn note_contents(&self, allocation: u64, bytes: u64, kind: MemoryKind, holds: Contents) {
        if !self.logging.load(Ordering::Relaxed) {
            return;
        }
        let mut s = self.state();
        let moment = s.moment;
        if let Some(log) = &mut s.log {
            log.push(MemoryEvent { moment, allocation, bytes, kind: Some(kind), holds: Some(holds) });
        }
    }

    /// The events since logging began or this was last called.
    pub fn take_log(&self) -> Vec<MemoryEvent> {
        self.state().log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Bytes live now, of all kinds.
    pub fn live(&self) -> u64 {
        self.state().total.live
    }

    /// Bytes live now of one kind.
    pub fn live_of(&self, kind: MemoryKind) -> u64 {
        self.state().kinds[kind as usize].live
    }

    /// Step bytes live now.
    pub fn step_live(&self) -> u64 {
        self.state().step.live
    }

    /// Highest live bytes of all kinds together since the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> u64 {
        self.state().total.peak
    }

    /// Highest live bytes of one kind since the last reset.
    pub fn peak_of(&self, kind: MemoryKind) -> u64 {
        self.state().kinds[kind as usize].peak
    }

    /// Highest step bytes since the last reset: what a byte budget bounds.
    pub fn step_peak(&self) -> u64 {
        self.state().step.peak
    }

    /// Starts a new measurement: every peak becomes what is live now, and the fingerprint starts again.
    pub fn reset_peak(&self) {
        let mut s = self.state();
        for gauge in &mut s.kinds {
            gauge.peak = gauge.live;
        }
        s.total.peak = s.total.live;
        s.step.peak = s.step.live;
        s.peak_moment = s.moment;
        s.fingerprint = 0;
        s.since = unique();
    }

    /// Sets or lifts the hard limit over all live bytes.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.state().limit = limit;
    }

    /// An order-sensitive hash of every allocation and release since the last reset. Two runs with equal
    /// fingerprints took and gave back the same bytes in the same order: stronger than equal peaks.
    pub fn fingerprint(&self) -> u64 {
        self.state().fingerprint
    }
}

impl State {
    fn check(&self, bytes: u64) -> Result<()> {
        let (live, limit) = (self.total.live, self.limit.unwrap_or(u64::MAX));
        match live.checked_add(bytes) {
            Some(after) if after <= limit => Ok(()),
            _ => Err(Error::OutOfMemory { requested: bytes, in_use: live, limit }),
        }
    }

    fn add_step(&mut self, bytes: u64) {
        let before = self.step.peak;
        self.step.add(bytes);
        if self.step.peak > before {
            self.peak_moment = self.moment;
        }
    }

    fn write(&mut self, allocation: u64, bytes: u64, kind: Option<MemoryKind>) {
        let moment = self.moment;
        if let Some(log) = &mut self.log {
            log.push(MemoryEvent { moment, allocation, bytes, kind, holds: None });
        }
    }

    fn note(&mut self, event: u64) {
        self.fingerprint = (self.fingerprint ^ event).wrapping_mul(0x0100_0000_01b3).rotate_left(7);
    }
}
