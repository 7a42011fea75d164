//! Rows of large, saturated and tiny numbers. Reported in: pytorch 125674, flash-attention 1012, 1046 (a maximum and a
//! logarithm in one number); pytorch 178123 (layer norm around 1e19); jax 6811, pytorch 31829 (log-sum-exp of nothing but
//! -inf). What is right is a closed form, or f64.

use retape_core::kernel::{CrossEntropySpec, LossReduction};
use retape_core::{DType, Result, Tape, Tensor, Var};
use retape_tests::floats;

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const INF: f64 = f64::INFINITY;

/// The value of f, and the gradient of its sum weighted by 1, 2, ..
fn run(shape: &[usize], x: &[f64], dtype: DType, f: impl Fn(&Var) -> Result<Var>) -> (Vec<f64>, Vec<f64>) {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, shape, x, dtype)).unwrap();
    let y = f(&x).unwrap();
    let g: Vec<f64> = (1..=y.shape().iter().product()).map(|i: usize| i as f64).collect();
    let value = y.tensor().unwrap().to_f64_vec().unwrap();
    let gradients = tape.backward_from(&[(&y, &floats(&device, &y.shape(), &g, y.dtype()))], false).unwrap();
    (value, gradients.of(&x).unwrap().to_f64_vec().unwrap())
}

fn close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let near = |(a, e): (&f64, &f64)| a == e || (a - e).abs() <= tolerance;
    assert!(actual.iter().zip(expected).all(near), "{what}: {actual:?}, should be {expected:?}");
}

fn targets(x: &Var, ids: &[i64]) -> Var {
    x.tape().constant(&Tensor::from_slice(&x.tape().device(), &[ids.len()], ids).unwrap()).unwrap()
}

const EACH: CrossEntropySpec = CrossEntropySpec { ignore: -100, reduction: LossReduction::None, smoothing: 0.0 };

/// n equal logits are n equal chances, however large they are.
#[test]
fn equal_logits_are_equal_chances() {
    for dtype in FLOATS {
        let tolerance = if matches!(dtype, DType::BF16 | DType::F16) { 4e-3 } else { 1e-6 };
        for logit in [0.0, -1e4, 1e4, 6e4, -1e9, 1e8, f32::MIN as f64] {
            let most = match dtype {
                DType::F16 => 65504.0,
                DType::BF16 => 3.38e38,
                _ => f64::MAX,
            };
            if logit.abs() > most {
                continue;
            }
            for n in [3, 4, 100] {
                let what = format!("{n} logits of {logit:e} in {dtype}");
                let (x, chance) = (vec![logit; n], 1.0 / n as f64);
                let entropy = (n as f64).ln();
                let mut at_class = vec![chance; n];
                at_class[1] -= 1.0;
                for smoothing in [0.0, 0.5] {
                    let spec = CrossEntropySpec { smoothing, ..EACH };
                    let (loss, dx) =
                        run(&[1, n], &x, dtype, |x| x.cross_entropy_with(&targets(x, &[1]), None, 1, spec));
                    close(&what, &loss, &[entropy], tolerance * entropy);
                    // The even part of the target cancels.
                    let expected: Vec<f64> = at_class.iter().map(|g| g * (1.0 - smoothing)).collect();
                    close(&what, &dx, &expected, tolerance);
                }
                let even = |x: &Var| {
                    let even = floats(&x.tape().device(), &[1, n], &vec![0.25; n], dtype);
                    x.cross_entropy_with(&x.tape().constant(&even)?, None, 1, EACH)
                };
                let (loss, dx) = run(&[1, n], &x, dtype, even);
                close(&what, &loss, &[n as f64 / 4.0 * entropy], tolerance * n as f64 * entropy);
                close(&what, &dx, &vec![0.0; n], tolerance);
                let (y, dx) = run(&[1, n], &x, dtype, |x| x.logsumexp(&[1], false));
                if dtype == DType::F64 {
                    close(&what, &y, &[logit + entropy], 1e-6);
                }
                close(&what, &dx, &vec![chance; n], tolerance);
                let (y, _) = run(&[1, n], &x, dtype, |x| x.log_softmax(1));
                close(&what, &y, &vec![-entropy; n], tolerance * entropy);
                let (y, _) = run(&[1, n], &x, dtype, Var::softmax);
                close(&what, &y, &vec![chance; n], tolerance);
            }
        }
    }
}

