//! RSS of one step, measured in a process of its own: within a process that has run other steps, memory that they freed
//! would be reused unseen.

use crate::args::Common;
use crate::measure::Case;
use crate::{model, report};
use retape::nn::GptConfig;
use serde_json::Value;
use std::process::{Command, Stdio};

/// Runs `retape step` once per case, without rounds, and takes its `peak_rss_delta_bytes`. What can't be measured stays
/// none, with a note.
pub fn measure(cases: &mut [Case], name: &str, config: &GptConfig, common: &Common, mut tick: impl FnMut(&str)) {
    for case in cases {
        tick(&format!("RSS: {} {}", case.form.name(), case.policy.label()));
        match one(case, name, config, common) {
            Ok(bytes) => case.resident_delta = bytes,
            Err(reason) => report::note(&format!("note: no RSS of {}: {reason}", case.policy.label())),
        }
    }
}

fn one(case: &Case, name: &str, config: &GptConfig, common: &Common) -> Result<Option<u64>, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.args(["step", "--json", "--steps", "0", "--policy", &case.policy.name]);
    command.args(model::flags(name, &GptConfig { attention: case.form, ..config.clone() }));
    command.args(["--threads", &common.thread_count().to_string()]);
    command.args(["--seed", &common.seed.unwrap_or(0).to_string()]);
    for mark in &case.policy.marks {
        command.args(["--mark", mark]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let line: Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    Ok(line["peak_rss_delta_bytes"].as_u64())
}
