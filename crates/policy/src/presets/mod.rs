//! The presets, one file each, and the table from which the command line, help and tests take them.
//!
//! They know a model by the roles of its scopes and by ops, never by names, so they are for any model whose scopes have roles.
//! `blocks.{i}` in their patterns is the `i`-th scope of role block, see [`Rule`].

mod balanced;
mod flash_ffn;
mod full_per_layer;
mod int8_all;
mod int8_residual;
mod length_adaptive;
mod none;
mod selective;
mod selective_attention;
mod selective_ffn;
mod sqrt_n;

pub use balanced::balanced;
pub use flash_ffn::flash_ffn;
pub use full_per_layer::full_per_layer;
pub use int8_all::int8_all;
pub use int8_residual::int8_residual;
pub use length_adaptive::length_adaptive;
pub use none::none;
pub use selective::selective;
pub use selective_attention::selective_attention;
pub use selective_ffn::selective_ffn;
pub use sqrt_n::sqrt_n;

use crate::{Error, Result, Rule, RuleSet};
use retape_core::{Int8Spec, Mark};

/// All presets.
pub const PRESETS: &[Preset] = &[
    Preset { name: "none", about: "keep all that backward reads", arguments: &[], build: |_, _| none() },
    Preset {
        name: "full_per_layer",
        about: "keep each block's input and recompute the rest of it",
        arguments: &[],
        build: |_, _| full_per_layer(),
    },
    Preset {
        name: "selective_attention",
        about: "recompute the scores, softmax and dropout of attention; keep q, k and v",
        arguments: &[],
        build: |_, _| selective_attention(),
    },
    Preset {
        name: "selective_ffn",
        about: "recompute all inside the feed-forward network from its kept input",
        arguments: &[],
        build: |_, _| selective_ffn(),
    },
    Preset {
        name: "selective",
        about: "selective_attention and selective_ffn, and recompute the blocks' norms",
        arguments: &[],
        build: |_, _| selective(),
    },
    Preset {
        name: "flash_ffn",
        about: "the marks of selective_ffn, for a model with tiled attention",
        arguments: &[],
        build: |_, _| flash_ffn(),
    },
    Preset {
        name: "length_adaptive",
        about: "selective_attention where the sequence is longer than a threshold",
        arguments: &[Argument {
            name: "threshold",
            about: "the longest sequence whose attention is kept",
            least: 0,
            default: |_| 2048,
        }],
        build: |args, _| length_adaptive(args[0]),
    },
    Preset {
        name: "int8_residual",
        about: "store the residual stream as int8",
        arguments: &[GROUP],
        build: |args, _| int8_residual(group_of(args[0])),
    },
    Preset {
        name: "int8_all",
        about: "store everything as int8 that may be",
        arguments: &[GROUP],
        build: |args, _| int8_all(group_of(args[0])),
    },
    Preset {
        name: "balanced",
        about: "recompute the results of memory-bound ops, sums apart",
        arguments: &[],
        build: |_, _| balanced(),
    },
    Preset {
        name: "sqrt_n",
        about: "Chen's segments: keep every n-th block's output and recompute the rest, a segment at a time",
        arguments: &[Argument {
            name: "every",
            about: "blocks per segment; the default is the square root of the number of blocks, rounded up",
            least: 1,
            default: |shape| sqrt_n::sqrt_rounded_up(shape.blocks).max(1),
        }],
        build: |args, shape| sqrt_n(args[0], shape.blocks),
    },
];

const GROUP: Argument = Argument { name: "group", about: "elements per scale", least: 1, default: |_| 64 };

fn group_of(group: usize) -> Int8Spec {
    Int8Spec { group, ..Int8Spec::default() }
}

/// What presets need to know of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// How many scopes of role block it has; where those have several parents, the most that one has.
    pub blocks: usize,
}

/// A row of [`PRESETS`].
#[derive(Debug)]
pub struct Preset {
    /// Its name on the command line and in files.
    pub name: &'static str,
    /// What it does, in one line.
    pub about: &'static str,
    /// Its arguments.
    pub arguments: &'static [Argument],
    /// Takes a value for each argument, in their order.
    build: fn(&[usize], &ModelShape) -> RuleSet,
}

/// An argument of a preset, a whole number.
#[derive(Debug)]
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// What it says, in one line.
    pub about: &'static str,
    /// The smallest value that it takes.
    pub least: usize,
    /// The value if none is given.
    pub default: fn(&ModelShape) -> usize,
}

impl Preset {
    /// The policy, with arguments in the form `name=value`.
    fn parse<'a>(&self, arguments: impl Iterator<Item = &'a str>, shape: &ModelShape) -> Result<RuleSet> {
        let mut given = vec![None; self.arguments.len()];
        for text in arguments {
            let wrong = |reason| Error::InvalidArgument { policy: self.name, argument: text.to_owned(), reason };
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            let at = self.arguments.iter().position(|a| a.name == name).ok_or_else(|| wrong(self.usage(shape)))?;
            if given[at].is_some() {
                return Err(wrong("is given twice".to_owned()));
            }
            let least = self.arguments[at].least;
            let value = value.parse().ok().filter(|&value: &usize| value >= least);
            given[at] = Some(value.ok_or_else(|| wrong(format!("write {name}=N with a whole number N >= {least}")))?);
        }
        let values = self.arguments.iter().zip(given).map(|(a, given)| given.unwrap_or_else(|| (a.default)(shape)));
        Ok((self.build)(&values.collect::<Vec<_>>(), shape))
    }

    fn usage(&self, shape: &ModelShape) -> String {
        match self.arguments {
            [] => "this policy takes no arguments".to_owned(),
            some => {
                let some: Vec<_> = some.iter().map(|a| format!("{}={}", a.name, (a.default)(shape))).collect();
                format!("this policy takes {} (the default)", some.join(", "))
            }
        }
    }
}

/// The preset that `spec` names, with its arguments: `length_adaptive:threshold=1024`.
pub fn preset(spec: &str, shape: &ModelShape) -> Result<RuleSet> {
    let mut parts = spec.split(':');
    let name = parts.next().unwrap_or_default();
    match PRESETS.iter().find(|preset| preset.name == name) {
        Some(preset) => preset.parse(parts, shape),
        None => Err(Error::UnknownPolicy { name: name.to_owned(), nearest: nearest(name) }),
    }
}

/// The preset that someone who wrote `name` is likely to have meant: one that starts so, or one a few typos away.
fn nearest(name: &str) -> Option<&'static str> {
    let starts_so = |preset: &str| !name.is_empty() && preset.starts_with(name);
    let distances = PRESETS.iter().map(|p| (!starts_so(p.name), edit_distance(name, p.name), p.name));
    let (other_start, edits, nearest) = distances.min()?;
    (!other_start || edits <= name.len() / 3).then_some(nearest)
}

/// Insertions, deletions and replacements of a character that make `b` of `a` (Levenshtein, one row at a time).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// A rule of a preset.
fn rule(pattern: &str, mark: Mark) -> Rule {
    Rule::new(pattern, mark).expect("the patterns of presets are valid")
}

/// As [`rule`], for results of the ops of this pattern.
fn rule_of_op(pattern: &str, op: &str, mark: Mark) -> Rule {
    rule(pattern, mark).op(op).expect("the patterns of presets are valid")
}
