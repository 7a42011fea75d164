//! Checkpoints of a training run: directories `DIR/step-N`, each there whole or not at all.
//!
//! A checkpoint is written into a directory of another name, flushed to the disk and renamed; only then is the one
//! before removed (renamed first as well). So whenever the process is killed, the highest `step-N` is complete.

use crate::error::{Failure, Result};
use crate::trainer::{Settings, Trainer};
use retape::nn::checkpoint::{Cast, save_parameters};
use retape::nn::data::ByteText;
use retape::nn::{Gpt, GptConfig, LossScaler, Random};
use retape::policy::Profile;
use retape::prelude::Device;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const CONFIG: &str = "config.json";
/// Prefix of directories that are no checkpoints: being written, or being removed.
const UNFINISHED: &str = ".unfinished-";

/// All of a run but the tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Version of this format.
    pub format: u32,
    /// Steps done.
    pub step: u64,
    /// Seed of parameters, data order and dropout.
    pub seed: u64,
    /// The model's name.
    pub name: String,
    /// Its configuration.
    pub model: GptConfig,
    /// The policy, as `--policy` takes it.
    pub policy: String,
    /// Marks over it, as `--mark` takes them.
    pub marks: Vec<String>,
    /// The profile that a budget was planned with, where it was given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// How parameters are updated.
    pub settings: Settings,
    /// The state of the loss's scaling, of a model in f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<LossScaler>,
    /// The text.
    pub data: DataId,
}

/// What a text is known by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataId {
    /// Its file; none for the built-in text.
    pub file: Option<PathBuf>,
    /// Its length.
    pub bytes: usize,
    /// FNV-1a of its bytes, in hexadecimal.
    pub hash: String,
}

impl DataId {
    /// Of a text from a file, or of the built-in one.
    pub fn of(text: &ByteText, file: Option<&Path>) -> DataId {
        let hash = text
            .bytes()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let file = file.map(|f| f.canonicalize().unwrap_or_else(|_| f.to_owned()));
        DataId { file, bytes: text.bytes().len(), hash: format!("{hash:016x}") }
    }

    /// True where the bytes are the same, wherever they lie.
    pub fn is_same_text(&self, other: &DataId) -> bool {
        (self.bytes, &self.hash) == (other.bytes, &other.hash)
    }
}

/// The current format.
pub const FORMAT: u32 = 1;

fn io(action: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Failure {
    let what = format!("can't {action} {}", path.display());
    move |e| Failure::other(format!("{what}: {e}"))
}

/// Checkpoints in a directory as (step, path), the latest first.
fn list(dir: &Path) -> std::io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let step = entry.file_name().to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        if let Some(step) = step {
            found.push((step, entry.path()));
        }
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// The latest checkpoint of a directory.
pub fn latest(dir: &Path) -> Result<Option<PathBuf>> {
    match list(dir) {
        Ok(found) => Ok(found.into_iter().next().map(|(_, path)| path)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Failure::usage(format!("can't read {}: {e}; give a directory", dir.display()))),
    }
}

/// The configuration of a checkpoint.
pub fn read_config(checkpoint: &Path) -> Result<RunConfig> {
    let path = checkpoint.join(CONFIG);
    let wrong = |reason: String| Failure::usage(format!("{} is no checkpoint of retape: {reason}", path.display()));
    let text = fs::read_to_string(&path).map_err(|e| wrong(e.to_string()))?;
    let config: RunConfig = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    if config.format != FORMAT {
        return Err(wrong(format!("it has format {}, this version reads {FORMAT}", config.format)));
    }
    config.model.validate()?;
    Ok(config)
}

/// The model of a checkpoint.
pub fn read_model(checkpoint: &Path, config: &RunConfig, device: &Device) -> Result<Gpt> {
    Ok(Gpt::load(&checkpoint.join(MODEL), device, &config.model, Cast::Refuse)?)
}

/// Puts a checkpoint's optimizer state, loss scaling and step into a trainer.
pub fn restore(checkpoint: &Path, config: &RunConfig, trainer: &mut Trainer) -> Result<()> {
    trainer.optimizer.load(&checkpoint.join(OPTIMIZER))?;
    if let Some(scaler) = config.scaler {
        if !(scaler.scale().is_finite() && scaler.scale() > 0.0) {
            let scale = scaler.scale();
            return Err(Failure::usage(format!(
                "{}: config.json scales the loss by {scale}; it must be a positive number",
                checkpoint.display()
            )));
        }
        trainer.scaler = Some(scaler);
    }
    trainer.done = config.step;
    trainer.random = Random::at(config.seed, config.step);
    Ok(())
}

/// Writes `dir/step-N` and removes older ones. Killed at any moment, it leaves the older or the new one. A model that
/// isn't finite is an error, and so is a checkpoint that reads back otherwise than it was written; the older one stays.
pub fn save(dir: &Path, trainer: &Trainer, config: &RunConfig) -> Result<()> {
    trainer.check_finite()?;
    clean(dir)?;
    let config = RunConfig { step: trainer.done, scaler: trainer.scaler, ..config.clone() };
    let unfinished = dir.join(format!("{UNFINISHED}{}", std::process::id()));
    fs::create_dir_all(&unfinished).map_err(io("make", &unfinished))?;
    save_parameters(&unfinished.join(MODEL), trainer.parameters(), &[("format", "pt".to_owned())])?;
    trainer.optimizer.save(&unfinished.join(OPTIMIZER))?;
    let text = serde_json::to_string_pretty(&config)?;
    retape::nn::checkpoint::write_atomically(&unfinished.join(CONFIG), |path| fs::write(path, text.as_bytes()))?;
    if !read_config(&unfinished).is_ok_and(|read| read == config) {
        let what = unfinished.join(CONFIG);
        return Err(Failure::internal(format!("{} reads back otherwise than it was written", what.display())));
    }
    let checkpoint = dir.join(format!("step-{}", config.step));
    fs::rename(&unfinished, &checkpoint).map_err(io("write", &checkpoint))?;
    sync_directory(dir).map_err(io("flush", dir))?;
    for (step, older) in list(dir).map_err(io("read", dir))? {
        if step < config.step {
            let removed = dir.join(format!("{UNFINISHED}{}-{step}", std::process::id()));
            fs::rename(&older, &removed).map_err(io("remove", &older))?;
        }
    }
    clean(dir)
}

/// A lock of a directory.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "it is held, not read")] Option<fs::File>);

/// Takes a directory for this process as long as the lock lives, which a kill ends too. One that another process holds
/// is an error: each would remove the other's checkpoints. Where directories can't be opened (not on Unix) or locked
/// nobody is kept out.
pub fn lock(dir: &Path) -> Result<Lock> {
    if !cfg!(unix) {
        return Ok(Lock(None));
    }
    let file = fs::File::open(dir).map_err(io("open", dir))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(Some(file))),
        Err(fs::TryLockError::WouldBlock) => Err(Failure::usage(format!(
            "--save {}: another process saves there at the moment; name another directory, or wait for it",
            dir.display()
        ))),
        Err(fs::TryLockError::Error(_)) => Ok(Lock(None)),
    }
}

