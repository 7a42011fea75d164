//! Reductions, softmax, norm, loss, embedding, quantization and products against plain f64 loops.

mod common;
use common::*;
use retape_core::kernel::{self, CrossEntropySpec, LossReduction, RandomStream, ReduceFn, Window};
use retape_core::layout::contiguous_strides;
use retape_core::{DType, Device, Error, MemoryKind, Tensor};

/// Index of each output element that the input elements belong to, in row-major order.
fn groups(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let strides = contiguous_strides(out);
    let n: usize = shape.iter().product();
    let at = |mut i: usize| {
        let mut group = 0;
        for d in (0..shape.len()).rev() {
            group += if out[d] == 1 { 0 } else { i % shape[d] * strides[d] };
            i /= shape[d];
        }
        group
    };
    (0..n).map(at).collect()
}

#[test]
fn reductions() {
    let device = device(2);
    let cases: [(&[usize], &[usize]); 14] = [
        (&[], &[]),
        (&[0], &[1]),
        (&[3, 0], &[3, 1]),
        (&[0, 3], &[1, 3]),
        (&[5, 70], &[5, 1]),
        (&[300, 70], &[1, 70]),
        (&[300, 1], &[1, 1]),
        (&[7, 6, 5], &[1, 6, 1]),
        (&[7, 6, 5], &[7, 1, 5]),
        (&[2, 3, 4, 5, 6], &[1, 3, 1, 5, 1]),
        (&[2, 3, 4, 5, 6], &[2, 1, 4, 1, 6]),
        (&[40_000], &[1]),
        (&[2, 20_000], &[2, 1]),
        (&[4, 5], &[4, 5]),
    ];
    for (dtype, (shape, to)) in FLOATS.iter().flat_map(|&d| cases.map(|c| (d, c))) {
        let n: usize = shape.iter().product();
        // Few distinct values, so that maxima have ties.
        let x: Vec<f64> = values(n, 1).iter().map(|x| (x * 8.0).round() / 8.0).collect();
        let groups = groups(shape, to);
        let len = to.iter().product();
        let (mut sum, mut max, mut ties) = (vec![0.0; len], vec![f64::NEG_INFINITY; len], vec![0.0; len]);
        for (&x, &o) in x.iter().zip(&groups) {
            sum[o] += x;
            max[o] = f64::max(max[o], x);
        }
        for (&x, &o) in x.iter().zip(&groups) {
            ties[o] += (x == max[o]) as u8 as f64;
        }
        let g = values(len, 7);
        let grad: Vec<f64> =
            x.iter().zip(&groups).map(|(&x, &o)| if x == max[o] { g[o] / ties[o] } else { 0.0 }).collect();
        let mut bits = vec![];
        for x in views(&device, dtype, shape, &x) {
            let what = format!("{dtype}{shape:?} to {to:?}");
            let out = poisoned(&device, dtype, to);
            run(&device, kernel::Reduce { f: ReduceFn::Sum, x: &x, out: &out });
            close(&what, &out, &sum, tolerance(dtype) * 10.0);
            bits.push(out.to_bytes().unwrap());
            run(&device, kernel::Reduce { f: ReduceFn::Max, x: &x, out: &out });
            close(&what, &out, &max, 0.0);
            let (dx, g) = (poisoned(&device, dtype, shape), tensor(&device, dtype, to, &g));
            run(&device, kernel::ReduceGrad { f: ReduceFn::Max, x: &x, y: &out, g: &g, out: &dx });
            close(&what, &dx, &grad, tolerance(dtype));
            let norm = poisoned(&device, DType::F64, &[]);
            run(&device, kernel::SquaredNorm { x: &x, out: &norm });
            close("squared norm", &norm, &[x.to_f64_vec().unwrap().iter().map(|x| x * x).sum()], 1e-9);
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "a view's sum has other bits than a copy's");
    }
    let nan = tensor(&device, DType::F32, &[3], &[1.0, f64::NAN, 2.0]);
    let out = poisoned(&device, DType::F32, &[1]);
    run(&device, kernel::Reduce { f: ReduceFn::Max, x: &nan, out: &out });
    assert!(out.item().unwrap().is_nan());
}

