//! Layer and RMS norm.

use crate::twins::{FLOATS, LIES, Lie, Twin, compare, numbers};
use retape_core::{DType, kernel};

fn shapes() -> [&'static [usize]; 8] {
    [&[3, 5], &[], &[4], &[2, 3, 32], &[5, 33], &[2, 257], &[2, 1032], &[2, 0]]
}

fn stats(shape: &[usize]) -> Vec<usize> {
    shape[..shape.len().saturating_sub(1)].to_vec()
}

#[test]
fn forward_backward_and_parameters() {
    for dtype in FLOATS {
        for shape in shapes() {
            for lie in LIES {
                if lie != Lie::Plain && shape.len() < 2 {
                    continue;
                }
                for (centred, scaled) in [(true, true), (true, false), (false, true)] {
                    check(dtype, shape, lie, centred, scaled);
                }
            }
        }
    }
}

/// Rows in several pieces.
#[test]
fn many_rows() {
    for (dtype, shape) in [(DType::F32, &[300, 8][..]), (DType::BF16, &[2, 100, 24]), (DType::BF16, &[130, 300])] {
        check(dtype, shape, Lie::Plain, true, true);
    }
    check(DType::F32, &[0, 5], Lie::Plain, true, true);
}

/// Rows that don't fit into a team's registers, or only just.
#[test]
fn long_rows() {
    for width in [4104, 8192, 8193, 8200] {
        check(DType::F32, &[2, width], Lie::Plain, true, true);
        check(DType::BF16, &[2, width], Lie::Inside, false, true);
    }
}

fn check(dtype: DType, shape: &[usize], lie: Lie, centred: bool, scaled: bool) {
    let n = shape.last().copied().unwrap_or(1);
    let label = format!("norm of {shape:?} {lie:?}, centred {centred}, scaled {scaled}");
    let x = Twin::random(lie, shape, 1, dtype);
    // An element that repeats, and a view.
    let weight = Twin::random(Lie::Inside, &[n], 2, dtype);
    let bias = Twin::random(Lie::Plain, &[n], 3, dtype);
    let g = Twin::random(lie, shape, 4, dtype);
    compare(&label, dtype, 64.0, &[&x, &weight, &bias], |side| {
        let (out, mean, rstd) = (side.out(shape), side.stat(&stats(shape)), side.stat(&stats(shape)));
        let (weight, bias) = (scaled.then(|| side.input(1)), scaled.then(|| side.input(2)));
        let mean = centred.then_some(&mean);
        side.run(kernel::LayerNorm { x: side.input(0), weight, bias, eps: 1e-3, out: &out, mean, rstd: &rstd });
        [out, rstd].into_iter().chain(mean.cloned()).collect()
    });
    let (mean, rstd) = statistics(&x, shape, centred, dtype);
    compare(&format!("gradient of {label}"), dtype, 256.0, &[&x, &weight, &mean, &rstd, &g], |side| {
        let [x, weight, mean, rstd] = [0, 1, 2, 3].map(|i| side.input(i));
        let (weight, mean) = (scaled.then_some(weight), centred.then_some(mean));
        let out = side.out(shape);
        side.run(kernel::LayerNormGrad { x, weight, mean, rstd, g: side.input(4), out: &out });
        let in_place = side.copy_of(4);
        side.run(kernel::LayerNormGrad { x, weight, mean, rstd, g: &in_place, out: &in_place });
        let (dweight, dbias) = (side.out(&[n]), side.out(&[n]));
        let (dw, db) = (Some(&dweight), scaled.then_some(&dbias));
        side.run(kernel::LayerNormParamGrad { x, mean, rstd, g: side.input(4), dweight: dw, dbias: db });
        [out, in_place, dweight].into_iter().chain(db.cloned()).collect()
    });
}

/// The statistics as the CPU finds them, in the statistics' dtype.
fn statistics(x: &Twin, shape: &[usize], centred: bool, dtype: DType) -> (Twin, Twin) {
    let new = |shape: &[usize]| retape_core::Tensor::full(x.theirs.device(), shape, DType::F64, f64::NAN).unwrap();
    let (out, mean, rstd) = (new(shape), new(&stats(shape)), new(&stats(shape)));
    let kernel = kernel::LayerNorm {
        x: &x.theirs,
        weight: None,
        bias: None,
        eps: 1e-3,
        out: &out,
        mean: centred.then_some(&mean),
        rstd: &rstd,
    };
    x.theirs.device().run(kernel).unwrap();
    let dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let twin = |t: &retape_core::Tensor| Twin::of(&stats(shape), &t.to_vec::<f64>().unwrap(), dtype);
    (twin(&mean), twin(&rstd))
}

