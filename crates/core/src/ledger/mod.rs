//! The ledger: every saved tensor of a tape, what it costs, who decided about it and who reads it.

mod collect;
mod diff;
mod lint;

use crate::ops::Spec;
use crate::{DType, Mark, Origin, Roles};
pub use diff::LedgerChange;
use std::fmt;

/// An entry's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryMark {
    /// Nobody marked it.
    Unmarked,
    /// No mark can change it: a leaf, an integer or a statistic.
    Exact,
    /// The mark that counts.
    Mark(Mark),
}

impl EntryMark {
    /// `none`, `exact`, or the mark's name.
    pub fn name(self) -> &'static str {
        match self {
            EntryMark::Unmarked => "none",
            EntryMark::Exact => "exact",
            EntryMark::Mark(mark) => mark.name(),
        }
    }
}

/// Its name.
impl fmt::Display for EntryMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Its name.
impl serde::Serialize for EntryMark {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What set an entry's mark.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DecidedBy {
    /// Nothing.
    Default,
    /// Nothing can: it is kept exactly.
    Exact,
    /// The user, on the value.
    Value,
    /// The innermost marked scope.
    Scope,
    /// The policy's rule of this name.
    Rule(String),
}

/// `default`, `exact`, `value`, `scope`, or the rule's name.
impl fmt::Display for DecidedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DecidedBy::Default => "default",
            DecidedBy::Exact => "exact",
            DecidedBy::Value => "value",
            DecidedBy::Scope => "scope",
            DecidedBy::Rule(name) => name,
        })
    }
}

/// As text.
impl serde::Serialize for DecidedBy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One value that backward needs, directly or to replay another.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LedgerEntry {
    /// A number that is unique on the tape.
    pub id: u64,
    /// Scopes and name.
    pub path: String,
    /// The op that made it.
    pub op: &'static str,
    /// Roles of the scopes around it.
    pub roles: Roles,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// Bytes in full precision.
    pub bytes: u64,
    /// Bytes that the tape stores for it (0 if dropped).
    pub stored_bytes: u64,
    /// Its mark.
    pub mark: EntryMark,
    /// What set the mark.
    pub rule: DecidedBy,
    /// Paths of the ops whose backward reads it.
    pub readers: Vec<String>,
    /// FLOPs to replay it once from what is stored, if dropped.
    pub recompute_flops: u64,
    /// Ops in that replay.
    pub depth: u64,
    /// What that replay begins with: paths of stored values and of inputs, parameters apart, the nearest first. At most
    /// [`MOST_SOURCES`](LedgerEntry::MOST_SOURCES) of them.
    pub replayed_from: Vec<String>,
    /// Relative L2 error of what is stored against the original, if the tape measures it.
    pub quantization_error: Option<f64>,
    /// True where a handle of the user's still holds the full tensor.
    pub held_by_handle: bool,
}

impl LedgerEntry {
    /// How many paths [`replayed_from`](LedgerEntry::replayed_from) lists at most.
    pub const MOST_SOURCES: usize = 8;

    /// Whether it has this mark, whatever the arguments.
    pub fn is(&self, mark: Mark) -> bool {
        self.mark.name() == mark.name()
    }

    /// Whether nothing is stored of it, so that it is replayed.
    pub fn is_dropped(&self) -> bool {
        let dropped = match self.mark {
            EntryMark::Mark(mark) => mark == Mark::Recompute,
            // Not read itself, and what others are replayed from lies before it.
            EntryMark::Unmarked => self.depth > 0,
            EntryMark::Exact => false,
        };
        dropped && self.stored_bytes == 0
    }

    fn spec(&self) -> Spec {
        Spec::new(self.shape.clone(), self.dtype)
    }

    /// Whether it is kept in full against its mark, because an op reads it exactly.
    pub fn is_skipped(&self) -> bool {
        let packs = |mark: Mark| mark.is_lossy() && mark.packs(&self.spec());
        matches!(self.mark, EntryMark::Mark(mark) if packs(mark) && self.packed_as().is_none())
    }

    /// The mark by whose format fewer bytes are stored of it than it has.
    pub fn packed_as(&self) -> Option<Mark> {
        match self.mark {
            EntryMark::Mark(mark) if mark.packs(&self.spec()) && self.stored_bytes < self.bytes => Some(mark),
            _ => None,
        }
    }
}

/// Something that a user of a policy should know; never an error.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Lint {
    /// A stable name of the kind of lint, `rule-matched-nothing`.
    pub code: &'static str,
    /// The rule or path that it is about.
    pub subject: String,
    /// What to know, and what to do about it.
    pub message: String,
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.code, self.subject, self.message)
    }
}

/// How often a policy's rule decided, and who wrote it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RuleUse {
    /// The rule's name.
    pub rule: String,
    /// Who wrote it.
    pub origin: Origin,
    /// Values for which it decided.
    pub values: u64,
}

/// Sums over a ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct LedgerTotals {
    /// Bytes in full precision of all entries.
    pub bytes: u64,
    /// Bytes stored.
    pub stored_bytes: u64,
}

/// Every saved tensor of a tape at one moment, in recording order.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize)]
pub struct Ledger {
    /// The entries.
    pub values: Vec<LedgerEntry>,
    /// What the policy's rules did.
    pub rules: Vec<RuleUse>,
    /// What to know.
    pub lint: Vec<Lint>,
}

impl Ledger {
    /// Sums over the entries.
    pub fn totals(&self) -> LedgerTotals {
        self.values.iter().fold(LedgerTotals::default(), |t, v| LedgerTotals {
            bytes: t.bytes + v.bytes,
            stored_bytes: t.stored_bytes + v.stored_bytes,
        })
    }

    /// The entry of a path, the first in recording order.
    pub fn get(&self, path: &str) -> Option<&LedgerEntry> {
        self.values.iter().find(|v| v.path == path)
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A longer path than 200 letters stands out of its column; formatting takes no more than 65,535.
        let width = self.values.iter().map(|v| v.path.chars().count()).max().unwrap_or(0).clamp(4, 200);
        writeln!(
            f,
            "{:width$}  {:12} {:20} {:>12} {:>12}  {:9} {:>12} {:>5}  rule",
            "path", "op", "shape", "bytes", "stored", "mark", "replay FLOPs", "depth"
        )?;
        for v in &self.values {
            let shape = format!("{}{:?}", v.dtype, v.shape);
            writeln!(
                f,
                "{:width$}  {:12} {shape:20} {:>12} {:>12}  {:9} {:>12} {:>5}  {}",
                v.path, v.op, v.bytes, v.stored_bytes, v.mark, v.recompute_flops, v.depth, v.rule
            )?;
        }
        let totals = self.totals();
        write!(f, "{:width$}  {:12} {:20} {:>12} {:>12}", "total", "", "", totals.bytes, totals.stored_bytes)?;
        for lint in &self.lint {
            write!(f, "\nlint: {lint}")?;
        }
        Ok(())
    }
}
