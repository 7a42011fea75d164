//! The model and the device that the command line asks for.

use crate::args::{Attention, Common, DeviceKind, ModelArgs};
use crate::error::{Failure, Result};
use crate::{process, report};
use retape::Device;
use retape::nn::{AttentionForm, GptConfig};
use serde_json::{Value, json};

impl ModelArgs {
    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.as_deref().unwrap_or("tiny")
    }

    /// The named model with what the command line changes in it; valid.
    pub fn config(&self) -> Result<GptConfig> {
        self.over(GptConfig::named(self.name())?)
    }

    /// `base` with what the command line changes in it; valid. Attention stays.
    pub fn over(&self, base: GptConfig) -> Result<GptConfig> {
        let heads = self.heads.unwrap_or(base.heads);
        let as_many = if base.kv_heads == base.heads { heads } else { base.kv_heads };
        let config = GptConfig {
            layers: self.layers.unwrap_or(base.layers),
            dim: self.dim.unwrap_or(base.dim),
            heads,
            kv_heads: self.kv_heads.unwrap_or(as_many),
            seq: self.seq.unwrap_or(base.seq),
            batch: self.batch.unwrap_or(base.batch),
            vocab: self.vocab.unwrap_or(base.vocab),
            dropout: self.dropout.unwrap_or(base.dropout),
            linear_bias: self.linear_bias.unwrap_or(base.linear_bias),
            tied: self.tied.unwrap_or(base.tied),
            attention: base.attention,
            dtype: self.dtype.unwrap_or(base.dtype),
        };
        config.validate()?;
        Ok(config)
    }

    /// The one form of attention, for commands that take one.
    pub fn form(&self, command: &str) -> Result<AttentionForm> {
        match self.attention.unwrap_or(Attention::Flash) {
            Attention::Flash => Ok(AttentionForm::Flash),
            Attention::Explicit => Ok(AttentionForm::Explicit),
            Attention::Both => {
                Err(Failure::usage(format!("{command} takes one form of attention; write flash or explicit")))
            }
        }
    }
}

/// A configuration as flags, for a process that shall measure the same.
pub fn flags(name: &str, config: &GptConfig) -> Vec<String> {
    let switch = |on: bool| if on { "on" } else { "off" }.to_owned();
    [
        ("--model", name.to_owned()),
        ("--layers", config.layers.to_string()),
        ("--dim", config.dim.to_string()),
        ("--heads", config.heads.to_string()),
        ("--kv-heads", config.kv_heads.to_string()),
        ("--seq", config.seq.to_string()),
        ("--batch", config.batch.to_string()),
        ("--vocab", config.vocab.to_string()),
        ("--dropout", config.dropout.to_string()),
        ("--linear-bias", switch(config.linear_bias)),
        ("--tied", switch(config.tied)),
        ("--dtype", config.dtype.to_string()),
        ("--attention", config.attention.name().to_owned()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect()
}

/// A model as JSON: its name, then its configuration, with the forms of attention that were asked for.
pub fn to_json(name: &str, config: &GptConfig, attention: Attention) -> Result<Value> {
    let mut model = json!({ "name": name });
    if let (Value::Object(model), Value::Object(fields)) = (&mut model, serde_json::to_value(config)?) {
        model.extend(fields);
        let form = if attention == Attention::Both { "both" } else { attention.forms()[0].name() };
        model.insert("attention".into(), form.into());
        model.insert("parameters".into(), config.parameter_count().into());
    }
    Ok(model)
}

impl Common {
    /// The device, with its memory limit.
    pub fn open_device(&self) -> Result<Device> {
        let device = match self.device {
            DeviceKind::Cpu => retape::cpu_with_threads(usize::from(self.threads.unwrap_or(0)))?,
            DeviceKind::Cuda(ordinal) => retape::cuda(ordinal).map_err(|error| Failure::usage(error.to_string()))?,
            DeviceKind::Meta => retape::meta(),
        };
        device.meter().set_limit(self.memory_limit);
        Ok(device)
    }

    /// Threads that kernels run on.
    pub fn thread_count(&self) -> usize {
        let offered = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.threads.map_or_else(offered, usize::from)
    }

    /// Fails where `bytes` of tensors can't fit into this machine's free memory, before the system ends the process.
    pub fn check_fits(&self, bytes: u64) -> Result<()> {
        match process::available_bytes() {
            Some(available) if self.device == DeviceKind::Cpu && bytes > available => Err(Failure::usage(format!(
                "this needs {} of tensors and {} are free here; take a smaller model or batch, or --device meta for a \
                 dry run",
                report::bytes(bytes),
                report::bytes(available)
            ))),
            _ => Ok(()),
        }
    }
}
