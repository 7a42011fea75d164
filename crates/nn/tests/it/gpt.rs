use crate::small;
use approx::{assert_abs_diff_eq, assert_relative_eq};
use retape_core::{DType, Device, Tape, TapeOptions, Tensor, meta};
use retape_nn::{AttentionForm, Error, Gpt, GptConfig, Parameter};

const FORMS: [AttentionForm; 2] = [AttentionForm::Flash, AttentionForm::Explicit];

fn tokens(device: &Device, shape: &[usize], vocab: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<i64> = (0..count).map(|i| ((i * i + 3 * i) % vocab) as i64).collect();
    Tensor::from_slice(device, shape, &values).unwrap()
}

#[test]
fn names_are_those_of_gpt2lmheadmodel() {
    let names = |config: GptConfig| {
        let model = Gpt::new(&meta(), &config, 0).unwrap();
        model.parameters().iter().map(|p| format!("{} {:?}", p.name(), p.shape())).collect::<Vec<_>>()
    };
    let tied = names(GptConfig { layers: 1, ..small(AttentionForm::Flash) });
    assert_eq!(
        tied,
        [
            "transformer.wte.weight [11, 8]",
            "transformer.wpe.weight [6, 8]",
            "transformer.h.0.ln_1.weight [8]",
            "transformer.h.0.ln_1.bias [8]",
            "transformer.h.0.attn.c_attn.weight [8, 24]",
            "transformer.h.0.attn.c_attn.bias [24]",
            "transformer.h.0.attn.c_proj.weight [8, 8]",
            "transformer.h.0.attn.c_proj.bias [8]",
            "transformer.h.0.ln_2.weight [8]",
            "transformer.h.0.ln_2.bias [8]",
            "transformer.h.0.mlp.c_fc.weight [8, 32]",
            "transformer.h.0.mlp.c_fc.bias [32]",
            "transformer.h.0.mlp.c_proj.weight [32, 8]",
            "transformer.h.0.mlp.c_proj.bias [8]",
            "transformer.ln_f.weight [8]",
            "transformer.ln_f.bias [8]",
        ]
    );
    let untied = names(GptConfig { layers: 1, tied: false, linear_bias: false, ..small(AttentionForm::Flash) });
    assert_eq!(untied.last().unwrap(), "lm_head.weight [11, 8]");
    assert!(!untied.iter().any(|n| n.contains("c_attn.bias") || n.contains("c_fc.bias") || n.contains("c_proj.bias")));
}

