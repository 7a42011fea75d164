//! Rules in TOML.

use crate::presets::{self, ModelShape};
use crate::rule::parse_role;
use crate::{Error, Result, Rule, RuleSet, parse_bytes, parse_mark};
use retape_core::glob::Glob;
use retape_core::{Mark, Origin};
use serde::Deserialize;

/// A file. Its rules stay tables at first, so that an error in one can say which it is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    preset: Option<String>,
    segments: Option<Vec<String>>,
    #[serde(default)]
    rule: Vec<toml::Table>,
}

#[derive(Deserialize)]
struct Entry {
    path: Option<String>,
    role: Option<String>,
    output_of: Option<String>,
    mark: String,
    ids: Option<Vec<u64>>,
    op: Option<String>,
    min_bytes: Option<NumberOrText>,
    max_bytes: Option<NumberOrText>,
    rank: Option<usize>,
    shape: Option<Vec<NumberOrText>>,
    max_intensity: Option<f64>,
    /// Of the mark.
    #[serde(flatten)]
    arguments: toml::Table,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number that is not negative, or text")]
enum NumberOrText {
    Number(u64),
    Text(String),
}

impl NumberOrText {
    fn text(self) -> String {
        match self {
            NumberOrText::Number(number) => number.to_string(),
            NumberOrText::Text(text) => text,
        }
    }
}

impl RuleSet {
    /// Reads a file of rules, the first match deciding; a preset may stand above them and has the last word:
    ///
    /// ```
    /// # use retape_policy::{ModelShape, RuleSet};
    /// let rules = r#"
    ///     preset = "selective"
    ///     segments = ["blocks.*"]      # scopes of which backward holds the boundaries alone; may be left out
    ///
    ///     [[rule]]
    ///     path = "blocks.*.mlp.*"      # see `Rule` for the patterns; may be left out beside one of the next three
    ///     role = "feed_forward"        # see `Rule::role`
    ///     mark = "int8"                # or "keep", "recompute", "bf16"
    ///     group = 32                   # of int8: elements per scale, 64 if left out
    ///     rounding = "stochastic"      # of int8: or "nearest", which it is if left out
    ///     output_of = "block"          # see `Rule::output_of`
    ///     op = "gelu*"                 # this and all below may be left out; and see `Rule::ids`
    ///     min_bytes = "1MiB"           # or a plain number
    ///     max_bytes = "1.5GB"
    ///     rank = 3
    ///     shape = ["*", ">=1024", 512] # see `Rule::shape`
    ///     max_intensity = 8            # FLOPs per byte of traffic
    /// "#;
    /// RuleSet::from_toml(rules, &ModelShape { blocks: 12 })?;
    /// # Ok::<(), retape_policy::Error>(())
    /// ```
    pub fn from_toml(text: &str, shape: &ModelShape) -> Result<RuleSet> {
        let file: File = toml::from_str(text).map_err(|e| invalid(text, &e))?;
        let rules = file.rule.into_iter().zip(1..).map(|(table, number)| {
            let wrong = |reason| Error::InvalidTomlRule { number, reason };
            let entry: Entry = table.try_into().map_err(|e| wrong(one_line(&e)))?;
            rule(entry).map_err(wrong)
        });
        let rules = rules.collect::<Result<Vec<_>>>()?;
        let mut user = RuleSet::named(Origin::User, rules, |i, rule| format!("[[rule]] number {}: {rule}", i + 1));
        for scopes in file.segments.unwrap_or_default() {
            let glob = Glob::new(&scopes).map_err(|reason| Error::InvalidRule { rule: scopes, reason })?;
            user = user.with_segments(glob);
        }
        Ok(match file.preset {
            Some(spec) => user.then(presets::preset(&spec, shape)?),
            None => user,
        })
    }
}

/// The rule that an entry describes, or what is wrong with it.
fn rule(entry: Entry) -> Result<Rule, String> {
    let name = entry.mark.split(':').next().unwrap_or_default();
    let mark = parse_mark(name).map_err(|e| e.to_string()).and(entry.mark.parse::<Mark>())?;
    let mark = entry.arguments.iter().try_fold(mark, |mark, (key, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let own = "path, role, output_of, mark, ids, op, min_bytes, max_bytes, rank, shape, max_intensity";
        mark.with(key, &text).map_err(|reason| format!("`{key}`: {reason}; the keys of every rule are {own}"))
    })?;
    let by_role = entry.role.is_some() || entry.output_of.is_some();
    match (&entry.path, &entry.ids) {
        (None, None) if !by_role => {
            let reason = "has none of `path`, `role`, `output_of` and `ids`; write the pattern of the values it is for";
            return Err(reason.to_owned());
        }
        (_, Some(ids)) if ids.is_empty() => return Err("`ids` is empty; leave it out, or list numbers".to_owned()),
        _ => {}
    }
    let role = entry.role.as_deref().map(parse_role).transpose()?;
    let output_of = entry.output_of.as_deref().map(parse_role).transpose()?;
    let bytes = |size: NumberOrText| parse_bytes(&size.text());
    let build = || {
        let mut rule = Rule::new(entry.path.as_deref().unwrap_or("**"), mark)?;
        if let Some(role) = role {
            rule = rule.role(role);
        }
        if let Some(role) = output_of {
            rule = rule.output_of(role);
        }
        if let Some(ids) = entry.ids {
            rule = rule.ids(ids);
        }
        if let Some(op) = &entry.op {
            rule = rule.op(op)?;
        }
        if let Some(min) = entry.min_bytes {
            rule = rule.min_bytes(bytes(min)?);
        }
        if let Some(max) = entry.max_bytes {
            rule = rule.max_bytes(bytes(max)?);
        }
        if let Some(rank) = entry.rank {
            rule = rule.rank(rank);
        }
        if let Some(shape) = entry.shape {
            let dims: Vec<_> = shape.into_iter().map(NumberOrText::text).collect();
            rule = rule.shape(dims.iter().map(String::as_str))?;
        }
        if let Some(max) = entry.max_intensity {
            rule = rule.max_intensity(max);
        }
        Ok(rule)
    };
    build().map_err(|e: Error| e.to_string())
}

/// What is wrong in a text, and where.
pub(crate) fn invalid(text: &str, error: &toml::de::Error) -> Error {
    let start = error.span().map_or(0, |span| span.start);
    Error::InvalidToml { line: text[..start].matches('\n').count() + 1, reason: one_line(error) }
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().trim_end().replace('\n', "; ")
}
