//! The golden training run of PyTorch that `tests/fixtures/gpt_curve` holds (or the folder named by
//! `RETAPE_GPT_CURVE`), and a run of ours to compare with it, on any device. Sizes are read from the weights and
//! `curve.json`.

use approx::assert_relative_eq;
use retape_core::{DType, Device, Gradients, Tape, TapeOptions, Tensor};
use retape_nn::checkpoint::{self, Cast, File};
use retape_nn::{AdamW, AdamWConfig, AttentionForm, Gpt, GptConfig, Parameter};
use serde_json::Value;
use std::path::PathBuf;

/// How far a dtype may be from the golden numbers.
pub struct Tolerance {
    /// Relative, of losses.
    pub loss: f64,
    /// Relative, of gradient norms.
    pub norm: f64,
    /// Absolute, of each element of each gradient of step 1.
    pub gradient: f64,
}

/// What f64 and f32 are held to.
pub fn tolerance(dtype: DType) -> Tolerance {
    match dtype {
        DType::F64 => Tolerance { loss: 1e-10, norm: 1e-10, gradient: 1e-12 },
        _ => Tolerance { loss: 5e-6, norm: 1e-4, gradient: 1e-6 },
    }
}

/// The golden run.
pub struct Golden {
    /// Where the files are.
    pub folder: PathBuf,
    /// `curve.json`.
    pub curve: Value,
    /// `[steps, batch, seq + 1]`, u8.
    pub batches: Tensor,
}

impl Golden {
    /// Reads it; `host` is a CPU device.
    pub fn open(host: &Device) -> Golden {
        let folder = std::env::var_os("RETAPE_GPT_CURVE")
            .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gpt_curve")), PathBuf::from);
        let text = std::fs::read_to_string(folder.join("curve.json"));
        let text = text.unwrap_or_else(|e| panic!("no golden run in {}: curve.json: {e}", folder.display()));
        let curve: Value = serde_json::from_str(&text).expect("curve.json is JSON");
        assert_eq!(curve["format"], 1, "the format of {}", folder.display());
        assert!(
            curve["runs"].as_object().is_some_and(|runs| !runs.is_empty()),
            "{} holds no runs: nothing would be tested",
            folder.display()
        );
        let batches = checkpoint::open(&folder.join("batches.safetensors")).unwrap();
        Golden { batches: batches.read("tokens", host).unwrap(), folder, curve }
    }

    /// One of its files of tensors.
    pub fn file(&self, name: &str) -> File {
        checkpoint::open(&self.folder.join(format!("{name}.safetensors"))).unwrap()
    }

    /// Losses or gradient norms of a run such as `f64.all`.
    pub fn numbers(&self, run: &str, what: &str) -> Vec<f64> {
        let numbers = self.curve["runs"][run][what].as_array();
        let numbers = numbers.unwrap_or_else(|| panic!("curve.json has no {what} of run {run}"));
        assert!(!numbers.is_empty(), "{what} of run {run} is empty");
        numbers.iter().map(|v| v.as_f64().expect("a number")).collect()
    }

    /// Sizes from the weights; heads and the layer norms' epsilon only `curve.json` knows.
    pub fn config(&self, weights: &str, dtype: DType, attention: AttentionForm) -> GptConfig {
        let file = self.file(weights);
        let names = file.names();
        let shape = |name: &str| file.read(name, self.batches.device()).unwrap().shape().to_vec();
        let (wte, wpe) = (shape("transformer.wte.weight"), shape("transformer.wpe.weight"));
        let model = &self.curve["model"];
        assert_eq!(model["ln_eps"], 1e-5);
        assert_eq!(model["gelu"], "tanh");
        let heads = model["heads"].as_u64().unwrap() as usize;
        GptConfig {
            layers: names.iter().filter(|n| n.ends_with(".ln_1.weight")).count(),
            dim: wte[1],
            heads,
            kv_heads: heads,
            seq: wpe[0],
            batch: self.batches.shape()[1],
            vocab: wte[0],
            dropout: 0.0,
            linear_bias: names.iter().any(|n| n.ends_with("c_fc.bias")),
            tied: !names.iter().any(|n| n == "lm_head.weight"),
            attention,
            dtype,
        }
    }

    /// The model with the weights of a file.
    pub fn model(&self, device: &Device, weights: &str, config: &GptConfig) -> Gpt {
        let model = Gpt::new(device, config, 0).unwrap();
        let path = self.folder.join(format!("{weights}.safetensors"));
        checkpoint::load_parameters(&path, &model.parameters(), Cast::Allow).unwrap();
        model
    }

