//! Checkpointing. Reported in: C1 pytorch 96136, 62471; C2 OLMo-core 828, guided-diffusion 167; C3 pytorch 190717; C5
//! pytorch 196914; C6 pytorch 155171, transformers 30320; C7 Automodel 3140, torchtitan 3146; C8 Megatron-LM 1478; C9
//! pytorch 77284, 80151, 154642; C10 transformers 21381, fairseq 3583; C11 pytorch 113737; C12 pytorch 142862; C13
//! pytorch 82156; C14 jax 20015; C15 Megatron-LM 1225; C16 pytorch 133566, bitsandbytes 1270; C17 torchtitan's tests;
//! C18 actnn 35; C19 pytorch's partitioner; C20 pytorch 166926; C21 Megatron-LM 290; C22 torch's determinism check; C23
//! jax 27748, 23869. C4 (a smaller budget, a larger peak) is for the planner; C9 and C22 also stand in `settling.rs`,
//! by kernel and by bit.

use retape_core::{
    BackwardOptions, DType, Device, Error, Mark, MemoryKind, Policy, Result, Tape, TapeOptions, Tensor, Var, Verify,
    meta, scope,
};
use retape_nn::data::ByteText;
use retape_nn::{AdamW, AdamWConfig, AttentionForm, Gpt, GptConfig};
use retape_policy::{ModelShape, PRESETS, Rule, RuleSet, presets::preset};
use retape_tests::random;
use std::cell::Cell;
use std::rc::Rc;

fn cpu() -> Device {
    retape_cpu::device_with_threads(2).unwrap()
}

fn config() -> GptConfig {
    GptConfig {
        layers: 3,
        dim: 32,
        heads: 2,
        kv_heads: 2,
        seq: 16,
        batch: 2,
        dropout: 0.1,
        ..GptConfig::named("tiny").unwrap()
    }
}

fn policy(name: &str) -> Option<Rc<dyn Policy>> {
    Some(Rc::new(preset(name, &ModelShape { blocks: config().layers }).unwrap()))
}

/// Bytes by pass and parameter.
type GradientBytes = Vec<Vec<Vec<u8>>>;

/// One step: the gradients' bytes, the loss's bytes, the tape.
fn step(model: &Gpt, device: &Device, options: TapeOptions, passes: usize) -> Result<(GradientBytes, Vec<u8>, Tape)> {
    let batch = ByteText::moby_dick().batches(model.config().seq, model.config().batch, 1).unwrap().batch(0);
    let (tokens, targets) = batch.tensors(device).unwrap();
    let tape = Tape::with(device, TapeOptions { seed: options.seed.or(Some(1)), ..options });
    let loss = model.loss(&tape, &tokens, &targets).unwrap();
    let loss_bytes = loss.tensor()?.to_bytes()?;
    let mut all = Vec::new();
    for pass in 0..passes {
        let gradients =
            if pass + 1 < passes { tape.backward_with(&loss, BackwardOptions::RETAIN)? } else { tape.backward(&loss)? };
        let parameters = model.parameters();
        let bytes = parameters.iter().map(|p| gradients.parameter(p.id()).unwrap().to_bytes());
        all.push(bytes.collect::<Result<_>>()?);
    }
    Ok((all, loss_bytes, tape))
}

/// C1, C6, C8: state outside the tape is touched once, however much is replayed: replay runs recorded kernels, not user
/// code.
#[test]
fn c01_c06_c08_side_effects_fire_once() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[4, 8], 1, DType::F32)).unwrap();
    let (calls, cache) = (Cell::new(0), std::cell::RefCell::new(Vec::new()));
    let y = tape
        .within(scope("block").mark(Mark::Recompute), || {
            let h = x.gelu()?;
            calls.set(calls.get() + 1); // a running statistic, a counter of an auxiliary loss
            cache.borrow_mut().push(h.tensor()?); // a key-value cache
            h.tanh()?.exp()
        })
        .unwrap();
    let loss = y.clone().square().unwrap().sum().unwrap();
    drop(y);
    for _ in 0..3 {
        tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
    }
    assert!(tape.stats().replays > 0);
    assert_eq!((calls.get(), cache.borrow().len()), (1, 1));
}

