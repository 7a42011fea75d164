//! `retape plan`: the cheapest marks whose peak fits a budget.

use crate::args::{Common, PlanArgs};
use crate::error::{Failure, Result};
use crate::planning::Planning;
use crate::policy::Planned;
use crate::report::{self, bytes};
use crate::subject::MetaModel;
use retape::nn::GptConfig;
use retape::policy::PlannedMark;
use retape::prelude::Mark;
use serde_json::json;
use std::path::Path;

/// Runs the command.
pub fn run(args: &PlanArgs, common: &Common) -> Result<()> {
    let config = GptConfig { attention: args.model.form("plan")?, ..args.model.config()? };
    if args.measure && args.planning.profile.is_some() {
        return Err(Failure::usage("--measure and --profile both say what ops cost; leave one out"));
    }
    let dry = MetaModel::new(&config)?;
    let mut planning = Planning::new(&dry, common);
    planning.measure_costs = args.measure;
    let policy = planning.policy(&args.planning.spec(&args.budget, &args.marks.marks))?;
    let Some(Planned { budget, plan, smallest }) = &policy.plan else {
        return Err(Failure::internal("a budget without a plan"));
    };
    let needed = plan.peak_bytes + 2 * config.parameter_bytes() as u64;
    if let Some(limit) = common.memory_limit.filter(|&limit| needed > limit) {
        return Err(Failure::usage(format!(
            "the plan's peak is {} with parameters and gradients, and --memory-limit {}; take a smaller --budget",
            bytes(needed),
            bytes(limit)
        )));
    }
    if let Some(file) = &args.save_profile {
        write("--save-profile", file, &planning.profile.unwrap_or_default().to_toml())?;
    }
    if let Some(file) = &args.out {
        write("--out", file, &plan.to_toml())?;
    }
    if common.json {
        let marks: Vec<_> = plan.marks.iter().map(|m| json!({ "path": m.path, "mark": m.mark.name() })).collect();
        return report::print_line(
            &json!({
                "marks": marks,
                "budget_bytes": budget,
                "predicted_peak_bytes": plan.peak_bytes,
                "predicted_overhead_percent": plan.overhead_percent,
                "predicted_time_percent": plan.overhead_seconds_percent,
                "gradient_error_bound": plan.gradient_error_bound,
                "smallest_feasible_bytes": smallest,
            })
            .to_string(),
        );
    }
    let title = format!("{} under {}, {} attention", args.model.name(), policy.label(), config.attention.name());
    report::print_line(&title)?;
    print(&plan.marks, args.all)?;
    let parameters = config.parameter_bytes() as u64;
    let error = plan.gradient_error_bound.map_or("unknown".into(), |e| format!("{:.2} %", 100.0 * e));
    let rows = [
        ("budget of the step", bytes(*budget)),
        ("peak of the step, predicted", bytes(plan.peak_bytes)),
        ("  saved after forward", bytes(plan.saved_bytes)),
        ("parameters and gradients", bytes(2 * parameters)),
        ("peak with them", bytes(plan.peak_bytes + 2 * parameters)),
        ("  and AdamW's state", bytes(plan.peak_bytes + 4 * parameters)),
        ("replayed FLOPs", format!("{:.2} %", plan.overhead_percent)),
        ("predicted time", format!("{:+.2} %", plan.overhead_seconds_percent)),
        ("gradient error, estimated", error),
        ("smallest budget with a plan", bytes(*smallest)),
    ];
    report::print_line(&report::pairs(rows).to_string())?;
    if let Some(file) = &args.out {
        report::note(&format!("wrote {0}; use it with --policy {0}", file.display()));
    }
    Ok(())
}

fn write(option: &str, file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).map_err(|e| Failure::usage(format!("{option} {}: can't write it: {e}", file.display())))
}

/// The marks: value by value, or the values of all blocks together with how many have each mark.
fn print(marks: &[PlannedMark], all: bool) -> Result<()> {
    if all {
        let mut table = report::table(&["path", "op", "bytes", "mark"], &[0, 1, 3]);
        for m in marks {
            table.add_row([m.path.clone(), m.op.to_owned(), bytes(m.bytes), m.mark.name().to_owned()]);
        }
        return report::print_line(&table.to_string());
    }
    let mut groups: Vec<(String, &PlannedMark, Vec<&'static str>)> = Vec::new();
    for m in marks {
        let path = report::without_numbers(&m.path);
        let same = |g: &&mut (String, &PlannedMark, _)| (&g.0, g.1.op, &g.1.shape) == (&path, m.op, &m.shape);
        match groups.iter_mut().find(same) {
            Some(group) => group.2.push(m.mark.name()),
            None => groups.push((path, m, vec![m.mark.name()])),
        }
    }
    let marks: Vec<&str> = Mark::all().map(Mark::name).collect();
    let columns = [&["path", "op", "bytes"][..], &marks, &["blocks"]].concat();
    let mut table = report::table(&columns, &[0, 1, columns.len() - 1]);
    for (path, first, names) in groups {
        let count = |mark: &&str| match names.iter().filter(|name| *name == mark).count() {
            0 => String::new(),
            n => n.to_string(),
        };
        // One letter a block: k, r, i, b.
        let letters: String = names.iter().filter_map(|name| name.chars().next()).collect();
        let mut row = vec![path, first.op.to_owned(), bytes(first.bytes)];
        row.extend(marks.iter().map(count));
        row.push(report::shortened(&letters, 48));
        table.add_row(row);
    }
    report::print_line(&table.to_string())
}
