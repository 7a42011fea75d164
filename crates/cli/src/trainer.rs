//! Training steps: what step `n` does is a function of the parameters, the optimizer's state, the seed and `n`.

use crate::error::{Failure, Result};
use crate::policy::NamedPolicy;
use retape::MemoryKind;
use retape::nn::data::{Batch, Batches, ByteText};
use retape::nn::{AdamW, Gpt, GptConfig, LossScaler, Parameter, Parameters, Random, clip_grad_norm};
use retape::prelude::{AdamWConfig, DType, Device, Tape, TapeOptions, Tensor};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Batches of a text for a model's vocabulary: where that is smaller than a byte's, bytes wrap around.
#[derive(Debug)]
pub struct Batcher {
    batches: Batches,
    vocab: usize,
}

impl Batcher {
    /// Batches of a text.
    pub fn new(text: &ByteText, config: &GptConfig, seed: u64) -> Result<Batcher> {
        Ok(Batcher { batches: text.batches(config.seq, config.batch, seed)?, vocab: config.vocab })
    }

    /// Batches of the built-in text.
    pub fn built_in(config: &GptConfig, seed: u64) -> Result<Batcher> {
        Batcher::new(&ByteText::moby_dick(), config, seed)
    }

    /// The built-in text's first batch. On the meta device only its shape, of any size: no text is as long.
    pub fn first(device: &Device, config: &GptConfig, seed: u64) -> Result<(Tensor, Tensor)> {
        if device.computes() {
            return Batcher::built_in(config, seed)?.tensors(device, 0);
        }
        let input = || Tensor::uninit(device, &[config.batch, config.seq], DType::I64, MemoryKind::Input);
        Ok((input()?, input()?))
    }

    /// Tokens and targets of a training step.
    pub fn tensors(&self, device: &Device, step: u64) -> Result<(Tensor, Tensor)> {
        self.on_device(device, self.batches.batch(step))
    }

    /// Tokens and targets of the text from its start on; `None` past its end.
    pub fn consecutive(&self, device: &Device, index: usize) -> Result<Option<(Tensor, Tensor)>> {
        self.batches.consecutive(index).map(|batch| self.on_device(device, batch)).transpose()
    }

    fn on_device(&self, device: &Device, mut batch: Batch) -> Result<(Tensor, Tensor)> {
        let vocab = i64::try_from(self.vocab).unwrap_or(i64::MAX);
        batch.tokens.iter_mut().chain(&mut batch.targets).for_each(|token| *token %= vocab);
        Ok(batch.tensors(device)?)
    }
}

/// How parameters are updated.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Learning rate after the warm-up.
    #[serde(with = "retape::serde_float")]
    pub lr: f64,
    /// Steps over which it rises, linearly.
    pub warmup: u64,
    /// Decay of the first moment.
    #[serde(with = "retape::serde_float")]
    pub beta1: f64,
    /// Decay of the second moment.
    #[serde(with = "retape::serde_float")]
    pub beta2: f64,
    /// Decay of matrices and embeddings.
    #[serde(with = "retape::serde_float")]
    pub weight_decay: f64,
    /// Bound of the gradient norm.
    #[serde(with = "retape::serde_float")]
    pub clip: f64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { lr: 1e-3, warmup: 10, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, clip: 1.0 }
    }
}

impl Settings {
    /// Fails where a setting is out of its range, before anything is made or written.
    pub fn check(&self) -> Result<()> {
        if self.clip.is_nan() || self.clip <= 0.0 {
            return Err(Failure::usage(format!(
                "--clip {}: the bound of the gradient norm must be above 0; inf: no bound",
                self.clip
            )));
        }
        AdamW::decay_all(Vec::new(), self.adamw())?;
        Ok(())
    }

    fn adamw(&self) -> AdamWConfig {
        let Settings { lr, beta1, beta2, weight_decay, .. } = *self;
        AdamWConfig { lr, beta1, beta2, eps: 1e-8, weight_decay }
    }
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    /// The model.
    pub model: Gpt,
    /// Its optimizer.
    pub optimizer: AdamW,
    /// For models that compute in f16.
    pub scaler: Option<LossScaler>,
    /// Steps done.
    pub done: u64,
    /// The seed of each step's tape.
    pub random: Random,
    parameters: Parameters,
    batcher: Batcher,
    settings: Settings,
}