/// C2, C3: dropout is drawn once. The same bits under every lossless preset, and the same counter afterwards.
#[test]
fn c02_c03_dropout_is_the_same_under_every_preset() {
    let device = cpu();
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        let model = Gpt::new(&device, &GptConfig { attention, ..config() }, 1).unwrap();
        let options =
            |name| TapeOptions { policy: policy(name), seed: Some(9), verify: Verify::Bits, ..TapeOptions::default() };
        let (plain, loss, tape) = step(&model, &device, options("none"), 1).unwrap();
        let counter = tape.random_counter();
        assert!(counter > 0);
        for known in PRESETS {
            let (gradients, other, tape) = step(&model, &device, options(known.name), 1).unwrap();
            assert_eq!(other, loss, "{}", known.name);
            assert_eq!(tape.random_counter(), counter, "{}", known.name);
            assert!(gradients == plain || tape.stats().quantized > 0, "{}", known.name);
        }
    }
}

/// C5: the dry run is the run: it ends at zero bytes, and its peak is the meter's.
#[test]
fn c05_the_dry_run_ends_at_zero() {
    for known in PRESETS {
        let run = |device: &Device| {
            let model = Gpt::new(device, &config(), 1).unwrap();
            let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
            let (tokens, targets) = batch.tensors(device).unwrap();
            let base = device.meter().live();
            device.meter().reset_peak();
            let tape =
                Tape::with(device, TapeOptions { policy: policy(known.name), seed: Some(1), ..TapeOptions::default() });
            let loss = model.loss(&tape, &tokens, &targets).unwrap();
            drop(tape.backward(&loss).unwrap());
            let peak = device.meter().step_peak();
            drop((loss, tape));
            (peak, device.meter().live() - base)
        };
        let (dry, real) = (run(&meta()), run(&cpu()));
        assert_eq!(dry, real, "{}", known.name);
        assert_eq!(dry.1, 0, "{}", known.name);
    }
}

/// C7: integers are kept exactly; a user's mark on one is an error.
#[test]
fn c07_integers_are_kept_exactly() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[4, 8], 1, DType::F32)).unwrap();
    let ids = x.scale(5.0).unwrap().cast(DType::I64).unwrap();
    for mark in Mark::all().filter(|&mark| mark != Mark::Keep) {
        let error = ids.set_mark(mark).unwrap_err();
        assert!(matches!(error, Error::MarkNotAllowed { .. }), "{error}");
    }
    // A rule that covers one is lint, and changes nothing.
    let everything: Rc<dyn Policy> = Rc::new(RuleSet::new([Rule::new("**", Mark::Recompute).unwrap()]));
    let tape = Tape::with(&device, TapeOptions { policy: Some(everything), seed: Some(1), ..TapeOptions::default() });
    let table = tape.leaf(&random(&device, &[9, 4], 1, DType::F32)).unwrap();
    let position = tape.constant(&random(&device, &[3], 2, DType::F32)).unwrap();
    let ids = position.abs().unwrap().scale(5.0).unwrap().cast(DType::I64).unwrap();
    let _loss = table.embedding(&ids).unwrap().sum().unwrap();
    drop(ids);
    let ledger = tape.ledger().unwrap();
    let saved = ledger.values.iter().find(|v| v.dtype == DType::I64).unwrap();
    assert_eq!((saved.mark.name(), saved.stored_bytes), ("exact", 24));
    assert!(ledger.lint.iter().any(|l| l.code == "exact-value-covered"), "{ledger}");
}