/// Removes what a killed process left.
fn clean(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(io("read", dir))? {
        let path = entry.map_err(io("read", dir))?.path();
        let unfinished = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(UNFINISHED));
        if unfinished {
            fs::remove_dir_all(&path).map_err(io("remove", &path))?;
        }
    }
    Ok(())
}

/// Makes renames in a directory last. Where directories can't be opened (not on Unix) the rename alone must do.
fn sync_directory(dir: &Path) -> std::io::Result<()> {
    if cfg!(unix) { fs::File::open(dir)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config() -> RunConfig {
        let sensitivity =
            [("transformer.h.*.mlp.gelu gelu_tanh".to_owned(), 0.25), ("head linear".to_owned(), f64::INFINITY)];
        RunConfig {
            format: FORMAT,
            step: 3,
            seed: 7,
            name: "tiny".into(),
            model: GptConfig::default(),
            policy: "none".into(),
            marks: vec!["**.gelu=recompute".into()],
            profile: Some(Profile {
                sensitivity: [("int8".to_owned(), sensitivity.into_iter().collect())].into(),
                ..Profile::default()
            }),
            settings: Settings::default(),
            scaler: Some(LossScaler::default()),
            data: DataId { file: None, bytes: 1000, hash: "0".into() },
        }
    }

    /// Calls `f` with a pointer to each number, and each text that stands for one.
    fn numbers(value: &Value, at: String, f: &mut dyn FnMut(&str)) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| {
                numbers(value, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), f);
            }),
            Value::Number(_) => f(&at),
            Value::String(text) if text == "inf" => f(&at),
            _ => {}
        }
    }

    /// Every number of a run's configuration, at its extremes, is after saving what it was before.
    #[test]
    fn numbers_come_back_as_they_were() {
        let whole = serde_json::to_value(config()).unwrap();
        assert_eq!(serde_json::from_value::<RunConfig>(whole.clone()).unwrap(), config());
        let extremes = [
            json!(0),
            json!(1),
            json!((1u64 << 53) + 1),
            json!(u64::MAX),
            json!(-0.0),
            json!(0.1 + 0.2),
            json!(5e-324),
            json!(1e-320),
            json!(f64::MIN_POSITIVE),
            json!(f64::MAX),
            json!(123456789012345680.0 / 3.0),
            json!("inf"),
            json!("-inf"),
        ];
        let (mut places, mut accepted) = (0, 0);
        numbers(&whole, String::new(), &mut |at| {
            places += 1;
            for extreme in &extremes {
                let mut changed = whole.clone();
                *changed.pointer_mut(at).unwrap() = extreme.clone();
                // What the field can't hold is refused when it is read.
                let Ok(config) = serde_json::from_value::<RunConfig>(changed) else { continue };
                accepted += 1;
                let text = serde_json::to_string_pretty(&config).unwrap();
                let again: RunConfig = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{at} {extreme}: {e}"));
                assert_eq!(again, config, "{at} = {extreme}");
                assert_eq!(serde_json::to_string_pretty(&again).unwrap(), text, "{at} = {extreme}");
            }
        });
        assert!(places >= 20 && accepted >= 4 * places, "{accepted} of {places} places");
        for field in ["lr", "beta1", "beta2", "weight_decay", "clip"] {
            let mut infinite = whole.clone();
            infinite["settings"][field] = json!("inf");
            assert!(serde_json::from_value::<RunConfig>(infinite).is_ok(), "{field}");
        }
    }
}
