//! Every preset on whole models: the dry run's peak, the ledger's bytes and the gradients' bits.

use retape_core::{DType, Device, MemoryKind, ParameterId, Policy, Tape, TapeOptions, meta};
use retape_nn::data::ByteText;
use retape_nn::{AttentionForm, Gpt, GptConfig};
use retape_policy::{ModelShape, PRESETS, presets::preset};
use std::collections::BTreeMap;
use std::rc::Rc;

struct Step {
    saved: u64,
    peak: u64,
    fingerprint: u64,
    replayed_flops: u64,
    forward_flops: u64,
    gradients: BTreeMap<String, Vec<u8>>,
    int8: bool,
}

fn policy(name: &str, config: &GptConfig) -> Option<Rc<dyn Policy>> {
    let policy = preset(name, &ModelShape { blocks: config.layers }).unwrap();
    Some(Rc::new(policy))
}

/// One step of a model under a preset: forward, ledger against meter, backward.
fn step(device: &Device, config: &GptConfig, name: &str, keep_gradients: bool) -> Step {
    let model = Gpt::new(device, config, 1).unwrap();
    let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
    let (tokens, targets) = batch.tensors(device).unwrap();
    let base = device.meter().live();
    device.meter().reset_peak();
    let tape =
        Tape::with(device, TapeOptions { policy: policy(name, config), seed: Some(3), ..TapeOptions::default() });
    let loss = model.loss(&tape, &tokens, &targets).unwrap();
    let ledger = tape.ledger().unwrap();
    let meter = device.meter();
    let saved = meter.live_of(MemoryKind::Saved) + meter.live_of(MemoryKind::Quantized);
    assert_eq!(ledger.totals().stored_bytes, saved, "{name}: ledger and meter");
    assert_eq!(tape.saved_bytes(), saved, "{name}: tape and meter");
    // The loss is the only other thing of the step that is live.
    assert_eq!(meter.live() - base, saved + 4, "{name}");
    assert_eq!(meter.live_of(MemoryKind::Workspace), 0, "{name}");
    let gradients = tape.backward(&loss).unwrap();
    let stats = tape.stats();
    let of = |id: ParameterId| gradients.parameter(id).expect("every parameter has a gradient").to_bytes().unwrap();
    let gradients = if keep_gradients {
        model.parameters().iter().map(|p| (p.name().to_string(), of(p.id()))).collect()
    } else {
        BTreeMap::new()
    };
    let (peak, fingerprint) = (meter.step_peak(), meter.fingerprint());
    drop((loss, tape));
    let (forward_flops, replayed_flops) = (stats.forward_flops, stats.replayed_flops);
    Step { saved, peak, fingerprint, gradients, forward_flops, replayed_flops, int8: stats.quantized > 0 }
}

/// Live bytes return to what they were: after backward, without any backward, and after a forward that fails.
#[test]
fn nothing_is_left() {
    let device = retape_cpu::device();
    let config = GptConfig { dropout: 0.1, layers: 2, ..GptConfig::named("tiny").unwrap() };
    for preset in PRESETS {
        let base = device.meter().live();
        step(&device, &config, preset.name, false);
        assert_eq!(device.meter().live(), base, "{} after backward", preset.name);
        let model = Gpt::new(&device, &config, 1).unwrap();
        let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let with_model = device.meter().live();
        let options = || TapeOptions { policy: policy(preset.name, &config), seed: Some(3), ..TapeOptions::default() };
        let tape = Tape::with(&device, options());
        device.meter().reset_peak();
        drop(model.loss(&tape, &tokens, &targets).unwrap());
        let forward_peak = device.meter().peak();
        assert_eq!(device.meter().live(), with_model, "{}: a dropped loss frees all while the tape lives", preset.name);
        drop(tape);
        let tape = Tape::with(&device, options());
        // Runs out somewhere in the middle.
        let needed = forward_peak - with_model;
        device.meter().set_limit(Some(with_model + needed / 2));
        assert!(model.loss(&tape, &tokens, &targets).is_err(), "{}", preset.name);
        device.meter().set_limit(None);
        drop(tape);
        assert_eq!(device.meter().live(), with_model, "{} after a failed forward", preset.name);
    }
}

fn check(config: &GptConfig) {
    let device = retape_cpu::device();
    let mut plain: Option<Step> = None;
    for preset in PRESETS {
        let real = step(&device, config, preset.name, true);
        let dry = step_dry(config, preset.name);
        assert_eq!(
            (dry.peak, dry.saved, dry.fingerprint),
            (real.peak, real.saved, real.fingerprint),
            "{}",
            preset.name
        );
        let plain = plain.get_or_insert_with(|| step(&device, config, "none", true));
        let same = plain.gradients == real.gradients;
        assert!(same || real.int8, "{}: other gradients than without marks", preset.name);
        println!(
            "{:?} {:20} saved {:>6.2} MiB, peak {:>6.2} MiB ({:>5.1}%), replayed {:>5.2}% of a step's FLOPs",
            config.attention,
            preset.name,
            real.saved as f64 / 1048576.0,
            real.peak as f64 / 1048576.0,
            100.0 * real.peak as f64 / plain.peak as f64,
            100.0 * real.replayed_flops as f64 / (3 * real.forward_flops) as f64,
        );
    }
}

fn step_dry(config: &GptConfig, name: &str) -> Step {
    step(&meta(), config, name, false)
}

#[test]
fn predicted_is_measured_and_bits_are_equal_on_tiny() {
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        let tiny = GptConfig::named("tiny").unwrap();
        check(&GptConfig { attention, dropout: 0.1, ..tiny.clone() });
        check(&GptConfig { attention, linear_bias: false, tied: false, ..tiny });
    }
}

#[test]
fn predicted_is_measured_and_bits_are_equal_in_sixteen_bits() {
    for (attention, dtype) in [(AttentionForm::Flash, DType::BF16), (AttentionForm::Explicit, DType::F16)] {
        check(&GptConfig { attention, dtype, dropout: 0.1, ..GptConfig::named("tiny").unwrap() });
    }
}

#[test]
fn predicted_is_measured_and_bits_are_equal_on_w1() {
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        check(&GptConfig { attention, ..GptConfig::named("w1").unwrap() });
    }
}
