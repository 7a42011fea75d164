//! What two ledgers of one model do differently, value by value.

use super::{DecidedBy, Ledger, LedgerEntry};
use std::collections::{BTreeMap, BTreeSet};

/// A value that two assignments of marks treat differently.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LedgerChange {
    /// Its number on the tape.
    pub id: u64,
    /// Scopes and name.
    pub path: String,
    /// The op that made it.
    pub op: &'static str,
    /// Its mark in the first ledger; `unsaved` where backward needs it for nothing there.
    pub from: &'static str,
    /// Its mark in the second.
    pub to: &'static str,
    /// Bytes in full precision.
    pub bytes: u64,
    /// Bytes that the first stores.
    pub from_stored_bytes: u64,
    /// Bytes that the second stores.
    pub to_stored_bytes: u64,
    /// FLOPs to replay it once, where it is dropped: in the second ledger, else in the first.
    pub recompute_flops: u64,
    /// Who decided on either side and what follows from it, in words.
    pub why: String,
}

/// What becomes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Unsaved,
    Kept,
    Packed(&'static str),
    Dropped,
}

impl Fate {
    fn of(entry: Option<&LedgerEntry>) -> Fate {
        match entry {
            None => Fate::Unsaved,
            Some(entry) if entry.is_dropped() => Fate::Dropped,
            Some(entry) => entry.packed_as().map_or(Fate::Kept, |mark| Fate::Packed(mark.name())),
        }
    }
}

/// A ledger, with what its entries are replayed from turned round.
struct Side<'a> {
    entries: BTreeMap<(u64, &'a str), &'a LedgerEntry>,
    replayed_from: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Side<'a> {
    fn new(ledger: &'a Ledger) -> Side<'a> {
        let mut side = Side { entries: BTreeMap::new(), replayed_from: BTreeMap::new() };
        for entry in &ledger.values {
            side.entries.insert((entry.id, &entry.path), entry);
            for source in &entry.replayed_from {
                side.replayed_from.entry(source).or_default().push(&entry.path);
            }
        }
        side
    }

    fn why(&self, key: (u64, &str)) -> String {
        let Some(entry) = self.entries.get(&key) else { return "backward doesn't need it".into() };
        let who = match &entry.rule {
            DecidedBy::Default => "nothing marks it".to_owned(),
            DecidedBy::Value => "a mark on the value decides".to_owned(),
            DecidedBy::Scope => "the mark of its scope decides".to_owned(),
            DecidedBy::Exact => "no mark can change it".to_owned(),
            DecidedBy::Rule(rule) => format!("rule `{rule}` decides"),
        };
        let fate = match Fate::of(Some(entry)) {
            Fate::Dropped => {
                let ops = match entry.depth {
                    1 => "1 op replays".to_owned(),
                    depth => format!("{depth} ops replay"),
                };
                match &entry.replayed_from[..] {
                    [] => format!("dropped, {ops} it"),
                    sources => format!("dropped, {ops} it from {}", some(sources.iter().map(String::as_str))),
                }
            }
            Fate::Packed(mark) => format!("stored as {mark}"),
            _ if entry.is_skipped() => "an op reads it exactly, so it is kept in full".to_owned(),
            _ if entry.readers.is_empty() => match self.replayed_from.get(key.1) {
                Some(others) => format!("kept because {} replayed from it", verb(others)),
                None => "kept".to_owned(),
            },
            _ => "kept".to_owned(),
        };
        format!("{who}: {fate}")
    }
}

fn verb(paths: &[&str]) -> String {
    format!("{} {}", some(paths.iter().copied()), if paths.len() == 1 { "is" } else { "are" })
}

/// The first few of some paths.
fn some<'a>(paths: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 3;
    let paths: Vec<&str> = paths.collect();
    let mut text = paths.iter().take(SHOWN).map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", ");
    if paths.len() > SHOWN {
        text += &format!(" and {} more", paths.len() - SHOWN);
    }
    text
}

