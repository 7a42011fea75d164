//! Elementwise kernels, copies and random numbers against plain f64 arithmetic.

mod common;
#[allow(dead_code)] // what other tests use
#[path = "../../../tests/src/functions.rs"]
mod functions;

use common::*;
use functions::{slope, value, value_of_two};
use retape_core::kernel::{self, AdamWConfig, BinaryFn, RandomStream, UnaryFn};
use retape_core::{DType, Error, MemoryKind, Tensor};
use std::ops::Range;

/// Numbers that f32 holds, spread over a range.
fn spread(values: Vec<f64>, over: Range<f64>) -> Vec<f64> {
    let place = |x: f64| over.start + (x / 4.0 + 0.5) * (over.end - over.start);
    values.into_iter().map(|x| f64::from(place(x) as f32)).collect()
}

const SHAPES: [&[usize]; 8] = [&[], &[1], &[0], &[3, 0, 2], &[5, 7], &[2, 3, 1, 5, 4], &[65], &[3, 200]];

#[test]
fn unary_and_gradient() {
    let device = device(2);
    let functions = UnaryFn::ALL.concat();
    let each = || functions.iter().flat_map(|&f| SHAPES.map(|shape| (f, shape)));
    for (dtype, (f, shape)) in FLOATS.iter().flat_map(|&dtype| each().map(move |case| (dtype, case))) {
        let n = shape.iter().product();
        let x = spread(values(n, 1), f.domain());
        let g = values(n, 2);
        let want: Vec<f64> = x.iter().map(|&x| value(f, x)).collect();
        let saved = if f.grad_reads_output() { want.clone() } else { x.clone() };
        let want_grad: Vec<f64> = saved.iter().zip(&g).map(|(&saved, g)| g * slope(f, saved)).collect();
        let what = format!("{f:?} {dtype}{shape:?}");
        for x in views(&device, dtype, shape, &x) {
            let out = poisoned(&device, dtype, shape);
            run(&device, kernel::Unary { f, x: &x, out: &out });
            close(&what, &out, &want, tolerance(dtype));
        }
        for (saved, g) in views(&device, dtype, shape, &saved).iter().zip(views(&device, dtype, shape, &g).iter().rev())
        {
            let out = poisoned(&device, dtype, shape);
            run(&device, kernel::UnaryGrad { f, saved, g, out: &out });
            close(&what, &out, &want_grad, 3.0 * tolerance(dtype));
        }
        let x = tensor(&device, dtype, shape, &x);
        run(&device, kernel::Unary { f, x: &x, out: &x });
        close(&what, &x, &want, tolerance(dtype));
        let (saved, g) = (tensor(&device, dtype, shape, &saved), tensor(&device, dtype, shape, &g));
        run(&device, kernel::UnaryGrad { f, saved: &saved, g: &g, out: &g });
        close(&what, &g, &want_grad, 3.0 * tolerance(dtype));
    }
}

