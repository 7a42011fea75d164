//! Reductions and their gradients.

use crate::twins::{FLOATS, LIES, Lie, Twin, compare, numbers};
use retape_core::DType;
use retape_core::kernel::{self, ReduceFn};

fn kinds() -> Vec<ReduceFn> {
    let norms = [0.0, 1.0, 2.0, 3.0, 0.5, f64::INFINITY, f64::NEG_INFINITY].map(|ord| ReduceFn::Norm { ord });
    let mut kinds = vec![ReduceFn::Sum, ReduceFn::Max, ReduceFn::Min, ReduceFn::Prod, ReduceFn::LogSumExp];
    kinds.extend([0.0, 1.0].map(|correction| ReduceFn::Var { correction }));
    kinds.push(ReduceFn::Std { correction: 1.0 });
    kinds.extend(norms);
    kinds
}

fn reduced(shape: &[usize], dims: &[usize]) -> Vec<usize> {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

fn check(f: ReduceFn, x: &Twin, dims: &[usize], dtype: DType) {
    let label = format!("{f:?} of {:?} over {dims:?}", x.shape());
    let kept = reduced(x.shape(), dims);
    compare(&label, dtype, 64.0, &[x], |side| {
        let out = side.out(&kept);
        side.run(kernel::Reduce { f, x: side.input(0), out: &out });
        vec![out]
    });
}

#[test]
fn every_kind_over_any_dimensions() {
    for dtype in FLOATS {
        for lie in LIES {
            let x = Twin::random(lie, &[3, 5, 7], 1, dtype);
            for f in kinds() {
                for dims in [&[][..], &[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]] {
                    check(f, &x, dims, dtype);
                }
            }
        }
    }
}

#[test]
fn shapes_with_edges() {
    for (shape, dims) in [
        (&[][..], &[][..]),
        (&[1], &[0]),
        (&[0, 3], &[0]),
        (&[0, 3], &[1]),
        (&[3, 0], &[1]),
        (&[4, 33], &[1]),
        (&[2, 1025], &[1]),
        (&[257, 12], &[0]),
        (&[70, 300], &[0]),
        (&[2, 300, 5], &[1]),
        (&[9, 4, 31], &[0, 1]),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let x = Twin::random(Lie::Plain, shape, 2, dtype);
            for f in [ReduceFn::Sum, ReduceFn::Max, ReduceFn::LogSumExp, ReduceFn::Norm { ord: 2.0 }] {
                check(f, &x, dims, dtype);
            }
        }
    }
}

/// Groups in pieces, by rows and by columns.
#[test]
fn groups_in_pieces() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for (shape, dims) in
            [(&[2, 20_000][..], &[1][..]), (&[40_001], &[0]), (&[3000, 8], &[0]), (&[20, 1000, 3], &[0, 1])]
        {
            let x = Twin::random(Lie::Plain, shape, 3, dtype);
            for f in
                [ReduceFn::Sum, ReduceFn::Max, ReduceFn::Norm { ord: 1.0 }, ReduceFn::Norm { ord: f64::NEG_INFINITY }]
            {
                check(f, &x, dims, dtype);
            }
        }
    }
}

#[test]
fn not_a_number_and_infinity() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let rows = [[1.0, nan, 2.0], [inf, 1.0, 2.0], [-inf, -inf, -inf], [-inf, 1.0, inf], [0.0, -0.0, 0.0]];
    for dtype in FLOATS {
        let x = Twin::of(&[5, 3], rows.as_flattened(), dtype);
        for f in kinds() {
            check(f, &x, &[1], dtype);
            check(f, &x, &[0], dtype);
        }
    }
}

/// What the kernels hold for themselves is known, and bounded by shapes.
#[test]
fn the_workspace_is_counted() {
    let device = retape_cuda_emulator::device();
    assert_eq!(device.scratch_bytes(), 0);
    let x = retape_core::Tensor::full(&device, &[1 << 20], DType::F32, 1.0).unwrap();
    let out = retape_core::Tensor::full(&device, &[1], DType::F32, 0.0).unwrap();
    for _ in 0..2 {
        device.run(kernel::Reduce { f: ReduceFn::Sum, x: &x, out: &out }).unwrap();
        assert_eq!(out.item().unwrap(), f64::from(1 << 20));
        let held = device.scratch_bytes();
        assert!(held > 0 && held <= 1 << 17, "{held}");
    }
}

/// Strides don't show in the bits.
#[test]
fn a_view_sums_as_its_copy() {
    for (shape, dims) in [(&[40, 37][..], &[1][..]), (&[300, 12], &[0])] {
        let values = numbers(4, shape.iter().product());
        let of = |lie| {
            let x = Twin::lying(lie, shape, &values, DType::F32).ours;
            let out = retape_core::Tensor::full(x.device(), &reduced(shape, dims), DType::F32, f64::NAN).unwrap();
            x.device().run(kernel::Reduce { f: ReduceFn::Sum, x: &x, out: &out }).unwrap();
            out.to_bytes().unwrap()
        };
        assert!(of(Lie::Plain) == of(Lie::Turned) && of(Lie::Plain) == of(Lie::Inside), "{shape:?}");
    }
}