impl Ledger {
    /// What `other` does differently from this ledger, in recording order. Both must be of the same forward pass. A
    /// value counts as changed where other bytes are stored of it, or where it is dropped on one side only; a mark
    /// that changes neither doesn't.
    ///
    /// ```
    /// use retape_core::{DType, Mark, Tape, Tensor, meta};
    ///
    /// let device = meta();
    /// let x = Tensor::full(&device, &[64, 64], DType::F32, 0.0)?;
    /// let ledger = |mark| {
    ///     let tape = Tape::new(&device);
    ///     let h = tape.leaf(&x)?.tanh()?;
    ///     h.set_mark(mark)?;
    ///     let _loss = h.square()?.sum()?;
    ///     tape.ledger()
    /// };
    /// let changed = ledger(Mark::Keep)?.diff(&ledger(Mark::Recompute)?);
    /// assert_eq!((changed[0].from, changed[0].to), ("keep", "recompute"));
    /// # Ok::<(), retape_core::Error>(())
    /// ```
    pub fn diff(&self, other: &Ledger) -> Vec<LedgerChange> {
        let (from, to) = (Side::new(self), Side::new(other));
        let keys: BTreeSet<(u64, &str)> = from.entries.keys().chain(to.entries.keys()).copied().collect();
        let mut changes = Vec::new();
        for key in keys {
            let (a, b) = (from.entries.get(&key).copied(), to.entries.get(&key).copied());
            let stored = |entry: Option<&LedgerEntry>| entry.map_or(0, |e| e.stored_bytes);
            let Some(entry) = b.or(a) else { continue };
            if (Fate::of(a), stored(a)) == (Fate::of(b), stored(b)) {
                continue;
            }
            let mut readers: Vec<&str> = Vec::new();
            for reader in [a, b].into_iter().flatten().flat_map(|e| &e.readers) {
                if !readers.contains(&reader.as_str()) {
                    readers.push(reader);
                }
            }
            let reads = match readers.len() {
                0 if [a, b].into_iter().any(|side| Fate::of(side) == Fate::Dropped) => {
                    "backward doesn't read it itself, replays of others pass through it".to_owned()
                }
                0 => "backward doesn't read it itself".to_owned(),
                _ => format!("read by {}", some(readers.into_iter())),
            };
            let flops = |entry: Option<&LedgerEntry>| entry.map_or(0, |e| e.recompute_flops);
            changes.push(LedgerChange {
                id: entry.id,
                path: entry.path.clone(),
                op: entry.op,
                from: a.map_or("unsaved", |e| e.mark.name()),
                to: b.map_or("unsaved", |e| e.mark.name()),
                bytes: entry.bytes,
                from_stored_bytes: stored(a),
                to_stored_bytes: stored(b),
                recompute_flops: if Fate::of(b) == Fate::Dropped { flops(b) } else { flops(a) },
                why: format!("before, {}; after, {}; {reads}", from.why(key), to.why(key)),
            });
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Int8Spec, Ledger, Mark, Tape, Tensor, meta};

    /// tanh, gelu and silu, each read by the next and by nothing else; marks for the first two.
    fn ledger(tanh: Option<Mark>, gelu: Option<Mark>) -> Ledger {
        let device = meta();
        let x = Tensor::full(&device, &[8, 64], DType::F32, 0.0).unwrap();
        let tape = Tape::new(&device);
        let mark = |v: crate::Var, mark: Option<Mark>| {
            mark.into_iter().for_each(|mark| v.set_mark(mark).unwrap());
            v
        };
        let mut h = mark(tape.leaf(&x).unwrap().tanh().unwrap(), tanh);
        h = mark(h.gelu().unwrap(), gelu);
        let loss = h.clone().silu().unwrap().sum().unwrap();
        drop(h);
        let ledger = tape.ledger().unwrap();
        tape.backward(&loss).unwrap();
        ledger
    }

    #[test]
    fn equal_ledgers_have_no_differences() {
        let a = ledger(None, Some(Mark::Recompute));
        assert_eq!(a.diff(&a), []);
        // A mark that changes nothing: it was kept before.
        assert_eq!(ledger(None, None).diff(&ledger(Some(Mark::Keep), None)), []);
        assert_eq!(Ledger::default().diff(&Ledger::default()), []);
    }

    #[test]
    fn a_change_says_who_decided_and_what_follows() {
        let (a, b) = (ledger(None, None), ledger(None, Some(Mark::Recompute)));
        let changes = a.diff(&b);
        let [change] = &changes[..] else { panic!("{changes:#?}") };
        assert_eq!((change.path.as_str(), change.from, change.to), ("gelu", "none", "recompute"));
        assert_eq!((change.bytes, change.from_stored_bytes, change.to_stored_bytes), (2048, 2048, 0));
        let entry = b.get("gelu").unwrap();
        assert_eq!(
            (change.recompute_flops, &entry.replayed_from[..]),
            (entry.recompute_flops, &["tanh".to_owned()][..])
        );
        assert!(change.recompute_flops > 0);
        assert_eq!(
            change.why,
            "before, nothing marks it: kept; after, a mark on the value decides: dropped, 1 op replays it from `tanh`; \
             read by `silu`"
        );
        // The other way round, the FLOPs are those that are saved.
        let back = b.diff(&a);
        assert_eq!((back[0].from, back[0].to, back[0].recompute_flops), ("recompute", "none", change.recompute_flops));
    }

    #[test]
    fn int8_and_chains_are_told_apart() {
        let int8 = ledger(Some(Mark::Int8(Int8Spec::default())), None);
        let both = ledger(Some(Mark::Recompute), Some(Mark::Recompute));
        let changes = int8.diff(&both);
        let marks: Vec<_> = changes.iter().map(|c| (c.path.as_str(), c.from, c.to)).collect();
        assert_eq!(marks, [("tanh", "int8", "recompute"), ("gelu", "none", "recompute")]);
        assert!(changes[0].from_stored_bytes > 512 && changes[0].from_stored_bytes < 2048);
        assert!(changes[1].why.contains("2 ops replay it from `leaf`"), "{}", changes[1].why);
        assert!(changes[0].why.contains("stored as int8"), "{}", changes[0].why);
    }

    #[test]
    fn what_others_are_replayed_from_says_so() {
        let device = meta();
        let x = Tensor::full(&device, &[8, 64], DType::F32, 0.0).unwrap();
        let ledger = |mark| {
            let tape = Tape::new(&device);
            // Scaling reads nothing, so what it scales is stored for the replay alone.
            let h = tape.leaf(&x).unwrap().scale(2.0).unwrap();
            let t = h.clone().scale(3.0).unwrap();
            h.set_mark(Mark::Keep).unwrap();
            t.set_mark(mark).unwrap();
            let loss = t.clone().silu().unwrap().sum().unwrap();
            drop((t, h));
            let ledger = tape.ledger().unwrap();
            tape.backward(&loss).unwrap();
            ledger
        };
        let changes = ledger(Mark::Keep).diff(&ledger(Mark::Recompute));
        let source = changes.iter().find(|c| c.from == "unsaved").unwrap_or_else(|| panic!("{changes:#?}"));
        assert_eq!((source.to, source.to_stored_bytes), ("keep", 2048));
        assert!(source.why.contains("kept because"), "{}", source.why);
    }
}
