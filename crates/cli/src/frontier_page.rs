//! The frontier as a page: the points, and what each does with the values of every block.

use crate::args::Common;
use crate::error::{Failure, Result};
use crate::frontier::Point;
use crate::inspect;
use crate::measure::Case;
use crate::page::Page;
use crate::report::without_numbers;
use retape::nn::GptConfig;
use retape::{EntryMark, LedgerEntry, Mark};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// A point of another engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    engine: String,
    label: String,
    peak_bytes: u64,
    saved_bytes: Option<u64>,
    overhead_percent: f64,
}

/// The points of a file of other engines', if there is one.
pub fn read_peers(file: Option<&Path>) -> Result<Vec<Peer>> {
    let Some(file) = file else { return Ok(Vec::new()) };
    let wrong = |reason: String| {
        Failure::usage(format!(
            "--peers {}: {reason}; it must be a JSON list of objects with engine, label, peak_bytes and \
             overhead_percent",
            file.display()
        ))
    };
    let text = std::fs::read(file).map_err(|e| wrong(format!("can't read it: {e}")))?;
    let peers: Vec<Peer> = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    match peers.iter().find(|p| p.peak_bytes == 0 || p.engine.trim().is_empty() || p.label.trim().is_empty()) {
        Some(peer) => Err(wrong(format!("`{}` `{}` lacks a name or its peak_bytes", peer.engine, peer.label))),
        None => Ok(peers),
    }
}

/// Values that differ in nothing but the block's number, or one outside the blocks.
#[derive(Debug, Serialize)]
struct Row {
    path: String,
    op: &'static str,
    /// Of one of them.
    bytes: u64,
    in_blocks: bool,
    /// A letter for each block, or one.
    #[serde(skip)]
    cells: HashMap<usize, String>,
}

/// The number of the block that a path lies in.
fn block_of(path: &str) -> Option<usize> {
    path.strip_prefix("transformer.h.")?.split('.').next()?.parse().ok()
}

/// A mark as the letter that it begins with. A lossy mark that a reader doesn't allow is as good as `exact`.
fn letter(entry: &LedgerEntry) -> char {
    let mark = match entry.mark {
        _ if entry.is_skipped() => EntryMark::Exact,
        // Stored as it is.
        EntryMark::Mark(mark) if mark.is_lossy() && entry.packed_as().is_none() => EntryMark::Mark(Mark::Keep),
        mark => mark,
    };
    first(mark.name())
}

fn first(name: &str) -> char {
    name.chars().next().unwrap_or('n')
}

/// Colours of lossy formats in page.css.
const COLOURS: usize = 3;

/// The formats that change numbers, as the page draws them: by letter, a colour's name and what to say.
fn lossy_marks() -> BTreeMap<char, (String, &'static str)> {
    let formats = Mark::FORMATS.iter().filter_map(Mark::format).filter(|format| format.is_lossy());
    formats.enumerate().map(|(i, f)| (first(f.name()), (format!("lossy-{}", i % COLOURS), f.about()))).collect()
}

/// The rows of all points of one form of attention, in recording order, with each point's letters.
fn rows(ledgers: &[(usize, Vec<LedgerEntry>)], blocks: usize) -> Vec<Row> {
    let mut order: Vec<(u64, Row)> = Vec::new();
    let mut index: HashMap<String, usize> = HashMap::new();
    for (point, entries) in ledgers {
        for entry in entries {
            let block = block_of(&entry.path);
            let path = if block.is_some() { without_numbers(&entry.path) } else { entry.path.clone() };
            let at = *index.entry(path.clone()).or_insert(order.len());
            if at == order.len() {
                let (op, bytes, in_blocks) = (entry.op, entry.bytes, block.is_some());
                order.push((entry.id, Row { path, op, bytes, in_blocks, cells: HashMap::new() }));
            }
            let (first, row) = &mut order[at];
            *first = (*first).min(entry.id);
            let width = if row.in_blocks { blocks } else { 1 };
            let cells = row.cells.entry(*point).or_insert_with(|| ".".repeat(width));
            let at = block.unwrap_or(0).min(width - 1);
            cells.replace_range(at..=at, letter(entry).encode_utf8(&mut [0; 4]));
        }
    }
    // By the first block that has them: in the order in which a block computes.
    order.sort_by_key(|(first, _)| *first);
    order.into_iter().map(|(_, row)| row).collect()
}