#[test]
fn products() {
    let device = device(2);
    let cases = [
        (1, 1, 1, 1),
        (2, 3, 4, 5),
        (1, 0, 4, 3),
        (3, 4, 0, 2),
        (1, 5, 6, 0),
        (0, 2, 2, 2),
        (2, 300, 33, 65),
        (1, 17, 400, 9),
    ];
    for (dtype, (batch, m, n, k)) in FLOATS.iter().flat_map(|&d| cases.map(|c| (d, c))) {
        let (a, b, c) = (values(batch * m * k, 1), values(k * n, 2), values(batch * m * n, 3));
        let mut want = c.clone();
        for (i, w) in want.iter_mut().enumerate() {
            let (z, r, c) = (i / (m * n), i / n % m, i % n);
            *w += 0.5 * (0..k).map(|l| a[(z * m + r) * k + l] * b[l * n + c]).sum::<f64>();
        }
        let product: Vec<f64> = want.iter().zip(&c).map(|(w, c)| w - c).collect();
        for (a, b) in views(&device, dtype, &[batch, m, k], &a).iter().flat_map(|a| {
            views(&device, dtype, &[k, n], &b).into_iter().map(move |b| (a.clone(), b.expand(&[batch, k, n]).unwrap()))
        }) {
            let what = format!("{dtype} {batch}x({m},{n},{k})");
            let (fresh, sum) = (poisoned(&device, dtype, &[batch, m, n]), tensor(&device, dtype, &[batch, m, n], &c));
            run(&device, kernel::Matmul { a: &a, b: &b, alpha: 0.5, accumulate: false, out: &fresh });
            close(&what, &fresh, &product, 10.0 * tolerance(dtype));
            run(&device, kernel::Matmul { a: &a, b: &b, alpha: 0.5, accumulate: true, out: &sum });
            close(&what, &sum, &want, 10.0 * tolerance(dtype));
        }
    }
}

#[test]
fn softmax_and_masks() {
    let device = device(2);
    let inf = f64::INFINITY;
    for dtype in FLOATS {
        for n in [1, 5, 64, 65, 300] {
            let (mut x, g) = (values(4 * n, 1), values(4 * n, 2));
            x[n..2 * n].iter_mut().for_each(|v| *v -= 1e5);
            x[2 * n..3 * n].fill(-inf);
            let x: Vec<f64> = x.iter().map(|&x| x as f32 as f64).collect();
            let mut want = vec![0.0; 4 * n];
            for (x, y) in x.chunks(n).zip(want.chunks_mut(n)).enumerate().filter(|(r, _)| *r != 2).map(|p| p.1) {
                let max = x.iter().copied().fold(-inf, f64::max);
                let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
                y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - max).exp() / sum);
            }
            let mut grad = vec![0.0; 4 * n];
            for r in 0..4 {
                let dot: f64 = (r * n..(r + 1) * n).map(|i| want[i] * g[i]).sum();
                (r * n..(r + 1) * n).for_each(|i| grad[i] = want[i] * (g[i] - dot));
            }
            for (x, g) in views(&device, dtype, &[4, n], &x).iter().zip(views(&device, dtype, &[4, n], &g)) {
                let out = poisoned(&device, dtype, &[4, n]);
                run(&device, kernel::Softmax { x, out: &out });
                close("softmax", &out, &want, tolerance(dtype));
                let dx = poisoned(&device, dtype, &[4, n]);
                run(&device, kernel::SoftmaxGrad { y: &out, g: &g, out: &dx });
                close("softmax grad", &dx, &grad, tolerance(dtype));
                let g = g.copy(MemoryKind::Input).unwrap();
                run(&device, kernel::SoftmaxGrad { y: &out, g: &g, out: &g });
                close("softmax grad in place", &g, &grad, tolerance(dtype));
            }
        }
        for bad in [f64::NAN, inf] {
            let (x, out) = (tensor(&device, dtype, &[3], &[0.0, bad, 1.0]), poisoned(&device, dtype, &[3]));
            run(&device, kernel::Softmax { x: &x, out: &out });
            assert!(out.to_f64_vec().unwrap()[1].is_nan());
        }
        for (tq, tk) in [(3, 5), (5, 3), (1, 4), (70, 70), (2, 0)] {
            let x = values(2 * tq * tk, 1);
            let hidden = |i: usize| i % tk + tq > i / tk % tq + tk;
            let want: Vec<f64> = (0..x.len()).map(|i| if hidden(i) { -inf } else { x[i] }).collect();
            for x in views(&device, dtype, &[2, tq, tk], &x) {
                let out = poisoned(&device, dtype, &[2, tq, tk]);
                let diagonal = tk as isize - tq as isize;
                run(&device, kernel::Triangle { x: &x, upper: false, diagonal, value: -inf, out: &out });
                close("lower triangle", &out, &want, 0.0);
            }
        }
    }
}

