//! Rows of large, saturated and tiny numbers. Reported in: pytorch 125674, flash-attention 1012, 1046 (a maximum and a
//! logarithm in one number); pytorch 178123 (layer norm around 1e19); jax 6811, pytorch 31829 (log-sum-exp of nothing
//! but
//! -inf). What is right is a closed form, or f64.

use retape_core::kernel::{CrossEntropySpec, LossReduction};
use retape_core::{BackwardOptions, DType, Result, Tape, Tensor, Var};
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
    let gradients =
        tape.backward_from(&[(&y, &floats(&device, &y.shape(), &g, y.dtype()))], BackwardOptions::default()).unwrap();
    (value, gradients.of(&x).unwrap().to_f64_vec().unwrap())
}

fn close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let near = |(a, e): (&f64, &f64)| a == e || a.is_nan() && e.is_nan() || (a - e).abs() <= tolerance;
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
                        run(&[1, n], &x, dtype, |x| x.clone().cross_entropy_with(targets(x, &[1]), None, 1, spec));
                    close(&what, &loss, &[entropy], tolerance * entropy);
                    // The even part of the target cancels.
                    let expected: Vec<f64> = at_class.iter().map(|g| g * (1.0 - smoothing)).collect();
                    close(&what, &dx, &expected, tolerance);
                }
                let even = |x: &Var| {
                    let even = floats(&x.tape().device(), &[1, n], &vec![0.25; n], dtype);
                    x.clone().cross_entropy_with(&x.tape().constant(&even)?, None, 1, EACH)
                };
                let (loss, dx) = run(&[1, n], &x, dtype, even);
                close(&what, &loss, &[n as f64 / 4.0 * entropy], tolerance * n as f64 * entropy);
                close(&what, &dx, &vec![0.0; n], tolerance);
                let (y, dx) = run(&[1, n], &x, dtype, |x| x.clone().logsumexp(&[1], false));
                if dtype == DType::F64 {
                    close(&what, &y, &[logit + entropy], 1e-6);
                }
                close(&what, &dx, &vec![chance; n], tolerance);
                let (y, _) = run(&[1, n], &x, dtype, |x| x.clone().log_softmax(1));
                close(&what, &y, &vec![-entropy; n], tolerance * entropy);
                let (y, _) = run(&[1, n], &x, dtype, |x| x.clone().softmax());
                close(&what, &y, &vec![chance; n], tolerance);
            }
        }
    }
}

