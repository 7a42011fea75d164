//! A measured case as the line that `step --json` prints.

use crate::args::{Common, DeviceKind};
use crate::measure::Case;
use crate::report::{median, milliseconds};
use crate::subject::Sample;
use retape::nn::GptConfig;
use serde::Serialize;

/// Medians over the rounds; null where nothing was timed, and on the meta device where there are no numbers.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    pub engine: &'static str,
    pub version: &'static str,
    pub workload: String,
    pub attention: &'static str,
    pub policy: String,
    pub marks: Vec<String>,
    pub device: String,
    pub threads: usize,
    pub dtype: &'static str,
    pub repeats: usize,
    pub forward_ms: Option<f64>,
    pub backward_ms: Option<f64>,
    pub total_ms: Option<f64>,
    pub cpu_ms: Option<f64>,
    pub recompute_ms: Option<f64>,
    pub quantize_ms: Option<f64>,
    pub bookkeeping_ms: Option<f64>,
    pub saved_bytes: u64,
    pub peak_bytes: u64,
    pub predicted_peak_bytes: u64,
    pub predicted_overhead_percent: f64,
    pub peak_rss_delta_bytes: Option<u64>,
    pub param_bytes: u64,
    pub scratch_bytes: u64,
    pub loss: Option<f64>,
    pub grad_norm: Option<f64>,
    pub gflops: Option<f64>,
    pub budget_bytes: Option<u64>,
    pub loss_after: Option<f64>,
}

impl Line {
    /// The line of a case.
    pub fn of(case: &Case, workload: &str, config: &GptConfig, common: &Common) -> Line {
        let of_rounds = |figure: &dyn Fn(&Sample) -> f64| median(case.rounds.iter().map(figure));
        let nanos = |n: u64| n as f64 / 1e6;
        // A GPU's kernels are only queued in a timed step; where it spends its time, the steps with time per path tell.
        let parts = if matches!(common.device, DeviceKind::Cuda(_)) { &case.profiles } else { &case.rounds };
        let of_parts = |figure: &dyn Fn(&Sample) -> f64| median(parts.iter().map(figure));
        let total_ms = of_rounds(&|s| milliseconds(s.total()));
        Line {
            engine: "retape",
            version: env!("CARGO_PKG_VERSION"),
            workload: workload.to_owned(),
            attention: case.form.name(),
            policy: case.policy.spec.name.clone(),
            marks: case.policy.spec.marks.iter().map(ToString::to_string).collect(),
            device: common.device.to_string(),
            threads: common.thread_count(),
            dtype: config.dtype.name(),
            repeats: case.rounds.len(),
            forward_ms: of_rounds(&|s| milliseconds(s.forward)),
            backward_ms: of_rounds(&|s| milliseconds(s.backward)),
            total_ms,
            cpu_ms: of_rounds(&|s| milliseconds(s.cpu)),
            recompute_ms: of_parts(&|s| nanos(s.stats.replay_nanos)),
            quantize_ms: of_parts(&|s| nanos(s.stats.quantize_nanos)),
            bookkeeping_ms: of_parts(&|s| milliseconds(s.total()) - nanos(s.stats.kernel_nanos)),
            saved_bytes: case.warm_up.saved_bytes,
            // Bytes don't vary from round to round; the highest is reported, so that it would show if they did.
            peak_bytes: case.rounds.iter().chain([&case.warm_up]).map(|s| s.peak_bytes).max().unwrap_or(0),
            predicted_peak_bytes: case.prediction.peak_bytes,
            predicted_overhead_percent: case.prediction.overhead_percent,
            peak_rss_delta_bytes: case.resident_delta,
            param_bytes: config.parameter_bytes() as u64,
            scratch_bytes: case.scratch_bytes,
            loss: case.warm_up.loss,
            grad_norm: case.gradient_norm,
            gflops: total_ms.map(|ms| config.step_flops() / ms / 1e6),
            budget_bytes: case.policy.plan.as_ref().map(|planned| planned.budget),
            loss_after: case.loss_after,
        }
    }

    /// Policy and marks.
    pub fn label(&self) -> String {
        std::iter::once(&self.policy).chain(&self.marks).map(String::as_str).collect::<Vec<_>>().join(" + ")
    }
}
