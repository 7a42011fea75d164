//! What a policy is for a model: a preset or a file as it is, a budget by planning.

use crate::args::Common;
use crate::error::{Failure, Result};
use crate::policy::{Budget, NamedPolicy, Planned, PolicySpec};
use crate::report;
use crate::subject::{MetaModel, Subject};
use retape::Trace;
use retape::policy::{CostModel, LossyFormat, LossyUse, Planner, PlannerOptions, Profile, Sensitivity};
use retape::prelude::{Gradients, Mark, Policy};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

/// Times that a plan is made again where its measured error is above the bound.
const CALIBRATIONS: usize = 4;

/// Steps of which costs are measured.
const COST_STEPS: usize = 5;

/// Finds the policies of one model.
#[derive(Debug)]
pub struct Planning<'a> {
    dry: &'a MetaModel,
    common: &'a Common,
    /// Measure what ops cost, where no profile says it.
    pub measure_costs: bool,
    /// What was measured or loaded.
    pub profile: Option<Profile>,
    /// The marks of which the loaded file has errors: none where it has none.
    loaded: Vec<Mark>,
    /// The last planner, and what it is for.
    planner: Option<(String, Rc<Planner>)>,
    /// The model on the device, with its gradients under the user's marks alone, and which these are.
    measured: Option<(Subject, Gradients, String)>,
}

