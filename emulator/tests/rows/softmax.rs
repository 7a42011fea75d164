//! Softmax, its logarithm, and triangles.

use crate::twins::{FLOATS, LIES, Lie, Side, Twin, compare, numbers};
use retape_core::{DType, Tensor, kernel};

const SHAPES: [&[usize]; 11] =
    [&[3, 5], &[], &[4], &[2, 3, 31], &[5, 33], &[2, 257], &[2, 1032], &[2, 0], &[1, 8192], &[1, 8193], &[1, 8200]];

fn forward(side: &Side, x: &Tensor) -> Vec<Tensor> {
    let (soft, log) = (side.out(x.shape()), side.out(x.shape()));
    side.run(kernel::Softmax { x, out: &soft });
    side.run(kernel::LogSoftmax { x, out: &log });
    vec![soft, log]
}

#[test]
fn forward_and_backward() {
    for dtype in FLOATS {
        for shape in SHAPES {
            for lie in LIES {
                let values: Vec<f64> = numbers(1, shape.iter().product()).iter().map(|v| v * 6.0).collect();
                let x = Twin::lying(lie, shape, &values, dtype);
                compare(&format!("softmax of {shape:?} {lie:?}"), dtype, 16.0, &[&x], |side| {
                    forward(side, side.input(0))
                });
                // Outputs that softmax might have given.
                let y = Twin::random(lie, shape, 2, dtype);
                let g = Twin::random(lie, shape, 3, dtype);
                compare(&format!("gradient of softmax of {shape:?} {lie:?}"), dtype, 64.0, &[&y, &g], |side| {
                    let (y, g, soft, log) = (side.input(0), side.input(1), side.out(shape), side.out(shape));
                    side.run(kernel::SoftmaxGrad { y, g, out: &soft });
                    side.run(kernel::LogSoftmaxGrad { y, g, out: &log });
                    let (soft_in_place, log_in_place) = (side.copy_of(1), side.copy_of(1));
                    side.run(kernel::SoftmaxGrad { y, g: &soft_in_place, out: &soft_in_place });
                    side.run(kernel::LogSoftmaxGrad { y, g: &log_in_place, out: &log_in_place });
                    vec![soft, log, soft_in_place, log_in_place]
                });
            }
        }
    }
}

#[test]
fn rows_of_extremes() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    for width in [3, 40, 1100, 8201] {
        // Rows that are -1e4 but for the ends.
        let ends = [
            (-1e4, -1e4, -1e4),
            (-inf, -inf, -inf),
            (nan, 0.0, 1.0),
            (0.0, 1.0, nan),
            (inf, 1.0, 0.0),
            (-inf, 1.0, -inf),
            (6e4, -6e4, 6e4),
        ];
        let row = |&(first, middle, last): &(f64, f64, f64)| {
            let mut row = vec![middle; width];
            (row[0], row[width - 1]) = (first, last);
            row
        };
        let values: Vec<f64> = ends.iter().flat_map(row).collect();
        for dtype in FLOATS {
            let x = Twin::of(&[ends.len(), width], &values, dtype);
            compare("softmax of extremes", dtype, 16.0, &[&x], |side| forward(side, side.input(0)));
            let g = Twin::random(Lie::Plain, &[2, width], 4, dtype);
            let y = Twin::of(&[2, width], &[vec![-inf; width], vec![-1.0; width]].concat(), dtype);
            compare("gradient of a row of only -inf", dtype, 64.0, &[&y, &g], |side| {
                let out = side.out(&[2, width]);
                side.run(kernel::LogSoftmaxGrad { y: side.input(0), g: side.input(1), out: &out });
                vec![out]
            });
        }
    }
}

#[test]
fn triangles() {
    for dtype in FLOATS {
        for (lie, shape) in
            [(Lie::Plain, &[2, 5, 9][..]), (Lie::Turned, &[7, 4]), (Lie::Inside, &[3, 33]), (Lie::Plain, &[0, 3])]
        {
            let x = Twin::random(lie, shape, 5, dtype);
            for upper in [false, true] {
                for diagonal in [0, 1, -1, -3, 4, 100, -100, isize::MAX, isize::MIN] {
                    compare("triangle", dtype, 0.0, &[&x], |side| {
                        let (out, in_place) = (side.out(shape), side.copy_of(0));
                        let x = side.input(0);
                        side.run(kernel::Triangle { x, upper, diagonal, value: f64::NEG_INFINITY, out: &out });
                        side.run(kernel::Triangle { x: &in_place, upper, diagonal, value: 2.0, out: &in_place });
                        vec![out, in_place]
                    });
                }
            }
        }
    }
    // What is left out may be NaN.
    let x = Twin::of(&[2, 2], &[1.0, f64::NAN, 2.0, 3.0], DType::F32);
    compare("triangle of NaN", DType::F32, 0.0, &[&x], |side| {
        let out = side.out(&[2, 2]);
        side.run(kernel::Triangle { x: side.input(0), upper: false, diagonal: 0, value: 0.0, out: &out });
        vec![out]
    });
}