#[test]
fn layer_norm_and_gradients() {
    let device = device(2);
    for (dtype, (rows, n), affine) in FLOATS.iter().flat_map(|&d| {
        [(1, 1), (3, 5), (200, 70), (0, 4), (2, 1000)].into_iter().flat_map(move |s| [true, false].map(|a| (d, s, a)))
    }) {
        let (x, g, w, b) = (values(rows * n, 1), values(rows * n, 2), values(n, 3), values(n, 4));
        let (w, b) = if affine { (w, b) } else { (vec![1.0; n], vec![0.0; n]) };
        let eps = 1e-5;
        let (mut y, mut dx, mut dw, mut db) = (vec![], vec![], vec![0.0; n], vec![0.0; n]);
        let (mut means, mut rstds) = (vec![], vec![]);
        for (x, g) in x.chunks(n).zip(g.chunks(n)) {
            let mean = x.iter().sum::<f64>() / n as f64;
            let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64 + eps).sqrt();
            let hat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let e: Vec<f64> = g.iter().zip(&w).map(|(g, w)| g * w).collect();
            let e_mean = e.iter().sum::<f64>() / n as f64;
            let eh_mean = e.iter().zip(&hat).map(|(e, h)| e * h).sum::<f64>() / n as f64;
            for i in 0..n {
                y.push(hat[i] * w[i] + b[i]);
                dx.push(rstd * (e[i] - e_mean - hat[i] * eh_mean));
                dw[i] += g[i] * hat[i];
                db[i] += g[i];
            }
            means.push(mean);
            rstds.push(rstd);
        }
        let tol = 20.0 * tolerance(dtype);
        let (w, b) = (tensor(&device, dtype, &[n], &w), tensor(&device, dtype, &[n], &b));
        let (weight, bias) = if affine { (Some(&w), Some(&b)) } else { (None, None) };
        for (x, g) in
            views(&device, dtype, &[rows, n], &x).iter().zip(views(&device, dtype, &[rows, n], &g).iter().rev())
        {
            let [out, mean, rstd] = [&[rows, n][..], &[rows], &[rows]].map(|s| poisoned(&device, dtype, s));
            run(&device, kernel::LayerNorm { x, weight, bias, eps, out: &out, mean: Some(&mean), rstd: &rstd });
            close("layer norm", &out, &y, tol);
            close("mean", &mean, &means, tol);
            close("rstd", &rstd, &rstds, tol);
            run(&device, kernel::LayerNormGrad { x, weight, mean: Some(&mean), rstd: &rstd, g, out: &out });
            close("dx", &out, &dx, if n == 1 { 1e-3 } else { tol });
            let (pw, pb) = (poisoned(&device, dtype, &[n]), poisoned(&device, dtype, &[n]));
            let (dweight, dbias) = (Some(&pw), Some(&pb));
            run(&device, kernel::LayerNormParamGrad { x, mean: Some(&mean), rstd: &rstd, g, dweight, dbias });
            close("dweight", &pw, &dw, tol);
            close("dbias", &pb, &db, tol);
            let g = g.copy(MemoryKind::Input).unwrap();
            run(&device, kernel::LayerNormGrad { x, weight, mean: Some(&mean), rstd: &rstd, g: &g, out: &g });
            close("dx in place", &g, &dx, if n == 1 { 1e-3 } else { tol });
        }
    }
}

