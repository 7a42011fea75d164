//! RSS of one step, measured in a process of its own: within a process that has run other steps, memory that they freed
//! would be reused unseen.

use crate::args::Common;
use crate::measure::Case;
use crate::{model, report};
use retape::nn::GptConfig;
use retape::policy::Rule;
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
        let file = tempfile::Builder::new().prefix("retape-plan-").suffix(".toml").tempfile()?;
        std::fs::write(file.path(), planned.plan.to_toml())?;
        Ok(file)
    });
    let file: Option<tempfile::NamedTempFile> = file.transpose().map_err(|e: std::io::Error| e.to_string())?;
    // The file has the user's marks in it.
    let marks: &[Rule] = if file.is_some() { &[] } else { &case.policy.spec.marks };
    run(case, file.as_ref().map(|file| file.path()), marks, name, config, common)
}

fn run(
    case: &Case,
    plan: Option<&Path>,
    marks: &[Rule],
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
    for mark in marks {
        command.args(["--mark", &mark.to_string()]);
    }
    let output = command.stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let line: Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    Ok(line["peak_rss_delta_bytes"].as_u64())
}