/// What a training step was like.
#[derive(Debug)]
pub struct Trained {
    /// Before the update.
    pub loss: f64,
    /// Wall time.
    pub time: Duration,
    /// Highest step bytes.
    pub peak_bytes: u64,
    /// What the loss was scaled by, in f16.
    pub loss_scale: Option<f64>,
    /// False where a gradient wasn't finite and the scale was lowered instead.
    pub updated: bool,
}

/// Batches of a validation, at most.
const VALIDATION_BATCHES: usize = 32;

impl Trainer {
    /// At step 0, with a fresh optimizer.
    pub fn new(model: Gpt, batcher: Batcher, settings: Settings, seed: u64) -> Result<Trainer> {
        let parameters = model.parameters();
        let optimizer = AdamW::decay_matrices(parameters.clone(), settings.adamw())?;
        let scaler = (model.config().dtype == DType::F16).then(LossScaler::default);
        let random = Random::new(seed);
        Ok(Trainer { model, optimizer, scaler, done: 0, random, parameters, batcher, settings })
    }

    /// The parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The next step.
    pub fn step(&mut self, policy: &NamedPolicy) -> Result<Trained> {
        let device = self.parameters[0].device();
        let start = Instant::now();
        device.meter().reset_peak();
        let (tokens, targets) = self.batcher.tensors(&device, self.done)?;
        let seed = Some(self.random.next_seed());
        let options = TapeOptions { policy: Some(policy.rules.clone()), seed, ..TapeOptions::default() };
        let tape = Tape::with(&device, options);
        let loss = self.model.loss(&tape, &tokens, &targets)?;
        let gradients = match &self.scaler {
            Some(scaler) => scaler.backward(&tape, &loss)?,
            None => tape.backward(&loss)?,
        };
        let value = loss.item()?;
        drop(loss);
        drop(tape);
        let warm = ((self.done + 1) as f64 / self.settings.warmup.max(1) as f64).min(1.0);
        self.optimizer.set_lr(self.settings.lr * warm)?;
        let loss_scale = self.scaler.map(|s| s.scale());
        let updated = match &mut self.scaler {
            Some(scaler) => {
                scaler.step(&mut self.optimizer, &gradients, &self.parameters, self.settings.clip)?.is_some()
            }
            None => {
                let clip = clip_grad_norm(&gradients, &self.parameters, self.settings.clip)?;
                self.optimizer.step(&gradients, clip.scale)?;
                true
            }
        };
        self.done += 1;
        device.synchronize()?;
        let (time, peak_bytes) = (start.elapsed(), device.meter().step_peak());
        Ok(Trained { loss: value, time, peak_bytes, loss_scale, updated })
    }

    /// Fails where a parameter holds an infinity or NaN: a last update may have made it, which no gradient has shown
    /// yet.
    pub fn check_finite(&self) -> Result<()> {
        for parameter in &self.parameters {
            if parameter.tensor().to_f64_vec()?.iter().any(|x| !x.is_finite()) {
                return Err(Failure::other(format!(
                    "parameter `{}` holds an infinity or NaN after step {}; take a lower --lr",
                    parameter.name(),
                    self.done
                )));
            }
        }
        Ok(())
    }

    /// The mean loss on the first batches of a text, without dropout and without saving anything for backward.
    pub fn validate(&mut self, text: &Batcher) -> Result<f64> {
        let device = self.parameters[0].device();
        self.model.set_training(false);
        self.parameters.iter().for_each(|p| p.set_requires_grad(false));
        let mean = || {
            let (mut sum, mut windows) = (0.0, 0.0);
            for index in 0..VALIDATION_BATCHES {
                let Some((tokens, targets)) = text.consecutive(&device, index)? else { break };
                let weight = tokens.shape()[0] as f64;
                sum += weight * self.model.loss(&Tape::new(&device), &tokens, &targets)?.item()?;
                windows += weight;
            }
            Ok(sum / windows)
        };
        let result = mean();
        self.parameters.iter().for_each(|p| p.set_requires_grad(true));
        self.model.set_training(true);
        result
    }
}
