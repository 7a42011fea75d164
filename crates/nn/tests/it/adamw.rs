use crate::{Scratch, gradients, parameter};
use approx::assert_relative_eq;
use retape_core::{BackwardOptions, DType, Device, Gradients, MemoryKind, Tape, Tensor, kernel, meta};
use retape_nn::checkpoint::{Cast, load_parameters, load_training, save_parameters, save_training};
use retape_nn::{AdamW, AdamWConfig, Error, Parameter, ParameterGroup};

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
    assert_eq!(device.meter().live_of(MemoryKind::Optimizer), 2 * 3 * 8);
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 3 * 8);
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
    let loss = x.clone().mul(&x).unwrap().sum().unwrap();
    optimizer.step(&g, 1.0).unwrap();
    assert_ne!(address(), first, "held by a tape and a user: replaced");
    assert_eq!(seen.to_f64_vec().unwrap(), before);
    let late = tape.backward(&loss).unwrap();
    assert_eq!(late.of(&x).unwrap().to_f64_vec().unwrap(), [2.0 * before[0]], "the tape's gradient is of its numbers");
    assert_ne!(values(&w), before);
    drop((seen, x, loss, tape, late, g));
    assert_eq!(device.meter().live_of(MemoryKind::Parameter), 8);
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

const PLAIN: AdamWConfig = AdamWConfig { lr: 6e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };

fn filled(device: &Device, name: &str, dtype: DType, value: f64) -> Parameter {
    Parameter::new(name, Tensor::full(device, &[5], dtype, value).unwrap()).unwrap()
}

/// The gradient `value` for every element, in the parameter's dtype.
fn constant_gradient(p: &Parameter, value: f64) -> Gradients {
    let tape = Tape::new(&p.device());
    let x = p.var(&tape).unwrap();
    let ones = Tensor::full(&p.device(), &p.shape(), p.dtype(), value).unwrap();
    tape.backward_from(&[(&x.scale(1.0).unwrap(), &ones)], BackwardOptions::default()).unwrap()
}

/// 1000 steps of 6e-4 from 1.0, each far below what 16 bits hold beside it, are 0.6. And 16 bits are no more than the
/// rounding of what f32 does, also where squares of gradients are below the smallest f16.
#[test]
fn small_steps_add_up_in_sixteen_bits() {
    let device = retape_cpu::device();
    for (dtype, rounding) in [(DType::BF16, 2e-3), (DType::F16, 3e-4)] {
        // Powers of two, which every dtype holds.
        for gradient in [1.0, 2f64.powi(-13), 512.0] {
            for config in [PLAIN, AdamWConfig { weight_decay: 0.01, ..PLAIN }] {
                let (half, full) = (filled(&device, "w", dtype, 1.0), filled(&device, "w", DType::F32, 1.0));
                let mut of_half = AdamW::decay_all(vec![half.clone()], config).unwrap();
                let mut of_full = AdamW::decay_all(vec![full.clone()], config).unwrap();
                for _ in 0..1000 {
                    of_half.step(&constant_gradient(&half, gradient), 1.0).unwrap();
                    of_full.step(&constant_gradient(&full, gradient), 1.0).unwrap();
                }
                let rounded = full.tensor().cast(dtype, MemoryKind::Input).unwrap();
                assert_eq!(half.tensor().to_bytes().unwrap(), rounded.to_bytes().unwrap(), "{dtype} {gradient}");
                let expected = by_hand(1.0, &[gradient; 1000], config);
                assert!((values(&half)[0] - expected).abs() < rounding, "{dtype}: {} for {expected}", values(&half)[0]);
                if config.weight_decay == 0.0 {
                    assert!((values(&half)[0] - 0.4).abs() < rounding);
                }
            }
        }
    }
}

/// Two moments in the dtype that is computed in, and a master copy for 16 bits; the meta device sees the same.
#[test]
fn the_state_is_counted() {
    for (dtype, bytes) in [(DType::F64, 16), (DType::F32, 8), (DType::BF16, 12), (DType::F16, 12)] {
        let run = |device: &Device| {
            let w = filled(device, "w", dtype, 1.0);
            let mut optimizer = AdamW::decay_all(vec![w.clone()], PLAIN).unwrap();
            let mut figures = vec![];
            for _ in 0..2 {
                let g = constant_gradient(&w, 1.0);
                device.meter().reset_peak();
                optimizer.step(&g, 1.0).unwrap();
                figures.push((device.meter().step_peak(), device.meter().fingerprint()));
            }
            w.set(w.tensor().copy(MemoryKind::Parameter).unwrap()).unwrap();
            optimizer.step(&constant_gradient(&w, 1.0), 1.0).unwrap();
            assert_eq!(optimizer.state_bytes(), 5 * bytes, "{dtype}");
            assert_eq!(device.meter().live_of(MemoryKind::Optimizer) as usize, 5 * bytes, "{dtype}");
            (figures, device.meter().live(), device.meter().fingerprint())
        };
        assert_eq!(run(&retape_cpu::device()), run(&meta()), "{dtype}");
    }
}

