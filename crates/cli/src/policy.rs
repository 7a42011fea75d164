//! Policies as the command line names them.

use crate::error::Result;
use retape::policy::{Context, Rule, RuleSet, parse};
use std::rc::Rc;

/// A policy with the name and marks it was asked for by.
#[derive(Debug, Clone)]
pub struct NamedPolicy {
    /// The preset with its arguments, or the file.
    pub name: String,
    /// The user's marks over it, as `GLOB=MARK`.
    pub marks: Vec<String>,
    /// What the tape asks.
    pub rules: Rc<RuleSet>,
}

impl NamedPolicy {
    /// The policy `name` for a model of `blocks` blocks, with marks over it.
    pub fn new(name: &str, marks: &[Rule], blocks: usize) -> Result<NamedPolicy> {
        let policy = parse(name, &Context { blocks })?;
        let rules = Rc::new(if marks.is_empty() { policy } else { RuleSet::new(marks.iter().cloned()).then(policy) });
        Ok(NamedPolicy { name: name.to_owned(), marks: marks.iter().map(Rule::to_string).collect(), rules })
    }

    /// Keeps all that backward reads: what others are compared with.
    pub fn none() -> NamedPolicy {
        NamedPolicy { name: "none".into(), marks: Vec::new(), rules: Rc::new(RuleSet::default()) }
    }

    /// True for [`none`](NamedPolicy::none) without marks.
    pub fn is_reference(&self) -> bool {
        self.name == "none" && self.marks.is_empty()
    }

    /// Name and marks.
    pub fn label(&self) -> String {
        std::iter::once(&self.name).chain(&self.marks).map(String::as_str).collect::<Vec<_>>().join(" + ")
    }
}
