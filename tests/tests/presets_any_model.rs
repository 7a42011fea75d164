//! Every preset on models of other kinds than GPT, whose values it finds by roles and ops; and how blocks are counted.

use retape_core::{DType, Device, Error, Gradients, Mark, Result, Role, Tape, TapeOptions, Tensor, Var, meta, scope};
use retape_policy::{ModelShape, PRESETS, Rule, RuleSet, presets::preset};
use retape_tests::models::{MODELS, Model};
use std::rc::Rc;

struct Step {
    /// Bytes stored at the end of forward.
    saved: u64,
    /// Replayed FLOPs over those of a step without replays, in percent.
    overhead: f64,
    gradients: Gradients,
    quantized: u64,
    lint: Vec<String>,
}

fn step(device: &Device, model: &Model, name: &str) -> Result<Step> {
    let policy = preset(name, &ModelShape { blocks: model.blocks }).unwrap();
    let options = TapeOptions { policy: Some(Rc::new(policy)), seed: Some(5), ..TapeOptions::default() };
    let tape = Tape::with(device, options);
    let loss = (model.loss)(&tape)?;
    let lint = tape.ledger()?.lint.iter().map(ToString::to_string).collect();
    let saved = tape.saved_bytes();
    let gradients = tape.backward(&loss)?;
    let stats = tape.stats();
    let overhead = stats.overhead_percent();
    Ok(Step { saved, overhead, gradients, quantized: stats.quantized, lint })
}

/// Whether a preset must save something on a model.
fn must_save(name: &str, model: &Model) -> bool {
    match name {
        "full_per_layer" | "sqrt_n" | "int8_all" => true,
        "selective_attention" => model.explicit_attention,
        "selective_ffn" | "flash_ffn" => model.feed_forward,
        "selective" => model.explicit_attention || model.feed_forward,
        _ => false,
    }
}

#[test]
fn every_preset_on_every_model() {
    println!("{:10} {:20} {:>10} {:>8}", "model", "preset", "saved less", "FLOPs");
    for model in &MODELS {
        let none = step(&meta(), model, "none").unwrap();
        assert!(none.lint.is_empty(), "{}: {:?}", model.name, none.lint);
        for preset in PRESETS {
            let case = format!("{} under {}", model.name, preset.name);
            let step = step(&meta(), model, preset.name).unwrap_or_else(|e| panic!("{case}: {e}"));
            let less = 100.0 * (1.0 - step.saved as f64 / none.saved as f64);
            println!("{:10} {:20} {less:>9.1}% {:>7.1}%", model.name, preset.name, step.overhead);
            if step.saved >= none.saved && preset.name != "none" {
                let told = |lint: &String| {
                    let codes = ["preset-matched-nothing", "policy-saves-nothing", "mark-saves-nothing"];
                    codes.iter().any(|code| lint.starts_with(code)) && (lint.contains("set ") || lint.contains("give "))
                };
                assert!(step.lint.iter().any(told), "{case}: nothing saved, and no word of it: {:?}", step.lint);
            }
            assert!(
                step.saved < none.saved || !must_save(preset.name, model),
                "{case}: saves nothing: {:?}",
                step.lint
            );
        }
    }
}

#[test]
fn gradients_have_the_same_bits() {
    for model in &MODELS {
        let device = retape_cpu::device();
        let none = step(&device, model, "none").unwrap();
        for preset in PRESETS {
            let real = step(&device, model, preset.name).unwrap();
            assert_eq!(real.saved, step(&meta(), model, preset.name).unwrap().saved, "{} {}", model.name, preset.name);
            let distance = real.gradients.distance(&none.gradients).unwrap();
            let expected = if preset.name.starts_with("int8") { 0.2 } else { 0.0 };
            assert!(distance <= expected, "{} under {}: {distance}", model.name, preset.name);
            assert_eq!(real.quantized > 0, expected > 0.0, "{} under {}", model.name, preset.name);
        }
    }
}

fn numbers(device: &Device, shape: &[usize]) -> Tensor {
    Tensor::full(device, shape, DType::F32, 0.5).unwrap()
}

/// A net of two layers without roles.
fn without_roles(tape: &Tape) -> Result<Var> {
    let mut x = tape.constant(&numbers(&tape.device(), &[8, 16]))?;
    for i in 0..2 {
        let weight = tape.leaf(&numbers(&tape.device(), &[16, 16]))?;
        x = x.within(format!("layer.{i}"), |x| x.linear(weight, None)?.gelu()?.tanh())?;
    }
    x.sum()
}

