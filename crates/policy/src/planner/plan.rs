//! A plan, as a policy and as a file of rules.

use super::graph::{Choice, Graph, like};
use retape_core::{Decision, Ledger, Lint, Mark, Origin, Policy, Rounding, RuleInfo, Site, Trace};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Marks for all values of one forward pass, with what they will take. It is a [`Policy`] for a tape that records the same
/// ops: the same code on the same shapes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The step's highest bytes: what the meter will show.
    pub peak_bytes: u64,
    /// Bytes stored at the end of forward.
    pub saved_bytes: u64,
    /// FLOPs of replays over those of a step without any (backward counted as twice forward), in percent.
    pub overhead_percent: f64,
    /// Predicted seconds of replays, quantizing and dequantizing, over those of a step without any, in percent.
    pub overhead_seconds_percent: f64,
    /// Bound of the relative error of the gradients: the sum over all int8 values of what was measured of each. 0 without
    /// int8; `None` where int8 is used and nothing was measured.
    pub gradient_error_bound: Option<f64>,
    /// The mark of each value that was free to be marked, in recording order.
    pub marks: Vec<PlannedMark>,
    pub(super) policy: Rc<PlanMarks>,
}

/// A value's part in a [`Plan`].
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlannedMark {
    /// Scopes and name.
    pub path: String,
    /// The op that made it.
    pub op: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes in full precision.
    pub bytes: u64,
    /// Its mark.
    #[serde(serialize_with = "name_of")]
    pub mark: Mark,
    /// The value's number on its tape.
    pub id: u64,
}

fn name_of<S: serde::Serializer>(mark: &Mark, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(mark.name())
}

impl Plan {
    /// As a tape takes it.
    pub fn policy(&self) -> Rc<dyn Policy> {
        self.policy.clone()
    }

    /// As a file of rules that [`RuleSet::from_toml`](crate::RuleSet::from_toml) reads: the values that are alike in a rule
    /// each. It is for the same model and shapes only; on another, what a rule doesn't match is an error.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "# A plan for one model and one shape: values are named by their numbers.\n\
             # Peak of the step {} bytes, replayed FLOPs {:.2} %.\n",
            self.peak_bytes, self.overhead_percent
        );
        let mut groups: BTreeMap<(String, &str, Vec<usize>, String), Vec<u64>> = BTreeMap::new();
        for planned in &self.marks {
            let mark = match planned.mark {
                Mark::Int8(spec) => {
                    let rounding = match spec.rounding {
                        Rounding::Stochastic => "stochastic",
                        _ => "nearest",
                    };
                    format!("mark = \"int8\"\ngroup = {}\nrounding = \"{rounding}\"", spec.group)
                }
                mark => format!("mark = \"{}\"", mark.name()),
            };
            let key = (like(&planned.path), planned.op, planned.shape.clone(), mark);
            groups.entry(key).or_default().push(planned.id);
        }
        // In the order of the first value of each.
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, ids)| ids[0]);
        for ((path, op, shape, mark), ids) in groups {
            text += &format!("\n# {path}\n[[rule]]\n{mark}\nop = \"{op}\"\nshape = {shape:?}\nids = {ids:?}\n");
        }
        text
    }
}

impl Policy for Plan {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        self.policy.mark(site)
    }

    fn rules(&self) -> &[RuleInfo] {
        self.policy.rules()
    }

    fn is_segment(&self, scope: &str) -> bool {
        self.policy.is_segment(scope)
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        self.policy.lint(ledger)
    }
}

/// Marks by the number of the value, under what the trace was recorded with.
#[derive(Debug)]
pub(super) struct PlanMarks {
    given: Option<Rc<dyn Policy>>,
    /// By number, with the op that the value is of.
    marks: Vec<Option<(&'static str, Mark)>>,
    rules: Vec<RuleInfo>,
    /// Values of other ops than planned that were met: the tape records something else.
    others: Cell<u64>,
}

impl PlanMarks {
    pub fn new(trace: &Trace, graph: &Graph, choices: &[Choice]) -> PlanMarks {
        let len = graph.items.iter().map(|item| item.id as usize + 1).max().unwrap_or(0);
        let mut marks = vec![None; len];
        for (item, &choice) in graph.items.iter().zip(choices) {
            marks[item.id as usize] = Some((trace.values()[item.value].op, graph.mark(choice)));
        }
        let given = trace.policy().cloned();
        let mut rules = given.as_ref().map_or(Vec::new(), |policy| policy.rules().to_vec());
        rules.push(RuleInfo { name: "plan".into(), origin: Origin::Preset });
        PlanMarks { given, marks, rules, others: Cell::new(0) }
    }
}

impl Policy for PlanMarks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let given = self.given.as_ref().and_then(|policy| policy.mark(site));
        let planned = || {
            let (op, mark) = self.marks.get(site.id as usize).copied().flatten()?;
            if op != site.op {
                self.others.set(self.others.get() + 1);
                return None;
            }
            Some(Decision { mark, rule: self.rules.len() - 1 })
        };
        given.or_else(planned)
    }

    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }

    fn is_segment(&self, scope: &str) -> bool {
        self.given.as_ref().is_some_and(|policy| policy.is_segment(scope))
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        let mut lint = self.given.as_ref().map_or(Vec::new(), |policy| policy.lint(ledger));
        if self.others.get() > 0 {
            lint.push(Lint {
                code: "plan-of-another-model",
                subject: "plan".into(),
                message:
                    "values are of other ops than planned, so its marks and promises don't hold; plan for this model"
                        .into(),
            });
        }
        lint
    }
}
