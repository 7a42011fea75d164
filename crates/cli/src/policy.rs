//! Policies as the command line names them.

use crate::error::{Failure, Result};
use retape::policy::{ModelShape, Plan, Rule, RuleSet, parse, parse_bytes};
use retape::prelude::Policy;
use std::path::PathBuf;
use std::rc::Rc;

/// A policy as it was asked for; what it is depends on the model where it is a budget.
#[derive(Debug, Clone, Default)]
pub struct PolicySpec {
    /// A preset with its arguments, a file of rules, or `budget:BYTES` with [`Budget`]'s arguments.
    pub name: String,
    /// The user's marks over it.
    pub marks: Vec<Rule>,
    /// A profile for budgets.
    pub profile: Option<PathBuf>,
    /// Nobody asked for this budget: where no plan fits, it is left out.
    pub optional: bool,
}

/// What a budget's plan must keep to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// How much the step may take.
    pub size: Size,
    /// The relative error that lossy marks may add to the gradients; no lossy mark where none.
    pub max_gradient_error: Option<f64>,
    /// Elements per scale of int8.
    pub group: usize,
}

/// A number of bytes, or a share of what `none` takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Size {
    Bytes(u64),
    Percent(f64),
}

impl Size {
    /// Bytes, of `none`'s peak.
    pub fn bytes(self, none: u64) -> u64 {
        match self {
            Size::Bytes(bytes) => bytes,
            Size::Percent(percent) => (none as f64 * percent / 100.0) as u64,
        }
    }

    fn parse(text: &str) -> Result<Size, String> {
        let Some(number) = text.strip_suffix('%') else {
            return parse_bytes(text).map(Size::Bytes).map_err(|_| {
                format!("`{text}` is not a budget; write it like 512MiB, 1.5GB, 4096, or 75% of what `none` takes")
            });
        };
        match number.trim().parse::<f64>() {
            Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(Size::Percent(percent)),
            _ => Err(format!("`{text}` is not a share; write it like 75%")),
        }
    }
}

/// Checks a budget on the command line and gives it back as it was written.
pub fn parse_budget(text: &str) -> Result<String, String> {
    Size::parse(text).map(|_| text.to_owned())
}

impl Budget {
    /// Reads what follows `budget:`.
    fn parse(text: &str) -> Result<Budget> {
        let wrong = |reason: String| Failure::usage(format!("policy `budget:{text}`: {reason}"));
        let mut parts = text.split(':');
        let size = Size::parse(parts.next().unwrap_or_default()).map_err(wrong)?;
        let mut budget = Budget { size, max_gradient_error: None, group: 64 };
        for part in parts {
            match part.split_once('=') {
                Some(("max_gradient_error", value)) => {
                    budget.max_gradient_error = Some(parse_error(value).map_err(wrong)?);
                }
                Some(("group", value)) => {
                    let group = value.parse().ok().filter(|&group: &usize| group > 0);
                    budget.group = group.ok_or_else(|| wrong("write group=N with a whole number N >= 1".into()))?;
                }
                _ => return Err(wrong(format!("`{part}`: a budget takes max_gradient_error=E and group=N"))),
            }
        }
        Ok(budget)
    }
}

/// A bound of the relative gradient error.
pub fn parse_error(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|e: &f64| e.is_finite() && *e >= 0.0).ok_or_else(|| {
        format!("`{text}` is not a relative error; write a number such as 0.01, or 0 for exact gradients")
    })
}

impl PolicySpec {
    /// The preset or file `name`, with marks over it.
    pub fn new(name: &str, marks: &[Rule]) -> PolicySpec {
        PolicySpec { name: name.to_owned(), marks: marks.to_vec(), ..PolicySpec::default() }
    }

    /// Keeps all that backward reads: what others are compared with.
    pub fn none() -> PolicySpec {
        PolicySpec::new("none", &[])
    }

    /// The budget, if it is one.
    pub fn budget(&self) -> Result<Option<Budget>> {
        self.name.strip_prefix("budget:").map(Budget::parse).transpose()
    }

    /// Name and marks.
    pub fn label(&self) -> String {
        let marks: Vec<String> = self.marks.iter().map(Rule::to_string).collect();
        std::iter::once(&self.name).chain(&marks).map(String::as_str).collect::<Vec<_>>().join(" + ")
    }

    /// The user's marks alone, if there are any.
    pub fn user_rules(&self) -> Option<RuleSet> {
        (!self.marks.is_empty()).then(|| RuleSet::new(self.marks.iter().cloned()))
    }

    /// What it is for a model of `blocks` blocks, where it isn't a budget.
    pub fn rules(&self, blocks: usize) -> Result<RuleSet> {
        let policy = parse(&self.name, &ModelShape { blocks })?;
        Ok(match self.user_rules() {
            Some(rules) => rules.then(policy),
            None => policy,
        })
    }
}

/// A policy with the name and marks it was asked for by.
#[derive(Debug, Clone)]
pub struct NamedPolicy {
    /// What was asked for.
    pub spec: PolicySpec,
    /// What the tape asks.
    pub rules: Rc<dyn Policy>,
    /// Where it is a budget's.
    pub plan: Option<Planned>,
}

/// A budget's plan.
#[derive(Debug, Clone)]
pub struct Planned {
    /// Bytes that were allowed.
    pub budget: u64,
    /// The marks.
    pub plan: Rc<Plan>,
    /// The smallest budget that has a plan.
    pub smallest: u64,
}

impl NamedPolicy {
    /// Keeps all that backward reads.
    pub fn none() -> NamedPolicy {
        NamedPolicy { spec: PolicySpec::none(), rules: Rc::new(RuleSet::default()), plan: None }
    }

    /// True for [`none`](NamedPolicy::none) without marks.
    pub fn is_reference(&self) -> bool {
        self.spec.name == "none" && self.spec.marks.is_empty()
    }

    /// Name and marks.
    pub fn label(&self) -> String {
        self.spec.label()
    }
}
