use crate::{Scratch, gradients, parameter};
use approx::assert_relative_eq;
use retape_core::{Kind, Tape, meta};
use retape_nn::{AdamW, AdamWConfig, Error, ParameterGroup};

const CONFIG: AdamWConfig = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-3, weight_decay: 0.2 };

/// The formula, written out.
fn by_hand(mut p: f64, gradients: &[f64], c: AdamWConfig) -> f64 {
    let (mut m, mut v) = (0.0, 0.0);
    for (i, g) in gradients.iter().enumerate() {
        let t = i as i32 + 1;
        p -= c.lr * c.weight_decay * p;
        m = c.beta1 * m + (1.0 - c.beta1) * g;
        v = c.beta2 * v + (1.0 - c.beta2) * g * g;
        let (mean, square) = (m / (1.0 - c.beta1.powi(t)), v / (1.0 - c.beta2.powi(t)));
        p -= c.lr * mean / (square.sqrt() + c.eps);
    }
    p
}

fn values(p: &retape_nn::Parameter) -> Vec<f64> {
    p.tensor().to_f64_vec().unwrap()
}

#[test]
fn as_by_hand() {
    let device = retape_cpu::device();
    let w = parameter(&device, "w", &[2, 1], &[1.0, -3.0]);
    let b = parameter(&device, "b", &[1], &[0.5]);
    let mut optimizer = AdamW::decay_matrices(vec![w.clone(), b.clone()], CONFIG).unwrap();
    let steps: [([f64; 2], f64); 3] = [([0.3, -2.0], 0.0), ([-1.0, 4.0], 2.0), ([0.0, 0.1], -1.0)];
    for (gw, gb) in &steps {
        optimizer.step(&gradients(&device, &[(&w, gw), (&b, &[*gb])]), 0.5).unwrap();
    }
    for (i, start) in [1.0, -3.0].into_iter().enumerate() {
        let expected = by_hand(start, &steps.map(|s| 0.5 * s.0[i]), CONFIG);
        assert_relative_eq!(values(&w)[i], expected, max_relative = 1e-14);
    }
    let no_decay = AdamWConfig { weight_decay: 0.0, ..CONFIG };
    assert_relative_eq!(values(&b)[0], by_hand(0.5, &steps.map(|s| 0.5 * s.1), no_decay), max_relative = 1e-14);
    assert_eq!(optimizer.state_bytes(), 2 * 3 * 8);
    assert_eq!(device.meter().live_of(Kind::Optimizer), 2 * 3 * 8);
    assert_eq!(device.meter().live_of(Kind::Parameter), 3 * 8);
}

#[test]
fn groups_have_their_own_settings() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[1], &[1.0]), parameter(&device, "b", &[1], &[1.0]));
    let slow = AdamWConfig { lr: 0.001, ..CONFIG };
    let group = |p: &retape_nn::Parameter, config| ParameterGroup { parameters: vec![p.clone()], config };
    let mut optimizer = AdamW::new(vec![group(&a, CONFIG), group(&b, slow)]).unwrap();
    optimizer.step(&gradients(&device, &[(&a, &[2.0]), (&b, &[2.0])]), 1.0).unwrap();
    assert_relative_eq!(values(&a)[0], by_hand(1.0, &[2.0], CONFIG), max_relative = 1e-14);
    assert_relative_eq!(values(&b)[0], by_hand(1.0, &[2.0], slow), max_relative = 1e-14);
    optimizer.set_lr(0.0).unwrap();
    let before = values(&a);
    optimizer.step(&gradients(&device, &[(&a, &[2.0])]), 1.0).unwrap();
    assert_eq!(values(&a), before);
}

#[test]
fn without_a_gradient_nothing_changes() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[1], &[1.0]), parameter(&device, "b", &[1], &[1.0]));
    let mut optimizer = AdamW::decay_all(vec![a.clone(), b.clone()], CONFIG).unwrap();
    optimizer.step(&gradients(&device, &[(&a, &[2.0])]), 1.0).unwrap();
    assert_eq!(values(&b), [1.0], "no decay either");
    assert_eq!(optimizer.state_bytes(), 16);
    // b's first step is its step 1, whenever it comes.
    optimizer.step(&gradients(&device, &[(&b, &[3.0])]), 1.0).unwrap();
    assert_relative_eq!(values(&b)[0], by_hand(1.0, &[3.0], CONFIG), max_relative = 1e-14);
    assert_relative_eq!(values(&a)[0], by_hand(1.0, &[2.0], CONFIG), max_relative = 1e-14);
}

#[test]
fn a_frozen_parameter_stays() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[1], &[1.0]), parameter(&device, "b", &[1], &[1.0]));
    b.set_requires_grad(false);
    let mut optimizer = AdamW::decay_all(vec![a.clone(), b.clone()], CONFIG).unwrap();
    optimizer.step(&gradients(&device, &[(&a, &[2.0]), (&b, &[2.0])]), 1.0).unwrap();
    assert_eq!(values(&b), [1.0]);
    assert_ne!(values(&a), [1.0]);
}

