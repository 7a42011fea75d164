//! Marks: what the tape does with a value that backward will read; and the policy that decides marks for a whole model.

use crate::ledger::{Ledger, Lint};
use crate::tape::storage::Int8Spec;
use crate::{DType, Role, Roles};
use std::fmt;
use std::ops::Range;

/// What becomes of a value when its last handle goes and backward still needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum Mark {
    /// Store it in full.
    Keep,
    /// Drop it, and replay its op when backward asks for it.
    Recompute,
    /// Store it as int8 with a scale per group.
    Int8(Int8Spec),
    /// Store it as bf16: 2 bytes an element.
    Bf16,
}

impl Mark {
    /// The name used in ledgers, rules and on the command line.
    pub fn name(self) -> &'static str {
        self.format().map_or("recompute", |format| format.name())
    }

    /// All marks, formats with their usual arguments.
    pub fn all() -> impl Iterator<Item = Mark> {
        let [exact, lossy @ ..] = Mark::FORMATS;
        [exact, Mark::Recompute].into_iter().chain(lossy)
    }

    /// The mark with an argument of its format changed: `("group", "32")` of int8.
    ///
    /// # Errors
    /// What would be right, where the mark has no such argument or the value is none of it.
    pub fn with(self, argument: &str, value: &str) -> Result<Mark, String> {
        match self.format() {
            Some(format) => format.with(argument, value),
            None => Err(format!("`{}` takes no arguments; leave out `{argument}`", self.name())),
        }
    }

    /// As rules write it: the name, and what differs from the usual arguments: `int8:group=32`.
    pub fn text(self) -> String {
        let arguments = self.format().map_or(Vec::new(), |format| format.arguments());
        arguments.into_iter().fold(self.name().to_owned(), |text, (name, value)| format!("{text}:{name}={value}"))
    }
}

/// Its name.
impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Reads what [`Mark::text`] writes.
impl std::str::FromStr for Mark {
    type Err = String;

    fn from_str(text: &str) -> Result<Mark, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let unknown = || {
            let names: Vec<&str> = Mark::all().map(Mark::name).collect();
            format!("unknown mark `{name}`; the marks are {}", names.join(", "))
        };
        let mark = Mark::all().find(|mark| mark.name() == name).ok_or_else(unknown)?;
        parts.try_fold(mark, |mark, argument| {
            let (name, value) = argument.split_once('=').unwrap_or((argument, ""));
            mark.with(name, value)
        })
    }
}

/// What a policy sees of a value. It is never asked for views, leaves, integers and per-row statistics.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// The value's number on its tape: the same whenever the same ops are recorded, whatever the marks.
    pub id: u64,
    /// Scopes and op, `blocks.3.attn.softmax`; a value that outlives its scope bears the scope's path.
    pub path: &'a str,
    /// The op's name, `softmax`.
    pub op: &'static str,
    /// Roles of the open scopes around it.
    pub roles: Roles,
    /// Roles of the scopes that it outlived: whose output it is.
    pub output_of: Roles,
    /// The blocks that its path goes through, the outermost first.
    pub blocks: &'a [BlockScope],
    /// Which output of the op.
    pub output: usize,
    /// The value's shape.
    pub shape: &'a [usize],
    /// The value's dtype.
    pub dtype: DType,
    /// The value's bytes in full precision.
    pub bytes: u64,
    /// FLOPs of computing it once from its op's inputs.
    pub flops: u64,
    /// Bytes that computing it once reads and writes.
    pub traffic: u64,
}

impl Site<'_> {
    /// The names by which patterns know it: its path, and its path by the numbers of the blocks that it goes through.
    /// Where `gpt.h.3` is a block, `gpt.h.3.mlp.gelu` is also `blocks.3.mlp.gelu` and `gpt.h.blocks.3.mlp.gelu`. A
    /// block that is itself called `blocks.N` goes by its number only, so that `blocks.3` means one block.
    pub fn names(&self) -> impl Iterator<Item = String> {
        names(self.path, self.blocks)
    }
}

