//! `retape frontier`: policies measured against each other.

use crate::args::{Attention, Common, DeviceKind, FrontierArgs};
use crate::chart;
use crate::error::{Failure, Result};
use crate::frontier_page;
use crate::line::Line;
use crate::measure::{Case, Measuring, measure};
use crate::model;
use crate::policy::{NamedPolicy, PolicySpec};
use crate::report::{self, bytes, figure, median};
use crate::resident;
use crate::subject::MetaModel;
use retape::nn::{AttentionForm, GptConfig};
use retape::policy::PRESETS;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use std::rc::Rc;

/// Planned beside all presets, where neither policies nor budgets are asked for.
const DEFAULT_BUDGETS: [&str; 3] = ["75%", "50%", "30%"];

/// A point of the frontier.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    #[serde(flatten)]
    pub line: Line,
    /// Median over rounds of CPU time (on a GPU: of time) against `none`'s in the same round, minus 1.
    pub overhead_percent: Option<f64>,
    /// The quartiles of the same; none with fewer than four rounds.
    pub overhead_quartiles_percent: Option<[f64; 2]>,
    /// The median of wall time's.
    pub overhead_wall_percent: Option<f64>,
    /// Peak bytes saved, of what `full_per_layer` saves on this form of attention.
    pub share_of_full_savings_percent: Option<f64>,
    /// Peak bytes saved against explicit `none`, of what explicit `full_per_layer` saves.
    pub share_of_unfused_savings_percent: Option<f64>,
    /// Relative L2 of all gradients against `none`'s.
    pub gradient_error: Option<f64>,
    /// No other point is better in both peak and overhead.
    pub pareto: bool,
}

impl Point {
    /// Measured overhead, or the predicted one where nothing was timed.
    pub fn overhead(&self) -> f64 {
        self.overhead_percent.unwrap_or(self.line.predicted_overhead_percent)
    }
}

/// Peaks of `none` and `full_per_layer`.
struct Range {
    none: u64,
    full: u64,
}

impl Range {
    fn of(config: &GptConfig, form: AttentionForm) -> Result<Range> {
        let dry = MetaModel::new(&GptConfig { attention: form, ..config.clone() })?;
        let peak = |name| {
            let rules = Rc::new(PolicySpec::new(name, &[]).rules(config.layers)?);
            Ok::<_, Failure>(dry.predict(&NamedPolicy { rules, ..NamedPolicy::none() })?.peak_bytes)
        };
        Ok(Range { none: peak("none")?, full: peak("full_per_layer")? })
    }

    fn share(&self, peak: u64) -> Option<f64> {
        let range = self.none as f64 - self.full as f64;
        (range != 0.0).then(|| 100.0 * (self.none as f64 - peak as f64) / range)
    }
}

/// Runs the command.
pub fn run(args: &FrontierArgs, common: &Common) -> Result<()> {
    let config = args.model.config()?;
    let attention = args.model.attention.unwrap_or(Attention::Both);
    let policies = policies(args)?;
    let peers = frontier_page::read_peers(args.peers.as_deref())?;
    if let Some(dir) = &args.out {
        std::fs::create_dir_all(dir)
            .map_err(|e| Failure::usage(format!("--out {}: can't make this directory: {e}", dir.display())))?;
    }
    let measuring = Measuring {
        rounds: args.measure.steps.unwrap_or(5),
        compare: true,
        train_steps: args.measure.train_steps,
        resident: false,
        profile: false,
    };
    let computes = common.device.computes();
    let passes = if computes { measuring.rounds + 2 + usize::from(measuring.train_steps > 0) } else { 1 };
    let bar = report::progress((passes * policies.len() * attention.forms().len()) as u64);
    let tick = |what: &str| {
        bar.set_message(what.to_owned());
        bar.inc(1);
    };
    let mut cases = measure(&config, attention.forms(), &policies, measuring, common, tick)?;
    if common.device == DeviceKind::Cpu {
        resident::measure(&mut cases, args.model.name(), &config, common, tick);
    }
    bar.finish_and_clear();
    let points = points(&cases, args.model.name(), &config, common)?;
    let model = model::to_json(args.model.name(), &config, attention)?;
    let document = json!({ "model": model, "device": common.device.to_string(), "points": points });
    if let Some(dir) = &args.out {
        write(&dir.join("frontier.json"), format!("{document:#}\n").as_bytes())?;
        write(&dir.join("frontier.csv"), &csv_of(&points)?)?;
        write(&dir.join("frontier.svg"), chart::svg(&points, args.model.name())?.as_bytes())?;
        let page = frontier_page::html(&document, &points, &cases, &peers, &config, common)?;
        write(&dir.join("frontier.html"), page.as_bytes())?;
    }
    if common.json {
        report::print_line(&document.to_string())?;
    } else {
        print(&points, args.model.name(), common)?;
        match &args.out {
            Some(dir) => report::note(&format!("wrote frontier.json, .csv, .svg and .html to {}", dir.display())),
            None => report::note("add --out DIR to write frontier.json, .csv, .svg and .html"),
        }
    }
    match points.iter().find(|p| p.line.peak_bytes != p.line.predicted_peak_bytes) {
        Some(Point { line, .. }) => Err(Failure::internal(format!(
            "the peak of `{}` with {} attention is {} bytes, and the dry run's {}",
            line.label(),
            line.attention,
            line.peak_bytes,
            line.predicted_peak_bytes
        ))),
        None => Ok(()),
    }
}