/// C9: memory is back at the baseline after backward, without any backward, and after a forward that fails.
#[test]
fn c09_memory_comes_back() {
    let device = cpu();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    let base = device.meter().live();
    for known in PRESETS {
        let options = || TapeOptions { policy: policy(known.name), seed: Some(1), ..TapeOptions::default() };
        drop(step(&model, &device, options(), 2).unwrap());
        assert_eq!(device.meter().live(), base, "{} after backward", known.name);
        let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let tape = Tape::with(&device, options());
        drop(model.loss(&tape, &tokens, &targets).unwrap());
        drop(tape);
        let tape = Tape::with(&device, options());
        let wrong = Tensor::from_slice(&device, &[2, 16], &[999i64; 32]).unwrap();
        assert!(model.loss(&tape, &tokens, &wrong).is_err(), "targets outside the vocabulary");
        drop((tape, wrong, tokens, targets));
        assert_eq!(device.meter().live(), base, "{} after a failed forward", known.name);
    }
}

/// C10: a segment whose input needs no gradient still gives its parameters theirs.
#[test]
fn c10_parameters_of_a_segment_without_input_gradient() {
    let device = cpu();
    let run = |marked: bool| {
        let tape = Tape::new(&device);
        let x = tape.constant(&random(&device, &[4, 8], 1, DType::F32)).unwrap();
        let w = tape.leaf(&random(&device, &[8, 8], 2, DType::F32)).unwrap();
        let inside = || x.matmul(&w)?.gelu()?.matmul(&w);
        let y = if marked { tape.within(scope("segment").mark(Mark::Recompute), inside) } else { inside() }.unwrap();
        let loss = y.clone().sum().unwrap();
        drop(y);
        tape.backward(&loss).unwrap().of(&w).unwrap().to_bytes().unwrap()
    };
    assert_eq!(run(true), run(false));
}

/// C11: parameters may be updated while a tape is alive; its gradients stay those of the old ones.
#[test]
fn c11_an_update_doesn_t_reach_a_living_tape() {
    let device = cpu();
    for name in ["none", "full_per_layer", "int8_all"] {
        let options = || TapeOptions { policy: policy(name), seed: Some(1), ..TapeOptions::default() };
        let model = Gpt::new(&device, &config(), 1).unwrap();
        let (expected, ..) = step(&model, &device, options(), 1).unwrap();
        let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let tape = Tape::with(&device, options());
        let loss = model.loss(&tape, &tokens, &targets).unwrap();
        let gradients = tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        let settings = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let before = model.parameters()[0].tensor().to_bytes().unwrap();
        AdamW::decay_all(model.parameters(), settings).unwrap().step(&gradients, 1.0).unwrap();
        assert_ne!(model.parameters()[0].tensor().to_bytes().unwrap(), before);
        let again = tape.backward(&loss).unwrap();
        for (p, bytes) in model.parameters().iter().zip(&expected[0]) {
            assert_eq!(again.parameter(p.id()).unwrap().to_bytes().unwrap(), *bytes, "{name}: {}", p.name());
        }
    }
}

/// C12: any number of passes over any mix of marks, with the same bits.
#[test]
fn c12_a_second_pass_has_the_same_bits() {
    let device = cpu();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    for known in PRESETS {
        let options =
            TapeOptions { policy: policy(known.name), seed: Some(1), verify: Verify::Bits, ..TapeOptions::default() };
        let (passes, ..) = step(&model, &device, options, 3).unwrap();
        assert!(passes.iter().all(|p| *p == passes[0]), "{}", known.name);
    }
}

/// C13: a value that three backward steps read is replayed once a pass, and freed after the last of them.
#[test]
fn c13_three_readers_one_replay() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[8, 8], 1, DType::F32)).unwrap();
    let h = x.gelu().unwrap().recompute().unwrap();
    let readers: Vec<Var> = vec![h.clone().tanh().unwrap(), h.clone().square().unwrap(), h.clone().sin().unwrap()];
    drop(h);
    let loss = readers[0].clone().mul(&readers[1]).unwrap().mul(&readers[2]).unwrap().sum().unwrap();
    drop(readers);
    for pass in 1..=2 {
        tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        assert_eq!(tape.stats().replayed_paths["gelu"], pass);
        assert_eq!(device.meter().live_of(MemoryKind::Recomputed), 0, "freed after its last reader");
    }
}