#[test]
fn limits_and_kinks() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let x = [-inf, -1e30, -100.0, -0.0, 0.0, 100.0, 1e30, inf, nan];
    let device = device(1);
    let cases: [(UnaryFn, [f64; 9], [f64; 9]); 6] = [
        (UnaryFn::Sigmoid, [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, nan], [nan; 9]),
        (
            UnaryFn::Silu,
            [0.0, 0.0, 0.0, 0.0, 0.0, 100.0, 1e30, inf, nan],
            [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, nan],
        ),
        (
            UnaryFn::Gelu,
            [0.0, 0.0, 0.0, 0.0, 0.0, 100.0, 1e30, inf, nan],
            [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, nan],
        ),
        (
            UnaryFn::GeluTanh,
            [0.0, 0.0, 0.0, 0.0, 0.0, 100.0, 1e30, inf, nan],
            [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, nan],
        ),
        (
            UnaryFn::Relu,
            [0.0, 0.0, 0.0, 0.0, 0.0, 100.0, 1e30, inf, nan],
            [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        ),
        (
            UnaryFn::Abs,
            [inf, 1e30, 100.0, 0.0, 0.0, 100.0, 1e30, inf, nan],
            [-1.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        ),
    ];
    for (dtype, (f, y, slope)) in FLOATS.iter().flat_map(|&d| cases.iter().map(move |c| (d, c))) {
        let (x, out) = (tensor(&device, dtype, &[9], &x), poisoned(&device, dtype, &[9]));
        run(&device, kernel::Unary { f: *f, x: &x, out: &out });
        close(&format!("{f:?}"), &out, y, 1e-6);
        if !f.grad_reads_output() {
            let g = tensor(&device, dtype, &[9], &[1.0; 9]);
            run(&device, kernel::UnaryGrad { f: *f, saved: &x, g: &g, out: &out });
            close(&format!("{f:?} grad"), &out, slope, 1e-6);
        }
    }
}

#[test]
fn binary_broadcast_and_ties() {
    let device = device(2);
    for dtype in FLOATS {
        for f in BinaryFn::ALL.concat() {
            let [of_a, of_b] = f.domain();
            let (a, b) = (spread(values(3 * 70, 1), of_a), spread(values(70, 2), of_b));
            let want: Vec<f64> = a.iter().zip(b.iter().cycle()).map(|(&a, &b)| value_of_two(f, a, b)).collect();
            for (a, b) in views(&device, dtype, &[3, 70], &a).iter().zip(views(&device, dtype, &[70], &b)) {
                let (out, b) = (poisoned(&device, dtype, &[3, 70]), b.expand(&[3, 70]).unwrap());
                run(&device, kernel::Binary { f, a, b: &b, out: &out });
                close(&format!("{f:?}"), &out, &want, tolerance(dtype));
                let a = a.copy(MemoryKind::Input).unwrap();
                run(&device, kernel::Binary { f, a: &a, b: &b, out: &a });
                close(&format!("{f:?} in place"), &a, &want, tolerance(dtype));
            }
        }
        let (a, b, g) = ([1.0, 2.0, f64::NAN, 4.0], [1.0, 3.0, 0.0, 0.0], [8.0; 4]);
        let [a, b, g] = [a, b, g].map(|v| tensor(&device, dtype, &[4], &v));
        let out = poisoned(&device, dtype, &[4]);
        run(&device, kernel::Binary { f: BinaryFn::Maximum, a: &b, b: &a, out: &out });
        close("maximum", &out, &[1.0, 3.0, f64::NAN, 4.0], 0.0);
        run(&device, kernel::ExtremumGrad { f: BinaryFn::Maximum, a: &a, b: &b, g: &g, out: &out });
        close("maximum grad", &out, &[4.0, 0.0, 8.0, 8.0], 0.0);
        let cond = Tensor::from_slice(&device, &[4], &[true, false, true, false]).unwrap();
        run(&device, kernel::Select { cond: &cond, a: &g, b: &b, out: &out });
        close("select", &out, &[8.0, 3.0, 8.0, 0.0], 0.0);
    }
}

#[test]
fn copies_between_all_dtypes() {
    let device = device(2);
    let x = [0.0, 1.0, -1.0, 2.75, -2.75, 100.0];
    for (from, to) in DType::ALL.iter().flat_map(|&a| DType::ALL.map(|b| (a, b))) {
        let source = tensor(&device, from, &[2, 3], &x);
        let held = source.to_f64_vec().unwrap();
        let want = |v: f64| match to {
            DType::Bool => (v != 0.0) as u8 as f64,
            DType::U8 if from == DType::I64 || from == DType::I32 => (v as i64 as u8) as f64,
            DType::U8 => (v as u8) as f64,
            DType::I64 | DType::I32 => v.trunc(),
            _ => v,
        };
        // Out of the transposed view, into a strided one.
        let wide = Tensor::full(&device, &[3, 5], to, 9.0).unwrap();
        let out = wide.narrow(1, 1, 2).unwrap();
        run(&device, kernel::Copy { x: &source.transpose(0, 1).unwrap(), out: &out });
        let turned: Vec<f64> = [0, 3, 1, 4, 2, 5].iter().map(|&i| want(held[i])).collect();
        close(&format!("{from} to {to}"), &out, &turned, 0.0);
        if to != DType::Bool {
            assert_eq!(wide.narrow(1, 3, 2).unwrap().to_f64_vec().unwrap(), [9.0; 6]);
        }
    }
    let large = Tensor::from_slice(&device, &[1], &[i64::MAX - 1]).unwrap();
    assert_eq!(large.cast(DType::I64, MemoryKind::Input).unwrap().to_vec::<i64>().unwrap(), [i64::MAX - 1]);
}

#[test]
fn random_streams() {
    let device = device(2);
    let n = 40_001;
    let out = poisoned(&device, DType::F32, &[n]);
    run(&device, kernel::Uniform { stream: STREAM, out: &out });
    let want: Vec<f64> = (0..n as u64).map(|i| (STREAM.word(i) >> 8) as f64 / 16_777_216.0).collect();
    close("uniform", &out, &want, 0.0);
    let wide = poisoned(&device, DType::F64, &[n]);
    run(&device, kernel::Uniform { stream: STREAM, out: &wide });
    let want: Vec<f64> = (0..n as u64).map(|i| STREAM.word(i) as f64 / 4_294_967_296.0).collect();
    close("uniform", &wide, &want, 0.0);
    run(&device, kernel::Normal { stream: STREAM, std: 2.0, out: &wide });
    let normal = wide.to_f64_vec().unwrap();
    let mean = normal.iter().sum::<f64>() / n as f64;
    let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
    assert!(mean.abs() < 0.04 && (variance - 4.0).abs() < 0.1, "{mean} {variance}");
    let p = 0.3;
    let x = values(n, 5);
    let want: Vec<f64> = x
        .iter()
        .enumerate()
        .map(|(i, x)| if (STREAM.word(i as u64) as u64) < RandomStream::threshold(p) { 0.0 } else { x / (1.0 - p) })
        .collect();
    let x = tensor(&device, DType::F32, &[n], &x);
    run(&device, kernel::Dropout { x: &x, p, stream: STREAM, out: &out });
    close("dropout", &out, &want, 1e-6);
    run(&device, kernel::Dropout { x: &x, p, stream: STREAM, out: &x });
    close("dropout in place", &x, &want, 1e-6);
}

#[test]
fn adamw_step() {
    let device = device(2);
    let n = 131;
    let config = AdamWConfig { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
    for dtype in FLOATS {
        let (p, g, m) = (values(n, 1), values(n, 2), values(n, 3));
        let v: Vec<f64> = values(n, 4).iter().map(|v| v.abs()).collect();
        let (mut wp, mut wm, mut wv) = (vec![], vec![], vec![]);
        for i in 0..n {
            let g = g[i] * 0.5;
            let (m, v) = (0.9 * m[i] + 0.1 * g, 0.99 * v[i] + 0.01 * g * g);
            let decayed = p[i] - 0.01 * 0.1 * p[i];
            let (mh, vh) = (m / (1.0 - 0.9f64.powi(3)), v / (1.0 - 0.99f64.powi(3)));
            wp.push(decayed - 0.01 * mh / (vh.sqrt() + 1e-6));
            wm.push(m);
            wv.push(v);
        }
        let [p, g, m, v] = [p, g, m, v].map(|x| tensor(&device, dtype, &[n], &x));
        run(&device, kernel::AdamW { p: &p, g: &g, m: &m, v: &v, step: 3, config, grad_scale: 0.5 });
        close("p", &p, &wp, tolerance(dtype));
        close("m", &m, &wm, tolerance(dtype));
        close("v", &v, &wv, tolerance(dtype));
    }
}

#[test]
fn unsupported_dtypes_are_errors() {
    let device = device(1);
    let x = Tensor::full(&device, &[2], DType::I32, 1.0).unwrap();
    let error = device.run(kernel::Unary { f: UnaryFn::Exp, x: &x, out: &x }).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { kernel: "unary", .. }), "{error}");
    assert!(error.to_string().contains("i32"), "{error}");
}
