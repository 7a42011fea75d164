//! Loss scaling: skipped steps, the scale's way down and up, and steps that scaling doesn't show in.

use crate::parameter;
use retape_core::{DType, Device, Gradients, Result, Tape, Var};
use retape_nn::{AdamW, AdamWConfig, LossScaler, Parameter};

const CONFIG: AdamWConfig = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

fn optimizer(w: &Parameter) -> AdamW {
    AdamW::decay_all(vec![w.clone()], CONFIG).unwrap()
}

/// The sum of 4 w, computed in f16: its gradient there is four times the scale.
fn gradients(scaler: &LossScaler, w: &Parameter) -> Gradients {
    let tape = Tape::new(&w.device());
    let loss = || -> Result<Var> { w.var(&tape).unwrap().cast(DType::F16)?.scale(4.0)?.sum() };
    let loss = loss().unwrap();
    scaler.backward(&tape, &loss).unwrap()
}

fn numbers(w: &Parameter) -> Vec<f64> {
    w.tensor().to_f64_vec().unwrap()
}

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

#[test]
fn overflow_skips_and_lowers_and_what_is_left_is_unscaled() {
    let device = cpu();
    let (w, plain) = (parameter(&device, "w", &[2], &[1.0, 2.0]), parameter(&device, "w", &[2], &[1.0, 2.0]));
    let (mut scaler, mut adamw) = (LossScaler::default(), optimizer(&w));
    for left in [32768.0, 16384.0, 8192.0] {
        let g = gradients(&scaler, &w);
        assert_eq!(scaler.step(&mut adamw, &g, std::slice::from_ref(&w), 1.0).unwrap(), None);
        assert_eq!((scaler.scale(), numbers(&w), adamw.state_bytes()), (left, vec![1.0, 2.0], 0));
    }
    let g = gradients(&scaler, &w);
    let clip = scaler.step(&mut adamw, &g, std::slice::from_ref(&w), 1.0).unwrap().unwrap();
    assert_eq!((clip.norm, scaler.scale()), (32f64.sqrt(), 8192.0));

    // The same numbers as a step without any scaling.
    let tape = Tape::new(&device);
    let loss = plain.var(&tape).unwrap().scale(4.0).unwrap().sum().unwrap();
    let g = tape.backward(&loss).unwrap();
    let mut adamw = optimizer(&plain);
    let clip = retape_nn::clip_grad_norm(&g, std::slice::from_ref(&plain), 1.0).unwrap();
    adamw.step(&g, clip.scale).unwrap();
    for (scaled, plain) in numbers(&w).iter().zip(numbers(&plain)) {
        approx::assert_relative_eq!(*scaled, plain, max_relative = 1e-12);
    }
}

#[test]
fn good_steps_raise_the_scale_and_its_state_can_be_saved() {
    let w = parameter(&cpu(), "w", &[1], &[1.0]);
    let mut scaler: LossScaler = serde_json::from_str(r#"{"scale":1024.0,"good":0}"#).unwrap();
    let mut adamw = optimizer(&w);
    for step in 1..=LossScaler::INTERVAL {
        let g = gradients(&scaler, &w);
        scaler.step(&mut adamw, &g, std::slice::from_ref(&w), f64::INFINITY).unwrap().unwrap();
        if step == 17 {
            scaler = serde_json::from_str(&serde_json::to_string(&scaler).unwrap()).unwrap();
        }
        assert_eq!(scaler.scale(), if step == LossScaler::INTERVAL { 2048.0 } else { 1024.0 });
    }
}

#[test]
fn what_no_scale_helps_is_an_error() {
    let w = parameter(&cpu(), "w", &[1], &[f64::NAN]);
    let (mut scaler, mut adamw) = (LossScaler::default(), optimizer(&w));
    let mut step = || {
        let tape = Tape::new(&w.device());
        let loss = w.var(&tape).unwrap().square().unwrap().sum().unwrap();
        let g = scaler.backward(&tape, &loss).unwrap();
        scaler.step(&mut adamw, &g, std::slice::from_ref(&w), 1.0)
    };
    for _ in 0..16 {
        assert_eq!(step().unwrap(), None);
    }
    assert!(step().unwrap_err().to_string().contains("infinity or NaN (first in `w`)"));
}