/// C14: a rule that matches nothing is an error that names it.
#[test]
fn c14_a_misspelt_rule_is_an_error() {
    let device = cpu();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    let misspelt: Rc<dyn Policy> = Rc::new(RuleSet::new([Rule::new("blocks.*.mpl.gelu", Mark::Recompute).unwrap()]));
    let Err(error) = step(&model, &device, TapeOptions { policy: Some(misspelt), ..TapeOptions::default() }, 1) else {
        panic!("a misspelt rule passed")
    };
    assert!(matches!(error, Error::RuleMatchedNothing { .. }) && error.to_string().contains("mpl"), "{error}");
}

/// C15: marks that save nothing are lint: attention's on tiled attention, and one on what nobody reads.
#[test]
fn c15_marks_that_save_nothing_are_lint() {
    let device = meta();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    let lint = |policy: Option<Rc<dyn Policy>>| {
        let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let tape = Tape::with(&device, TapeOptions { policy, seed: Some(1), ..TapeOptions::default() });
        let _loss = model.loss(&tape, &tokens, &targets).unwrap();
        tape.ledger().unwrap().lint
    };
    assert!(lint(policy("selective_attention")).iter().any(|l| l.code == "preset-matched-nothing"));
    let rule = RuleSet::new([Rule::new("blocks.*.mlp", Mark::Recompute).unwrap()]);
    assert!(lint(Some(Rc::new(rule))).iter().any(|l| l.code == "mark-saves-nothing"));
    assert!(lint(policy("none")).is_empty());
}

/// C16: the input of a frozen layer isn't saved for it.
#[test]
fn c16_a_frozen_layer_saves_nothing() {
    let device = meta();
    let saved = |frozen: bool| {
        let model = Gpt::new(&device, &config(), 1).unwrap();
        for p in model.parameters().iter().filter(|p| p.name().contains("mlp.c_fc.weight")) {
            p.set_requires_grad(!frozen);
        }
        let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let tape = Tape::new(&device);
        let _loss = model.loss(&tape, &tokens, &targets).unwrap();
        let ledger = tape.ledger().unwrap();
        (ledger.get("transformer.h.1.ln_2").is_some(), tape.saved_bytes())
    };
    let ((there, with), (frozen_there, without)) = (saved(false), saved(true));
    assert!(there && !frozen_there);
    assert_eq!(with - without, 3 * 2 * 16 * 32 * 4);
}

/// C17: marking everything Keep holds exactly what no policy holds, at every moment.
#[test]
fn c17_keep_everything_is_no_policy() {
    for attention in [AttentionForm::Flash, AttentionForm::Explicit] {
        let run = |policy: Option<Rc<dyn Policy>>| {
            let device = meta();
            let model = Gpt::new(&device, &GptConfig { attention, ..config() }, 1).unwrap();
            let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
            let (tokens, targets) = batch.tensors(&device).unwrap();
            device.meter().reset_peak();
            let tape = Tape::with(&device, TapeOptions { policy, seed: Some(1), ..TapeOptions::default() });
            let loss = model.loss(&tape, &tokens, &targets).unwrap();
            let forward = (tape.saved_bytes(), device.meter().step_peak());
            tape.backward(&loss).unwrap();
            (forward, device.meter().step_peak())
        };
        let keep: Rc<dyn Policy> = Rc::new(RuleSet::new([Rule::new("**", Mark::Keep).unwrap()]));
        assert_eq!(run(Some(keep)), run(None));
    }
}