/// In place where nobody looks; a tape that is alive, or a tensor that the user holds, never sees the change.
#[test]
fn in_place_or_copied() {
    let device = retape_cpu::device();
    let w = parameter(&device, "w", &[1], &[2.0]);
    let mut optimizer = AdamW::decay_all(vec![w.clone()], CONFIG).unwrap();
    let address = || w.tensor().storage().address();
    let g = gradients(&device, &[(&w, &[1.0])]);
    let first = address();
    optimizer.step(&g, 1.0).unwrap();
    assert_eq!(address(), first, "nobody else held it: overwritten");

    let seen = w.tensor();
    let before = seen.to_f64_vec().unwrap();
    let tape = Tape::new(&device);
    let x = w.var(&tape).unwrap();
    let loss = x.mul(&x).unwrap().sum().unwrap();
    optimizer.step(&g, 1.0).unwrap();
    assert_ne!(address(), first, "held by a tape and a user: replaced");
    assert_eq!(seen.to_f64_vec().unwrap(), before);
    let late = tape.backward(&loss).unwrap();
    assert_eq!(late.of(&x).unwrap().to_f64_vec().unwrap(), [2.0 * before[0]], "the tape's gradient is of its numbers");
    assert_ne!(values(&w), before);
    drop((seen, x, loss, tape, late, g));
    assert_eq!(device.meter().live_of(Kind::Parameter), 8);
}

#[test]
fn wrong_settings() {
    let device = meta();
    let w = || parameter(&device, "w", &[1], &[1.0]);
    let error = |config| AdamW::decay_all(vec![w()], config).unwrap_err().to_string();
    assert_eq!(error(AdamWConfig { beta1: 1.0, ..CONFIG }), "AdamW: beta1 must be in [0, 1), got 1");
    assert_eq!(error(AdamWConfig { lr: f64::NAN, ..CONFIG }), "AdamW: lr must be finite and at least 0, got NaN");
    assert_eq!(error(AdamWConfig { eps: -1.0, ..CONFIG }), "AdamW: eps must be finite and at least 0, got -1");
    let twice = w();
    let error = AdamW::decay_all(vec![twice.clone(), twice], CONFIG).unwrap_err().to_string();
    assert_eq!(error, "AdamW: parameter `w` is given twice");
    let mut optimizer = AdamW::decay_all(vec![w()], CONFIG).unwrap();
    assert!(optimizer.set_config(1, CONFIG).unwrap_err().to_string().contains("no group 1"));
}

#[test]
fn state_goes_to_disk_and_back() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("adamw");
    let path = scratch.path("optimizer.safetensors");
    let run = |stop: bool| {
        let w = parameter(&device, "w", &[2], &[1.0, -3.0]);
        let unused = parameter(&device, "unused", &[1], &[1.0]);
        let mut optimizer = AdamW::decay_all(vec![w.clone(), unused.clone()], CONFIG).unwrap();
        for i in 0..4 {
            if stop && i == 2 {
                optimizer.save(&path).unwrap();
                optimizer = AdamW::decay_all(vec![w.clone(), unused.clone()], CONFIG).unwrap();
                optimizer.load(&path).unwrap();
            }
            optimizer.step(&gradients(&device, &[(&w, &[0.3 + i as f64, -2.0])]), 1.0).unwrap();
        }
        values(&w)
    };
    assert_eq!(run(true), run(false));
    assert_eq!(scratch.files(), ["optimizer.safetensors"]);

    let mut other = AdamW::decay_all(vec![parameter(&device, "v", &[2], &[0.0, 0.0])], CONFIG).unwrap();
    assert!(matches!(other.load(&path), Err(Error::UnexpectedTensor { name, more: 2, .. }) if name == "w.m"));
    let mut other = AdamW::decay_all(vec![parameter(&device, "w", &[1], &[0.0])], CONFIG).unwrap();
    assert!(matches!(other.load(&path), Err(Error::WrongShape { .. })));
    assert_eq!(other.state_bytes(), 0, "a file that was refused changed nothing");
}

#[test]
fn a_step_without_memory_changes_nothing() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[2], &[1.0, 1.0]), parameter(&device, "b", &[64], &[1.0; 64]));
    let mut optimizer = AdamW::decay_all(vec![a.clone(), b.clone()], CONFIG).unwrap();
    let g = gradients(&device, &[(&a, &[1.0, 1.0]), (&b, &[1.0; 64])]);
    device.meter().set_limit(Some(device.meter().live() + 700));
    assert!(matches!(optimizer.step(&g, 1.0), Err(Error::Core(retape_core::Error::OutOfMemory { .. }))));
    device.meter().set_limit(None);
    assert_eq!(values(&a), [1.0, 1.0]);
    optimizer.step(&g, 1.0).unwrap();
    assert_relative_eq!(values(&a)[0], by_hand(1.0, &[1.0], CONFIG), max_relative = 1e-14);
}
