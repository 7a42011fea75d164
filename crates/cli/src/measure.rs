//! The one measuring core: what a forward and backward pass of a model takes under each of some policies.
//!
//! All cases run once per round, the order reversed every other round, after one warm-up round; figures are medians
//! over the rounds. Before that, dry runs predict bytes and FLOPs.

use crate::args::{Common, DeviceKind};
use crate::error::{Failure, Result};
use crate::planning::Planning;
use crate::policy::{NamedPolicy, PolicySpec};
use crate::report;
use crate::subject::{MetaModel, Prediction, Sample, Subject};
use crate::trainer::{Batcher, Settings, Trainer};
use retape::nn::{AttentionForm, Gpt, GptConfig};
use retape::prelude::Gradients;

/// What to measure of every case.
#[derive(Debug, Clone, Copy)]
pub struct Measuring {
    /// Rounds after the warm-up; 0 takes no time.
    pub rounds: usize,
    /// Compare gradients with `none`'s, which is then the first policy.
    pub compare: bool,
    /// Train this number of steps and report the loss.
    pub train_steps: u64,
    /// Measure RSS here, first of all. Only for one case in a process that has run nothing yet.
    pub resident: bool,
    /// Take time per path.
    pub profile: bool,
}

/// One policy on one form of attention, measured.
#[derive(Debug)]
pub struct Case {
    /// The form.
    pub form: AttentionForm,
    /// The policy.
    pub policy: NamedPolicy,
    /// From the dry run.
    pub prediction: Prediction,
    /// The warm-up step; on the meta device there is nothing else.
    pub warm_up: Sample,
    /// One per round.
    pub rounds: Vec<Sample>,
    /// None on the meta device.
    pub gradient_norm: Option<f64>,
    /// Where gradients were compared.
    pub gradient_error: Option<f64>,
    /// High-water RSS of a step minus RSS before it.
    pub resident_delta: Option<u64>,
    /// After training.
    pub loss_after: Option<f64>,
    /// Steps with time per path.
    pub profiles: Vec<Sample>,
    /// Scratch of the device's kernels by the end.
    pub scratch_bytes: u64,
}

/// Bytes of parameters, gradients and optimizer state, and what a step adds at most, of all that will be held at once.
fn needed_bytes(config: &GptConfig, forms: usize, measuring: Measuring, peak: u64) -> u64 {
    let parameters = config.parameter_bytes() as u64;
    let gradients = parameters * (1 + u64::from(measuring.compare));
    let training = if measuring.train_steps > 0 { 3 * parameters } else { 0 };
    (forms as u64 * parameters + gradients + training).saturating_add(peak)
}

/// Measures every policy on every form of attention. `tick` is called before each step with what will run.
pub fn measure(
    config: &GptConfig,
    forms: &[AttentionForm],
    policies: &[PolicySpec],
    measuring: Measuring,
    common: &Common,
    mut tick: impl FnMut(&str),
) -> Result<Vec<Case>> {
    let seed = common.seed.unwrap_or(0);
    if common.device.computes() {
        Batcher::built_in(config, seed)?; // a text that is too short is known before any dry run
    }
    let mut predictions = Vec::new();
    for &form in forms {
        let dry = MetaModel::new(&GptConfig { attention: form, ..config.clone() })?;
        let mut planning = Planning::new(&dry, common);
        for spec in policies {
            if spec.optional && !planning.is_feasible(spec)? {
                report::note(&format!("note: no plan fits {} with {} attention; left out", spec.label(), form.name()));
                continue;
            }
            let policy = planning.policy(spec)?;
            let prediction = dry.predict(&policy)?;
            predictions.push((form, policy, prediction));
        }
    }
    let peak = predictions.iter().map(|(_, _, p)| p.peak_bytes).max().unwrap_or(0);
    common.check_fits(needed_bytes(config, forms.len(), measuring, peak))?;

    if measuring.resident {
        touch_code(config, forms[0], common)?;
    }
    let device = common.open_device()?;
    let first = Subject::new(&device, &GptConfig { attention: forms[0], ..config.clone() }, seed)?;
    let resident = if measuring.resident && common.device == DeviceKind::Cpu {
        first.resident_delta(&predictions[0].1)?
    } else {
        None
    };
    let mut subjects = vec![first];
    for &form in &forms[1..] {
        subjects.push(subjects[0].with_form(form)?);
    }
    let subject_of = |form| subjects.iter().find(|s| s.config().attention == form).expect("one is made of each form");

    let mut cases = Vec::new();
    let mut reference: Option<(AttentionForm, Gradients)> = None;
    for (form, policy, prediction) in predictions {
        let subject = subject_of(form);
        tick(&format!("{} {}", form.name(), policy.label()));
        if reference.as_ref().is_some_and(|(of, _)| *of != form) {
            reference = None;
        }
        let (warm_up, gradients) = subject.step(&policy, false)?;
        let (mut gradient_norm, mut gradient_error) = (None, None);
        if device.computes() {
            gradient_norm = Some(subject.gradient_norm(&gradients)?);
            if measuring.compare {
                let error = match &reference {
                    Some((_, reference)) => gradients.distance(reference)?,
                    None => 0.0,
                };
                if error != 0.0 && warm_up.stats.quantized == 0 {
                    return Err(Failure::internal(format!(
                        "the gradients under `{}` differ from those under `none` by {error:e}, and nothing was \
                         quantized",
                        policy.label()
                    )));
                }
                gradient_error = Some(error);
                reference.get_or_insert((form, gradients));
            }
        }
        cases.push(Case {
            form,
            policy,
            prediction,
            warm_up,
            rounds: Vec::new(),
            gradient_norm,
            gradient_error,
            resident_delta: resident,
            loss_after: None,
            profiles: Vec::new(),
            scratch_bytes: 0,
        });
    }
    drop(reference);
    if !device.computes() {
        return Ok(cases);
    }
    for round in 0..measuring.rounds {
        let mut order: Vec<usize> = (0..cases.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            let case = &mut cases[i];
            tick(&format!("{} {}", case.form.name(), case.policy.label()));
            case.rounds.push(subject_of(case.form).step(&case.policy, false)?.0);
        }
    }
    for case in &mut cases {
        case.scratch_bytes = device.scratch_bytes();
        if measuring.profile {
            for _ in 0..measuring.rounds.max(1) {
                case.profiles.push(subject_of(case.form).step(&case.policy, true)?.0);
            }
        }
        if measuring.train_steps > 0 {
            tick(&format!("training: {} {}", case.form.name(), case.policy.label()));
            let config = subject_of(case.form).config();
            let model = Gpt::new(&device, config, seed)?;
            let mut trainer = Trainer::new(model, Batcher::built_in(config, seed)?, Settings::default(), seed)?;
            for _ in 0..measuring.train_steps {
                case.loss_after = Some(trainer.step(&case.policy)?.loss);
            }
        }
    }
    Ok(cases)
}

/// Runs a small step on another device, so that the pages of the program's code are resident before RSS is taken.
fn touch_code(config: &GptConfig, form: AttentionForm, common: &Common) -> Result<()> {
    let small = GptConfig { layers: 1, batch: 1, seq: config.seq.min(64), attention: form, ..config.clone() };
    if small.parameter_bytes() > 64 << 20 {
        return Ok(()); // the program's own pages don't matter beside it
    }
    let device = Common { memory_limit: None, ..common.clone() }.open_device()?;
    Subject::new(&device, &small, 0)?.step(&NamedPolicy::none(), false)?;
    Ok(())
}
