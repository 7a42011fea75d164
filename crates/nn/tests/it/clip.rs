use crate::{gradients, parameter};
use approx::assert_relative_eq;
use retape_core::{DType, MemoryKind, ParameterId, Tape, Tensor, meta};
use retape_nn::{AdamW, AdamWConfig, Error, LossScaler, Parameter, clip_grad_norm};

#[test]
fn norm_and_scale() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[2], &[0.0, 0.0]), parameter(&device, "b", &[1], &[0.0]));
    let unused = parameter(&device, "unused", &[1], &[0.0]);
    let g = gradients(&device, &[(&a, &[2.0, 3.0]), (&b, &[6.0])]);
    let all = [a, b, unused];
    let clip = clip_grad_norm(&g, &all, 3.5).unwrap();
    assert_eq!(clip.norm, 7.0);
    assert_eq!(clip.scale, 0.5);
    assert_eq!(clip_grad_norm(&g, &all, 7.0).unwrap().scale, 1.0);
    assert_eq!(clip_grad_norm(&g, &all, f64::INFINITY).unwrap().scale, 1.0);
    assert_eq!(clip_grad_norm(&g, &[], 1.0).unwrap().norm, 0.0);
    assert_eq!(device.meter().live_of(MemoryKind::Workspace), 0);
    for bound in [0.0, -1.0, f64::NAN] {
        assert!(matches!(clip_grad_norm(&g, &all, bound), Err(Error::Optimizer { .. })));
    }
}

/// 1e25 squared is no f32.
#[test]
fn f32_gradients_are_summed_in_f64() {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let w = Parameter::new("w", Tensor::full(&device, &[4], DType::F32, 1.0).unwrap()).unwrap();
    let loss = w.var(&tape).unwrap().scale(1e25).unwrap().sum().unwrap();
    let g = tape.backward(&loss).unwrap();
    assert_relative_eq!(clip_grad_norm(&g, &[w], 1.0).unwrap().norm, 2e25, max_relative = 1e-6);
}

#[test]
fn what_is_not_finite_is_named() {
    let device = retape_cpu::device();
    let (a, b) = (parameter(&device, "a", &[1], &[0.0]), parameter(&device, "b", &[1], &[0.0]));
    let g = gradients(&device, &[(&a, &[1.0]), (&b, &[f64::NAN])]);
    let error = clip_grad_norm(&g, &[a, b], 1.0).unwrap_err().to_string();
    assert_eq!(
        error,
        "the gradient norm is NaN: a gradient holds an infinity or NaN (first in `b`), or all are too large for f64 \
         together; nothing was updated"
    );
}

#[test]
fn meta_has_no_norm_but_the_same_bytes() {
    let device = meta();
    let a = parameter(&device, "a", &[1], &[0.0]);
    let clip = clip_grad_norm(&gradients(&device, &[(&a, &[2.0])]), &[a], 1.0).unwrap();
    assert!(clip.norm.is_nan());
    assert_eq!(clip.scale, 1.0);
}

const CONFIG: AdamWConfig = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };

/// Squares that leave the range of f64, on either side: the norm is right, and the clipped step is that of the
/// direction.
#[test]
fn squares_beyond_f64() {
    let device = retape_cpu::device();
    for (values, norm) in [
        ([3e200, 4e200], 5e200),
        ([3e307, 4e307], 5e307),
        ([3e-200, 4e-200], 5e-200),
        ([3e-310, 4e-310], 5e-310),
        ([1e308, 0.0], 1e308),
        ([0.0, 0.0], 0.0),
        // One that is far smaller than the other counts nothing.
        ([1e300, 1e-300], 1e300),
    ] {
        let (a, b) = (parameter(&device, "a", &[1], &[1.0]), parameter(&device, "b", &[1], &[1.0]));
        let g = gradients(&device, &[(&a, &values[..1]), (&b, &values[1..])]);
        let all = [a, b];
        let clip = clip_grad_norm(&g, &all, 1.0).unwrap();
        assert_relative_eq!(clip.norm, norm, max_relative = 1e-12);
        assert_relative_eq!(clip.scale, if norm > 1.0 { 1.0 / norm } else { 1.0 }, max_relative = 1e-12);
    }
    // Finite gradients with a norm beyond f64.
    let a = parameter(&device, "a", &[2], &[1.0, 1.0]);
    let error = clip_grad_norm(&gradients(&device, &[(&a, &[1.7e308, 1.7e308])]), &[a], 1.0).unwrap_err();
    assert!(matches!(&error, Error::NonFiniteNorm { norm, parameter } if *norm == f64::INFINITY && parameter == "a"));
    // No f64 brings this norm to this bound.
    let a = parameter(&device, "a", &[1], &[1.0]);
    let error = clip_grad_norm(&gradients(&device, &[(&a, &[1e300])]), &[a], 1e-300).unwrap_err();
    assert!(error.to_string().contains("1e-300"), "{error}");
}

