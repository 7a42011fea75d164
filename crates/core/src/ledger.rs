//! The ledger: every saved tensor of a tape, what it costs, who decided about it and who reads it.

use crate::{DType, Mark, Origin, Roles};
use std::fmt;

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
    /// `keep`, `recompute`, `int8`; `none` where nobody marked it; `exact` for what no mark can change.
    pub mark: &'static str,
    /// What set the mark: a rule's name, `value`, `scope`, or `default`.
    pub rule: String,
    /// Paths of the ops whose backward reads it.
    pub readers: Vec<String>,
    /// FLOPs to replay it once from what is stored, if dropped.
    pub recompute_flops: u64,
    /// Ops in that replay.
    pub depth: u64,
    /// What that replay begins with: paths of stored values and of inputs, parameters apart, the nearest first. At most
    /// [`MOST_SOURCES`](LedgerEntry::MOST_SOURCES) of them.
    pub replayed_from: Vec<String>,
    /// Relative L2 error of the stored int8 against the original, if the tape measures it.
    pub quantization_error: Option<f64>,
    /// True where a handle of the user's still holds the full tensor.
    pub held_by_handle: bool,
}

impl LedgerEntry {
    /// How many paths [`replayed_from`](LedgerEntry::replayed_from) lists at most.
    pub const MOST_SOURCES: usize = 8;

    /// The mark as a [`Mark`]'s name, for comparisons.
    pub fn is(&self, mark: Mark) -> bool {
        self.mark == mark.name()
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
