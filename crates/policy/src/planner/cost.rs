//! What running an op again costs, in seconds.

use retape_core::{Stats, Trace, TraceNode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Seconds of an op: measured where there is a figure for its path, else from its FLOPs and bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Of arithmetic.
    pub flops_per_second: f64,
    /// Of reading and writing memory.
    pub bytes_per_second: f64,
    /// Measured seconds of one forward run of the ops of a path.
    #[serde(default)]
    pub seconds: BTreeMap<String, f64>,
}

/// A core of a CPU that multiplies at 100 GFLOP/s and streams 10 GB/s. Their ratio decides what is planned, and it is
/// alike on most CPUs.
impl Default for CostModel {
    fn default() -> CostModel {
        CostModel { flops_per_second: 100e9, bytes_per_second: 10e9, seconds: BTreeMap::new() }
    }
}

impl CostModel {
    /// With the times of steps that were run with [`TapeOptions::profile`](retape_core::TapeOptions::profile): of
    /// each path the least, as other work on the machine only ever adds.
    pub fn measured<'a>(steps: impl IntoIterator<Item = &'a Stats>) -> CostModel {
        let mut model = CostModel::default();
        for (path, time) in steps.into_iter().flat_map(|stats| &stats.by_path) {
            let seconds = time.forward as f64 * 1e-9;
            let least = model.seconds.entry(path.clone()).or_insert(seconds);
            *least = least.min(seconds);
        }
        model
    }

    /// What is wrong with the figures, if anything is.
    pub(super) fn check(&self) -> Result<(), String> {
        let speeds = [("flops_per_second", self.flops_per_second), ("bytes_per_second", self.bytes_per_second)];
        for (name, value) in speeds {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{name} is {value}; it must be a positive number"));
            }
        }
        match self.seconds.iter().find(|(_, seconds)| !(seconds.is_finite() && **seconds >= 0.0)) {
            Some((path, seconds)) => Err(format!("`{path}` takes {seconds} seconds; that must be 0 or more")),
            None => Ok(()),
        }
    }

    /// Seconds of one run of each node of a trace. Where several share a measured path, each has a share of its time.
    pub(super) fn of_nodes(&self, trace: &Trace) -> Vec<f64> {
        let path = |node: &TraceNode| node.outputs.first().map(|&v| trace.values()[v].path.as_str());
        let estimates: Vec<f64> = trace.nodes().iter().map(|n| self.estimate(n)).collect();
        let mut of_path: BTreeMap<&str, f64> = BTreeMap::new();
        for (node, estimate) in trace.nodes().iter().zip(&estimates) {
            *of_path.entry(path(node).unwrap_or_default()).or_default() += estimate;
        }
        let seconds = trace.nodes().iter().zip(&estimates).map(|(node, &estimate)| {
            let path = path(node).unwrap_or_default();
            match (self.seconds.get(path), of_path[path]) {
                (Some(measured), all) if all > 0.0 => measured * estimate / all,
                _ => estimate,
            }
        });
        seconds.collect()
    }

    fn estimate(&self, node: &TraceNode) -> f64 {
        node.flops as f64 / self.flops_per_second + self.of_traffic(node.traffic)
    }

    /// Seconds of reading and writing `bytes` bytes.
    pub(super) fn of_traffic(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes_per_second
    }
}
