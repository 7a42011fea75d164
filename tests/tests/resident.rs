//! The memory that a step really takes from the system, against what the meter counts. One test alone in its process.

#![cfg(target_os = "linux")]

use retape_core::{Policy, Tape, TapeOptions};
use retape_nn::data::ByteText;
use retape_nn::{Gpt, GptConfig};
use retape_policy::{ModelShape, presets::preset};
use std::rc::Rc;

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A pool may hold at most 10% + 16 MiB above the highest requested bytes; scratch private to kernels comes on top.
#[test]
fn resident_memory_follows_the_meter() {
    let device = retape_cpu::device_with_threads(2).unwrap();
    let config = GptConfig { layers: 3, ..GptConfig::named("w1").unwrap() };
    let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
    // Thread stacks, code pages, the text: there before.
    let warm = |layers| {
        let model = Gpt::new(&device, &GptConfig { layers, dim: 48, seq: 32, ..config.clone() }, 1).unwrap();
        let small = ByteText::moby_dick().batches(32, 1, 2).unwrap().batch(0);
        let (tokens, targets) = small.tensors(&device).unwrap();
        let tape = Tape::new(&device);
        tape.backward(&model.loss(&tape, &tokens, &targets).unwrap()).unwrap();
    };
    warm(1);
    let before = resident() - device.meter().live();
    let model = Gpt::new(&device, &config, 1).unwrap();
    let (tokens, targets) = batch.tensors(&device).unwrap();
    for name in ["none", "int8_all", "selective", "full_per_layer", "none"] {
        let policy: Rc<dyn Policy> = Rc::new(preset(name, &ModelShape { blocks: config.layers }).unwrap());
        let tape = Tape::with(&device, TapeOptions { policy: Some(policy), ..TapeOptions::default() });
        let loss = model.loss(&tape, &tokens, &targets).unwrap();
        tape.backward(&loss).unwrap();
    }
    let peak = device.meter().peak();
    let scratch = device.scratch_bytes();
    let held = resident() - before;
    let bound = peak + peak / 10 + (16 << 20) + scratch;
    println!("peak {peak}, resident {held}, scratch {scratch}, bound {bound}");
    assert!(held <= bound, "resident {held} bytes, allowed {bound} (peak {peak}, scratch {scratch})");
}
