//! The plans that a planner knows, each run by the engine, and how it finds more.
//!
//! Nothing here depends on a budget, so that what one budget gets can't depend on what was asked before, and a larger
//! one never gets a slower plan. First come the solutions of minimum cuts, for what counts when forward ends and then
//! for what counts at the moments at which those plans peak. Then gaps between neighbours on the front of the best
//! are filled by plans that are the one for some blocks and the other for the rest, and plans on the front are
//! changed value by value. All of it stops when the engine has run a fixed number of nodes.

use super::cut::Cut;
use super::graph::{Choice, Draft, Graph};
use super::plan::PlanMarks;
use crate::{Error, Result};
use retape_core::{DryRun, Moment, Trace};
use std::collections::HashSet;
use std::rc::Rc;

/// Nodes that the engine may run, forward and backward each once per plan that is tried. A bound in seconds would give
/// other plans on another machine.
const WORK: u64 = 400_000;

/// Plans that are tried however large the model is.
const LEAST_PLANS: u64 = 40;

/// A plan and what it takes.
#[derive(Debug, Clone)]
pub(super) struct Point {
    pub draft: Draft,
    pub peak: u64,
    /// Of replays, packing and unpacking.
    pub seconds: f64,
    /// Bound of the gradient error.
    pub error: f64,
    pub run: DryRun,
}

#[derive(Debug)]
pub(super) struct Search<'a> {
    trace: &'a Trace,
    graph: &'a Graph,
    seconds_per_byte: f64,
    max_error: f64,
    work: u64,
    segments: bool,
    known: HashSet<Draft>,
    /// Best plans, peak rising and seconds falling.
    front: Vec<Point>,
    /// Why the first plan that the engine refused can't be.
    refused: Option<Error>,
}

