//! A model, and one step of it: a new tape with a policy, the loss, backward. The same code predicts a step's bytes and
//! FLOPs on the meta device.

use crate::error::{Failure, Result};
use crate::policy::NamedPolicy;
use crate::trainer::Batcher;
use crate::{process, report};
use retape::nn::{AttentionForm, Gpt, GptConfig, clip_grad_norm};
use retape::policy::Sensitivity;
use retape::prelude::{Device, Gradients, Mark, Policy, Tape, TapeOptions, Tensor};
use retape::{Stats, Trace};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The model that is measured: a GPT with a batch, on a device.
#[derive(Debug)]
pub struct Subject {
    model: Gpt,
    tokens: Tensor,
    targets: Tensor,
    seed: u64,
}

/// One step, measured.
#[derive(Debug)]
pub struct Sample {
    /// Wall time of forward.
    pub forward: Duration,
    /// Wall time of backward.
    pub backward: Duration,
    /// CPU time of both.
    pub cpu: Duration,
    /// The tape's counters.
    pub stats: Stats,
    /// Bytes of saved tensors at the end of forward.
    pub saved_bytes: u64,
    /// Highest step bytes.
    pub peak_bytes: u64,
    /// None on the meta device.
    pub loss: Option<f64>,
}

impl Sample {
    /// Wall time of forward and backward.
    pub fn total(&self) -> Duration {
        self.forward + self.backward
    }
}

/// A tape under a policy.
pub fn options(policy: &NamedPolicy, seed: u64) -> TapeOptions {
    TapeOptions { policy: Some(policy.rules.clone()), seed: Some(seed), ..TapeOptions::default() }
}

impl Subject {
    /// A model of this configuration from a seed, with the first batch of the built-in text.
    pub fn new(device: &Device, config: &GptConfig, seed: u64) -> Result<Subject> {
        let model = Gpt::new(device, config, seed)?;
        let (tokens, targets) = Batcher::first(device, config, seed)?;
        Ok(Subject { model, tokens, targets, seed })
    }

    /// Another form of attention, with the same batch.
    pub fn with_form(&self, form: AttentionForm) -> Result<Subject> {
        let config = GptConfig { attention: form, ..self.model.config().clone() };
        let model = Gpt::new(self.device(), &config, self.seed)?;
        Ok(Subject { model, tokens: self.tokens.clone(), targets: self.targets.clone(), seed: self.seed })
    }

    fn device(&self) -> &Device {
        self.tokens.device()
    }

    /// The configuration.
    pub fn config(&self) -> &GptConfig {
        self.model.config()
    }

    /// One step under a policy, and its gradients. With `profile`, the sample's stats have time per path.
    pub fn step(&self, policy: &NamedPolicy, profile: bool) -> Result<(Sample, Gradients)> {
        self.step_holding(policy, profile, Vec::new())
    }

    /// A step during whose forward other tensors are held.
    fn step_holding(&self, policy: &NamedPolicy, profile: bool, held: Vec<Tensor>) -> Result<(Sample, Gradients)> {
        let meter = self.device().meter();
        meter.reset_peak();
        let options = TapeOptions { profile, ..options(policy, self.seed) };
        let tape = Tape::with(self.device(), options);
        let (cpu, start) = (process::cpu_time(), Instant::now());
        let loss = self.model.loss(&tape, &self.tokens, &self.targets)?;
        self.device().synchronize()?;
        let forward = start.elapsed();
        let saved_bytes = tape.saved_bytes();
        drop(held);
        let start = Instant::now();
        let gradients = tape.backward(&loss)?;
        self.device().synchronize()?;
        let backward = start.elapsed();
        let cpu = process::cpu_time() - cpu;
        let peak_bytes = meter.step_peak();
        let loss = if self.device().computes() { Some(loss.item()?) } else { None };
        Ok((Sample { forward, backward, cpu, stats: tape.stats(), saved_bytes, peak_bytes, loss }, gradients))
    }

    /// The L2 norm of all gradients together.
    pub fn gradient_norm(&self, gradients: &Gradients) -> Result<f64> {
        Ok(clip_grad_norm(gradients, &self.model.parameters(), f64::INFINITY)?.norm)
    }

    /// What a lossy mark on each kind of value adds to the gradients; `trace` is the same model's.
    pub fn sensitivity(&self, trace: &Trace, mark: Mark) -> Result<Sensitivity> {
        let bar = report::progress(0);
        let forward = |tape: &Tape| self.model.loss(tape, &self.tokens, &self.targets).map_err(Failure::from);
        let tick = |kind: &str| {
            bar.set_message(format!("gradient error of {mark}: {kind}"));
            bar.inc_length(1);
            bar.inc(1);
        };
        let sensitivity = Sensitivity::measure(self.device(), trace, mark, forward, tick)?;
        bar.finish_and_clear();
        Ok(sensitivity)
    }

    /// High-water RSS of a step minus RSS before it. Meant for a process that has run nothing yet: memory freed earlier
    /// would be reused unseen. Buffers for all gradients are there before: held through forward, as in training that
    /// keeps its gradients, and in the device's pool for backward to take.
    pub fn resident_delta(&self, policy: &NamedPolicy) -> Result<Option<u64>> {
        let parameters = self.model.parameters();
        let buffers = parameters.iter().map(|p| Tensor::full(self.device(), &p.shape(), p.dtype(), 0.0));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let Some(before) = process::resident_bytes().filter(|_| process::reset_high_water()) else { return Ok(None) };
        self.step_holding(policy, false, buffers)?;
        Ok(process::high_water_bytes().map(|high| high.saturating_sub(before)))
    }
}

/// What a dry run tells of a policy.
#[derive(Debug, Clone, Copy)]
pub struct Prediction {
    /// Highest step bytes.
    pub peak_bytes: u64,
    /// Replayed FLOPs over those of a step that replays nothing (backward counted as twice forward), in percent.
    pub overhead_percent: f64,
}

/// A model on the meta device, for dry runs.
#[derive(Debug)]
pub struct MetaModel(Subject);

impl MetaModel {
    /// On a meta device of its own, without a limit.
    pub fn new(config: &GptConfig) -> Result<MetaModel> {
        Ok(MetaModel(Subject::new(&retape::meta(), config, 0)?))
    }

    /// The configuration.
    pub fn config(&self) -> &GptConfig {
        self.0.config()
    }

    /// The model in short, for messages.
    pub fn label(&self) -> String {
        let c = self.config();
        let sizes = format!("layers {} dim {} heads {} seq {} batch {}", c.layers, c.dim, c.heads, c.seq, c.batch);
        format!("{sizes} vocab {} {} {} attention", c.vocab, c.dtype, c.attention.name())
    }

    /// The forward pass, with the marks of `rules` given.
    pub fn trace(&self, rules: Option<Rc<dyn Policy>>) -> Result<Trace> {
        let subject = &self.0;
        Trace::record(subject.device(), rules, |tape| {
            Ok(subject.model.loss(tape, &subject.tokens, &subject.targets)?)
        })
    }

    /// What a step under this policy will take.
    pub fn predict(&self, policy: &NamedPolicy) -> Result<Prediction> {
        let (sample, _) = self.0.step(policy, false)?;
        Ok(Prediction { peak_bytes: sample.peak_bytes, overhead_percent: sample.stats.overhead_percent() })
    }
}
