//! Training on CUDA: the golden run of PyTorch, mixed precision, every preset, a budget, and the same bits from run to
//! run.

use retape_core::{DType, Device, Gradients, Policy, Tape, TapeOptions, Trace, meta};
use retape_cuda_emulator::device;
use retape_nn::checkpoint::{self, Cast};
use retape_nn::{AdamW, AttentionForm, Gpt, GptConfig, LossScaler, Parameter};
use retape_policy::{ModelShape, PRESETS, Planner, PlannerOptions};
use retape_tests::gpt_curve::{Golden, compare_curve};
use std::rc::Rc;

const FORMS: [AttentionForm; 2] = [AttentionForm::Flash, AttentionForm::Explicit];

/// The golden curve in f32, within the CPU's own tolerance.
#[test]
fn f32_follows_the_golden_curve() {
    let golden = Golden::open(&retape_cpu::device());
    for form in FORMS {
        compare_curve(&device(), &golden, DType::F32, form, "init", "f32.all", "loss");
    }
}

/// What a step gave and took.
struct Step {
    /// None on meta.
    numbers: Option<(f64, Vec<Vec<u8>>)>,
    peak: u64,
    fingerprint: u64,
}

/// A preset's rules.
fn preset(name: &str, config: &GptConfig) -> Rc<dyn Policy> {
    Rc::new(retape_policy::parse(name, &ModelShape { blocks: config.layers }).unwrap())
}

/// One step of the golden run's warm model.
fn step(device: &Device, golden: &Golden, config: &GptConfig, policy: Option<Rc<dyn Policy>>) -> Step {
    let model = Gpt::new(device, config, 0).unwrap();
    if device.computes() {
        let path = golden.folder.join("warm.safetensors");
        checkpoint::load_parameters(&path, &model.parameters(), Cast::Allow).unwrap();
    }
    let (tokens, targets) = golden.batch(0, device);
    device.meter().reset_peak();
    let tape = Tape::with(device, TapeOptions { policy, seed: Some(5), ..TapeOptions::default() });
    let loss = model.loss(&tape, &tokens, &targets).unwrap();
    let gradients = tape.backward(&loss).unwrap();
    let (peak, fingerprint) = (device.meter().step_peak(), device.meter().fingerprint());
    let bytes = |p: &Parameter| gradients.parameter(p.id()).unwrap().to_bytes().unwrap();
    let numbers = || (loss.item().unwrap(), model.parameters().iter().map(bytes).collect::<Vec<_>>());
    Step { numbers: device.computes().then(numbers), peak, fingerprint }
}

/// Every preset: memory as the dry run says, event by event; without int8 the bits of a step without a policy; twice
/// the same.
#[test]
fn every_preset_keeps_its_promises() {
    let golden = Golden::open(&retape_cpu::device());
    for (form, dtype) in [(AttentionForm::Flash, DType::F32), (AttentionForm::Explicit, DType::BF16)] {
        let config = GptConfig { dropout: 0.1, ..golden.config("warm", dtype, form) };
        let (loss, gradients) = step(&device(), &golden, &config, None).numbers.unwrap();
        let again = step(&device(), &golden, &config, None).numbers.unwrap();
        assert!(again == (loss, gradients.clone()), "{form:?} {dtype}: two runs differ");
        for preset in PRESETS {
            let context = format!("{} {form:?} {dtype}", preset.name);
            let real = step(&device(), &golden, &config, Some(self::preset(preset.name, &config)));
            let dry = step(&meta(), &golden, &config, Some(self::preset(preset.name, &config)));
            assert_eq!((real.peak, real.fingerprint), (dry.peak, dry.fingerprint), "{context}: predicted and measured");
            let numbers = real.numbers.unwrap();
            assert_eq!(numbers.0, loss, "{context}: loss");
            if !preset.name.starts_with("int8") {
                assert!(numbers.1 == gradients, "{context}: gradients differ");
            }
        }
    }
}

/// A plan for each of some budgets takes what it says, and changes no bit where nothing is stored as int8.
#[test]
fn budgets_are_kept() {
    let golden = Golden::open(&retape_cpu::device());
    let config = GptConfig { dropout: 0.1, ..golden.config("warm", DType::BF16, AttentionForm::Flash) };
    let dry = meta();
    let model = Gpt::new(&dry, &config, 0).unwrap();
    let (tokens, targets) = golden.batch(0, &dry);
    let forward = |tape: &Tape| Ok(model.loss(tape, &tokens, &targets).unwrap());
    let trace = Trace::record(&dry, None, |tape| forward(tape) as retape_core::Result<_>).unwrap();
    let exact = Planner::new(trace, PlannerOptions::default()).unwrap();
    let (smallest, largest) = (exact.smallest(), exact.largest());
    let reference = step(&device(), &golden, &config, None);
    assert_eq!(reference.peak, largest);
    for budget in [smallest, smallest.midpoint(largest)] {
        let plan = exact.plan(budget).unwrap();
        let real = step(&device(), &golden, &config, Some(plan.policy()));
        assert!(real.peak == plan.peak_bytes && real.peak <= budget, "{budget}: {} of {}", real.peak, plan.peak_bytes);
        assert!(real.numbers == reference.numbers, "{budget}: other numbers");
    }
}

/// Trains for some steps in mixed precision, f32 master weights with a model computed in `dtype`, and gives the losses.
fn mixed(golden: &Golden, dtype: DType, steps: usize) -> Vec<f64> {
    let device = device();
    let config = golden.config("init", dtype, AttentionForm::Flash);
    let model = golden.model(&device, "init", &config);
    let parameters = model.parameters();
    assert!(parameters.iter().all(|p| p.dtype() == DType::F32), "parameters are f32");
    let mut optimizer: AdamW = golden.optimizer(&model, "all");
    let mut scaler = LossScaler::default();
    let mut losses = Vec::new();
    for i in 0..steps {
        let (tokens, targets) = golden.batch(i, &device);
        let tape = Tape::new(&device);
        let loss = model.loss(&tape, &tokens, &targets).unwrap();
        losses.push(loss.item().unwrap());
        if dtype == DType::F16 {
            let gradients: Gradients = scaler.backward(&tape, &loss).unwrap();
            let stepped = scaler.step(&mut optimizer, &gradients, &parameters, f64::INFINITY).unwrap();
            assert!(stepped.is_some(), "step {i} overflowed");
        } else {
            let gradients = tape.backward(&loss).unwrap();
            optimizer.step(&gradients, 1.0).unwrap();
        }
    }
    losses
}

/// 20 steps in bf16 and f16 stay near the golden curve: within 0.1% and 0.02% of each loss (1.1e-4 and 1.6e-5
/// were seen).
#[test]
fn bf16_and_f16_stay_near_the_golden_curve() {
    let golden = Golden::open(&retape_cpu::device());
    let expected = golden.numbers("f64.all", "loss");
    for (dtype, tolerance) in [(DType::BF16, 1e-3), (DType::F16, 2e-4)] {
        let losses = mixed(&golden, dtype, 20);
        let errors = losses.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b);
        let worst = errors.fold(0.0, f64::max);
        println!("{dtype}: losses within {worst:.1e} of the golden ones");
        assert!(worst < tolerance, "{dtype}: {worst:e}; {losses:?}");
        assert!(losses[19] < losses[0] - 0.5, "{dtype}: it trains: {losses:?}");
    }
}
