//! The planner: the cheapest marks whose peak fits a byte budget.
//!
//! A [`Planner`] takes a [`Trace`], a forward pass that was recorded on the meta device. It proposes plans by minimum cuts
//! and local changes, and runs each on the engine itself, so that what it promises is what will be measured. It explores
//! without a budget in mind; [`Planner::plan`] then picks from what was found.
//!
//! ```
//! use retape_core::{DType, Tensor, Trace, meta};
//! use retape_policy::{Planner, PlannerOptions};
//!
//! let device = meta();
//! let x = Tensor::full(&device, &[512, 512], DType::F32, 0.0)?;
//! let trace = Trace::record(&device, None, |tape| {
//!     let mut h = tape.leaf(&x)?;
//!     for _ in 0..4 {
//!         h = h.gelu()?.softmax()?;
//!     }
//!     h.square()?.sum()
//! })?;
//! let planner = Planner::new(trace, PlannerOptions::default())?;
//! let plan = planner.plan(planner.largest() * 8 / 10)?;
//! assert!(plan.peak_bytes <= planner.largest() * 8 / 10);
//! # Ok::<(), retape_policy::Error>(())
//! ```

mod cost;
mod cut;
mod graph;
mod search;

use crate::{Error, Result};
pub use cost::CostModel;
use graph::{Choice, Graph, Int8Rules};
use retape_core::{Decision, Int8Spec, Mark, Origin, Policy, RuleInfo, Site, Trace, TraceValue};
use search::{Point, Search, run};
use std::collections::BTreeMap;
use std::rc::Rc;

/// What a planner may use.
#[derive(Debug, Clone, Default)]
pub struct PlannerOptions {
    /// What ops cost.
    pub costs: CostModel,
    /// Whether values may be stored as int8; only exact marks without.
    pub int8: Option<Int8Use>,
}

/// How int8 may be used.
#[derive(Debug, Clone, Default)]
pub struct Int8Use {
    /// Groups and rounding.
    pub spec: Int8Spec,
    /// The relative error of the gradients that it may add at most; any without.
    pub max_gradient_error: Option<f64>,
    /// The error that int8 of one value adds, by path, measured. A value that isn't listed counts as the worst that is, and
    /// where none is listed as unknown: then a bound forbids it.
    pub sensitivity: BTreeMap<String, f64>,
}

/// Finds plans for one forward pass.
#[derive(Debug)]
pub struct Planner {
    trace: Trace,
    graph: Graph,
    costs: CostModel,
    front: Vec<Point>,
}

/// Marks for all values of one forward pass, with what they will take. It is a [`Policy`] for a tape that records the same.
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
    policy: Rc<PlanMarks>,
}

/// A value's part in a [`Plan`].
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlannedMark {
    /// Scopes and name.
    pub path: String,
    /// The op that made it.
    pub op: &'static str,
    /// Its bytes in full precision.
    pub bytes: u64,
    /// Its mark.
    #[serde(serialize_with = "name_of")]
    pub mark: Mark,
    /// The value's number on its tape.
    pub id: u64,
}

fn name_of<S: serde::Serializer>(mark: &Mark, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(mark.name())
}

impl Planner {
    /// Explores the plans for a forward pass.
    ///
    /// # Errors
    /// [`Error::Engine`] where the engine can't run it.
    pub fn new(trace: Trace, options: PlannerOptions) -> Result<Planner> {
        let PlannerOptions { costs, int8 } = options;
        let int8 = int8.unwrap_or_else(|| Int8Use { max_gradient_error: Some(0.0), ..Int8Use::default() });
        // No number, or one below nothing, must not let more pass.
        let max_error = int8.max_gradient_error.map_or(f64::INFINITY, |e| e.max(0.0));
        let measured = |e: &f64| if e.is_nan() { f64::INFINITY } else { e.max(0.0) };
        let worst = int8.sensitivity.values().map(measured).max_by(f64::total_cmp);
        let error = |value: &TraceValue| {
            let unknown = if max_error.is_finite() { f64::INFINITY } else { 0.0 };
            int8.sensitivity.get(&value.path).map(measured).or(worst).unwrap_or(unknown)
        };
        let rules = (max_error > 0.0).then_some(Int8Rules { spec: int8.spec, error: &error });
        let graph = Graph::new(&trace, &costs, rules);
        let front = Search::new(&trace, &graph, costs.of_traffic(1), max_error).explore()?;
        Ok(Planner { trace, graph, costs, front })
    }

    /// The forward pass.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The smallest budget that has a plan.
    pub fn smallest(&self) -> u64 {
        self.front.first().map_or(0, |p| p.peak)
    }