/// What isn't finite is no good step, whichever parameter and place it is in, and changes nothing.
#[test]
fn what_is_not_finite_is_no_good_step() {
    let device = retape_cpu::device();
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for place in 0..4 {
            let all = ["a", "b"].map(|name| parameter(&device, name, &[2], &[1.0, 2.0]));
            let mut values = [1e200; 4];
            values[place] = bad;
            let g = gradients(&device, &[(&all[0], &values[..2]), (&all[1], &values[2..])]);
            let mut optimizer = AdamW::decay_all(all.to_vec(), CONFIG).unwrap();
            let named = all[place / 2].name().to_owned();
            let error = clip_grad_norm(&g, &all, 1.0).unwrap_err();
            assert!(matches!(&error, Error::NonFiniteNorm { parameter, .. } if *parameter == named), "{error}");
            let mut scaler = LossScaler::default();
            assert_eq!(scaler.step(&mut optimizer, &g, &all, 1.0).unwrap(), None);
            assert_eq!(scaler.scale(), LossScaler::default().scale() / 2.0);
            assert_eq!(serde_json::to_value(scaler).unwrap()["good"], 0);
            assert_eq!(optimizer.state_bytes(), 0);
            assert!(all.iter().all(|p| p.tensor().to_f64_vec().unwrap() == [1.0, 2.0]));
        }
    }
    // Large ones are finite, and a good step under any scale.
    let w = parameter(&device, "w", &[2], &[1.0, 2.0]);
    let mut optimizer = AdamW::decay_all(vec![w.clone()], CONFIG).unwrap();
    let mut scaler = LossScaler::default();
    let clip = scaler
        .step(&mut optimizer, &gradients(&device, &[(&w, &[3e200, 4e200])]), std::slice::from_ref(&w), 1.0)
        .unwrap();
    assert_relative_eq!(clip.unwrap().norm, 5e200 / 65536.0, max_relative = 1e-12);
    assert_eq!(serde_json::to_value(scaler).unwrap()["good"], 1);
    // The first step of AdamW goes lr in the direction of the sign.
    assert_relative_eq!(w.tensor().to_f64_vec().unwrap()[0], 0.9, max_relative = 1e-6);
}

/// f32 gradients up to the largest: clipped to a step of the right size, or an error that says what f32 can't hold.
#[test]
fn f32_gradients_near_the_largest() {
    let device = retape_cpu::device();
    for (size, fits) in [(1e30, true), (1e36, true), (3e38, false)] {
        let w = Parameter::new("w", Tensor::full(&device, &[4], DType::F32, 1.0).unwrap()).unwrap();
        let tape = Tape::new(&device);
        let g = tape.backward(&w.var(&tape).unwrap().scale(size).unwrap().sum().unwrap()).unwrap();
        let mut optimizer = AdamW::decay_all(vec![w.clone()], CONFIG).unwrap();
        let clip = clip_grad_norm(&g, std::slice::from_ref(&w), 1.0).unwrap();
        assert_relative_eq!(clip.norm, 2.0 * size, max_relative = 1e-6);
        let step = optimizer.step(&g, clip.scale);
        assert_eq!(step.is_ok(), fits, "{step:?}");
        if fits {
            assert_relative_eq!(w.tensor().to_f64_vec().unwrap()[0], 0.9, max_relative = 1e-6);
        } else {
            let error = step.unwrap_err().to_string();
            assert!(error.contains("grad_scale") && error.contains("`w` (f32)"), "{error}");
            assert_eq!((w.tensor().to_f64_vec().unwrap(), optimizer.state_bytes()), (vec![1.0; 4], 0));
        }
    }
}

#[test]
fn a_tied_weight_counts_once() {
    let device = retape_cpu::device();
    let w = parameter(&device, "w", &[2], &[0.0, 0.0]);
    let g = gradients(&device, &[(&w, &[3.0, 4.0])]);
    assert_eq!(clip_grad_norm(&g, &[w.clone(), w], 1.0).unwrap().norm, 5.0);
}

/// A gradient that isn't its parameter's is refused before anything changes.
#[test]
fn a_gradient_of_another_kind_is_refused() {
    let device = retape_cpu::device();
    let ones = |shape: &[usize], dtype| Tensor::full(&device, shape, dtype, 1.0).unwrap();
    let before = Parameter::new("before", ones(&[2], DType::F32)).unwrap();
    let w = Parameter::new("w", ones(&[4], DType::F32)).unwrap();
    let given = |id: ParameterId, wrong: &Tensor| {
        let tape = Tape::new(wrong.device());
        let x = tape.parameter(id, wrong, true).unwrap();
        tape.backward(&x.square().unwrap().sum().unwrap()).unwrap()
    };
    let elsewhere = retape_cpu::device();
    for wrong in [
        ones(&[8], DType::F32),
        ones(&[2, 2], DType::F32),
        ones(&[4], DType::F64),
        ones(&[4], DType::BF16),
        Tensor::full(&elsewhere, &[4], DType::F32, 1.0).unwrap(),
    ] {
        let mut optimizer = AdamW::decay_all(vec![before.clone(), w.clone()], CONFIG).unwrap();
        let error = optimizer.step(&given(w.id(), &wrong), 1.0).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Optimizer { .. }), "{text}");
        let found = format!("{}{:?}", wrong.dtype(), wrong.shape());
        assert!(text.contains("`w`") && text.contains(&found) && text.contains("f32[4]"), "{text}");
        assert_eq!((w.tensor().to_f64_vec().unwrap(), optimizer.state_bytes()), (vec![1.0; 4], 0));
    }
}