/// Numbers far from 0: the variance is that of what is left.
#[test]
fn a_large_mean() {
    let values: Vec<f64> = (0..600).map(|i| 1000.0 + f64::from(i % 7)).collect();
    for dtype in [DType::F32, DType::F64] {
        let x = Twin::of(&[2, 300], &values, dtype);
        compare("a large mean", dtype, 2000.0, &[&x], |side| {
            let (out, mean, rstd) = (side.out(&[2, 300]), side.stat(&[2, 1]), side.stat(&[2, 1]));
            let (x, mean_out) = (side.input(0), Some(&mean));
            side.run(kernel::LayerNorm {
                x,
                weight: None,
                bias: None,
                eps: 1e-5,
                out: &out,
                mean: mean_out,
                rstd: &rstd,
            });
            vec![out, rstd]
        });
    }
}

/// Rows whose squares overflow or vanish, by a warp and by a block; gradients as large as these rows make them small.
#[test]
fn far_from_one() {
    for (dtype, scale) in [(DType::F32, 1e19), (DType::F32, 1e-25), (DType::BF16, 1e19), (DType::F64, 1e200)] {
        for n in [5, 257, 4104, 8200] {
            let scaled = |seed: u64| numbers(seed, 2 * n).iter().map(|v| v * scale).collect::<Vec<f64>>();
            let (x, g) = (Twin::of(&[2, n], &scaled(1), dtype), Twin::of(&[2, n], &scaled(2), dtype));
            let weight = Twin::random(Lie::Plain, &[n], 3, dtype);
            for centred in [true, false] {
                compare(&format!("rows of {n} at {scale:e}"), dtype, 2000.0, &[&x, &g, &weight], |side| {
                    let [x, g, w] = [0, 1, 2].map(|i| side.input(i));
                    let (out, mean, rstd, dx) =
                        (side.out(&[2, n]), side.stat(&[2]), side.stat(&[2]), side.out(&[2, n]));
                    let (weight, mean) = (Some(w), centred.then_some(&mean));
                    let (bias, rstd, eps) = (None, &rstd, 0.0);
                    side.run(kernel::LayerNorm { x, weight, bias, eps, out: &out, mean, rstd });
                    side.run(kernel::LayerNormGrad { x, weight, mean, rstd, g, out: &dx });
                    vec![out, dx]
                });
            }
        }
    }
}

/// Gradients by rows whose mean f32 rounds, by a warp and by a block, and by rows that were normalised as one.
#[test]
fn gradients_far_from_0() {
    for (rows, n) in [(3, 5), (130, 40), (2, 4104), (2, 8200)] {
        let far = |i: usize| [1e6, -1e7, 0.0][i / n % 3] + [0.0, 1.0, 1.0, 3.0, 2.0, 4.0, 0.0][(i + i / 7) % 7];
        let values: Vec<f64> = (0..rows * n).map(far).collect();
        let x = Twin::of(&[rows, n], &values, DType::F32);
        let g = Twin::random(Lie::Plain, &[rows, n], 2, DType::F32);
        let weight = Twin::random(Lie::Plain, &[n], 3, DType::F32);
        compare(&format!("{rows} rows of {n} far from 0"), DType::F32, 2000.0, &[&x, &g, &weight], |side| {
            let [x, g, w] = [0, 1, 2].map(|i| side.input(i));
            let (out, mean, rstd, dx, dw) =
                (side.out(&[rows, n]), side.stat(&[rows]), side.stat(&[rows]), side.out(&[rows, n]), side.out(&[n]));
            let (weight, mean, rstd) = (Some(w), Some(&mean), &rstd);
            side.run(kernel::LayerNorm { x, weight, bias: None, eps: 1e-5, out: &out, mean, rstd });
            side.run(kernel::LayerNormGrad { x, weight, mean, rstd, g, out: &dx });
            side.run(kernel::LayerNormParamGrad { x, mean, rstd, g, dweight: Some(&dw), dbias: None });
            // The same rows cut in parts of 1 or of 4, whose columns share a weight.
            let part = if n % 4 == 0 { 4 } else { 1 };
            let cut = |t: &retape_core::Tensor| t.view_as(&[rows, n / part, part]).unwrap().unwrap();
            let repeated =
                |t: &retape_core::Tensor| t.view_as(&[rows, 1]).unwrap().unwrap().expand(&[rows, n / part]).unwrap();
            let (cut_x, cut_g, dw_part) = (cut(x), cut(g), side.out(&[part]));
            let (mean, rstd) = (mean.map(repeated), repeated(rstd));
            side.run(kernel::LayerNormParamGrad {
                x: &cut_x,
                mean: mean.as_ref(),
                rstd: &rstd,
                g: &cut_g,
                dweight: Some(&dw_part),
                dbias: None,
            });
            vec![out, dx, dw, dw_part]
        });
    }
}