#[test]
fn cross_entropy_and_ignored_rows() {
    let device = device(2);
    for (dtype, mean) in FLOATS.iter().flat_map(|&d| [true, false].map(|m| (d, m))) {
        let (rows, n) = (9, 130);
        let x: Vec<f64> = values(rows * n, 1).iter().map(|x| x * 10.0).collect();
        let target: Vec<i32> = (0..rows as i32).map(|r| if r % 3 == 1 { -1 } else { r * 13 % n as i32 }).collect();
        let count = if mean { 6.0 } else { 1.0 };
        let lse: Vec<f64> = x.chunks(n).map(|x| x.iter().map(|x| x.exp()).sum::<f64>().ln()).collect();
        let kept = || (0..rows).filter(|r| r % 3 != 1);
        let loss = kept().map(|r| lse[r] - x[r * n + target[r] as usize]).sum::<f64>() / count;
        let mut grad = vec![0.0; rows * n];
        for (r, c) in kept().flat_map(|r| (0..n).map(move |c| (r, c))) {
            let hit = (c == target[r] as usize) as u8 as f64;
            grad[r * n + c] = 0.75 * ((x[r * n + c] - lse[r]).exp() - hit) / count;
        }
        let ids = Tensor::from_slice(&device, &[rows], &target).unwrap();
        let g = tensor(&device, dtype, &[], &[0.75]);
        let reduction = if mean { LossReduction::Mean } else { LossReduction::Sum };
        let spec = CrossEntropySpec { ignore: -1, reduction, smoothing: 0.0 };
        for logits in views(&device, dtype, &[rows, n], &x) {
            let [l, s, dx] = [&[][..], &[rows, 2], &[rows, n]].map(|s| poisoned(&device, dtype, s));
            run(
                &device,
                kernel::CrossEntropy {
                    scores: kernel::ClassScores { logits: &logits, target: &ids, weight: None, spec },
                    loss: &l,
                    stats: Some(&s),
                },
            );
            close("loss", &l, &[loss], tolerance(dtype));
            let stats = x.chunks(n).zip(&lse).flat_map(|(x, lse)| {
                let most = x.iter().fold(f64::MIN, |m, &x| m.max(x));
                [most, lse - most]
            });
            close("statistics", &s, &stats.collect::<Vec<_>>(), tolerance(dtype));
            run(
                &device,
                kernel::CrossEntropyGrad {
                    scores: kernel::ClassScores { logits: &logits, target: &ids, weight: None, spec },
                    stats: &s,
                    g: &g,
                    out: &dx,
                },
            );
            close("gradient", &dx, &grad, 10.0 * tolerance(dtype));
        }
        let bad = Tensor::from_slice(&device, &[rows], &vec![n as i64; rows]).unwrap();
        let logits = tensor(&device, dtype, &[rows, n], &x);
        let [l, s] = [&[][..], &[rows, 2]].map(|s| poisoned(&device, dtype, s));
        let kernel = kernel::CrossEntropy {
            scores: kernel::ClassScores { logits: &logits, target: &bad, weight: None, spec },
            loss: &l,
            stats: Some(&s),
        };
        let error = device.run(kernel).unwrap_err();
        assert!(matches!(&error, Error::InvalidValue { .. }) && error.to_string().contains("130"), "{error}");
        let none = Tensor::from_slice(&device, &[rows], &vec![-1i64; rows]).unwrap();
        run(
            &device,
            kernel::CrossEntropy {
                scores: kernel::ClassScores { logits: &logits, target: &none, weight: None, spec },
                loss: &l,
                stats: Some(&s),
            },
        );
        assert!(if mean { l.item().unwrap().is_nan() } else { l.item().unwrap() == 0.0 });
    }
}