/// The mean loss of a language model's head, whose path is another.
#[test]
fn a_wide_loss_of_large_logits() {
    for dtype in [DType::F32, DType::BF16] {
        let (loss, dx) = run(&[1, 4], &[1e8; 4], dtype, |x| x.cross_entropy(&targets(x, &[2]), -100));
        close("loss", &loss, &[4f64.ln()], 1e-6);
        close("gradient", &dx, &[0.25, 0.25, -0.75, 0.25], 1e-6);
    }
}

/// A row of only -inf has no gradient, and one with some -inf is as if these were not there.
#[test]
fn what_is_masked_has_no_gradient() {
    let x = [-INF, -INF, -INF, 2.0, -INF, 2.0];
    for dtype in FLOATS {
        let run = |f: &dyn Fn(&Var) -> Result<Var>| run(&[2, 3], &x, dtype, f);
        let (y, dx) = run(&|x| x.logsumexp(&[1], false));
        assert_eq!(y[0], -INF, "{dtype}");
        close("log-sum-exp", &dx, &[0.0, 0.0, 0.0, 1.0, 0.0, 1.0], 0.0);
        let (y, dx) = run(&Var::softmax);
        close("softmax", &y, &[0.0, 0.0, 0.0, 0.5, 0.0, 0.5], 0.0);
        close("softmax", &dx, &[0.0, 0.0, 0.0, -0.5, 0.0, 0.5], 0.0);
        let (y, dx) = run(&|x| x.log_softmax(1));
        close("log-softmax", &y[..3], &[-INF; 3], 0.0);
        close("log-softmax", &dx, &[0.0, 0.0, 0.0, -3.5, 5.0, -1.5], 0.05);
        let (y, dx) = run(&|x| x.cross_entropy_with(&targets(x, &[0, 2]), None, 1, EACH));
        close("cross-entropy", &y, &[INF, 2f64.ln()], 4e-3);
        close("cross-entropy", &dx, &[0.0, 0.0, 0.0, 1.0, 0.0, -1.0], 0.0);
        let (y, dx) = run(&|x| x.amax(&[1], false));
        close("amax", &y, &[-INF, 2.0], 0.0);
        close("amax", &dx, &[1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 1.0, 0.0, 1.0], 2e-3);
    }
}

/// Norms don't depend on the scale, and their gradients go with its inverse; deviations and norms go with it.
#[test]
fn norms_far_from_one() {
    let row = [0.5, -1.0, 1.5, 0.25, 2.0, -0.75];
    type Norm<'a> = (&'a str, f64, &'a dyn Fn(&Var) -> Result<Var>);
    let norms: [Norm<'_>; 9] = [
        ("layer_norm", 0.0, &|x| x.layer_norm(None, None, 0.0)),
        ("rms_norm", 0.0, &|x| x.rms_norm(&[3], None, Some(0.0))),
        ("group_norm", 0.0, &|x| x.group_norm(1, None, None, 0.0)),
        ("normalize", 0.0, &|x| x.normalize(2.0, -1, 0.0)),
        ("normalize by 3", 0.0, &|x| x.normalize(3.0, -1, 0.0)),
        ("std", 1.0, &|x| x.std(&[-1], 1.0, false)),
        ("norm 2", 1.0, &|x| x.vector_norm(2.0, &[-1], false)),
        ("norm 3", 1.0, &|x| x.vector_norm(3.0, &[-1], false)),
        ("norm 1/2", 1.0, &|x| x.vector_norm(0.5, &[-1], false)),
    ];
    for (name, power, f) in norms {
        let (y, dx) = run(&[2, 3], &row, DType::F64, f);
        let scales = [(DType::F32, -83), (DType::F32, 63), (DType::F32, 120), (DType::BF16, 63), (DType::BF16, -83)];
        for (dtype, exponent) in scales.into_iter().chain([(DType::F64, 700), (DType::F64, -700)]) {
            let scale = 2f64.powi(exponent);
            let x: Vec<f64> = row.iter().map(|x| x * scale).collect();
            let (far_y, far_dx) = run(&[2, 3], &x, dtype, f);
            let what = format!("{name} in {dtype} at 2^{exponent}");
            let tolerance = if dtype == DType::BF16 { 0.05 } else { 1e-5 };
            let back = |values: Vec<f64>, power: f64| values.iter().map(|v| v / scale.powf(power)).collect::<Vec<_>>();
            close(&what, &back(far_y, power), &y, tolerance);
            close(&what, &back(far_dx, power - 1.0), &dx, tolerance);
        }
    }
}