/// The mean loss of a language model's head, whose path is another.
#[test]
fn a_wide_loss_of_large_logits() {
    for dtype in [DType::F32, DType::BF16] {
        let (loss, dx) = run(&[1, 4], &[1e8; 4], dtype, |x| x.clone().cross_entropy(targets(x, &[2]), -100));
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
        let (y, dx) = run(&|x| x.clone().logsumexp(&[1], false));
        assert_eq!(y[0], -INF, "{dtype}");
        close("log-sum-exp", &dx, &[0.0, 0.0, 0.0, 1.0, 0.0, 1.0], 0.0);
        let (y, dx) = run(&|x| x.clone().softmax());
        close("softmax", &y, &[0.0, 0.0, 0.0, 0.5, 0.0, 0.5], 0.0);
        close("softmax", &dx, &[0.0, 0.0, 0.0, -0.5, 0.0, 0.5], 0.0);
        let (y, dx) = run(&|x| x.clone().log_softmax(1));
        close("log-softmax", &y[..3], &[-INF; 3], 0.0);
        close("log-softmax", &dx, &[0.0, 0.0, 0.0, -3.5, 5.0, -1.5], 0.05);
        let (y, dx) = run(&|x| x.clone().cross_entropy_with(targets(x, &[0, 2]), None, 1, EACH));
        close("cross-entropy", &y, &[INF, 2f64.ln()], 4e-3);
        close("cross-entropy", &dx, &[0.0, 0.0, 0.0, 1.0, 0.0, -1.0], 0.0);
        let (y, dx) = run(&|x| x.clone().amax(&[1], false));
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
        ("layer_norm", 0.0, &|x| x.clone().layer_norm(None, None, 0.0)),
        ("rms_norm", 0.0, &|x| x.clone().rms_norm(&[3], None, Some(0.0))),
        ("group_norm", 0.0, &|x| x.clone().group_norm(1, None, None, 0.0)),
        ("normalize", 0.0, &|x| x.clone().normalize(2.0, -1, 0.0)),
        ("normalize by 3", 0.0, &|x| x.clone().normalize(3.0, -1, 0.0)),
        ("std", 1.0, &|x| x.clone().std(&[-1], 1.0, false)),
        ("norm 2", 1.0, &|x| x.clone().vector_norm(2.0, &[-1], false)),
        ("norm 3", 1.0, &|x| x.clone().vector_norm(3.0, &[-1], false)),
        ("norm 1/2", 1.0, &|x| x.clone().vector_norm(0.5, &[-1], false)),
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
    let y = x.clone().layer_norm(Some(w.clone()), Some(b.clone()), 1e-5).unwrap();
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

/// A sure and right answer costs what is left, not the rounding of the logit; a masked class without a share costs
/// nothing.
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
            x.clone().binary_cross_entropy_with_logits(
                &constant(&target)?,
                None,
                weighted.then_some(weight.clone()),
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

/// The gradients by x and by the weight of n numbers a row, by their definition; weight number i is that of element
/// i / places.
fn norm_gradients(x: &[f64], w: &[f64], g: &[f64], n: usize, places: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (Vec::new(), vec![0.0; w.len()]);
    for (row, (x, g)) in x.chunks(n).zip(g.chunks(n)).enumerate() {
        let mean = |of: &dyn Fn(usize) -> f64| (0..n).map(of).sum::<f64>() / n as f64;
        let centre = mean(&|i| x[i] - x[0]) + x[0];
        let rstd = 1.0 / (mean(&|i| (x[i] - centre).powi(2)) + 1e-5).sqrt();
        let channel = |i: usize| (row * n + i) / places % w.len();
        let (xhat, e) = (|i: usize| (x[i] - centre) * rstd, |i: usize| g[i] * w[channel(i)]);
        let (e_mean, ex_mean) = (mean(&e), mean(&|i| e(i) * xhat(i)));
        dx.extend((0..n).map(|i| rstd * (e(i) - e_mean - xhat(i) * ex_mean)));
        (0..n).for_each(|i| dw[channel(i)] += g[i] * xhat(i));
    }
    (dx, dw)
}

/// A row's gradients are those of its deviations, however far it lies from 0: the mean isn't rounded to f32 first.
#[test]
fn gradients_of_norms_far_from_0() {
    let device = retape_cpu::device();
    // Shape, groups of channels (none: layer norm), numbers a row, and numbers a weight.
    let cases: [(&[usize], usize, usize, usize); 6] = [
        (&[2, 3], 0, 3, 1),
        (&[130, 300], 0, 300, 1),
        (&[3, 4], 2, 2, 1),
        (&[3, 2, 3], 1, 6, 3),
        (&[3, 4, 150], 2, 300, 150),
        (&[3, 600, 3], 2, 900, 3),
    ];
    for (shape, groups, n, places) in cases {
        let len: usize = shape.iter().product();
        let far = |i: usize| [1e6, -1e7, 0.0][i / n % 3] + [0.0, 1.0, 1.0, 3.0, 2.0, 4.0, 0.0][(i + i / 7) % 7];
        let x: Vec<f64> = (0..len).map(far).collect();
        let g: Vec<f64> = (0..len).map(|i| (i * 5 % 11) as f64 / 8.0 - 0.5).collect();
        let w: Vec<f64> = (0..if groups == 0 { n } else { shape[1] }).map(|c| 0.5 + (c % 4) as f64 / 4.0).collect();
        let tape = Tape::new(&device);
        let leaf = |shape: &[usize], v: &[f64]| tape.leaf(&floats(&device, shape, v, DType::F32)).unwrap();
        let (xs, ws) = (leaf(shape, &x), leaf(&[w.len()], &w));
        let y = if groups == 0 {
            xs.clone().layer_norm(Some(ws.clone()), None, 1e-5)
        } else {
            xs.clone().group_norm(groups, Some(ws.clone()), None, 1e-5)
        };
        let g_tensor = floats(&device, shape, &g, DType::F32);
        let gradients = tape.backward_from(&[(&y.unwrap(), &g_tensor)], BackwardOptions::default()).unwrap();
        let of = |v: &Var| gradients.of(v).unwrap().to_f64_vec().unwrap();
        let (dx, dw) = norm_gradients(&x, &w, &g, n, places);
        close(&format!("dx of {shape:?}"), &of(&xs), &dx, 2e-5);
        close(&format!("dw of {shape:?}"), &of(&ws), &dw, 2e-5 * (len / w.len()) as f64);
    }
}

/// Beside an infinite element others don't count: the norm's slope by these is 0, and that by itself is NaN.
#[test]
fn norms_with_an_infinite_element() {
    for dtype in FLOATS {
        let run = |x: &[f64; 4], ord: f64| run(&[4], x, dtype, |x| x.clone().vector_norm(ord, &[], false));
        for ord in [1.5, 2.0, 3.0] {
            for infinite in [INF, -INF] {
                let (y, dx) = run(&[1.0, infinite, -2.0, 0.0], ord);
                close(&format!("norm {ord} in {dtype}"), &y, &[INF], 0.0);
                close(&format!("norm {ord} in {dtype}"), &dx, &[0.0, f64::NAN, 0.0, 0.0], 0.0);
            }
        }
        // sign(x) |x|^(ord - 1) y^(1 - ord)
        let (y, dx) = run(&[1.0, INF, -2.0, 0.0], 0.5);
        close(&format!("norm 1/2 in {dtype}"), &y, &[INF], 0.0);
        close(&format!("norm 1/2 in {dtype}"), &dx, &[INF, f64::NAN, -INF, 0.0], 0.0);
        let (y, dx) = run(&[1.0, INF, -2.0, INF], -1.0);
        close(&format!("norm -1 in {dtype}"), &y, &[2.0 / 3.0], 4e-3);
        close(&format!("norm -1 in {dtype}"), &dx, &[4.0 / 9.0, 0.0, -1.0 / 9.0, 0.0], 4e-3);
        let (_, dx) = run(&[1.0, f64::NAN, -2.0, 0.5], 2.0);
        close(&format!("norm 2 in {dtype}"), &dx, &[f64::NAN; 4], 0.0);
    }
}

/// A class without a share costs nothing, were its chance 0; nor has its target a gradient.
#[test]
fn masked_classes_without_weight() {
    let (x, weight, ln2) = ([0.0, -INF, 0.0], [1.0, 0.0, 2.0], 2f64.ln());
    for dtype in FLOATS {
        let constant = |x: &Var, v: &[f64]| x.tape().constant(&floats(&x.tape().device(), &[v.len()], v, dtype));
        let weighted = |spec| {
            run(&[1, 3], &x, dtype, move |x| {
                x.clone().cross_entropy_with(targets(x, &[1]), Some(constant(x, &weight)?.clone()), 1, spec)
            })
        };
        let (loss, dx) = weighted(EACH);
        close(&format!("{dtype}, no share"), &loss, &[0.0], 0.0);
        close(&format!("{dtype}, no share"), &dx, &[0.0; 3], 0.0);
        // All is spread: (1 + 2) / 3 of ln 2; the softmax 1/2 times this mass, less each share.
        let (loss, dx) = weighted(CrossEntropySpec { smoothing: 1.0, ..EACH });
        close(&format!("{dtype}, all spread"), &loss, &[ln2], 4e-3);
        close(&format!("{dtype}, all spread"), &dx, &[0.5 - 1.0 / 3.0, 0.0, 0.5 - 2.0 / 3.0], 1e-3);
        let (loss, dp) = run(&[1, 3], &[0.5, 0.5, 0.0], dtype, |p| {
            let x = constant(p, &x)?.reshape(&[1, 3])?;
            x.cross_entropy_with(p, Some(constant(p, &weight)?.clone()), 1, EACH)
        });
        close(&format!("{dtype}, distributions"), &loss, &[ln2 / 2.0], 4e-3);
        close(&format!("{dtype}, distributions"), &dp, &[ln2, 0.0, 2.0 * ln2], 4e-3);
        let (loss, dw) = run(&[3], &weight, dtype, |w| {
            let x = constant(w, &[x, x].concat())?.reshape(&[2, 3])?;
            let mean = CrossEntropySpec { reduction: LossReduction::Mean, ..EACH };
            x.cross_entropy_with(targets(w, &[1, 0]), Some(w.clone()), 1, mean)
        });
        // s_c / count, less the mean for each row of the class.
        close(&format!("{dtype}, weights"), &loss, &[ln2], 4e-3);
        close(&format!("{dtype}, weights"), &dw, &[0.0, INF, 0.0], 1e-6);
        let (loss, dx) = run(&[1, 3], &x, dtype, |x| {
            x.clone().nll_loss(targets(x, &[1]), Some(constant(x, &weight)?.clone()), 1, EACH)
        });
        close(&format!("{dtype}, log-probabilities"), &loss, &[0.0], 0.0);
        close(&format!("{dtype}, log-probabilities"), &dx, &[0.0; 3], 0.0);
    }
}