#[test]
fn embedding_and_gradient() {
    let device = device(2);
    for dtype in FLOATS {
        let (rows, width) = (7, 100);
        let (table, g) = (values(rows * width, 1), values(6 * width, 2));
        let ids = [3i64, 0, 3, 6, 3, 1];
        let want: Vec<f64> = ids.iter().flat_map(|&id| table[id as usize * width..][..width].to_vec()).collect();
        let mut grad = vec![0.0; rows * width];
        ids.iter()
            .enumerate()
            .for_each(|(r, &id)| (0..width).for_each(|c| grad[id as usize * width + c] += g[r * width + c]));
        let ids = Tensor::from_slice(&device, &[2, 3], &ids).unwrap();
        for (table, g) in
            views(&device, dtype, &[rows, width], &table).iter().zip(views(&device, dtype, &[2, 3, width], &g))
        {
            let (out, dt) = (poisoned(&device, dtype, &[2, 3, width]), poisoned(&device, dtype, &[rows, width]));
            run(&device, kernel::Embedding { table, ids: &ids, out: &out });
            close("embedding", &out, &want, 0.0);
            let order = &Tensor::uninit(&device, &[6], DType::I64, MemoryKind::Workspace).unwrap();
            run(&device, kernel::EmbeddingGrad { ids: &ids, g: &g, order, out: &dt });
            close("embedding grad", &dt, &grad, tolerance(dtype));
        }
        let table = tensor(&device, dtype, &[rows, width], &table);
        for bad in [-1i64, 7] {
            let ids = Tensor::from_slice(&device, &[2], &[0, bad]).unwrap();
            let out = poisoned(&device, dtype, &[2, width]);
            let error = device.run(kernel::Embedding { table: &table, ids: &ids, out: &out }).unwrap_err();
            assert!(matches!(error, Error::InvalidValue { .. }));
            let text = error.to_string();
            assert!(text.contains(&bad.to_string()) && text.contains("position 1") && text.contains("0..7"), "{text}");
            assert!(out.to_f64_vec().unwrap()[0].is_nan(), "written before it was checked");
        }
    }
}

/// How many steps of int8 a number is in a group of this largest magnitude.
fn steps(x: f64, scale: f64, dtype: DType) -> f64 {
    match dtype {
        _ if scale == 0.0 => 0.0,
        DType::F64 => x / scale * 127.0,
        _ => f64::from(x as f32 / scale as f32 * 127.0),
    }
}

#[test]
fn int8_round_trip() {
    let device = device(2);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for (shape, group) in
            [(&[][..], 64), (&[3, 200], 64), (&[2, 130], 33), (&[4, 5], 1), (&[0, 8], 4), (&[2, 3, 64], 64)]
        {
            let n: usize = shape.iter().product();
            let width = shape.last().copied().unwrap_or(1);
            let mut x = values(n, 1);
            x.iter_mut().take(group.min(width)).for_each(|v| *v = 0.0);
            for x in views(&device, dtype, shape, &x) {
                let mut groups = shape.to_vec();
                *groups.last_mut().unwrap_or(&mut 0) = width.div_ceil(group);
                let q = Tensor::full(&device, shape, DType::U8, 77.0).unwrap();
                let scales = poisoned(&device, dtype.computed_in(), if shape.is_empty() { &[] } else { &groups });
                run(&device, kernel::Quantize { x: &x, group, rounding: None, q: &q, scales: &scales });
                let out = poisoned(&device, dtype, shape);
                run(&device, kernel::Dequantize { q: &q, scales: &scales, group, out: &out });
                let held = x.to_f64_vec().unwrap();
                let scales = scales.to_f64_vec().unwrap();
                let bytes = q.to_vec::<u8>().unwrap();
                let mut want = vec![];
                for (row, x) in held.chunks(width).enumerate() {
                    for (k, x) in x.chunks(group).enumerate() {
                        let absmax = x.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                        let scale = scales[row * width.div_ceil(group) + k];
                        assert_eq!(scale, absmax);
                        want.extend(x.iter().map(|&x| steps(x, scale, dtype).round_ties_even()));
                    }
                }
                let got: Vec<f64> = bytes.iter().map(|&b| b as i8 as f64).collect();
                assert_eq!(got, want, "{dtype}{shape:?} by {group}");
                let bound = scales.iter().fold(0.0, |m: f64, &s| m.max(s)) / 127.0 * 0.51 + 0.02;
                for (a, b) in out.to_f64_vec().unwrap().iter().zip(&held) {
                    assert!((a - b).abs() <= bound, "{a} {b}");
                }
            }
        }
    }
    for bad in [f64::NAN, f64::INFINITY] {
        let x = tensor(&device, DType::F32, &[2, 4], &[1.0, bad, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]);
        let (q, scales) =
            (Tensor::full(&device, &[2, 4], DType::U8, 0.0).unwrap(), poisoned(&device, DType::F32, &[2, 1]));
        run(&device, kernel::Quantize { x: &x, group: 4, rounding: None, q: &q, scales: &scales });
        let scales = scales.to_vec::<f32>().unwrap();
        assert!(scales[0].is_nan() && scales[1] == 4.0);
    }
}

