//! Matmul against the CPU's in f64, on operands rounded to their dtypes.

use crate::both::{Both, Lie, both, epsilon, numbers};
use Lie::*;
use retape_core::{DType, MemoryKind, Tensor, kernel};

#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    batch: &'a [usize],
    mkn: (usize, usize, usize),
    lies: (Lie, Lie),
    /// Of a, b and out.
    dtypes: [DType; 3],
    alpha: f64,
    accumulate: bool,
}

const SINGLE: [DType; 3] = [DType::F32; 3];
const ORDINARY: Case<'_> =
    Case { batch: &[], mkn: (5, 6, 7), lies: (Plain, Plain), dtypes: SINGLE, alpha: 1.0, accumulate: false };

fn shape(batch: &[usize], rows: usize, columns: usize) -> Vec<usize> {
    [batch, &[rows, columns]].concat()
}

fn check(both: &Both, case: Case<'_>) -> Vec<u8> {
    let (m, k, n) = case.mkn;
    let tensors =
        |lie, shape: &[usize], dtype, seed| both.tensors(lie, shape, dtype, &numbers(shape.iter().product(), seed));
    let [a, a_cpu] = tensors(case.lies.0, &shape(case.batch, m, k), case.dtypes[0], 1);
    let [b, b_cpu] = tensors(case.lies.1, &shape(case.batch, k, n), case.dtypes[1], 2);
    let [out, out_cpu] = if case.accumulate {
        tensors(Plain, &shape(case.batch, m, n), case.dtypes[2], 3)
    } else {
        both.outs(&shape(case.batch, m, n), case.dtypes[2])
    };
    let wide = |t: &Tensor| t.cast(DType::F64, MemoryKind::Input).unwrap();
    let positive = |t: &Tensor| {
        let magnitudes: Vec<f64> = t.to_f64_vec().unwrap().iter().map(|x| x.abs()).collect();
        Tensor::from_slice(&both.cpu, t.shape(), &magnitudes).unwrap()
    };
    // The product, and the sum of its terms' magnitudes: rounding errors are in proportion to it.
    let product = |a: &Tensor, b: &Tensor, out: &Tensor| {
        let out = wide(out);
        let (alpha, accumulate) = (case.alpha, case.accumulate);
        both.cpu.run(kernel::Matmul { a, b, alpha, accumulate, out: &out }).unwrap();
        out.to_f64_vec().unwrap()
    };
    let want = product(&wide(&a_cpu), &wide(&b_cpu), &out_cpu);
    let terms = product(&positive(&a_cpu), &positive(&b_cpu), &positive(&out_cpu));
    let kernel = kernel::Matmul { a: &a, b: &b, alpha: case.alpha, accumulate: case.accumulate, out: &out };
    both.cuda.run(kernel).unwrap();
    let got = out.to_f64_vec().unwrap();
    let sums = if case.dtypes[2] == DType::F64 { DType::F64 } else { DType::F32 };
    for (i, ((&got, &want), terms)) in got.iter().zip(&want).zip(terms).enumerate() {
        let tolerance = 8.0 * epsilon(sums) * terms.abs() + 1.01 * epsilon(case.dtypes[2]) * want.abs();
        assert!((got - want).abs() <= tolerance, "{case:?}: element {i} is {got}, should be {want}");
    }
    out.to_bytes().unwrap()
}

const SIZES: [(usize, usize, usize); 11] = [
    (0, 5, 3),
    (1, 7, 1),
    (1, 130, 70),
    (7, 16, 65),
    (16, 0, 7),
    (63, 64, 65),
    (64, 64, 64),
    (130, 65, 63),
    (65, 130, 130),
    (3, 600, 64),
    (64, 33, 2),
];

#[test]
fn sizes_and_layouts_in_f32_and_f64() {
    let both = both();
    for dtype in [DType::F32, DType::F64] {
        for mkn in SIZES {
            for lies in [(Plain, Plain), (Transposed, Inside(3)), (Inside(4), Transposed), (Strided, Strided)] {
                check(&both, Case { mkn, lies, dtypes: [dtype; 3], ..ORDINARY });
            }
        }
    }
}

