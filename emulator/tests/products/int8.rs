//! Quantize and Dequantize: the CPU's bits.

use crate::both::{Both, Lie, both, numbers, same_bytes};
use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Tensor};

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const STREAM: RandomStream = RandomStream { seed: 42, counter: 3 };

fn check(both: &Both, lie: Lie, shape: &[usize], dtype: DType, group: usize, values: &[f64]) {
    let [x, x_cpu] = both.tensors(lie, shape, dtype, values);
    let mut groups = shape.to_vec();
    if let Some(last) = groups.last_mut() {
        *last = last.div_ceil(group);
    }
    for rounding in [None, Some(STREAM)] {
        let what = format!("{dtype} {shape:?} {lie:?} by {group}, {rounding:?}");
        let (q, scales) = (both.outs(shape, DType::U8), both.outs(&groups, dtype.computed_in()));
        let kernel = |i: usize, x| kernel::Quantize { x, group, rounding, q: &q[i], scales: &scales[i] };
        both.run(kernel(0, &x), kernel(1, &x_cpu));
        same_bytes(&format!("q, {what}"), &q);
        let same = |x: &[Tensor; 2]| {
            let [a, b] = [&x[0], &x[1]].map(|t| t.to_f64_vec().unwrap());
            a.iter().zip(&b).all(|(a, b)| a == b || a.is_nan() && b.is_nan())
        };
        assert!(same(&scales), "scales, {what}");
        for dtype in FLOATS.into_iter().filter(|out| out.computed_in() == dtype.computed_in()) {
            let outs = both.outs(shape, dtype);
            let kernel = |i: usize| kernel::Dequantize { q: &q[i], scales: &scales[i], group, out: &outs[i] };
            both.run(kernel(0), kernel(1));
            assert!(same(&outs), "{dtype} from {what}");
        }
    }
}

#[test]
fn groups_of_every_length() {
    let both = both();
    for dtype in FLOATS {
        for (shape, group) in [
            (&[][..], 64),
            (&[3, 200], 64),
            (&[2, 130], 33),
            (&[4, 5], 1),
            (&[0, 8], 4),
            (&[8, 0], 4),
            (&[2, 3, 64], 64),
            (&[2, 1000], 256),
            (&[2, 700], 300),
            (&[1, 1030], 1024),
            (&[1, 9000], 1 << 20),
        ] {
            let n: usize = shape.iter().product();
            let mut values = numbers(n, 1);
            values.iter_mut().take(group.min(40)).for_each(|v| *v = 0.0); // some groups are 0
            check(&both, Lie::Plain, shape, dtype, group, &values);
        }
    }
}

#[test]
fn views() {
    let both = both();
    for dtype in FLOATS {
        for lie in [Lie::Transposed, Lie::Inside(3), Lie::Inside(8), Lie::Strided, Lie::Expanded] {
            check(&both, lie, &[5, 72], dtype, 16, &numbers(5 * 72, 1));
            check(&both, lie, &[2, 3, 20], dtype, 8, &numbers(2 * 3 * 20, 1));
        }
    }
}

#[test]
fn values_at_the_edges() {
    let both = both();
    for dtype in FLOATS {
        for bad in [f64::NAN, f64::INFINITY, -f64::INFINITY, 1e-45, -0.0] {
            let mut values = numbers(40, 1);
            values[3] = bad;
            values[20..30].iter_mut().for_each(|v| *v = bad);
            check(&both, Lie::Plain, &[4, 10], dtype, 5, &values);
        }
    }
    // Each row of one magnitude, from the subnormal numbers to the largest.
    for (dtype, least, most) in
        [(DType::F64, -1074, 1024), (DType::F32, -149, 128), (DType::BF16, -133, 128), (DType::F16, -24, 16)]
    {
        let of_row = |row: usize| least + row as i32 * (most - least) / 64;
        let scaled = |(i, x): (usize, &f64)| {
            let e = of_row(i / 24);
            x * 2f64.powi(e / 2) * 2f64.powi(e - e / 2)
        };
        let values: Vec<f64> = numbers(64 * 24, 1).iter().enumerate().map(scaled).collect();
        check(&both, Lie::Plain, &[64, 24], dtype, 24, &values);
    }
    // Halves between two numbers, to the even one; and what is beyond f32.
    let halves: Vec<f64> =
        (0..255).map(|i| f64::from(i) - 127.0 + if i % 2 == 0 { 0.5 } else { 0.0 }).chain([127.0]).collect();
    check(&both, Lie::Plain, &[256], DType::F32, 256, &halves);
    check(&both, Lie::Plain, &[4], DType::F64, 2, &[1e300, 1.0, 2.0, 3.0]);
}