/// Stochastic rounding by the definition: bytes and scales of rows of `width`.
fn rounded_by_hand(x: &[f64], dtype: DType, width: usize, group: usize, stream: RandomStream) -> (Vec<i8>, Vec<f64>) {
    let (mut bytes, mut scales) = (vec![], vec![]);
    let mut numbers = 0..;
    for group in x.chunks(width).flat_map(|row| row.chunks(group)) {
        let absmax = group.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        for (&x, i) in group.iter().zip(&mut numbers) {
            let u = f64::from(stream.word(i)) / 2f64.powi(32);
            bytes.push((steps(x, absmax, dtype) + u).floor() as i8);
        }
        scales.push(absmax);
    }
    (bytes, scales)
}

/// Bytes and scales of the kernel.
fn rounded(device: &Device, x: &Tensor, group: usize, stream: RandomStream) -> (Vec<i8>, Vec<f64>) {
    let mut groups = x.shape().to_vec();
    if let Some(last) = groups.last_mut() {
        *last = last.div_ceil(group);
    }
    let q = Tensor::full(device, x.shape(), DType::U8, 77.0).unwrap();
    let scales = poisoned(device, x.dtype().computed_in(), &groups);
    run(device, kernel::Quantize { x, group, rounding: Some(stream), q: &q, scales: &scales });
    (q.to_vec::<u8>().unwrap().into_iter().map(|b| b as i8).collect(), scales.to_f64_vec().unwrap())
}

#[test]
fn stochastic_rounding_is_as_defined() {
    let device = device(2);
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for (shape, group) in [
            (&[][..], 64),
            (&[3, 200], 64),
            (&[7, 50], 13),
            (&[4, 5], 1),
            (&[0, 8], 4),
            (&[2, 3, 64], 64),
            (&[9, 130], 67),
        ] {
            let n: usize = shape.iter().product();
            let width = shape.last().copied().unwrap_or(1);
            let mut x = values(n, 1);
            x.iter_mut().take(group.min(width)).for_each(|v| *v = 0.0);
            let (mut seen, mut other) = (vec![], 0);
            for x in views(&device, dtype, shape, &x) {
                let held = x.to_f64_vec().unwrap();
                let got = rounded(&device, &x, group, STREAM);
                assert_eq!(got, rounded_by_hand(&held, dtype, width, group, STREAM), "{dtype}{shape:?} by {group}");
                assert_eq!(got, rounded(&device, &x, group, STREAM), "the same stream");
                for stream in [RandomStream { seed: 43, ..STREAM }, RandomStream { counter: 4, ..STREAM }] {
                    other += usize::from(rounded(&device, &x, group, stream).0 != got.0);
                }
                seen.push(got);
            }
            assert!(seen.iter().all(|s| *s == seen[0]), "a view has other bits than a copy");
            // Groups of one element are always the largest of theirs.
            assert!(other == 6 || group == 1 || n < 2, "{dtype}{shape:?}: other streams, the same bits");
        }
    }
}

/// Rounding to nearest is off by as much as half a step, each time in the same direction.
#[test]
fn stochastic_rounding_is_right_on_average() {
    let device = device(1);
    let (shape, group, draws) = ([7usize, 50], 13, 2000);
    let width = shape[1];
    for dtype in [DType::F32, DType::BF16] {
        let x = tensor(&device, dtype, &shape, &values(350, 1));
        let held = x.to_f64_vec().unwrap();
        let mut sums = vec![0.0; held.len()];
        let mut scales = vec![];
        for seed in 0..draws {
            let (bytes, by_group) = rounded(&device, &x, group, RandomStream { seed, ..STREAM });
            sums.iter_mut().zip(bytes).for_each(|(sum, b)| *sum += f64::from(b));
            scales = by_group;
        }
        let groups_per_row = width.div_ceil(group);
        let errors: Vec<f64> = (held.iter().zip(&sums).enumerate())
            .map(|(i, (x, sum))| {
                let scale = scales[i / width * groups_per_row + i % width / group];
                sum / draws as f64 - x / scale * 127.0
            })
            .collect();
        // In steps. A draw's standard deviation is at most 1/2: that of a mean 0.0112, that of all means' mean 0.0006.
        let worst = errors.iter().fold(0.0, |m: f64, e| m.max(e.abs()));
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        assert!(worst < 0.056 && mean.abs() < 0.003, "{dtype}: mean error {mean}, worst {worst}");
    }
}