#[test]
fn initial_numbers_are_gpt2s() {
    let device = retape_cpu::device();
    let config = GptConfig { layers: 8, dim: 64, vocab: 256, seq: 64, ..small(AttentionForm::Flash) };
    for parameter in Gpt::new(&device, &config, 3).unwrap().parameters() {
        let values = parameter.tensor().to_f64_vec().unwrap();
        let name = parameter.name();
        if name.ends_with("bias") {
            assert!(values.iter().all(|&v| v == 0.0), "{name}");
        } else if name.contains("ln_") {
            assert!(values.iter().all(|&v| v == 1.0), "{name}");
        } else {
            let std = if name.contains("c_proj") { 0.02 / 4.0 } else { 0.02 };
            let measured = (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt();
            assert_relative_eq!(measured, std, max_relative = 0.06);
        }
    }
}

/// Both forms compute one function, drawing the same dropout; grouped heads and short sequences too.
#[test]
fn the_forms_of_attention_agree() {
    let device = retape_cpu::device();
    for (kv_heads, dropout, time) in [(4, 0.0, 6), (4, 0.3, 6), (2, 0.0, 6), (2, 0.3, 5), (1, 0.3, 1)] {
        let run = |form| {
            let config = GptConfig { kv_heads, dropout, dtype: DType::F64, ..small(form) };
            let model = Gpt::new(&device, &config, 5).unwrap();
            let tape = Tape::with(&device, TapeOptions { seed: Some(9), ..TapeOptions::default() });
            let x = tokens(&device, &[2, time], 11);
            let loss = model.loss(&tape, &x, &x).unwrap();
            let value = loss.item().unwrap();
            let gradients = tape.backward(&loss).unwrap();
            let all = |p: &Parameter| gradients.parameter(p.id()).unwrap().to_f64_vec().unwrap();
            (value, model.parameters().iter().flat_map(all).collect::<Vec<f64>>())
        };
        let [(loss, gradients), (expected, golden)] = FORMS.map(run);
        assert_relative_eq!(loss, expected, max_relative = 1e-14);
        assert_abs_diff_eq!(&gradients[..], &golden[..], epsilon = 1e-14);
        assert!(gradients.iter().any(|g| g.abs() > 1e-3));
    }
}

#[test]
fn dropout_only_while_training() {
    let device = retape_cpu::device();
    let mut model = Gpt::new(&device, &GptConfig { dropout: 0.5, ..small(AttentionForm::Flash) }, 1).unwrap();
    let x = tokens(&device, &[2, 6], 11);
    let logits = |model: &Gpt, seed| {
        let tape = Tape::with(&device, TapeOptions { seed: Some(seed), ..TapeOptions::default() });
        let logits = model.forward(&tape, &x).unwrap().tensor().unwrap().to_vec::<f32>().unwrap();
        (logits, tape.random_counter())
    };
    assert_ne!(logits(&model, 1), logits(&model, 2));
    assert_eq!(logits(&model, 1), logits(&model, 1));
    // The embeddings, and in each block: the weights, the attention's result and the feed-forward one's.
    assert_eq!(logits(&model, 1).1, 7);
    model.set_training(false);
    assert_eq!(logits(&model, 1), logits(&model, 2));
    assert_eq!(logits(&model, 1).1, 0);
}

/// The values that backward reads, by path: what policies are written against.
#[test]
fn paths() {
    let device = meta();
    let x = tokens(&device, &[2, 6], 11);
    let paths = |config: GptConfig| {
        let model = Gpt::new(&device, &config, 0).unwrap();
        let tape = Tape::new(&device);
        let loss = model.loss(&tape, &x, &x).unwrap();
        let ledger = tape.ledger().unwrap();
        drop(loss);
        let exact = |v: &&retape_core::LedgerEntry| v.mark.name() != "exact";
        ledger.values.iter().filter(exact).map(|v| v.path.clone()).collect::<Vec<_>>()
    };
    let one = |form| GptConfig { layers: 1, ..small(form) };
    assert_eq!(
        paths(one(AttentionForm::Flash)),
        [
            "transformer.embed",
            "transformer.h.0.ln_1",
            "transformer.h.0.attn.c_attn",
            "transformer.h.0.attn.attention",
            "transformer.h.0.add",
            "transformer.h.0.ln_2",
            "transformer.h.0.mlp.c_fc",
            "transformer.h.0.mlp.gelu",
            "transformer.h.0",
            "transformer.ln_f",
            "lm_head",
        ]
    );
    let explicit = paths(GptConfig { dropout: 0.1, ..one(AttentionForm::Explicit) });
    let attention: Vec<&String> = explicit.iter().filter(|p| p.contains(".attn.")).collect();
    assert_eq!(
        attention,
        [
            "transformer.h.0.attn.c_attn",
            "transformer.h.0.attn.softmax",
            "transformer.h.0.attn.dropout",
            "transformer.h.0.attn.merge"
        ]
    );
}

#[test]
fn wrong_inputs() {
    let device = retape_cpu::device();
    let model = Gpt::new(&device, &small(AttentionForm::Flash), 0).unwrap();
    let run = |tokens: &Tensor, targets: &Tensor| {
        let tape = Tape::new(&device);
        let error = model.loss(&tape, tokens, targets).unwrap_err();
        assert_eq!(tape.saved_bytes(), 0, "an error leaves nothing on the tape");
        error
    };
    let x = tokens(&device, &[2, 6], 11);
    let error = run(&tokens(&device, &[6], 6), &x).to_string();
    assert_eq!(error, "Gpt: tokens are [6], targets [2, 6]; they must agree");
    let flat = tokens(&device, &[6], 6);
    assert_eq!(run(&flat, &flat).to_string(), "Gpt: targets must be i64[batch, time], got i64[6]");
    let long = tokens(&device, &[1, 7], 6);
    assert_eq!(run(&long, &long).to_string(), "Gpt: 7 tokens in a sequence, the model has 6 positions");
    let floats = Tensor::full(&device, &[2, 6], DType::F32, 0.0).unwrap();
    assert_eq!(run(&floats, &x).to_string(), "Gpt: tokens must be i64[batch, time], got f32[2, 6]");
    let outside = Tensor::full(&device, &[2, 6], DType::I64, 11.0).unwrap();
    let error = run(&outside, &x).to_string();
    assert!(
        error.contains("`transformer.wte.embedding`") && error.contains("id 11 at position 0 is outside"),
        "{error}"
    );
    let error = run(&x, &outside).to_string();
    assert!(error.contains("`loss.cross_entropy`") && error.contains("target 11 in row 0"), "{error}");
    let elsewhere = tokens(&retape_cpu::device(), &[2, 6], 11);
    assert!(matches!(run(&elsewhere, &elsewhere), Error::Core(retape_core::Error::DeviceMismatch { .. })));
}

/// Targets that don't count.
#[test]
fn ignored_targets() {
    let device = retape_cpu::device();
    let model = Gpt::new(&device, &GptConfig { dtype: DType::F64, ..small(AttentionForm::Flash) }, 0).unwrap();
    let x = tokens(&device, &[1, 6], 11);
    let loss = |targets: &[i64]| {
        let targets = Tensor::from_slice(&device, &[1, 6], targets).unwrap();
        model.loss(&Tape::new(&device), &x, &targets).unwrap().item().unwrap()
    };
    let i = Gpt::IGNORE;
    let (first, second) = (loss(&[1, i, i, i, i, i]), loss(&[i, 2, i, i, i, i]));
    assert_relative_eq!(loss(&[1, 2, i, i, i, i]), (first + second) / 2.0, max_relative = 1e-14);
}

/// The cast weights are constants there, which take no mark.
#[test]
fn without_gradients_a_model_in_sixteen_bits_gives_the_same_numbers() {
    let device = retape_cpu::device();
    for (dtype, tied) in [(DType::F32, true), (DType::BF16, true), (DType::F16, false)] {
        let config = GptConfig { dtype, tied, ..small(AttentionForm::Flash) };
        let model = Gpt::new(&device, &config, 1).unwrap();
        let tokens = tokens(&device, &[2, 6], config.vocab);
        let tape = Tape::new(&device);
        let logits = tape.no_grad(|| model.forward(&tape, &tokens)).unwrap();
        assert_eq!((logits.dtype(), logits.requires_grad(), tape.saved_bytes()), (dtype, false, 0));
        let recorded = model.forward(&Tape::new(&device), &tokens).unwrap();
        let bytes = |v: &retape_core::Var| v.tensor().unwrap().to_bytes().unwrap();
        assert_eq!(bytes(&logits), bytes(&recorded), "{dtype}");
    }
}
