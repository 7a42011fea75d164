//! `retape inspect`: the ledger of saved tensors, by a dry run on the meta device.

use crate::args::{Common, InspectArgs};
use crate::diff::{self, Side};
use crate::error::Result;
use crate::planning::Planning;
use crate::policy::{NamedPolicy, PolicySpec};
use crate::report::{self, bytes, count};
use crate::subject::{self, MetaModel};
use crate::trainer::Batcher;
use retape::LedgerEntry;
use retape::nn::{Gpt, GptConfig};
use retape::prelude::{Ledger, Tape};
use serde_json::json;
use std::collections::BTreeSet;

/// Runs the command.
pub fn run(args: &InspectArgs, common: &Common) -> Result<()> {
    let config = GptConfig { attention: args.model.form("inspect")?, ..args.model.config()? };
    let spec = args.budget.or_policy(args.policy.as_deref(), &args.marks.marks)?;
    let dry = MetaModel::new(&config)?;
    let mut planning = Planning::new(&dry, common);
    let policy = planning.policy(&spec)?;
    let (ledger, peak) = dry_run(&config, &policy, common)?;
    if let Some(name) = &args.diff {
        let other = planning.policy(&PolicySpec::new(name, &[]))?;
        let (other_ledger, other_peak) = dry_run(&config, &other, common)?;
        let from = Side { label: policy.label(), ledger: &ledger, peak };
        let to = Side { label: other.label(), ledger: &other_ledger, peak: other_peak };
        return diff::print(&from, &to, args.all, common.json);
    }
    let totals = ledger.totals();
    if common.json {
        let document = json!({
            "values": ledger.values,
            "totals": { "bytes": totals.bytes, "stored_bytes": totals.stored_bytes, "peak_bytes": peak },
            "lint": ledger.lint,
        });
        return report::print_line(&document.to_string());
    }
    let title = format!("{} under {}, {} attention", args.model.name(), policy.label(), config.attention.name());
    report::print_line(&format!("{title}: {} saved values, dry run", ledger.values.len()))?;
    print(&ledger, args.all)?;
    report::print_line(&format!(
        "stored {} of {}, peak of the step {}, parameters {}",
        bytes(totals.stored_bytes),
        bytes(totals.bytes),
        bytes(peak),
        bytes(config.parameter_bytes() as u64)
    ))?;
    for lint in &ledger.lint {
        report::print_line(&format!("lint: {lint}"))?;
    }
    Ok(())
}

/// The ledger at the end of forward, and the step's peak bytes.
pub fn dry_run(config: &GptConfig, policy: &NamedPolicy, common: &Common) -> Result<(Ledger, u64)> {
    let device = retape::meta();
    device.meter().set_limit(common.memory_limit);
    let seed = common.seed.unwrap_or(0);
    let model = Gpt::new(&device, config, seed)?;
    let (tokens, targets) = Batcher::first(&device, config, seed)?;
    device.meter().reset_peak();
    let tape = Tape::with(&device, subject::options(policy, seed));
    let loss = model.loss(&tape, &tokens, &targets)?;
    let ledger = tape.ledger()?;
    tape.backward(&loss)?;
    Ok((ledger, device.meter().step_peak()))
}

/// Values of all blocks that differ in nothing but the block's number.
struct Group<'a> {
    path: String,
    first: &'a LedgerEntry,
    values: u64,
    bytes: u64,
    stored: u64,
    flops: u64,
}

fn groups(ledger: &Ledger) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for value in &ledger.values {
        let path = report::without_numbers(&value.path);
        let same = |g: &Group<'_>| {
            let (a, b) = (g.first, value);
            g.path == path
                && (a.op, &a.shape, a.dtype, a.mark, &a.rule) == (b.op, &b.shape, b.dtype, b.mark, &b.rule)
                && (a.stored_bytes, a.depth) == (b.stored_bytes, b.depth)
        };
        let (bytes, stored, flops) = (value.bytes, value.stored_bytes, value.recompute_flops);
        match groups.iter_mut().find(|g| same(g)) {
            Some(group) => {
                group.values += 1;
                group.bytes += bytes;
                group.stored += stored;
                group.flops = group.flops.saturating_add(flops);
            }
            None => groups.push(Group { path, first: value, values: 1, bytes, stored, flops }),
        }
    }
    groups
}

fn print(ledger: &Ledger, all: bool) -> Result<()> {
    let columns =
        ["values", "path", "op", "shape", "bytes", "stored", "mark", "rule", "replay FLOPs", "depth", "read by"];
    let mut table = report::table(&columns, &[1, 2, 3, 6, 7, 10]);
    let groups = if all {
        let alone = ledger.values.iter().map(|v| Group {
            path: v.path.clone(),
            first: v,
            values: 1,
            bytes: v.bytes,
            stored: v.stored_bytes,
            flops: v.recompute_flops,
        });
        alone.collect()
    } else {
        groups(ledger)
    };
    for group in &groups {
        let value = group.first;
        let readers: BTreeSet<String> =
            value.readers.iter().map(|path| if all { path.clone() } else { report::without_numbers(path) }).collect();
        let readers = readers.into_iter().collect::<Vec<_>>().join(", ");
        let readers = if all { readers } else { report::shortened(&readers, 44) };
        let mark = if value.held_by_handle { format!("{} (held)", value.mark) } else { value.mark.to_string() };
        table.add_row([
            group.values.to_string(),
            group.path.clone(),
            value.op.to_owned(),
            format!("{}{:?}", value.dtype, value.shape),
            bytes(group.bytes),
            bytes(group.stored),
            mark,
            if all { value.rule.to_string() } else { report::shortened(&value.rule.to_string(), 36) },
            count(group.flops),
            value.depth.to_string(),
            readers,
        ]);
    }
    report::print_line(&table.to_string())
}