/// What kind of point it is.
fn kind(point: &Point) -> &'static str {
    let line = &point.line;
    match line.policy.as_str() {
        _ if line.budget_bytes.is_some() => "budget",
        _ if !line.marks.is_empty() => "marks",
        "none" => "none",
        name if name.ends_with(".toml") => "rules",
        _ => "preset",
    }
}

/// The page. `points` and `cases` are the same in the same order.
pub fn html(
    document: &Value,
    points: &[Point],
    cases: &[Case],
    peers: &[Peer],
    config: &GptConfig,
    common: &Common,
) -> Result<String> {
    let mut by_form: HashMap<&'static str, Vec<(usize, Vec<LedgerEntry>)>> = HashMap::new();
    for (i, case) in cases.iter().enumerate() {
        let config = GptConfig { attention: case.form, ..config.clone() };
        let unlimited = Common { memory_limit: None, ..common.clone() };
        let (ledger, _) = inspect::dry_run(&config, &case.policy, &unlimited)?;
        by_form.entry(case.form.name()).or_default().push((i, ledger.values));
    }
    let mut extras: Vec<Value> = points
        .iter()
        .map(|point| json!({ "label": point.line.label(), "kind": kind(point), "overhead": point.overhead() }))
        .collect();
    let lossy = lossy_marks();
    let mut forms = serde_json::Map::new();
    for (form, ledgers) in by_form {
        let rows = rows(&ledgers, config.layers.max(1));
        for (point, _) in &ledgers {
            let letters = rows.iter().map(|row| {
                let width = if row.in_blocks { config.layers } else { 1 };
                row.cells.get(point).cloned().unwrap_or_else(|| ".".repeat(width))
            });
            let letters: Vec<String> = letters.collect();
            extras[*point]["lossy"] = letters.iter().any(|row| row.contains(|c| lossy.contains_key(&c))).into();
            extras[*point]["marks"] = letters.into();
        }
        forms.insert(form.to_owned(), json!(rows));
    }
    let data = json!({
        "frontier": document,
        "extras": extras,
        "rows": forms,
        "blocks": config.layers,
        "peers": peers,
        "lossy": lossy,
    });
    Page::Frontier.fill(&format!("retape frontier: {}", document["model"]["name"].as_str().unwrap_or("")), &data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use retape::{DType, DecidedBy, Int8Spec};

    fn entry(id: u64, path: &str, mark: EntryMark) -> LedgerEntry {
        LedgerEntry {
            id,
            path: path.to_owned(),
            op: "gelu",
            roles: retape::Roles::default(),
            shape: vec![4],
            dtype: DType::F32,
            bytes: 16,
            stored_bytes: if matches!(mark, EntryMark::Mark(mark) if mark.is_lossy()) { 8 } else { 16 },
            mark,
            rule: DecidedBy::Default,
            readers: Vec::new(),
            recompute_flops: 0,
            depth: 0,
            replayed_from: Vec::new(),
            quantization_error: None,
            held_by_handle: false,
        }
    }

    #[test]
    fn marks_are_letters_by_block() {
        let int8 = EntryMark::Mark(Mark::Int8(Int8Spec::default()));
        let first = vec![
            entry(0, "transformer.embed", EntryMark::Unmarked),
            entry(2, "transformer.h.0.b", EntryMark::Mark(Mark::Keep)),
            entry(4, "transformer.h.1.b", EntryMark::Mark(Mark::Recompute)),
        ];
        let second = vec![entry(1, "transformer.h.0.a", EntryMark::Exact), entry(4, "transformer.h.1.b", int8)];
        assert_eq!(letter(&LedgerEntry { stored_bytes: 16, ..entry(0, "a", int8) }), 'e');
        let rows = rows(&[(0, first), (1, second)], 2);
        let shown: Vec<_> = rows.iter().map(|r| (r.path.as_str(), r.cells.get(&0), r.cells.get(&1))).collect();
        let text = |t: &str| Some(t.to_owned());
        assert_eq!(
            shown,
            [
                ("transformer.embed", text("n").as_ref(), None),
                ("transformer.h.*.a", None, text("e.").as_ref()),
                ("transformer.h.*.b", text("kr").as_ref(), text(".i").as_ref())
            ]
        );
    }
}