/// What a policy sees of a scope.
#[derive(Debug, Clone, Copy)]
pub struct ScopeSite<'a> {
    /// Names from the outermost scope to this one, `blocks.3.attn`.
    pub path: &'a str,
    /// The scope's own role.
    pub role: Option<Role>,
    /// The blocks that its path goes through, itself included, the outermost first.
    pub blocks: &'a [BlockScope],
}

impl ScopeSite<'_> {
    /// Its path, and its path by the numbers of blocks, see [`Site::names`].
    pub fn names(&self) -> impl Iterator<Item = String> {
        names(self.path, self.blocks)
    }
}

/// A scope of role [`Block`](Role::Block) that a path goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockScope {
    /// The block's path is the first `end` bytes of the path.
    pub end: usize,
    /// Which it is of the blocks with its parent's path (its own without the last segment), from 0. They are counted in
    /// the order in which they were first opened on the tape.
    pub index: usize,
}

fn names(path: &str, blocks: &[BlockScope]) -> impl Iterator<Item = String> {
    let blocks = blocks.iter().filter_map(|block| Some((path.split_at_checked(block.end)?, block.index)));
    let parent = |block: &'_ str| block.rsplit_once('.').map(|(parent, _)| parent.to_owned());
    let is_called_blocks = |parent: &str| parent == "blocks" || parent.ends_with(".blocks");
    let numbered = blocks.clone().any(|((block, _), _)| parent(block).is_some_and(|parent| is_called_blocks(&parent)));
    let own = (!numbered).then(|| path.to_owned());
    own.into_iter().chain(blocks.flat_map(move |((block, inside), index)| {
        let alone = format!("blocks.{index}{inside}");
        let in_parent = parent(block).map(|parent| match is_called_blocks(&parent) {
            true => format!("{parent}.{index}{inside}"),
            false => format!("{parent}.{alone}"),
        });
        [Some(alone), in_parent].into_iter().flatten()
    }))
}

/// A policy's answer: the mark, and which of its [`rules`](Policy::rules) gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The mark.
    pub mark: Mark,
    /// Index into the policy's rules.
    pub rule: usize,
}

/// Who wrote a rule: a user's rule that matches nothing is an error, a preset's is lint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A user, on the command line, in a file, in code.
    User,
    /// A preset of retape.
    Preset,
}

/// A rule's name and origin, for ledgers and messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleInfo {
    /// The rule as its author would recognise it.
    pub name: String,
    /// Who wrote it.
    pub origin: Origin,
}

/// A preset among a policy's rules. One of which no rule decides for any value is
/// [`Error::PresetMatchedNothing`](crate::Error) on a tape whose scopes have no roles, and lint on others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresetInfo {
    /// Its name.
    pub name: String,
    /// Its rules, as indices into [`Policy::rules`].
    pub rules: Range<usize>,
    /// The values that it is for, `what is inside a scope of role feed_forward`.
    pub looks_for: String,
    /// What to do where there are none.
    pub advice: String,
}

/// Decides marks as values are recorded. Must be a pure function of the site: a value is asked for again under another
/// path when it leaves a scope. It may ask its tape for facts, and not change it: see [`Tape`](crate::Tape).
pub trait Policy: fmt::Debug {
    /// The mark for a value, or none: then the value is kept if backward reads it and replayed through otherwise.
    fn mark(&self, site: &Site<'_>) -> Option<Decision>;

    /// The rules that [`Decision::rule`] points into.
    fn rules(&self) -> &[RuleInfo];

    /// The presets that some of the rules are of.
    fn presets(&self) -> &[PresetInfo] {
        &[]
    }

    /// Whether a scope is a *segment*: while backward visits another scope, only this one's boundaries are held.
    fn is_segment(&self, _scope: &ScopeSite<'_>) -> bool {
        false
    }

    /// What this policy would like its user to know of the values it met.
    fn lint(&self, _ledger: &Ledger) -> Vec<Lint> {
        Vec::new()
    }
}