/// Stopped after any step and read from files in any order, the run has the bits of one that never stopped.
#[test]
fn sixteen_bits_resume_with_the_same_bits() {
    let device = retape_cpu::device();
    let scratch = Scratch::new("master");
    let (model, state) = (scratch.path("model"), scratch.path("state"));
    let config = AdamWConfig { weight_decay: 0.01, ..PLAIN };
    for dtype in [DType::BF16, DType::F16] {
        let fresh = |value: f64| {
            let w = filled(&device, "w", dtype, value);
            (w.clone(), AdamW::decay_all(vec![w], config).unwrap())
        };
        let run = |stop_after: usize, how: usize| {
            let (mut w, mut optimizer) = fresh(1.0);
            for i in 0..60 {
                if i == stop_after {
                    let (to, mut adamw) = fresh(3.0);
                    match how {
                        0 => {
                            save_training(&model, &[w], &optimizer, &[]).unwrap();
                            load_training(&model, std::slice::from_ref(&to), Some(&mut adamw)).unwrap();
                        }
                        _ => {
                            save_parameters(&model, &[w], &[]).unwrap();
                            optimizer.save(&state).unwrap();
                            if how == 1 {
                                adamw.load(&state).unwrap();
                            }
                            load_parameters(&model, std::slice::from_ref(&to), Cast::Refuse).unwrap();
                            if how == 2 {
                                adamw.load(&state).unwrap();
                            }
                        }
                    }
                    (w, optimizer) = (to, adamw);
                }
                optimizer.step(&constant_gradient(&w, 0.25), 1.0).unwrap();
            }
            let state = optimizer.state().unwrap();
            let names: Vec<String> = state.iter().map(|s| s.name.clone()).collect();
            assert_eq!(names, ["w.m", "w.v", "w.master", "w.step"]);
            (w.tensor().to_bytes().unwrap(), state.iter().map(|s| s.tensor.to_bytes().unwrap()).collect::<Vec<_>>())
        };
        let whole = run(usize::MAX, 0);
        for how in 0..3 {
            assert!([1, 31, 59].into_iter().all(|stop_after| run(stop_after, how) == whole), "{dtype}, order {how}");
        }
    }
}

/// Numbers that the user sets are the parameter's from then on.
#[test]
fn a_parameter_that_is_set_is_followed() {
    let device = retape_cpu::device();
    let w = filled(&device, "w", DType::BF16, 1.0);
    let mut optimizer = AdamW::decay_all(vec![w.clone()], PLAIN).unwrap();
    optimizer.step(&constant_gradient(&w, 1.0), 1.0).unwrap();
    w.set(Tensor::full(&device, &[5], DType::BF16, -8.0).unwrap()).unwrap();
    optimizer.step(&constant_gradient(&w, 1.0), 1.0).unwrap();
    assert_eq!(values(&w), [-8.0; 5]);
    for _ in 0..998 {
        optimizer.step(&constant_gradient(&w, 1.0), 1.0).unwrap();
    }
    assert!((values(&w)[0] + 8.6).abs() < 0.04, "{}", values(&w)[0]);
}

/// The kernel by itself refuses operands that don't belong together.
#[test]
fn the_kernel_checks_its_operands() {
    let (device, other) = (retape_cpu::device(), retape_cpu::device());
    let t = |shape: &[usize], dtype| Tensor::full(&device, shape, dtype, 1.0).unwrap();
    let run = |p: &Tensor, [g, m, v]: [&Tensor; 3]| {
        let kernel = kernel::AdamW { p, g, m, v, step: 1, config: PLAIN, grad_scale: 1.0 };
        device.run(kernel).unwrap_err().to_string()
    };
    let p = t(&[4], DType::F32);
    let foreign = Tensor::full(&other, &[4], DType::F32, 1.0).unwrap();
    for wrong in [t(&[8], DType::F32), t(&[3], DType::F32), t(&[4], DType::F64), t(&[4], DType::I64), foreign] {
        for place in 0..3 {
            let mut others = [&p; 3];
            others[place] = &wrong;
            let error = run(&p, others);
            assert!(error.contains("adamw"), "{error}");
        }
    }
    run(&t(&[4], DType::I32), [&p; 3]);
    assert_eq!(p.to_vec::<f32>().unwrap(), [1.0; 4]);
}