impl<'a> Planning<'a> {
    /// For the model of a dry run.
    pub fn new(dry: &'a MetaModel, common: &'a Common) -> Planning<'a> {
        Planning { dry, common, measure_costs: false, profile: None, loaded: Vec::new(), planner: None, measured: None }
    }

    /// What was asked for, for this model.
    pub fn policy(&mut self, spec: &PolicySpec) -> Result<NamedPolicy> {
        let Some(budget) = spec.budget()? else {
            let rules = Rc::new(spec.rules(self.dry.config().layers)?);
            return Ok(NamedPolicy { spec: spec.clone(), rules, plan: None });
        };
        let planned = self.plan(spec, budget)?;
        Ok(NamedPolicy { spec: spec.clone(), rules: planned.plan.policy(), plan: Some(planned) })
    }

    /// False for a budget that no plan fits.
    pub fn is_feasible(&mut self, spec: &PolicySpec) -> Result<bool> {
        let Some(budget) = spec.budget()? else { return Ok(true) };
        let bytes = budget.size.bytes(self.dry.predict(&NamedPolicy::none())?.peak_bytes);
        Ok(self.planner(spec, budget)?.smallest() <= bytes)
    }

    fn plan(&mut self, spec: &PolicySpec, budget: Budget) -> Result<Planned> {
        let bytes = budget.size.bytes(self.dry.predict(&NamedPolicy::none())?.peak_bytes);
        let bound = budget.max_gradient_error.filter(|&e| e > 0.0);
        let mut planner = self.planner(spec, budget)?;
        let mut sensitivity = self.profile.as_ref().map_or_else(Default::default, |p| p.sensitivity.clone());
        for _ in 0..=CALIBRATIONS {
            let mut plan = planner.plan(bytes)?;
            let planned = |plan| Planned { budget: bytes, plan: Rc::new(plan), smallest: planner.smallest() };
            let Some(bound) = bound.filter(|_| self.common.device.computes()) else { return Ok(planned(plan)) };
            let measured = self.gradient_error(spec, plan.policy())?;
            let estimate = plan.gradient_error_bound.unwrap_or(0.0);
            if measured <= bound {
                plan.gradient_error_bound = plan.gradient_error_bound.map(|estimate| estimate.max(measured));
                return Ok(planned(plan));
            }
            // A little more than what was measured, so that the next is below.
            let used = |text: &str| plan.marks.iter().any(|planned| planned.mark.text() == text);
            for (_, errors) in sensitivity.iter_mut().filter(|(mark, _)| used(mark)) {
                *errors = errors.calibrated(estimate, 1.1 * measured);
            }
            planner = Rc::new(self.new_planner(spec, budget, sensitivity.clone())?);
        }
        report::note("note: every lossy plan that was tried adds more than the bound; this one uses none of its own");
        let planner = self.planner(spec, Budget { max_gradient_error: None, ..budget })?;
        Ok(Planned { budget: bytes, plan: Rc::new(planner.plan(bytes)?), smallest: planner.smallest() })
    }

    /// The planner for these marks and this use of lossy formats.
    fn planner(&mut self, spec: &PolicySpec, budget: Budget) -> Result<Rc<Planner>> {
        self.load_or_measure(spec, budget)?;
        let key = format!("{} {:?} {}", marks_of(spec), budget.max_gradient_error, budget.group);
        if let Some((of, planner)) = &self.planner
            && *of == key
        {
            return Ok(planner.clone());
        }
        let sensitivity = self.profile.as_ref().map_or_else(Default::default, |p| p.sensitivity.clone());
        let planner = Rc::new(self.new_planner(spec, budget, sensitivity)?);
        self.planner = Some((key, planner.clone()));
        Ok(planner)
    }

    fn new_planner(
        &self,
        spec: &PolicySpec,
        budget: Budget,
        mut sensitivity: BTreeMap<String, Sensitivity>,
    ) -> Result<Planner> {
        let costs = self.profile.as_ref().map_or_else(Default::default, |p| p.costs.clone());
        let mut measured = |mark: Mark| Some(LossyFormat { mark, sensitivity: sensitivity.remove(&mark.text())? });
        let lossy = budget.max_gradient_error.filter(|&e| e > 0.0).map(|bound| LossyUse {
            formats: lossy_marks(budget).filter_map(&mut measured).collect(),
            max_gradient_error: Some(bound),
        });
        Ok(Planner::new(self.trace(spec)?, PlannerOptions { costs, lossy, ..PlannerOptions::default() })?)
    }

    fn trace(&self, spec: &PolicySpec) -> Result<Trace> {
        let rules = spec.user_rules().map(|rules| Rc::new(rules) as Rc<dyn Policy>);
        self.dry.trace(rules)
    }

    /// The profile file, or what of it this budget needs and isn't known yet, measured.
    fn load_or_measure(&mut self, spec: &PolicySpec, budget: Budget) -> Result<()> {
        let model = self.dry.label();
        if self.profile.is_none() {
            let profile = match &spec.profile {
                Some(file) => load(file)?,
                None if self.measure_costs => Profile { costs: self.measure_costs()?, ..Profile::default() },
                None => Profile::default(),
            };
            if let (Some(file), Some(of)) = (&spec.profile, &profile.model)
                && *of != model
            {
                report::note(&format!("note: {} was measured of {of}; this is {model}", file.display()));
            }
            self.loaded = profile.sensitivity.keys().filter_map(|text| text.parse().ok()).collect();
            self.profile = Some(Profile { model: Some(profile.model.clone().unwrap_or(model)), ..profile });
        }
        if budget.max_gradient_error.is_some_and(|e| e > 0.0) {
            for mark in lossy_marks(budget) {
                self.measure_error(spec, mark)?;
            }
        }
        Ok(())
    }

    /// Measures what a lossy mark adds to the gradients, where nobody has. A profile file that has errors says which
    /// formats are used.
    fn measure_error(&mut self, spec: &PolicySpec, mark: Mark) -> Result<()> {
        if self.profile.as_ref().is_some_and(|profile| profile.sensitivity.contains_key(&mark.text())) {
            return Ok(());
        }
        if let (Some(file), false) = (&spec.profile, self.loaded.is_empty()) {
            let Some(other) = self.loaded.iter().find(|other| other.name() == mark.name()) else { return Ok(()) };
            let remedy = match other {
                Mark::Int8(int8) => format!("int8 in groups of {0}; take --int8-group {0}", int8.group),
                other => other.text(),
            };
            return Err(Failure::usage(format!("--profile {}: its errors are of {remedy}", file.display())));
        }
        let trace = self.trace(spec)?;
        let sensitivity = self.subject(spec)?.0.sensitivity(&trace, mark)?;
        let profile = self.profile.get_or_insert_default();
        profile.sensitivity.insert(mark.text(), sensitivity);
        Ok(())
    }

    /// What ops cost on the device: of each the least of some steps.
    fn measure_costs(&mut self) -> Result<CostModel> {
        let (subject, ..) = self.subject(&PolicySpec::none())?;
        let none = NamedPolicy::none();
        let bar = report::progress(COST_STEPS as u64);
        let steps = (0..COST_STEPS).map(|_| {
            bar.set_message("costs of ops");
            let stats = subject.step(&none, true)?.0.stats;
            bar.inc(1);
            Ok(stats)
        });
        let steps = steps.collect::<Result<Vec<_>>>()?;
        bar.finish_and_clear();
        Ok(CostModel::measured(&steps))
    }

    /// What a plan adds to the gradients on the device, beyond the user's marks.
    fn gradient_error(&mut self, spec: &PolicySpec, rules: Rc<dyn Policy>) -> Result<f64> {
        let policy = NamedPolicy { rules, ..NamedPolicy::none() };
        let (subject, without, _) = self.subject(spec)?;
        Ok(subject.step(&policy, false)?.1.distance(without)?)
    }

    fn subject(&mut self, spec: &PolicySpec) -> Result<&(Subject, Gradients, String)> {
        if !self.common.device.computes() {
            return Err(Failure::usage(
                "planning with measured costs or gradient errors needs numbers, which the meta device has not; \
                 use --device cpu or cuda:0, or a --profile that was saved there",
            ));
        }
        let marks = marks_of(spec);
        if self.measured.as_ref().is_none_or(|(.., of)| *of != marks) {
            let config = self.dry.config();
            let peak = self.dry.predict(&NamedPolicy::none())?.peak_bytes;
            self.common.check_fits(peak.saturating_add(3 * config.parameter_bytes() as u64))?;
            self.measured = None;
            let device = self.common.open_device()?;
            let subject = Subject::new(&device, config, self.common.seed.unwrap_or(0))?;
            let rules = Rc::new(spec.user_rules().unwrap_or_default());
            let without = subject.step(&NamedPolicy { rules, ..NamedPolicy::none() }, false)?.1;
            self.measured = Some((subject, without, marks));
        }
        Ok(self.measured.as_ref().expect("it was made above"))
    }
}

/// The user's marks, as a text.
fn marks_of(spec: &PolicySpec) -> String {
    PolicySpec { name: String::new(), ..spec.clone() }.label()
}

/// The lossy marks that a budget's plan may use, with its arguments.
fn lossy_marks(budget: Budget) -> impl Iterator<Item = Mark> {
    let group = budget.group.to_string();
    Mark::all().filter(|mark| mark.is_lossy()).map(move |mark| mark.with("group", &group).unwrap_or(mark))
}

fn load(file: &Path) -> Result<Profile> {
    let failed = |reason: String| Failure::usage(format!("--profile {}: {reason}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|e| failed(format!("can't read it: {e}")))?;
    Profile::from_toml(&text).map_err(|e| failed(e.to_string()))
}