/// `none` first, then what was asked for, each once.
fn policies(args: &FrontierArgs) -> Result<Vec<PolicySpec>> {
    let mut names: Vec<&str> = args.policies.iter().chain(&args.policy).map(|name| name.trim()).collect();
    let mut budgets: Vec<&str> = args.budgets.iter().map(|budget| budget.trim()).collect();
    if names.is_empty() && budgets.is_empty() {
        names = PRESETS.iter().map(|preset| preset.name).collect();
        budgets = DEFAULT_BUDGETS.to_vec();
    }
    let optional = args.budgets.is_empty();
    let marks = &args.marks.marks;
    args.planning.check(!budgets.is_empty() || names.iter().any(|name| name.starts_with("budget:")))?;
    let named = names.into_iter().map(|name| PolicySpec::new(name, marks));
    let budgets = budgets.into_iter().map(|budget| PolicySpec { optional, ..args.planning.spec(budget, marks) });
    let mut policies = vec![PolicySpec::none()];
    for policy in named.chain(budgets) {
        // Every one is known to be right before any is measured.
        if policy.budget()?.is_none() {
            policy.rules(1)?;
        }
        if policies.iter().all(|known| known.label() != policy.label()) {
            policies.push(policy);
        }
    }
    Ok(policies)
}

fn points(cases: &[Case], name: &str, config: &GptConfig, common: &Common) -> Result<Vec<Point>> {
    let unfused = Range::of(config, AttentionForm::Explicit)?;
    let fused = Range::of(config, AttentionForm::Flash)?;
    let mut points: Vec<Point> = Vec::new();
    for case in cases {
        let reference = cases.iter().find(|c| c.form == case.form && c.policy.is_reference());
        let reference = reference.ok_or_else(|| Failure::internal("a frontier without `none`"))?;
        let overheads = |time: &dyn Fn(&crate::subject::Sample) -> f64| -> Vec<f64> {
            let pairs = case.rounds.iter().zip(&reference.rounds);
            pairs.map(|(s, none)| 100.0 * (time(s) / time(none) - 1.0)).collect()
        };
        // CPU time is steadier than wall time; of a GPU it is only the time to launch.
        let steady = overheads(&|s| match common.device {
            DeviceKind::Cuda(_) => s.total().as_secs_f64(),
            _ => s.cpu.as_secs_f64(),
        });
        let line = Line::of(case, name, config, common);
        let range = if case.form == AttentionForm::Flash { &fused } else { &unfused };
        points.push(Point {
            overhead_percent: median(steady.iter().copied()),
            overhead_quartiles_percent: report::quartiles(steady),
            overhead_wall_percent: median(overheads(&|s| s.total().as_secs_f64())),
            share_of_full_savings_percent: range.share(line.peak_bytes),
            share_of_unfused_savings_percent: unfused.share(line.peak_bytes),
            gradient_error: case.gradient_error,
            pareto: false,
            line,
        });
    }
    let better = |a: &Point, b: &Point| a.line.peak_bytes < b.line.peak_bytes && a.overhead() < b.overhead();
    let pareto: Vec<bool> = points.iter().map(|p| !points.iter().any(|other| better(other, p))).collect();
    points.iter_mut().zip(pareto).for_each(|(point, pareto)| point.pareto = pareto);
    Ok(points)
}

