//! What a tape counts and times.

use std::collections::BTreeMap;

/// Time spent on one path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathTime {
    /// Nanoseconds in forward kernels.
    pub forward: u64,
    /// Nanoseconds in backward kernels, replays apart.
    pub backward: u64,
    /// Nanoseconds in replayed kernels.
    pub replay: u64,
}

/// Counters and clocks of a tape since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Kernels replayed by backward (one per node and replay).
    pub replays: u64,
    /// The most replays of one node in one pass.
    pub most_replays_of_a_node: u64,
    /// FLOPs of all replays.
    pub replayed_flops: u64,
    /// Bytes that replays read and write.
    pub replayed_traffic: u64,
    /// Bytes that packing and unpacking read and write.
    pub quantize_traffic: u64,
    /// FLOPs of forward.
    pub forward_flops: u64,
    /// Values that were packed, by any format.
    pub quantized: u64,
    /// Values that a format could not hold and that stayed full ([`NonFinite::KeepFull`](crate::NonFinite::KeepFull)).
    pub full_precision_fallbacks: u64,
    /// Nanoseconds in kernels, of all purposes.
    pub kernel_nanos: u64,
    /// Nanoseconds of replays, their bookkeeping included.
    pub replay_nanos: u64,
    /// Nanoseconds of packing and unpacking.
    pub quantize_nanos: u64,
    /// Paths that were replayed, with counts.
    pub replayed_paths: BTreeMap<String, u64>,
    /// Time per path, if the tape profiles.
    pub by_path: BTreeMap<String, PathTime>,
}

impl Stats {
    /// FLOPs of all replays over those of a step without any (backward counts as twice forward), in percent.
    pub fn overhead_percent(&self) -> f64 {
        overhead_percent(self.replayed_flops, self.forward_flops)
    }
}

/// Replayed FLOPs over those of a step that replays nothing, three times forward's, in percent.
pub(crate) fn overhead_percent(replayed_flops: u64, forward_flops: u64) -> f64 {
    100.0 * replayed_flops as f64 / forward_flops.saturating_mul(3).max(1) as f64
}