    /// The peak without any mark; a larger budget is as good.
    pub fn largest(&self) -> u64 {
        self.front.last().map_or(0, |p| p.peak)
    }

    /// All plans of which no other known one is better in both peak and seconds, least peak first.
    pub fn frontier(&self) -> impl Iterator<Item = Plan> {
        self.front.iter().map(|point| self.plan_of(point))
    }

    /// The cheapest plan whose peak is at most `budget` bytes. A larger budget never gives a slower one.
    ///
    /// # Errors
    /// [`Error::Infeasible`], which names the smallest budget that has a plan.
    pub fn plan(&self, budget: u64) -> Result<Plan> {
        let fitting = self.front.partition_point(|p| p.peak <= budget);
        let Some(best) = self.front[..fitting].last() else {
            return Err(Error::Infeasible { budget, smallest: self.smallest() });
        };
        match self.front.get(fitting) {
            Some(next) => Ok(self.plan_of(&self.on_the_way(best, next, budget)?)),
            None => Ok(self.plan_of(best)),
        }
    }

    /// The furthest plan on the way from one that fits to the next of the front, which doesn't, by bisection. Its seconds
    /// lie between theirs, so that it is never faster than what a larger budget gets.
    fn on_the_way(&self, fits: &Point, next: &Point, budget: u64) -> Result<Point> {
        let steps = search::path(&self.graph, &fits.choices, &next.choices);
        let (mut best, mut low, mut high) = (fits.clone(), 0, steps.len());
        while high - low > 1 {
            let middle = (low + high) / 2;
            let mut choices = fits.choices.to_vec();
            for &item in &steps[..middle] {
                choices[item] = next.choices[item];
            }
            let error = self.graph.error(&choices).max(fits.error.min(next.error));
            let point = match run(&self.trace, &self.graph, self.costs.of_traffic(1), choices.into(), error) {
                Err(error) if search::refuses(&error) => {
                    high = middle;
                    continue;
                }
                point => point?,
            };
            // A part of both may add more error than either.
            let fine = point.error <= fits.error.max(next.error);
            if fine && point.peak <= budget && point.seconds <= best.seconds && point.seconds >= next.seconds {
                (best, low) = (point, middle);
            } else {
                high = middle;
            }
        }
        Ok(best)
    }

    fn plan_of(&self, point: &Point) -> Plan {
        let step: f64 = 3.0 * self.graph.seconds.iter().sum::<f64>();
        let int8 = point.choices.contains(&Choice::Int8);
        let marks = self.graph.items.iter().zip(&*point.choices).map(|(item, &choice)| {
            let value = &self.trace.values()[item.value];
            let mark = self.graph.mark(choice);
            PlannedMark { path: value.path.clone(), op: value.op, bytes: value.bytes, mark, id: value.id }
        });
        Plan {
            peak_bytes: point.peak,
            saved_bytes: point.run.saved_bytes,
            overhead_percent: 100.0 * point.run.replayed_flops as f64 / (3 * point.run.forward_flops).max(1) as f64,
            overhead_seconds_percent: 100.0 * point.seconds / step.max(f64::MIN_POSITIVE),
            gradient_error_bound: if int8 && point.error == 0.0 { None } else { Some(point.error) },
            marks: marks.collect(),
            policy: Rc::new(PlanMarks::new(&self.graph, &point.choices)),
        }
    }
}

impl Plan {
    /// As a tape takes it.
    pub fn policy(&self) -> Rc<dyn Policy> {
        self.policy.clone()
    }
}

impl Policy for Plan {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        self.policy.mark(site)
    }

    fn rules(&self) -> &[RuleInfo] {
        self.policy.rules()
    }
}

/// Marks by the number of the value.
#[derive(Debug)]
struct PlanMarks {
    marks: Vec<Option<Mark>>,
    rules: [RuleInfo; 1],
}

impl PlanMarks {
    fn new(graph: &Graph, choices: &[Choice]) -> PlanMarks {
        let len = graph.items.iter().map(|item| item.id as usize + 1).max().unwrap_or(0);
        let mut marks = vec![None; len];
        for (item, &choice) in graph.items.iter().zip(choices) {
            marks[item.id as usize] = Some(graph.mark(choice));
        }
        PlanMarks { marks, rules: [RuleInfo { name: "plan".into(), origin: Origin::Preset }] }
    }
}

impl Policy for PlanMarks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let mark = self.marks.get(site.id as usize).copied().flatten()?;
        Some(Decision { mark, rule: 0 })
    }

    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }
}
