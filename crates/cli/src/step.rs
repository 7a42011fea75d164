//! `retape step`: one model under one policy (or several, interleaved).

use crate::args::{Attention, Common, DeviceKind, StepArgs};
use crate::error::Result;
use crate::line::Line;
use crate::measure::{Case, Measuring, measure};
use crate::policy::PolicySpec;
use crate::report::{bytes, figure};
use crate::{model, report, resident};
use retape::nn::GptConfig;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Time on one path, the mean over the profiled steps.
#[derive(Debug, Default, Serialize)]
struct PathRow {
    path: String,
    forward_ms: f64,
    backward_ms: f64,
    replay_ms: f64,
}

/// Runs the command.
pub fn run(args: &StepArgs, common: &Common) -> Result<()> {
    let config = args.model.config()?;
    let attention = args.model.attention.unwrap_or(Attention::Flash);
    let marks = &args.marks.marks;
    let policies: Vec<PolicySpec> = match &args.policy[..] {
        [] => vec![args.budget.or_policy(None, marks)?],
        names => names.iter().map(|name| args.budget.or_policy(Some(name), marks)).collect::<Result<_>>()?,
    };
    let single = policies.len() * attention.forms().len() == 1;
    let measuring = Measuring {
        rounds: args.measure.steps.unwrap_or(7),
        compare: false,
        train_steps: args.measure.train_steps,
        resident: single,
        profile: args.by_op,
    };
    let bar = report::progress(((measuring.rounds + 1) * policies.len() * attention.forms().len()) as u64);
    let tick = |what: &str| {
        bar.set_message(what.to_owned());
        bar.inc(1);
    };
    let mut cases = measure(&config, attention.forms(), &policies, measuring, common, tick)?;
    if !single && common.device == DeviceKind::Cpu {
        resident::measure(&mut cases, args.model.name(), &config, common, tick);
    }
    bar.finish_and_clear();
    for case in &cases {
        let line = Line::of(case, args.model.name(), &config, common);
        let by_op = args.by_op.then(|| by_path(case));
        if common.json {
            report::print_line(&to_json(&line, args.model.name(), &config, by_op)?.to_string())?;
        } else {
            print(&line, by_op)?;
        }
    }
    Ok(())
}

fn to_json(line: &Line, name: &str, config: &GptConfig, by_op: Option<Vec<PathRow>>) -> Result<Value> {
    let mut value = serde_json::to_value(line)?;
    let attention = if line.attention == "flash" { Attention::Flash } else { Attention::Explicit };
    value["model"] = model::to_json(name, config, attention)?;
    if let Some(rows) = by_op {
        value["by_op"] = json!(rows);
    }
    Ok(value)
}

fn by_path(case: &Case) -> Vec<PathRow> {
    let mut rows: BTreeMap<&str, PathRow> = BTreeMap::new();
    let share = 1e-6 / case.profiles.len().max(1) as f64;
    for (path, time) in case.profiles.iter().flat_map(|sample| &sample.stats.by_path) {
        let row = rows.entry(path).or_insert_with(|| PathRow { path: path.clone(), ..PathRow::default() });
        row.forward_ms += time.forward as f64 * share;
        row.backward_ms += time.backward as f64 * share;
        row.replay_ms += time.replay as f64 * share;
    }
    let mut rows: Vec<PathRow> = rows.into_values().collect();
    let total = |r: &PathRow| r.forward_ms + r.backward_ms + r.replay_ms;
    rows.sort_by(|a, b| total(b).total_cmp(&total(a)));
    rows
}

fn print(line: &Line, by_op: Option<Vec<PathRow>>) -> Result<()> {
    let title = format!(
        "{} under {}, {} attention, {} on {} with {} threads, medians of {} rounds",
        line.workload,
        line.label(),
        line.attention,
        line.dtype,
        line.device,
        line.threads,
        line.repeats
    );
    let ms = |value| format!("{} ms", figure(value, 2));
    let resident = line.peak_rss_delta_bytes.map_or("-".into(), bytes);
    let mut rows = vec![
        ("forward", ms(line.forward_ms)),
        ("backward", ms(line.backward_ms)),
        ("total", ms(line.total_ms)),
        ("  CPU time", ms(line.cpu_ms)),
        ("  recompute", ms(line.recompute_ms)),
        ("  quantize", ms(line.quantize_ms)),
        ("  bookkeeping", ms(line.bookkeeping_ms)),
        ("speed", format!("{} GFLOP/s", figure(line.gflops, 1))),
        ("saved after forward", bytes(line.saved_bytes)),
        ("peak of the step", bytes(line.peak_bytes)),
        ("  predicted", bytes(line.predicted_peak_bytes)),
        ("  RSS, gradients apart", resident),
        ("parameters", bytes(line.param_bytes)),
        ("scratch of kernels", bytes(line.scratch_bytes)),
        ("replayed FLOPs", format!("{:.1} %", line.predicted_overhead_percent)),
        ("loss", figure(line.loss, 6)),
        ("gradient norm", figure(line.grad_norm, 6)),
    ];
    if line.loss_after.is_some() {
        rows.push(("loss after training", figure(line.loss_after, 6)));
    }
    report::print_line(&format!("{title}\n{}", report::pairs(rows)))?;
    let Some(rows) = by_op else { return Ok(()) };
    let mut table = report::table(&["path", "forward ms", "backward ms", "replay ms"], &[0]);
    for row in rows {
        let ms = |value: f64| format!("{value:.3}");
        table.add_row([row.path.clone(), ms(row.forward_ms), ms(row.backward_ms), ms(row.replay_ms)]);
    }
    report::print_line(&table.to_string())
}
