//! Tests of the crate, one binary.

mod adamw;
mod builder;
mod checkpoint;
mod clip;
mod config;
mod data;
mod gpt;
mod handles;
mod loss_scaler;
mod parameter;
mod random;

use retape_core::{Device, Gradients, Tape, Tensor};
use retape_nn::{AttentionForm, GptConfig, Parameter};

/// A parameter of f64 numbers.
fn parameter(device: &Device, name: &str, shape: &[usize], values: &[f64]) -> Parameter {
    Parameter::new(name, Tensor::from_slice(device, shape, values).unwrap()).unwrap()
}

/// Exactly these gradients: of the sum over parameters of (parameter x constant).
fn gradients(device: &Device, of: &[(&Parameter, &[f64])]) -> Gradients {
    let tape = Tape::new(device);
    let mut total = None;
    for (parameter, values) in of {
        let constant = tape.constant(&Tensor::from_slice(device, &parameter.shape(), values).unwrap()).unwrap();
        let term = parameter.var(&tape).unwrap().mul(&constant).unwrap().sum().unwrap();
        total = Some(match total {
            Some(sum) => term.add(&sum).unwrap(),
            None => term,
        });
    }
    tape.backward(&total.unwrap()).unwrap()
}

/// A model that runs in no time.
fn small(attention: AttentionForm) -> GptConfig {
    GptConfig {
        layers: 2,
        dim: 8,
        heads: 4,
        kv_heads: 4,
        seq: 6,
        batch: 2,
        vocab: 11,
        attention,
        ..GptConfig::default()
    }
}

/// A file of its own in a directory of its own, removed at the end.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("retape-nn-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }
    fn path(&self, file: &str) -> std::path::PathBuf {
        self.0.join(file)
    }
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
