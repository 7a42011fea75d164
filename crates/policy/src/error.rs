//! The one error type of this crate. Every message says what was wrong, where, and what would be right.

use crate::PRESETS;
use crate::rule::mark_names;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All that can go wrong in writing down a policy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pattern or a predicate of a rule can't be read.
    #[error("rule `{rule}`: {reason}")]
    InvalidRule {
        /// The rule's pattern.
        rule: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// No such mark.
    #[error("unknown mark `{0}`; the marks are {marks}", marks = mark_names())]
    UnknownMark(String),
    /// Not a byte size.
    #[error("`{0}` is not a byte size; write it like 512MiB, 1.5GB or 4096")]
    InvalidBytes(String),
    /// No such preset.
    #[error("unknown policy `{name}`{}; the presets are {}; a policy may also be the path of a .toml file",
        .nearest.map_or_else(String::new, |n| format!(", did you mean `{n}`?")),
        PRESETS.iter().map(|p| p.name).collect::<Vec<_>>().join(", "))]
    UnknownPolicy {
        /// The name asked for.
        name: String,
        /// The preset with the most similar name, if one is similar.
        nearest: Option<&'static str>,
    },
    /// An argument that the preset doesn't have, or a value that it can't take.
    #[error("policy `{policy}`, argument `{argument}`: {reason}")]
    InvalidArgument {
        /// The preset.
        policy: &'static str,
        /// The argument as given.
        argument: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A file of rules isn't the TOML that is expected.
    #[error("line {line}: {reason}")]
    InvalidToml {
        /// Where, counted from 1.
        line: usize,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A `[[rule]]` of a file is wrong.
    #[error("[[rule]] number {number}: {reason}")]
    InvalidTomlRule {
        /// Which one, counted from 1.
        number: usize,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A file of rules can't be read.
    #[error("can't read the rules: {0}")]
    Unreadable(String),
    /// No plan fits the budget.
    #[error("no plan is known to fit {budget} bytes; the smallest budget that one fits is {smallest} bytes")]
    Infeasible {
        /// Bytes asked for.
        budget: u64,
        /// The least peak of all plans known.
        smallest: u64,
    },
    /// A profile with figures that nothing can have.
    #[error("profile: {0}")]
    InvalidProfile(String),
    /// The engine couldn't run a forward pass that is being planned.
    #[error(transparent)]
    Engine(#[from] retape_core::Error),
    /// Something is wrong in a file.
    #[error("{file}: {error}")]
    File {
        /// Its path.
        file: String,
        /// What is wrong.
        error: Box<Error>,
    },
}