/// Planes of several strips, windows that overlap, skip rows, reach into the padding or see nothing of a strip: the
/// bits of sums in the order of outputs, in f32 for halves. Sums that aren't rounded need no scratch.
#[test]
fn gradients_of_the_largest() {
    let device = device(2);
    let [height, width] = [700, 301];
    let window = |kernel, stride, before, dilation| Window { kernel, stride, before, dilation };
    let windows = [
        window([2, 2], [2, 2], [0, 0], [1, 1]),
        window([5, 3], [1, 2], [2, 1], [1, 1]),
        window([3, 2], [2, 1], [40, 0], [40, 7]),
        window([2, 2], [5, 3], [1, 1], [1, 1]),
        window([1, 1], [350, 100], [0, 0], [1, 1]),
    ];
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let fresh = common::device(2);
        for w in windows {
            let size =
                |d: usize, n: usize| (n + 2 * w.before[d] - w.dilation[d] * (w.kernel[d] - 1) - 1) / w.stride[d] + 1;
            let shape = [2, 1, size(0, height), size(1, width)];
            // Few distinct values, so that an element is often the largest of several windows.
            let x: Vec<f64> = values(2 * height * width, 1).iter().map(|x| (x * 4.0).round()).collect();
            let (out, index) =
                (poisoned(&device, dtype, &shape), Tensor::full(&device, &shape, DType::I32, 0.0).unwrap());
            let x = tensor(&device, dtype, &[2, 1, height, width], &x);
            run(&device, kernel::MaxPool { x: &x, window: w, out: &out, index: &index });
            let index = Tensor::from_slice(&fresh, &shape, &index.to_vec::<i32>().unwrap()).unwrap();
            let plane = shape[2] * shape[3];
            let g = tensor(&fresh, dtype, &shape, &values(2 * plane, 2));
            let dx = poisoned(&fresh, dtype, x.shape());
            run(&fresh, kernel::MaxPoolGrad { index: &index, g: &g, window: w, out: &dx });
            let mut sums = vec![0.0; 2 * height * width];
            for (i, (&place, g)) in index.to_vec::<i32>().unwrap().iter().zip(g.to_f64_vec().unwrap()).enumerate() {
                let sum = &mut sums[i / plane * height * width + place as usize];
                *sum = if dtype == DType::F64 { *sum + g } else { f64::from(*sum as f32 + g as f32) };
            }
            let want = tensor(&fresh, dtype, x.shape(), &sums);
            assert_eq!(dx.to_bytes().unwrap(), want.to_bytes().unwrap(), "{dtype} {w:?}");
        }
        let unrounded = matches!(dtype, DType::F32 | DType::F64);
        assert_eq!(fresh.scratch_bytes() == 0, unrounded, "{dtype}");
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    same_bits("sums and products", |device| {
        let make = |shape: &[usize], seed| tensor(device, DType::F32, shape, &values(shape.iter().product(), seed));
        let (a, b) = (make(&[300, 500], 1), make(&[500, 400], 2));
        let out = poisoned(device, DType::F32, &[300, 400]);
        run(device, kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out });
        let [all, rows, columns] = [[1, 1], [300, 1], [1, 500]].map(|s| poisoned(device, DType::F32, &s));
        for out in [&all, &rows, &columns] {
            run(device, kernel::Reduce { f: ReduceFn::Sum, x: &a, out });
        }
        let (dw, db) = (poisoned(device, DType::F32, &[500]), poisoned(device, DType::F32, &[500]));
        let (mean, rstd) = (make(&[300], 3), make(&[300], 4));
        let (dweight, dbias) = (Some(&dw), Some(&db));
        run(device, kernel::LayerNormParamGrad { x: &a, mean: Some(&mean), rstd: &rstd, g: &a, dweight, dbias });
        vec![out, all, rows, columns, dw, db]
    });
}
