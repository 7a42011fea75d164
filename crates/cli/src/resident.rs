//! RSS of one step, measured in a process of its own: within a process that has run other steps, memory that they freed
//! would be reused unseen.

use crate::args::Common;
use crate::measure::Case;
use crate::{model, report};
use retape::nn::GptConfig;
use serde_json::Value;
use std::path::Path;
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
    // A budget's plan goes as a file of rules: planning would leave its own memory behind in that process.
    let file = case.policy.plan.as_ref().map(|planned| {
        let file = std::env::temp_dir().join(format!("retape-plan-{}.toml", std::process::id()));
        std::fs::write(&file, planned.plan.to_toml()).map(|()| file).map_err(|e| e.to_string())
    });
    let file = file.transpose()?;
    let result = run(case, file.as_deref(), name, config, common);
    if let Some(file) = file {
        std::fs::remove_file(file).map_err(|e| e.to_string())?;
    }
    result
}

fn run(
    case: &Case,
    plan: Option<&Path>,
    name: &str,
    config: &GptConfig,
    common: &Common,
) -> Result<Option<u64>, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.args(["step", "--json", "--steps", "0", "--policy"]);
    match plan {
        Some(file) => command.arg(file),
        None => command.arg(&case.policy.spec.name),
    };
    command.args(model::flags(name, &GptConfig { attention: case.form, ..config.clone() }));
    command.args(["--threads", &common.thread_count().to_string()]);
    command.args(["--seed", &common.seed.unwrap_or(0).to_string()]);
    for mark in &case.policy.spec.marks {
        command.args(["--mark", &mark.to_string()]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let line: Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    Ok(line["peak_rss_delta_bytes"].as_u64())
}
