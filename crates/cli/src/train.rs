//! `retape train`: AdamW on a text, with checkpoints on disk.

use crate::args::{Common, DeviceKind, SettingArgs, TrainArgs};
use crate::checkpoint::{self, DataId, FORMAT, Lock, RunConfig};
use crate::error::{Failure, Result};
use crate::planning::Planning;
use crate::policy::{NamedPolicy, PolicySpec};
use crate::report::{self, bytes};
use crate::subject::MetaModel;
use crate::trainer::{Batcher, Settings, Trained, Trainer};
use retape::nn::checkpoint::Cast;
use retape::nn::data::{ByteText, VOCAB};
use retape::nn::{Gpt, GptConfig};
use retape::policy::Rule;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Runs the command.
pub fn run(args: &TrainArgs, common: &Common) -> Result<()> {
    if common.device == DeviceKind::Meta {
        return Err(Failure::usage("train needs numbers, which the meta device has not; use --device cpu"));
    }
    // A directory that is there is locked before its latest checkpoint is read, which then stays the latest.
    let existing = args.save.as_deref().filter(|dir| dir.is_dir());
    let mut lock = existing.map(checkpoint::lock).transpose()?;
    let resumed = match &args.resume {
        Some(dir) => Some(checkpoint::latest(dir)?.ok_or_else(|| {
            Failure::usage(format!("there is no checkpoint in {}; --save makes them", dir.display()))
        })?),
        None => None,
    };
    let saved = resumed.as_deref().map(checkpoint::read_config).transpose()?;
    let (text, validation) = texts(args, saved.as_ref())?;
    let mut config = config(args, common, saved.as_ref(), DataId::of(&text.0, text.1.as_deref()))?;
    let dry = MetaModel::new(&config.model)?;
    let mut planning = Planning::new(&dry, common);
    let asked = spec(&config, args)?;
    if asked.profile.is_none() {
        planning.profile = config.profile.clone();
    }
    let policy = planning.policy(&asked)?;
    if asked.profile.is_some() {
        config.profile = planning.profile.take();
    }
    drop(planning);
    if let Some(dir) = &args.save {
        prepare_directory(dir, args.resume.as_deref(), &mut lock)?;
    }
    let batcher = Batcher::new(&text.0, &config.model, config.seed)?;
    let validation = validation.map(|text| Batcher::new(&text, &config.model, config.seed)).transpose()?;

    let peak = dry.predict(&policy)?.peak_bytes;
    let parameters = config.model.parameter_bytes() as u64;
    common.check_fits(peak.saturating_add(4 * parameters))?;
    let device = common.open_device()?;
    let model = match (&resumed, &args.init) {
        (_, Some(file)) => Gpt::load(file, &device, &config.model, Cast::Allow)?,
        (Some(from), None) => checkpoint::read_model(from, &config, &device)?,
        (None, None) => Gpt::new(&device, &config.model, config.seed)?,
    };
    let mut trainer = Trainer::new(model, batcher, config.settings, config.seed)?;
    if let Some(from) = &resumed {
        checkpoint::restore(from, &config, &mut trainer)?;
        report::note(&format!("continuing {} at step {}", from.display(), trainer.done));
    }
    report::note(&format!(
        "memory: step {} + parameters {} + gradients {} + optimizer {} = {}",
        bytes(peak),
        bytes(parameters),
        bytes(parameters),
        bytes(2 * parameters),
        bytes(peak + 4 * parameters)
    ));
    train(args, common, trainer, &policy, validation.as_ref(), &config)
}

fn train(
    args: &TrainArgs,
    common: &Common,
    mut trainer: Trainer,
    policy: &NamedPolicy,
    validation: Option<&Batcher>,
    config: &RunConfig,
) -> Result<()> {
    let last = trainer
        .done
        .checked_add(args.steps)
        .ok_or_else(|| Failure::usage(format!("--steps {}: too many to count", args.steps)))?;
    let tokens = (config.model.batch * config.model.seq) as f64;
    let budget = policy.plan.as_ref().map(|planned| planned.budget);
    let bar = report::progress(args.steps);
    while trainer.done < last {
        let trained = trainer.step(policy)?;
        let (step, is_last) = (trainer.done, trainer.done == last);
        let due = is_last || (args.val_every > 0 && step.is_multiple_of(args.val_every));
        let validation_loss = validation.filter(|_| due).map(|text| trainer.validate(text)).transpose()?;
        let line = describe(step, &trained, tokens, validation_loss, budget, common.json);
        bar.suspend(|| report::print_line(&line))?;
        bar.inc(1);
        if let Some(dir) = args.save.as_deref().filter(|_| is_last || step.is_multiple_of(args.save_every)) {
            checkpoint::save(dir, &trainer, config)?;
        }
    }
    bar.finish_and_clear();
    if let Some(dir) = &args.save {
        report::note(&format!("saved {}", dir.join(format!("step-{last}")).display()));
    }
    Ok(())
}