#[test]
fn squared_norms() {
    for dtype in FLOATS {
        for (lie, shape) in
            [(Lie::Plain, &[40_000][..]), (Lie::Turned, &[9, 31]), (Lie::Inside, &[3, 0]), (Lie::Plain, &[])]
        {
            let x = Twin::random(lie, shape, 5, dtype);
            compare("squared norm", dtype, 16.0, &[&x], |side| {
                let out = side.filled(&[], DType::F64);
                side.run(kernel::SquaredNorm { x: side.input(0), out: &out });
                vec![out]
            });
        }
    }
}

/// What the gradient reads is what the CPU finds in f64, rounded: then both devices see the same ties.
#[test]
fn gradients() {
    for dtype in FLOATS {
        for (lie, shape, dims) in [
            (Lie::Plain, &[3, 4, 5][..], &[1][..]),
            (Lie::Plain, &[4, 70], &[1]),
            (Lie::Turned, &[3, 4, 5], &[0, 2]),
            (Lie::Inside, &[6, 5], &[0, 1]),
            (Lie::Repeated, &[4, 33], &[0]),
        ] {
            let mut values = numbers(6, shape.iter().product());
            values[1] = 0.0;
            values[3] = 0.0;
            let x = Twin::lying(lie, shape, &values, dtype);
            let kept = reduced(shape, dims);
            let g = Twin::random(Lie::Plain, &kept, 7, dtype);
            for f in kinds().into_iter().filter(|&f| f != ReduceFn::Sum) {
                let y = retape_core::Tensor::full(x.theirs.device(), &kept, DType::F64, f64::NAN).unwrap();
                y.device().run(kernel::Reduce { f: f.in_grad(), x: &x.theirs, out: &y }).unwrap();
                let y = Twin::of(&kept, &y.to_vec::<f64>().unwrap(), dtype);
                // The magnitudes' ends are among x; those of 0.5 and of least magnitude 0 are steep or 0.
                compare(
                    &format!("gradient of {f:?} of {shape:?} over {dims:?}"),
                    dtype,
                    256.0,
                    &[&x, &y, &g],
                    |side| {
                        let out = side.out(shape);
                        let (x, y, g) = (side.input(0), side.input(1), side.input(2));
                        side.run(kernel::ReduceGrad { f, x, y, g, out: &out });
                        vec![out]
                    },
                );
            }
        }
    }
}

/// Norms with an infinite element, and products with several, by a warp.
#[test]
fn gradients_with_infinite_elements() {
    let infinity = f64::INFINITY;
    for (dtype, n) in FLOATS.into_iter().flat_map(|d| [(d, 4), (d, 33), (d, 70)]) {
        let mut values: Vec<f64> = numbers(8, 3 * n).iter().map(|v| v + 2.5).collect();
        (values[1], values[2 * n], values[2 * n + 2]) = (infinity, infinity, -infinity);
        values[n + 3] = -infinity;
        let x = Twin::of(&[3, n], &values, dtype);
        let g = Twin::random(Lie::Plain, &[3, 1], 9, dtype);
        let each = Twin::random(Lie::Plain, &[3, n], 10, dtype);
        for ord in [0.5, 1.0, 1.5, 2.0, 3.0, -1.0] {
            compare(&format!("norm {ord} of {n} with infinity"), dtype, 256.0, &[&x, &g], |side| {
                let (f, x, g) = (ReduceFn::Norm { ord }, side.input(0), side.input(1));
                let (norm, y, out) = (side.out(&[3, 1]), side.out(&[3, 1]), side.out(&[3, n]));
                side.run(kernel::Reduce { f, x, out: &norm });
                side.run(kernel::Reduce { f: f.in_grad(), x, out: &y });
                side.run(kernel::ReduceGrad { f, x, y: &y, g, out: &out });
                vec![norm, out]
            });
        }
        compare(&format!("products of {n} with infinity"), dtype, 256.0, &[&x, &g, &each], |side| {
            let (x, y) = (side.input(0), side.out(&[3, 1]));
            let (whole, running) = (side.out(&[3, n]), side.out(&[3, n]));
            side.run(kernel::Reduce { f: ReduceFn::Prod, x, out: &y });
            side.run(kernel::ReduceGrad { f: ReduceFn::Prod, x, y: &y, g: side.input(1), out: &whole });
            side.run(kernel::CumprodGrad { x, g: side.input(2), dim: 1, out: &running });
            vec![whole, running]
        });
    }
}

/// The CPU's test of sums of equal addends, of fewer.
#[test]
fn the_error_of_a_sum_does_not_grow_with_its_length() {
    for dtype in [DType::F32, DType::BF16] {
        let found = retape_tests::sums::of_equal_addends(&crate::twins::cuda(), dtype, 40_000).unwrap();
        retape_tests::sums::assert_close(dtype, &found, 2e-6);
    }
}