/// A parameter's gradient and the statistics are finite there too, and eps still counts.
#[test]
fn layer_norm_around_1e19() {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, &[2, 2], &[1e19, -1e19, 3e-25, 1e-25], DType::F32)).unwrap();
    let [w, b] = [[2.0, 1.0], [0.5, 0.0]].map(|v| tape.leaf(&floats(&device, &[2], &v, DType::F32)).unwrap());
    let y = x.layer_norm(Some(&w), Some(&b), 1e-5).unwrap();
    // Of two numbers xhat is +-1, but where eps is all there is.
    close("y", &y.tensor().unwrap().to_f64_vec().unwrap(), &[2.5, -1.0, 0.5, 0.0], 1e-6);
    let gradients = tape.backward(&y.sum().unwrap()).unwrap();
    let of = |v: &Var| gradients.of(v).unwrap().to_f64_vec().unwrap();
    close("dw", &of(&w), &[1.0, -1.0], 1e-6);
    close("db", &of(&b), &[2.0, 2.0], 0.0);
    // rstd (e - mean(e)) = 1 / sqrt(1e-5) * +-1/2 in the second row; of two numbers the first row's cancels.
    close("dx", &of(&x)[2..], &[158.11388, -158.11388], 1e-3);
    assert!(of(&x)[..2].iter().all(|d| d.abs() < 1e-24), "{:?}", of(&x));
}

/// A sure and right answer costs what is left, not the rounding of the logit; a masked class without a share costs nothing.
#[test]
fn binary_cross_entropy_of_sure_logits() {
    let logits = [20.0, -20.0, 1e9, -1e9, -INF, 20.0];
    let target = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0];
    let tiny = (-20f64).exp().ln_1p();
    for (dtype, weighted) in FLOATS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
        let (loss, dx) = run(&[6], &logits, dtype, |x| {
            let constant =
                |values: &[f64]| x.tape().constant(&floats(&x.tape().device(), &[values.len()], values, dtype));
            let weight = constant(&[3.0])?;
            x.binary_cross_entropy_with_logits(
                &constant(&target)?,
                None,
                weighted.then_some(&weight),
                LossReduction::None,
            )
        });
        let w = if weighted { 3.0 } else { 1.0 };
        let expected = [w * tiny, tiny, 0.0, 0.0, 0.0, 20.0 + tiny];
        let least = if dtype == DType::F16 { 6e-8 } else { 0.0 };
        for (a, e) in loss.iter().zip(expected) {
            assert!(
                (a - e).abs() <= 0.01 * e + least,
                "{dtype}, weighted {weighted}: {loss:?}, should be {expected:?}"
            );
        }
        let p = 1.0 / (1.0 + 20f64.exp());
        let expected = [-w * p, 2.0 * p, 0.0, 0.0, 0.0, 6.0 * (1.0 - p)];
        for (a, e) in dx.iter().zip(expected) {
            assert!((a - e).abs() <= 0.01 * e.abs() + least, "{dtype}, {weighted}: {dx:?}, should be {expected:?}");
        }
    }
}