#[test]
fn without_roles_a_preset_is_an_error() {
    for known in PRESETS {
        let policy = preset(known.name, &ModelShape { blocks: 2 }).unwrap();
        let tape = Tape::with(&meta(), TapeOptions { policy: Some(Rc::new(policy)), ..TapeOptions::default() });
        // Nothing is recorded, so nothing is missed.
        assert!(tape.ledger().is_ok(), "{}", known.name);
        let loss = without_roles(&tape).unwrap();
        if matches!(known.name, "none" | "int8_all" | "balanced") {
            tape.ledger().unwrap_or_else(|e| panic!("{}: {e}", known.name));
            tape.backward(&loss).unwrap_or_else(|e| panic!("{}: {e}", known.name));
            continue;
        }
        for error in [tape.ledger().err(), tape.backward(&loss).err()] {
            let Some(Error::PresetMatchedNothing { preset, example, largest, .. }) = &error else {
                panic!("{}: {error:?}", known.name);
            };
            assert_eq!(preset, known.name);
            assert_eq!(largest, "`layer.0.linear` (linear), `layer.0` (tanh)");
            assert_eq!(example, "layer.*.linear=recompute");
            let message = error.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(message.contains("no scope on this tape has a role; give scopes theirs"), "{message}");
            assert!(message.contains(largest) && message.contains(example), "{message}");
        }
        // The rule that the error names works.
        let rule: Rule = "layer.*.linear=recompute".parse().unwrap();
        let policy: Rc<RuleSet> = Rc::new(RuleSet::new([rule]));
        let tape = Tape::with(&meta(), TapeOptions { policy: Some(policy), ..TapeOptions::default() });
        let loss = without_roles(&tape).unwrap();
        tape.backward(&loss).unwrap();
        assert!(tape.stats().replays > 0);
    }
}

/// Paths of the values that a rule with this pattern recomputes.
fn matched(pattern: &str, record: impl FnOnce(&Tape, Var) -> Result<Var>) -> Vec<String> {
    let policy: Rc<RuleSet> = Rc::new(RuleSet::new([Rule::new(pattern, Mark::Recompute).unwrap()]));
    let device = meta();
    let tape = Tape::with(&device, TapeOptions { policy: Some(policy), ..TapeOptions::default() });
    let x = tape.leaf(&numbers(&device, &[4, 4])).unwrap();
    let loss = record(&tape, x).unwrap().sum().unwrap();
    let ledger = match tape.ledger() {
        Ok(ledger) => ledger,
        Err(Error::RuleMatchedNothing { .. }) => return Vec::new(),
        Err(error) => panic!("{error}"),
    };
    drop(loss);
    ledger.values.iter().filter(|v| v.is(Mark::Recompute)).map(|v| v.path.clone()).collect()
}

/// A block with a value inside, and its output.
fn block(x: Var, name: &str) -> Result<Var> {
    x.within(scope(name).role(Role::Block), |x| x.tanh()?.tanh())
}

#[test]
fn blocks_are_counted_by_parent() {
    let coder = |_: &Tape, mut x: Var| {
        for name in ["enc.h.0", "enc.h.1", "dec.first", "dec.second"] {
            x = block(x, name)?;
        }
        x.tanh()
    };
    for (pattern, paths) in [
        ("blocks.1", &["enc.h.1", "dec.second"][..]),
        ("blocks.1.*", &["enc.h.1.tanh", "dec.second.tanh"]),
        ("**.blocks.0.**", &["enc.h.0.tanh", "dec.first.tanh"]),
        ("dec.blocks.0.**", &["dec.first.tanh"]),
        ("enc.h.blocks.*", &["enc.h.0", "enc.h.1"]),
        ("dec.second.tanh", &["dec.second.tanh"]),
        ("blocks.2", &[]),
        ("enc.blocks.0", &[]),
    ] {
        assert_eq!(matched(pattern, coder), paths, "{pattern}");
    }
}