fn describe(
    step: u64,
    trained: &Trained,
    tokens: f64,
    validation_loss: Option<f64>,
    budget_bytes: Option<u64>,
    as_json: bool,
) -> String {
    let tokens_per_s = tokens / trained.time.as_secs_f64();
    if as_json {
        let (loss, peak_bytes) = (trained.loss, trained.peak_bytes);
        let mut line = json!({
            "step": step, "loss": loss, "tokens_per_s": tokens_per_s, "peak_bytes": peak_bytes,
            "budget_bytes": budget_bytes, "validation_loss": validation_loss,
        });
        if let Some(scale) = trained.loss_scale {
            (line["loss_scale"], line["updated"]) = (scale.into(), trained.updated.into());
        }
        return line.to_string();
    }
    let validation = validation_loss.map_or(String::new(), |loss| format!("  validation loss {loss:.4}"));
    let peak = bytes(trained.peak_bytes);
    let skipped = match trained.loss_scale {
        Some(scale) if !trained.updated => format!("  not updated: gradients overflow with the loss scaled by {scale}"),
        _ => String::new(),
    };
    format!("step {step:>6}  loss {:.4}  {tokens_per_s:>8.0} tokens/s  peak {peak}{validation}{skipped}", trained.loss)
}

/// A text and the file it is from.
type Text = (ByteText, Option<PathBuf>);

/// The text to train on and the one to validate on: files, or the two parts of the built-in text.
fn texts(args: &TrainArgs, saved: Option<&RunConfig>) -> Result<(Text, Option<ByteText>)> {
    let file = args.data.clone().or_else(|| saved?.data.file.clone());
    let given = args.val.as_deref().map(ByteText::from_file).transpose()?;
    let Some(file) = file else {
        let all = ByteText::moby_dick();
        let whole = String::from_utf8_lossy(all.bytes());
        let mut middle = whole.len() / 10 * 9;
        while !whole.is_char_boundary(middle) {
            middle += 1;
        }
        let part = |name: &str, text: &str| ByteText::from_text(format!("{} ({name})", all.name()), text);
        let validation = given.unwrap_or_else(|| part("validation", &whole[middle..]));
        return Ok(((part("training", &whole[..middle]), None), Some(validation)));
    };
    Ok(((ByteText::from_file(&file)?, Some(file)), given))
}

/// The run's configuration: the checkpoint's, or the command line's. What would change a checkpoint's bits is an error.
fn config(args: &TrainArgs, common: &Common, saved: Option<&RunConfig>, data: DataId) -> Result<RunConfig> {
    let asked = match &args.budget.budget {
        Some(budget) => Some(args.budget.planning.spec(budget, &[]).name),
        None => args.policy.clone(),
    };
    let marks = || args.marks.marks.iter().map(Rule::to_string).collect::<Vec<_>>();
    let config = match saved {
        None => {
            let form = args.model.form("train")?;
            RunConfig {
                format: FORMAT,
                step: 0,
                seed: common.seed.unwrap_or(0),
                name: args.model.name().to_owned(),
                model: GptConfig { attention: form, ..args.model.config()? },
                policy: asked.unwrap_or_else(|| "none".into()),
                marks: marks(),
                settings: settings(&args.settings, Settings::default()),
                scaler: None,
                profile: None,
                data,
            }
        }
        Some(saved) => {
            let differs = |what: &str| {
                Err(Failure::usage(format!(
                    "--resume: {what} differs from the checkpoint's; leave it out to continue with the same bits"
                )))
            };
            let base =
                if args.model.model.is_some() { args.model.config()? } else { args.model.over(saved.model.clone())? };
            let form = if args.model.attention.is_some() { args.model.form("train")? } else { saved.model.attention };
            if (GptConfig { attention: form, ..base }) != saved.model {
                return differs("the model");
            }
            if common.seed.is_some_and(|seed| seed != saved.seed) {
                return differs("--seed");
            }
            if !data.is_same_text(&saved.data) {
                return differs("the text of --data");
            }
            let mut config = RunConfig { settings: settings(&args.settings, saved.settings), data, ..saved.clone() };
            if let Some(policy) = asked {
                (config.policy, config.marks) = (policy, marks());
            } else if !args.marks.marks.is_empty() {
                config.marks = marks();
            }
            config
        }
    };
    config.settings.check()?;
    if config.model.vocab < VOCAB {
        return Err(Failure::usage(format!(
            "--vocab {}: text is bytes, so training needs a vocabulary of at least {VOCAB}",
            config.model.vocab
        )));
    }
    Ok(config)
}

fn spec(config: &RunConfig, args: &TrainArgs) -> Result<PolicySpec> {
    let marks = config.marks.iter().map(|mark| mark.parse::<Rule>()).collect::<Result<Vec<_>, _>>()?;
    let profile = args.budget.planning.profile.clone();
    Ok(PolicySpec { profile, ..PolicySpec::new(&config.policy, &marks) })
}

fn settings(args: &SettingArgs, base: Settings) -> Settings {
    Settings {
        lr: args.lr.unwrap_or(base.lr),
        warmup: args.warmup.unwrap_or(base.warmup),
        beta1: args.beta1.unwrap_or(base.beta1),
        beta2: args.beta2.unwrap_or(base.beta2),
        weight_decay: args.weight_decay.unwrap_or(base.weight_decay),
        clip: args.clip.unwrap_or(base.clip),
    }
}

/// Makes the directory and locks it. One that holds another run's checkpoints is an error: they would be removed.
fn prepare_directory(dir: &Path, resumed: Option<&Path>, lock: &mut Option<Lock>) -> Result<()> {
    let failed = |e| Failure::usage(format!("--save {}: can't make this directory: {e}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    if lock.is_none() {
        *lock = Some(checkpoint::lock(dir)?);
    }
    let same = |other: &Path| matches!((dir.canonicalize(), other.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if checkpoint::latest(dir)?.is_some() && !resumed.is_some_and(same) {
        return Err(Failure::usage(format!(
            "--save {0}: a run is saved there already; continue it with --resume {0}, or name another directory",
            dir.display()
        )));
    }
    Ok(())
}
