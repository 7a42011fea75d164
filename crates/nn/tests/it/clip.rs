use crate::{gradients, parameter};
use approx::assert_relative_eq;
use retape_core::{DType, Kind, Tape, Tensor, meta};
use retape_nn::{Error, Parameter, clip_grad_norm};

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
    assert_eq!(device.meter().live_of(Kind::Workspace), 0);
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
        "the gradient norm is NaN: a gradient holds an infinity or NaN (first in `b`); nothing was updated"
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