/// A row per point, with the columns of the JSON.
fn csv_of(points: &[Point]) -> Result<Vec<u8>> {
    let failed = |e: csv::Error| Failure::other(format!("writing CSV: {e}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    for (i, point) in points.iter().enumerate() {
        let Value::Object(fields) = serde_json::to_value(point)? else {
            return Err(Failure::internal("a point is no JSON object"));
        };
        if i == 0 {
            writer.write_record(fields.keys()).map_err(failed)?;
        }
        let cell = |value: &Value| match value {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            Value::Array(items) => {
                let texts = items.iter().map(|item| item.as_str().map_or_else(|| item.to_string(), str::to_owned));
                texts.collect::<Vec<_>>().join(" ")
            }
            other => other.to_string(),
        };
        writer.write_record(fields.values().map(cell)).map_err(failed)?;
    }
    writer.into_inner().map_err(|e| Failure::other(format!("writing CSV: {e}")))
}

fn write(path: &Path, contents: &[u8]) -> Result<()> {
    std::fs::write(path, contents).map_err(|e| Failure::other(format!("can't write {}: {e}", path.display())))
}

fn print(points: &[Point], name: &str, common: &Common) -> Result<()> {
    let columns = [
        "attention",
        "policy",
        "peak",
        "saved",
        "ms",
        "CPU ms",
        if matches!(common.device, DeviceKind::Cuda(_)) { "+time %" } else { "+CPU %" },
        "+FLOPs %",
        "replay ms",
        "int8 ms",
        "of full %",
        "grad error",
        "loss after",
        "best",
    ];
    let trained = points.iter().any(|p| p.line.loss_after.is_some());
    let shown: Vec<&str> = columns.iter().copied().filter(|c| trained || *c != "loss after").collect();
    let mut table = report::table(&shown, &[0, 1]);
    let mut sorted: Vec<&Point> = points.iter().collect();
    sorted.sort_by_key(|p| (p.line.attention != "flash", std::cmp::Reverse(p.line.peak_bytes)));
    for p in sorted {
        let line = &p.line;
        let mut row = vec![
            line.attention.to_owned(),
            line.label(),
            bytes(line.peak_bytes),
            bytes(line.saved_bytes),
            figure(line.total_ms, 1),
            figure(line.cpu_ms, 1),
            match p.overhead_quartiles_percent {
                Some([low, high]) => format!("{} ({low:.1} to {high:.1})", figure(p.overhead_percent, 1)),
                None => figure(p.overhead_percent, 1),
            },
            figure(Some(line.predicted_overhead_percent), 1),
            figure(line.recompute_ms, 1),
            figure(line.quantize_ms, 1),
            figure(p.share_of_full_savings_percent, 0),
            p.gradient_error.map_or("-".into(), |e| if e == 0.0 { "0".into() } else { format!("{e:.1e}") }),
        ];
        if trained {
            row.push(figure(line.loss_after, 4));
        }
        row.push(if p.pareto { "*".into() } else { String::new() });
        table.add_row(row);
    }
    let rounds = points.first().map_or(0, |p| p.line.repeats);
    let how = match common.device {
        DeviceKind::Cpu => format!("medians of {rounds} rounds on cpu with {} threads", common.thread_count()),
        DeviceKind::Cuda(_) => format!("medians of {rounds} rounds on {}", common.device),
        DeviceKind::Meta => "dry runs, nothing computed".to_owned(),
    };
    let clock = match common.device {
        DeviceKind::Cuda(_) => "+time: the step's time",
        _ => "+CPU: the step's CPU time",
    };
    let mismatches = points.iter().filter(|p| p.line.peak_bytes != p.line.predicted_peak_bytes).count();
    let promise = match (common.device, mismatches) {
        (DeviceKind::Meta, _) => String::new(),
        (_, 0) => "\nEvery peak is the dry run's, to the byte.".to_owned(),
        (_, n) => format!("\n{n} peaks differ from the dry run's."),
    };
    report::print_line(&format!(
        "{name}: {how}\n{table}{promise}\n\
         {clock} over none's with the same attention (quartiles); +FLOPs: what the dry run predicts.\n\
         of full: peak saved, of what full_per_layer saves. best *: no other point is better in both peak and this."
    ))
}