#[test]
fn sizes_and_layouts_in_16_bits() {
    let both = both();
    for (dtype, out) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F32)] {
        for mkn in SIZES {
            for lies in [
                (Plain, Plain),
                (Transposed, Plain),
                (Plain, Transposed),
                (Transposed, Transposed),
                (Inside(3), TransposedInside(1)),
                (TransposedInside(8), Inside(8)),
                (Strided, Plain),
            ] {
                check(&both, Case { mkn, lies, dtypes: [dtype, dtype, out], ..ORDINARY });
            }
        }
    }
}

#[test]
fn mixed_dtypes() {
    use DType::*;
    let both = both();
    for dtypes in [[F32, BF16, F32], [F16, F16, BF16], [BF16, F16, F16], [F32, F32, BF16], [BF16, F32, F16]] {
        for mkn in [(7, 16, 65), (2, 40, 9), (66, 20, 3)] {
            check(&both, Case { mkn, lies: (Plain, Transposed), dtypes, ..ORDINARY });
        }
    }
}

#[test]
fn factors_and_sums() {
    use DType::*;
    let both = both();
    for dtypes in [SINGLE, [F64; 3], [BF16; 3], [F16, F16, F32], [BF16, F32, BF16]] {
        for (alpha, accumulate) in [(0.5, false), (-2.0, true), (1.0, true), (0.0, true), (0.0, false)] {
            for mkn in [(65, 40, 72), (4, 0, 5), (2, 100, 3)] {
                check(&both, Case { mkn, lies: (Plain, Transposed), dtypes, alpha, accumulate, ..ORDINARY });
            }
        }
    }
}

#[test]
fn batches() {
    let both = both();
    for dtypes in [SINGLE, [DType::BF16; 3]] {
        for batch in [&[3][..], &[2, 3], &[0], &[1, 2], &[2, 1, 3]] {
            for lies in
                [(Plain, Plain), (Plain, Expanded), (Expanded, Plain), (Inside(8), Expanded), (Inside(1), Transposed)]
            {
                for mkn in [(5, 24, 16), (1, 9, 12), (17, 8, 1)] {
                    check(&both, Case { batch, mkn, lies, dtypes, ..ORDINARY });
                }
            }
        }
    }
}

/// As many tiles as there are multiprocessors: the large ones are chosen.
#[test]
fn large_tiles() {
    let both = both();
    let mut lies =
        [(Plain, Plain), (Transposed, Plain), (Plain, Transposed), (Transposed, Transposed)].into_iter().cycle();
    for (batch, mkn) in [(66, (130, 40, 8)), (132, (9, 100, 40)), (44, (24, 64, 300))] {
        for dtype in [DType::BF16, DType::F16] {
            for lies in lies.by_ref().take(2) {
                check(&both, Case { batch: &[batch], mkn, lies, dtypes: [dtype; 3], accumulate: true, ..ORDINARY });
            }
        }
    }
}

#[test]
fn equal_bits_from_run_to_run() {
    let both = both();
    for dtypes in [SINGLE, [DType::F64; 3], [DType::BF16; 3]] {
        for mkn in [(70, 100, 65), (3, 1000, 5)] {
            let case = Case { mkn, lies: (Plain, Transposed), dtypes, ..ORDINARY };
            let first = check(&both, case);
            (0..3).for_each(|_| assert_eq!(check(&both, case), first, "{case:?}"));
        }
    }
}

/// What isn't finite spreads along its row or column, and no further.
#[test]
fn not_finite() {
    let both = both();
    for dtype in [DType::F32, DType::BF16] {
        for (n, lie) in [(70, Plain), (3, Transposed)] {
            let (m, k) = (9, 40);
            let mut values = numbers(m * k, 1);
            values[3 * k + 39] = f64::NAN;
            let [a, _] = both.tensors(Plain, &[m, k], dtype, &values);
            let [b, _] = both.tensors(lie, &[k, n], dtype, &numbers(k * n, 2));
            let [out, _] = both.outs(&[m, n], dtype);
            both.cuda.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out }).unwrap();
            let wrong =
                out.to_f64_vec().unwrap().iter().enumerate().find(|(i, x)| x.is_nan() != (i / n == 3)).map(|x| x.0);
            assert_eq!(wrong, None, "{dtype}, {n} columns");
        }
    }
}