/// C18: a packed store drops the full tensor; where a handle still owns it, the lint calls the mark a loss.
#[test]
fn c18_a_packed_store_drops_the_full_tensor() {
    let bytes = [("int8", 64 * 64 + 64 * 4), ("bf16", 64 * 64 * 2)];
    for mark in Mark::all().filter(|mark| mark.is_lossy()) {
        let device = cpu();
        let base = device.meter().live();
        let tape = Tape::new(&device);
        let x = tape.leaf(&random(&device, &[64, 64], 1, DType::F32)).unwrap();
        let h = x.clone().scale(2.0).unwrap();
        h.set_mark(mark).unwrap();
        let loss = h.clone().gelu().unwrap().sum().unwrap();
        assert!(tape.ledger().unwrap().lint.iter().any(|l| l.code == "held-by-handle"), "{mark}");
        drop(h);
        let leaf = 64 * 64 * 4;
        let (_, packed) =
            bytes.iter().find(|(name, _)| *name == mark.name()).expect("a new format's bytes belong here");
        assert_eq!(device.meter().live() - base, leaf + packed + 4, "{mark}");
        drop(loss);
    }
}

/// C19: what the user sees is never the quantized value.
#[test]
fn c19_the_user_sees_exact_values() {
    let device = cpu();
    let run = |mark: Option<Mark>| {
        let tape = Tape::new(&device);
        let x = tape.leaf(&random(&device, &[8, 64], 1, DType::F32)).unwrap();
        let h = x.gelu().unwrap();
        if let Some(mark) = mark {
            h.set_mark(mark).unwrap();
        }
        let loss = h.clone().square().unwrap().sum().unwrap();
        tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        (h.tensor().unwrap().to_bytes().unwrap(), loss.tensor().unwrap().to_bytes().unwrap())
    };
    for mark in Mark::all() {
        assert_eq!(run(Some(mark)), run(None), "{mark}");
    }
}

/// C20, C22: a replay has the bits of what was dropped, on any number of threads; the audit says so.
#[test]
fn c20_replays_are_bit_equal() {
    let run = |threads| {
        let device = retape_cpu::device_with_threads(threads).unwrap();
        let model = Gpt::new(&device, &config(), 1).unwrap();
        let options = TapeOptions { policy: policy("full_per_layer"), verify: Verify::Bits, ..TapeOptions::default() };
        step(&model, &device, options, 1).unwrap().0
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

/// C21: segments of any length have the same gradients.
#[test]
fn c21_segments_of_any_length() {
    let device = cpu();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    let (plain, ..) = step(&model, &device, TapeOptions::default(), 1).unwrap();
    for every in 1..=4 {
        let segments = preset(&format!("sqrt_n:every={every}"), &ModelShape { blocks: 3 }).unwrap();
        let options = TapeOptions { policy: Some(Rc::new(segments)), verify: Verify::Bits, ..TapeOptions::default() };
        let (gradients, _, tape) = step(&model, &device, options, 1).unwrap();
        assert_eq!(gradients, plain, "segments of {every}");
        assert!(tape.stats().most_replays_of_a_node <= 2);
    }
}

/// C23: recompute goes on saving memory: its bytes are numbers that this test knows, step after step.
#[test]
fn c23_bytes_are_asserted() {
    let device = meta();
    let model = Gpt::new(&device, &config(), 1).unwrap();
    let boundary = 2 * 16 * 32 * 4;
    let statistics = 2 * 16 * 4;
    let logits = 2 * 16 * 256 * 4;
    for _ in 0..3 {
        let batch = ByteText::moby_dick().batches(16, 2, 1).unwrap().batch(0);
        let (tokens, targets) = batch.tensors(&device).unwrap();
        let tape = Tape::with(
            &device,
            TapeOptions { policy: policy("full_per_layer"), seed: Some(1), ..TapeOptions::default() },
        );
        let _loss = model.loss(&tape, &tokens, &targets).unwrap();
        // The blocks' inputs and the last output; mean and rstd of seven norms, the two statistics of attention (2
        // heads) and those of the loss; the head's input and the logits.
        let expected = 4 * boundary + 7 * 2 * statistics + 3 * 2 * 2 * statistics + 2 * statistics + boundary + logits;
        assert_eq!(tape.saved_bytes(), expected);
    }
}
