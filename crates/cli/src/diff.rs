//! `retape inspect --diff`: what two policies do differently, value by value.

use crate::error::Result;
use crate::report::{self, bytes, count, without_numbers};
use retape::LedgerChange;
use retape::prelude::Ledger;
use serde_json::json;

/// A policy's name, ledger and peak bytes.
pub struct Side<'a> {
    /// The policy.
    pub label: String,
    /// Its ledger.
    pub ledger: &'a Ledger,
    /// The step's peak under it.
    pub peak: u64,
}

/// Prints what changes from one policy to another.
pub fn print(from: &Side<'_>, to: &Side<'_>, all: bool, as_json: bool) -> Result<()> {
    let changed = from.ledger.diff(to.ledger);
    if as_json {
        let side = |side: &Side<'_>| {
            json!({
                "policy": side.label,
                "stored_bytes": side.ledger.totals().stored_bytes,
                "peak_bytes": side.peak,
            })
        };
        let rows = changed.iter().map(|c| {
            json!({
                "path": c.path, "from": c.from, "to": c.to, "bytes": c.bytes, "recompute_flops": c.recompute_flops,
                "why": c.why, "id": c.id, "op": c.op,
                "from_stored_bytes": c.from_stored_bytes, "to_stored_bytes": c.to_stored_bytes,
            })
        });
        let document = json!({ "changed": rows.collect::<Vec<_>>(), "from": side(from), "to": side(to) });
        return report::print_line(&document.to_string());
    }
    report::print_line(&format!(
        "{} values are treated differently; before: {}, after: {}",
        changed.len(),
        from.label,
        to.label
    ))?;
    let columns = ["values", "path", "before", "after", "stored before", "stored after", "replay FLOPs", "why"];
    let mut table = report::table(&columns, &[1, 2, 3, 7]);
    for group in groups(&changed, all) {
        let first = group.first;
        table.add_row([
            group.values.to_string(),
            group.path,
            first.from.to_owned(),
            first.to.to_owned(),
            bytes(group.from_bytes),
            bytes(group.to_bytes),
            count(group.flops),
            group.why,
        ]);
    }
    if !changed.is_empty() {
        report::print_line(&table.to_string())?;
    }
    let stored = |side: &Side<'_>| bytes(side.ledger.totals().stored_bytes);
    report::print_line(&format!(
        "stored {} before and {} after, peak of the step {} and {}",
        stored(from),
        stored(to),
        bytes(from.peak),
        bytes(to.peak)
    ))
}

/// Changes that differ in nothing but the block's number.
struct Group<'a> {
    path: String,
    why: String,
    first: &'a LedgerChange,
    values: u64,
    from_bytes: u64,
    to_bytes: u64,
    flops: u64,
}

fn groups(changed: &[LedgerChange], all: bool) -> Vec<Group<'_>> {
    let starred = |text: &str| if all { text.to_owned() } else { without_block_numbers(text) };
    let mut groups: Vec<Group<'_>> = Vec::new();
    for change in changed {
        let (path, why) = (if all { change.path.clone() } else { without_numbers(&change.path) }, starred(&change.why));
        let same = |g: &&mut Group<'_>| {
            !all && (&g.path, &g.why, g.first.from, g.first.to) == (&path, &why, change.from, change.to)
        };
        let group = match groups.iter_mut().find(same) {
            Some(group) => group,
            None => {
                groups.push(Group { path, why, first: change, values: 0, from_bytes: 0, to_bytes: 0, flops: 0 });
                groups.last_mut().expect("one was pushed")
            }
        };
        group.values += 1;
        group.from_bytes += change.from_stored_bytes;
        group.to_bytes += change.to_stored_bytes;
        group.flops = group.flops.saturating_add(change.recompute_flops);
    }
    groups
}

/// A sentence in which the paths between backticks have `*` for each number.
fn without_block_numbers(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(i, part)| if i % 2 == 1 { without_numbers(part) } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_lose_their_numbers() {
        assert_eq!(
            without_block_numbers("2 ops replay it from `transformer.h.3.ln_1`, 4 more"),
            "2 ops replay it from `transformer.h.*.ln_1`, 4 more"
        );
    }
}
