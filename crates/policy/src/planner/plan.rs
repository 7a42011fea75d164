//! A plan, as a policy and as a file of rules.

use super::graph::{Draft, Graph, like};
use crate::names::Names;
use retape_core::glob::Glob;
use retape_core::{Decision, Ledger, Lint, Mark, Origin, Policy, PresetInfo, RuleInfo, ScopeSite, Site, Trace};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Marks for all values of one forward pass, with what they will take. It is a [`Policy`] for a tape that records the
/// same ops: the same code on the same shapes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The step's highest bytes: what the meter will show.
    pub peak_bytes: u64,
    /// Bytes stored at the end of forward.
    pub saved_bytes: u64,
    /// FLOPs of replays over those of a step without any (backward counted as twice forward), in percent.
    pub overhead_percent: f64,
    /// Predicted seconds of replays, packing and unpacking, over those of a step without any, in percent.
    pub overhead_seconds_percent: f64,
    /// Estimate of the relative error of the gradients, from above: the sum, over the kinds of values of which any is
    /// stored by a lossy format, of what all of a kind were measured to add as leaves. 0 without; `None` where one is
    /// used (the user's own included) and nothing was measured. A value that much is replayed from may add more:
    /// measure the plan.
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

    /// As a file of rules that [`RuleSet::from_toml`](crate::RuleSet::from_toml) reads: the values that are alike in
    /// a rule each, those that the user marked included. It is for the same model and shapes only; on another, what a
    /// rule doesn't match is an error.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "# A plan for one model and one shape: values are named by their numbers.\n\
             # Peak of the step {} bytes, replayed FLOPs {:.2} %.\n",
            self.peak_bytes, self.overhead_percent
        );
        let mut groups: BTreeMap<(String, &str, Vec<usize>, String), Vec<u64>> = BTreeMap::new();
        for planned in self.marks.iter().chain(&self.policy.given_marks) {
            let arguments = planned.mark.format().map_or(Vec::new(), |format| format.arguments());
            let mark = arguments.iter().fold(format!("mark = \"{}\"", planned.mark), |text, (name, value)| {
                let is_number = value.parse::<f64>().is_ok();
                text + &if is_number { format!("\n{name} = {value}") } else { format!("\n{name} = \"{value}\"") }
            });
            let key = (like(&planned.path), planned.op, planned.shape.clone(), mark);
            groups.entry(key).or_default().push(planned.id);
        }
        if !self.policy.segments.is_empty() {
            text += &format!("segments = {SEGMENTS:?}\n");
        }
        // In the order of the first value of each.
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, ids)| ids[0]);
        for ((path, op, shape, mark), ids) in groups {
            let path = path.replace(char::is_control, " ");
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

    fn presets(&self) -> &[PresetInfo] {
        self.policy.presets()
    }

    fn is_segment(&self, scope: &ScopeSite<'_>) -> bool {
        self.policy.is_segment(scope)
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        self.policy.lint(ledger)
    }
}

/// The scopes that a plan makes segments of: blocks by their role, and scopes that go by a number.
const SEGMENTS: [&str; 2] = ["**.blocks.*", "**.[0-9]*"];

/// Marks by the number of the value, under what the trace was recorded with.
#[derive(Debug)]
pub(super) struct PlanMarks {
    given: Option<Rc<dyn Policy>>,
    given_marks: Vec<PlannedMark>,
    /// By number, with the op that the value is of and its shape.
    marks: Vec<Option<(&'static str, Vec<usize>, Mark)>>,
    segments: Vec<Glob>,
    rules: Vec<RuleInfo>,
}

impl PlanMarks {
    pub fn new(trace: &Trace, graph: &Graph, draft: &Draft) -> PlanMarks {
        let len = graph.items.iter().map(|item| item.id as usize + 1).max().unwrap_or(0);
        let mut marks = vec![None; len];
        for (item, &choice) in graph.items.iter().zip(&*draft.choices) {
            let value = &trace.values()[item.value];
            marks[item.id as usize] = Some((value.op, value.shape.clone(), graph.mark(choice)));
        }
        let given = trace.policy().cloned();
        let by_policy = trace.values().iter().filter(|v| given.is_some() && !v.exact);
        let given_marks = by_policy.filter_map(|v| {
            let (path, shape) = (v.path.clone(), v.shape.clone());
            Some(PlannedMark { path, op: v.op, shape, bytes: v.bytes, mark: v.given?, id: v.id })
        });
        let given_marks = given_marks.collect();
        let mut rules = given.as_ref().map_or(Vec::new(), |policy| policy.rules().to_vec());
        rules.push(RuleInfo { name: "plan".into(), origin: Origin::Preset });
        let globs = SEGMENTS.iter().filter(|_| draft.segments);
        let segments = globs.map(|glob| Glob::new(glob).expect("these patterns are valid")).collect();
        PlanMarks { given, given_marks, marks, segments, rules }
    }

    fn planned(&self, id: u64) -> Option<&(&'static str, Vec<usize>, Mark)> {
        self.marks.get(id as usize)?.as_ref()
    }
}

impl Policy for PlanMarks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let given = self.given.as_ref().and_then(|policy| policy.mark(site));
        let planned = || {
            let (op, _, mark) = self.planned(site.id)?;
            (*op == site.op).then_some(Decision { mark: *mark, rule: self.rules.len() - 1 })
        };
        given.or_else(planned)
    }

    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }

    fn presets(&self) -> &[PresetInfo] {
        self.given.as_ref().map_or(&[], |policy| policy.presets())
    }

    fn is_segment(&self, scope: &ScopeSite<'_>) -> bool {
        let paths = Names::new(|| scope.names());
        self.segments.iter().any(|glob| paths.any(glob))
            || self.given.as_ref().is_some_and(|policy| policy.is_segment(scope))
    }

    /// Values of other ops or shapes than planned: the tape records something else.
    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        let mut lint = self.given.as_ref().map_or(Vec::new(), |policy| policy.lint(ledger));
        let other = ledger.values.iter().find(|value| {
            self.planned(value.id).is_some_and(|(op, shape, _)| *op != value.op || *shape != value.shape)
        });
        if let Some(value) = other {
            lint.push(Lint {
                code: "plan-of-another-model",
                subject: value.path.clone(),
                message: "its op or shape isn't the planned one, so the plan's promises don't hold; plan for this \
                          model and shape"
                    .into(),
            });
        }
        lint
    }
}