impl<'a> Search<'a> {
    /// Plans that add at most `max_error` to the gradients, with segments if they may have them.
    pub fn new(
        trace: &'a Trace,
        graph: &'a Graph,
        seconds_per_byte: f64,
        max_error: f64,
        segments: bool,
    ) -> Search<'a> {
        let (known, front) = (HashSet::new(), Vec::new());
        let work = WORK.max(2 * LEAST_PLANS * trace.nodes().len() as u64);
        Search { trace, graph, seconds_per_byte, max_error, work, segments, known, front, refused: None }
    }

    /// The front of all that was found.
    pub fn explore(mut self) -> Result<Vec<Point>> {
        let keep = vec![Choice::Keep; self.graph.items.len()];
        self.try_plan(keep, false)?;
        self.cuts(None)?;
        let mut moments: Vec<Moment> = self.front.iter().map(|p| p.run.peak_moment).collect();
        moments.sort_unstable();
        moments.dedup();
        // The moments of the front's ends and middle: peaks are at few.
        let step = moments.len().div_ceil(4).max(1);
        for moment in moments.into_iter().step_by(step) {
            self.cuts(Some(moment))?;
        }
        self.thin()?;
        loop {
            let before = self.known.len();
            self.fill_gaps()?;
            self.change_values()?;
            if self.known.len() == before || self.work == 0 {
                return match self.refused {
                    Some(error) if self.front.is_empty() => Err(error),
                    _ => Ok(self.front),
                };
            }
        }
    }

    /// Runs a plan, unless it is known, not allowed, or the work is done.
    fn try_plan(&mut self, choices: Vec<Choice>, segments: bool) -> Result<()> {
        let draft = Draft { choices: choices.into(), segments };
        if self.known.contains(&draft) {
            return Ok(());
        }
        let error = self.graph.error(&draft.choices);
        if error > self.max_error {
            return Ok(());
        }
        // The first is what all else is compared with.
        let visits = 2 * self.trace.nodes().len() as u64;
        if self.work < visits && !self.front.is_empty() {
            self.work = 0;
            return Ok(());
        }
        self.work -= visits.min(self.work);
        self.known.insert(draft.clone());
        match run(self.trace, self.graph, self.seconds_per_byte, draft, error) {
            Ok(point) => insert(&mut self.front, point),
            Err(error) if refuses(&error) => drop(self.refused.get_or_insert(error)),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What no cut proposes: of the values that the plan of the least peak keeps in every block, every k-th alone,
    /// and all else of the blocks recomputed (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"),
    /// with and without segments; and every k-th of all values.
    fn thin(&mut self) -> Result<()> {
        let Some(least) = self.front.first().map(|p| p.draft.choices.clone()) else { return Ok(()) };
        let items = self.graph.items.len();
        let every =
            |most: usize| (0..).map(|i| 2.0 * 1.4f64.powi(i)).map(|k| k as usize).take_while(move |&k| 2 * k <= most);
        for class in
            self.graph.classes.iter().filter(|class| class.items.len() >= 4 && least[class.items[0]] == Choice::Keep)
        {
            let repeated = |i: usize| self.graph.classes[self.graph.items[i].class].items.len() >= 4;
            for k in every(class.items.len()) {
                let mut thinned: Vec<Choice> =
                    (0..items).map(|i| if repeated(i) { Choice::Recompute } else { least[i] }).collect();
                class.items.iter().skip(k - 1).step_by(k).for_each(|&i| thinned[i] = Choice::Keep);
                if self.segments {
                    self.try_plan(thinned.clone(), true)?;
                }
                self.try_plan(thinned, false)?;
            }
        }
        for k in every(items) {
            let thinned = (0..items).map(|i| if i % k == 0 { Choice::Keep } else { Choice::Recompute });
            self.try_plan(thinned.collect(), false)?;
        }
        Ok(())
    }

    /// The solutions of cuts for what is live at a moment.
    fn cuts(&mut self, moment: Option<Moment>) -> Result<()> {
        let cut = Cut::new(self.graph, moment, self.seconds_per_byte);
        let packed = self.graph.items.iter().flat_map(|item| item.packed.iter().flatten());
        let errors: Vec<f64> = packed.map(|packed| packed.error).filter(|e| *e > 0.0 && e.is_finite()).collect();
        // From no price on error to one that forbids lossy formats.
        let mut prices = vec![0.0];
        if !errors.is_empty() {
            let all: f64 = self.graph.seconds.iter().sum::<f64>();
            let scale = all / errors.iter().sum::<f64>();
            prices.extend((-6..=6).map(|k| scale * 4f64.powi(k)));
        }
        let mut found: Vec<(f64, f64, Vec<Choice>)> = Vec::new();
        for price in prices {
            for solution in cut.hull(price) {
                if self.graph.error(&solution.choices) <= self.max_error {
                    found.push((solution.bytes, solution.seconds, solution.choices));
                }
            }
        }
        // What another beats in both isn't worth a run.
        found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut least = f64::INFINITY;
        for (_, seconds, choices) in found {
            if seconds < least {
                least = seconds;
                self.try_plan(choices, false)?;
            }
        }
        Ok(())
    }

    /// How wide a gap between two neighbours of the front is: the area between them, of the whole front's.
    fn gap(&self) -> impl Fn(&[Point]) -> f64 + use<'a> {
        let (first, last) = (self.front.first(), self.front.last());
        let ends =
            first.zip(last).map_or((1, 0.0), |(first, last)| (last.peak - first.peak, first.seconds - last.seconds));
        let (width, height) = (ends.0.max(1) as f64, ends.1.max(f64::MIN_POSITIVE));
        move |pair| (pair[1].peak - pair[0].peak) as f64 / width * (pair[0].seconds - pair[1].seconds) / height
    }

    /// The plan of the front beside the widest gap that isn't `done`; first of all the one of the least peak.
    fn beside_widest_gap(&self, done: &HashSet<Draft>) -> Option<Draft> {
        let gap = self.gap();
        let width = |i: usize| match i {
            0 => f64::INFINITY,
            _ => gap(&self.front[i - 1..=i]).max(self.front.get(i..=i + 1).map_or(0.0, &gap)),
        };
        let open = (0..self.front.len()).filter(|&i| !done.contains(&self.front[i].draft));
        open.max_by(|&a, &b| width(a).total_cmp(&width(b))).map(|i| self.front[i].draft.clone())
    }

    /// Halves the widest gaps of the front, until none can be.
    fn fill_gaps(&mut self) -> Result<()> {
        let mut tried: HashSet<[Draft; 2]> = HashSet::new();
        loop {
            let gap = self.gap();
            let open = self.front.windows(2).filter(|p| !tried.contains(&[p[0].draft.clone(), p[1].draft.clone()]));
            // Finer than a thousandth of a thousandth isn't seen.
            let widest = open.filter(|p| gap(p) > 1e-6).max_by(|a, b| gap(a).total_cmp(&gap(b)));
            let Some([less, more]) = widest else { return Ok(()) };
            let (less, more) = (less.draft.clone(), more.draft.clone());
            tried.insert([less.clone(), more.clone()]);
            let steps = path(self.graph, &less.choices, &more.choices);
            if steps.len() < 2 {
                continue;
            }
            for from in [0, steps.len() / 2] {
                let mut mixed = less.choices.to_vec();
                for &item in &steps[from..(from + steps.len() / 2).min(steps.len())] {
                    mixed[item] = more.choices[item];
                }
                self.try_plan(mixed, less.segments)?;
            }
            if self.work == 0 {
                return Ok(());
            }
        }
    }

    /// Changes plans of the front by one value, then by two.
    fn change_values(&mut self) -> Result<()> {
        for pairs in [false, true] {
            let mut done: HashSet<Draft> = HashSet::new();
            while let Some(next) = self.beside_widest_gap(&done) {
                done.insert(next.clone());
                let changes = self.changes(&next.choices);
                for (i, &(item, choice)) in changes.iter().enumerate() {
                    let mut changed = next.choices.to_vec();
                    changed[item] = choice;
                    if !pairs {
                        self.try_plan(changed, next.segments)?;
                        continue;
                    }
                    for &(other, choice) in changes[..i].iter().filter(|(other, _)| *other != item) {
                        let mut changed = changed.clone();
                        changed[other] = choice;
                        self.try_plan(changed, next.segments)?;
                    }
                }
                if self.work == 0 {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The changes of one value that are tried: of those of a class with the same choice, the first and the last.
    fn changes(&self, choices: &[Choice]) -> Vec<(usize, Choice)> {
        let mut changes = Vec::new();
        for class in self.graph.classes.iter().rev() {
            for of in self.graph.choices() {
                let alike = || class.items.iter().copied().filter(|&i| choices[i] == of);
                let (first, last) = (alike().next(), alike().next_back());
                let ends = last.into_iter().chain(first.filter(|_| first != last));
                changes.extend(ends.flat_map(|i| self.graph.others(i, of).map(move |c| (i, c))));
            }
        }
        changes
    }
}

/// Whether an error of a run is the plan's fault: under its marks, one that the user sets by value comes too late, or
/// the device's hard limit is exceeded.
pub(super) fn refuses(error: &Error) -> bool {
    matches!(error, Error::Engine(retape_core::Error::MarkTooLate { .. } | retape_core::Error::OutOfMemory { .. }))
}

/// Runs a plan.
pub(super) fn run(trace: &Trace, graph: &Graph, seconds_per_byte: f64, draft: Draft, error: f64) -> Result<Point> {
    let run = trace.run(Some(Rc::new(PlanMarks::new(trace, graph, &draft))))?;
    let replays: f64 = run.replays.iter().map(|&(node, count)| graph.seconds[node] * count as f64).sum();
    let seconds = replays + seconds_per_byte * run.quantize_traffic as f64;
    Ok(Point { draft, peak: run.peak_bytes, seconds, error, run })
}

/// Puts a point on the front, if nothing there is as good in both.
fn insert(front: &mut Vec<Point>, point: Point) {
    let at = front.partition_point(|p| p.peak < point.peak);
    let beaten = |p: &Point| p.peak <= point.peak && p.seconds <= point.seconds;
    if at > 0 && beaten(&front[at - 1]) || front.get(at).is_some_and(beaten) {
        return;
    }
    let worse = front[at..].iter().take_while(|p| p.seconds >= point.seconds).count();
    front.splice(at..at + worse, [point]);
}

/// The items in which two plans differ, in the order in which one becomes the other: blocks nearest to the loss
/// first, so that a part of the way is the one plan for the last blocks and the other for those before.
pub(super) fn path(graph: &Graph, from: &[Choice], to: &[Choice]) -> Vec<usize> {
    let mut differ: Vec<usize> = (0..from.len()).filter(|&i| from[i] != to[i]).collect();
    differ.sort_by_key(|&i| std::cmp::Reverse(graph.items[i].value));
    differ
}