    /// Tokens and targets of a step.
    pub fn batch(&self, step: usize, device: &Device) -> (Tensor, Tensor) {
        let batch = self.batches.narrow(0, step, 1).unwrap();
        let &[_, rows, window] = batch.shape() else { panic!("tokens are [steps, batch, seq + 1]") };
        let bytes = batch.to_vec::<u8>().unwrap();
        let part = |from: usize| {
            let rows = bytes.chunks(window).flat_map(|row| row[from..from + window - 1].iter().map(|&b| i64::from(b)));
            rows.collect::<Vec<_>>()
        };
        let tensor = |from| Tensor::from_slice(device, &[rows, window - 1], &part(from)).unwrap();
        (tensor(0), tensor(1))
    }

    /// The golden optimizer; `decay` is `all` or `2d`.
    pub fn optimizer(&self, model: &Gpt, decay: &str) -> AdamW {
        let settings = &self.curve["adamw"];
        let number = |v: &Value| v.as_f64().unwrap();
        let config = AdamWConfig {
            lr: number(&settings["lr"]),
            beta1: number(&settings["betas"][0]),
            beta2: number(&settings["betas"][1]),
            eps: number(&settings["eps"]),
            weight_decay: number(&settings["weight_decay"]),
        };
        match decay {
            "all" => AdamW::decay_all(model.parameters(), config),
            "2d" => AdamW::decay_matrices(model.parameters(), config),
            other => panic!("decay rule {other}"),
        }
        .unwrap()
    }
}

/// One step under a policy: loss and gradients.
pub fn step(model: &Gpt, options: TapeOptions, (tokens, targets): &(Tensor, Tensor)) -> (f64, Gradients) {
    let tape = Tape::with(tokens.device(), options);
    let loss = model.loss(&tape, tokens, targets).unwrap();
    let value = loss.item().unwrap();
    (value, tape.backward(&loss).unwrap())
}

/// The L2 norm of all gradients together.
pub fn norm(gradients: &Gradients, parameters: &[Parameter]) -> f64 {
    retape_nn::clip_grad_norm(gradients, parameters, f64::INFINITY).unwrap().norm
}

/// The largest absolute difference of two tensors' elements, which must have one shape.
pub fn largest_difference(what: &str, ours: &Tensor, golden: &Tensor) -> f64 {
    assert_eq!(ours.shape(), golden.shape(), "shape of {what}");
    let (ours, golden) = (ours.to_f64_vec().unwrap(), golden.to_f64_vec().unwrap());
    let differences = ours.iter().zip(&golden).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |most: f64, d| if d.is_nan() { f64::NAN } else { most.max(d) })
}

/// Trains for the number of steps of the golden run `losses`, and compares each loss (and gradient norm, where given).
pub fn compare_curve(
    device: &Device,
    golden: &Golden,
    dtype: DType,
    form: AttentionForm,
    weights: &str,
    run: &str,
    losses: &str,
) {
    let decay = run.rsplit('.').next().expect("a run ends with its rule of decay");
    let config = golden.config(weights, dtype, form);
    let model = golden.model(device, weights, &config);
    let parameters = model.parameters();
    let mut optimizer = golden.optimizer(&model, decay);
    let tolerance = tolerance(dtype);
    let (losses, norms) = (golden.numbers(run, losses), golden.numbers(run, "grad_norm"));
    let (mut worst_loss, mut worst_norm) = (0.0f64, 0.0f64);
    for (i, &expected) in losses.iter().enumerate() {
        let (loss, gradients) = step(&model, TapeOptions::default(), &golden.batch(i, device));
        assert_relative_eq!(loss, expected, max_relative = tolerance.loss, epsilon = 0.0);
        worst_loss = worst_loss.max((loss - expected).abs() / expected);
        if let Some(&expected) = norms.get(i) {
            let norm = norm(&gradients, &parameters);
            assert_relative_eq!(norm, expected, max_relative = tolerance.norm, epsilon = 0.0);
            worst_norm = worst_norm.max((norm - expected).abs() / expected);
        }
        optimizer.step(&gradients, 1.0).unwrap();
    }
    let steps = losses.len();
    println!("{run} {form:?} {steps} steps: loss {worst_loss:.1e}, gradient norm {worst_norm:.1e} relative");
}
