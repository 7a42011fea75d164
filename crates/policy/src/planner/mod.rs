//! The planner: the cheapest marks whose peak fits a byte budget.
//!
//! A [`Planner`] takes a [`Trace`], a forward pass that was recorded on the meta device. It proposes plans by minimum
//! cuts and local changes, and runs each on the engine itself, so that what it promises is what will be measured. It
//! explores without a budget in mind; [`Planner::plan`] then picks from what was found.
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
//! let budget = planner.smallest().midpoint(planner.largest());
//! let plan = planner.plan(budget)?;
//! assert!(plan.peak_bytes <= budget);
//! # Ok::<(), retape_policy::Error>(())
//! ```

mod cache;
mod cost;
mod cut;
mod graph;
mod plan;
mod profile;
mod search;
mod sensitivity;

use crate::{Error, Result};
pub use cache::PlanCache;
pub use cost::CostModel;
use graph::{Choice, Draft, Graph};
use plan::PlanMarks;
pub use plan::{Plan, PlannedMark};
pub use profile::Profile;
use retape_core::{Mark, Trace, TraceValue};
use search::{Point, Search, run};
pub use sensitivity::Sensitivity;
use std::rc::Rc;

/// What a planner may use.
#[derive(Debug, Clone, Default)]
pub struct PlannerOptions {
    /// What ops cost.
    pub costs: CostModel,
    /// How lossy formats may be used; only exact marks without.
    pub lossy: Option<LossyUse>,
    /// Marks alone: no plan makes segments of repeated scopes, which the smallest peaks of deep models need. Those are
    /// the scopes of role block, and those whose last name is a number.
    pub without_segments: bool,
}

/// How lossy formats may be used.
#[derive(Debug, Clone, Default)]
pub struct LossyUse {
    /// The formats.
    pub formats: Vec<LossyFormat>,
    /// The relative error of the gradients that they may add at most; any without.
    pub max_gradient_error: Option<f64>,
}

/// A lossy format that a plan may use.
#[derive(Debug, Clone)]
pub struct LossyFormat {
    /// The mark, with its arguments.
    pub mark: Mark,
    /// What storing each value so adds, measured. Where nothing was, a bound forbids the format.
    pub sensitivity: Sensitivity,
}

/// These formats, unmeasured and without a bound.
impl FromIterator<Mark> for LossyUse {
    fn from_iter<I: IntoIterator<Item = Mark>>(marks: I) -> LossyUse {
        let format = |mark| LossyFormat { mark, sensitivity: Sensitivity::default() };
        LossyUse { formats: marks.into_iter().map(format).collect(), max_gradient_error: None }
    }
}

impl LossyUse {
    /// No number, or one below nothing, must not let more pass.
    fn max_error(&self) -> f64 {
        self.max_gradient_error.map_or(f64::INFINITY, |e| e.max(0.0))
    }

    /// What storing a value so adds to the gradients, or what stands for it.
    fn error(&self, format: &LossyFormat, value: &TraceValue) -> f64 {
        let unknown = if self.max_error().is_finite() { f64::INFINITY } else { 0.0 };
        format.sensitivity.of(value).unwrap_or(unknown)
    }

    /// What a mark that the user gave adds, where that is known: by its name, as the arguments may differ.
    fn error_of(&self, mark: Mark, value: &TraceValue) -> Option<f64> {
        let format = self.formats.iter().find(|format| format.mark.name() == mark.name())?;
        Some(self.error(format, value)).filter(|e| *e > 0.0)
    }
}

/// The cheapest exact plan of a forward pass whose peak is at most `bytes` bytes. A [`Planner`] gives many budgets'
/// plans, and lossy formats; a [`PlanCache`] the plans of many shapes.
///
/// # Errors
/// [`Error::Infeasible`], which names the smallest budget that has a plan.
pub fn budget(bytes: u64, trace: Trace) -> Result<Plan> {
    Planner::new(trace, PlannerOptions::default())?.plan(bytes)
}

/// Finds plans for one forward pass.
#[derive(Debug)]
pub struct Planner {
    trace: Trace,
    graph: Graph,
    costs: CostModel,
    front: Vec<Point>,
}

impl Planner {
    /// Explores the plans for a forward pass.
    ///
    /// # Errors
    /// [`Error::Engine`] where the engine can't run it.
    pub fn new(trace: Trace, options: PlannerOptions) -> Result<Planner> {
        let PlannerOptions { costs, lossy, without_segments } = options;
        costs.check().map_err(Error::InvalidProfile)?;
        let lossy = lossy.filter(|lossy| lossy.max_error() > 0.0).unwrap_or_default();
        let max_error = lossy.max_error();
        let graph = Graph::new(&trace, &costs, &lossy);
        let front = Search::new(&trace, &graph, costs.of_traffic(1), max_error, !without_segments).explore()?;
        Ok(Planner { trace, graph, costs, front })
    }

    /// The forward pass.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The smallest budget that has a plan: the least peak of all that were tried, which isn't proven to be the least
    /// there is.
    pub fn smallest(&self) -> u64 {
        self.front.first().map_or(0, |p| p.peak)
    }

    /// The peak of the fastest plan; a larger budget is as good.
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

    /// The furthest plan on the way from one that fits to the next of the front, which doesn't, by bisection. Its
    /// seconds lie between theirs, so that it is never faster than what a larger budget gets.
    fn on_the_way(&self, fits: &Point, next: &Point, budget: u64) -> Result<Point> {
        let steps = search::path(&self.graph, &fits.draft.choices, &next.draft.choices);
        let (mut best, mut low, mut high) = (fits.clone(), 0, steps.len());
        while high - low > 1 {
            let middle = (low + high) / 2;
            let mut choices = fits.draft.choices.to_vec();
            for &item in &steps[..middle] {
                choices[item] = next.draft.choices[item];
            }
            let error = self.graph.error(&choices);
            let draft = Draft { choices: choices.into(), segments: fits.draft.segments };
            let point = match run(&self.trace, &self.graph, self.costs.of_traffic(1), draft, error) {
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
        let is_lossy = point.draft.choices.iter().any(|choice| matches!(choice, Choice::Packed(_)));
        let error = point.error + self.graph.given_error;
        let known = error.is_finite() && (!is_lossy || point.error > 0.0);
        let marks = self.graph.items.iter().zip(&*point.draft.choices).map(|(item, &choice)| {
            let value = &self.trace.values()[item.value];
            let (mark, shape) = (self.graph.mark(choice), value.shape.clone());
            PlannedMark { path: value.path.clone(), op: value.op, shape, bytes: value.bytes, mark, id: value.id }
        });
        Plan {
            peak_bytes: point.peak,
            saved_bytes: point.run.saved_bytes,
            overhead_percent: point.run.overhead_percent(),
            overhead_seconds_percent: 100.0 * point.seconds / step.max(f64::MIN_POSITIVE),
            gradient_error_bound: known.then_some(error),
            marks: marks.collect(),
            policy: Rc::new(PlanMarks::new(&self.trace, &self.graph, &point.draft)),
        }
    }
}