#[test]
fn blocks_in_blocks() {
    let nested = |_: &Tape, mut x: Var| {
        for outer in ["stage.a", "stage.b"] {
            x = x.within(scope(outer).role(Role::Block), |x| block(block(x, "h.0")?, "h.1")?.tanh())?;
        }
        Ok(x)
    };
    for (pattern, paths) in [
        ("blocks.1.tanh", &["stage.a.h.1.tanh", "stage.b.h.1.tanh"][..]),
        ("blocks.0.h.1.tanh", &["stage.a.h.1.tanh"]),
        ("stage.b.h.blocks.0.tanh", &["stage.b.h.0.tanh"]),
        // The first of its parent, of either kind.
        ("blocks.0", &["stage.a.h.0", "stage.a", "stage.b.h.0"]),
    ] {
        assert_eq!(matched(pattern, nested), paths, "{pattern}");
    }
}

#[test]
fn a_block_that_is_opened_again_keeps_its_number() {
    let again = |_: &Tape, mut x: Var| {
        for name in ["h.a", "h.b", "h.a", "h.c"] {
            x = block(x, name)?;
        }
        // Opened without the role, it is the same block by its path.
        x.within("h.b", |x| x.within("more", |x| x.tanh()?.tanh()))?.tanh()
    };
    for (pattern, paths) in [
        ("blocks.0.*", &["h.a.tanh", "h.a.tanh"][..]),
        ("blocks.2", &["h.c"]),
        ("blocks.1.more.tanh", &["h.b.more.tanh"]),
        ("blocks.3", &[]),
    ] {
        assert_eq!(matched(pattern, again), paths, "{pattern}");
    }
}

#[test]
fn blocks_that_are_called_so_go_by_their_number() {
    let from_one = |_: &Tape, mut x: Var| {
        for name in ["enc.blocks.2", "enc.blocks.1", "enc.blocks.3"] {
            x = block(x, name)?;
        }
        x.tanh()
    };
    for (pattern, paths) in [
        ("blocks.1", &["enc.blocks.1"][..]),
        ("blocks.0", &["enc.blocks.2"]),
        ("enc.blocks.2", &["enc.blocks.3"]),
        ("**.blocks.2.tanh", &["enc.blocks.3.tanh"]),
        ("enc.blocks.3", &[]),
    ] {
        assert_eq!(matched(pattern, from_one), paths, "{pattern}");
    }
}

#[test]
fn without_a_role_blocks_go_by_their_names() {
    let named = |_: &Tape, mut x: Var| {
        for name in ["blocks.0", "blocks.1", "h.0"] {
            x = x.within(name, |x| x.tanh()?.tanh())?;
        }
        x.tanh()
    };
    for (pattern, paths) in
        [("blocks.1", &["blocks.1"][..]), ("**.blocks.*.**", &["blocks.0.tanh", "blocks.1.tanh"]), ("blocks.2", &[])]
    {
        assert_eq!(matched(pattern, named), paths, "{pattern}");
    }
}

/// A value has the roles of the open scopes around it, and is the output of those that it outlived.
#[test]
fn roles_follow_a_value_out_of_its_scopes() {
    let names = |rule: Rule| {
        let tape =
            Tape::with(&meta(), TapeOptions { policy: Some(Rc::new(RuleSet::new([rule]))), ..Default::default() });
        let x = tape.leaf(&numbers(&tape.device(), &[4, 4])).unwrap();
        let y = x.within(scope("h.0").role(Role::Block), |x| {
            let y = x.within(scope("attn").role(Role::Attention), |x| x.tanh()?.tanh())?;
            // Its output is the block's too.
            y.within(scope("mlp").role(Role::FeedForward), |x| x.tanh()?.tanh())
        });
        let loss = y.unwrap().tanh().unwrap().sum().unwrap();
        let ledger = tape.ledger().unwrap();
        drop(loss);
        let marked = ledger.values.iter().filter(|v| v.is(Mark::Recompute)).map(|v| v.path.clone());
        marked.collect::<Vec<_>>()
    };
    let any = || Rule::new("**", Mark::Recompute).unwrap();
    assert_eq!(names(any().role(Role::Block)), ["h.0.attn.tanh", "h.0.attn", "h.0.mlp.tanh"]);
    assert_eq!(names(any().role(Role::Attention)), ["h.0.attn.tanh"]);
    assert_eq!(names(any().output_of(Role::Attention)), ["h.0.attn"]);
    assert_eq!(names(any().output_of(Role::Block)), ["h.0"]);
    assert_eq!(names(any().output_of(Role::FeedForward)), ["h.0"]);
    assert_eq!(names(any().output_of(Role::Attention).role(Role::Block)), ["h.0.attn"]);
}
