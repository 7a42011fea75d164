//! Columns for convolutions, and pooling.

use crate::twins::{FLOATS, LIES, Lie, Twin, compare, numbers};
use retape_core::DType;
use retape_core::kernel::{self, PoolDivisor, Window};

fn windows() -> [Window; 5] {
    let window = |kernel, stride, before, dilation| Window { kernel, stride, before, dilation };
    [
        window([1, 1], [1, 1], [0, 0], [1, 1]),
        window([2, 3], [1, 2], [0, 1], [1, 1]),
        window([3, 3], [2, 1], [1, 1], [1, 2]),
        window([2, 2], [3, 3], [0, 0], [2, 1]),
        window([3, 1], [1, 1], [3, 0], [2, 1]),
    ]
}

fn outputs(w: &Window, d: usize, size: usize) -> usize {
    (size + 2 * w.before[d]).saturating_sub(w.dilation[d] * (w.kernel[d] - 1)).div_ceil(w.stride[d])
}

#[test]
fn columns_and_pools() {
    for shape in [[2, 3, 7, 6], [1, 1, 5, 9], [1, 2, 3, 40], [0, 2, 5, 5]] {
        for w in windows() {
            let (oh, ow) = (outputs(&w, 0, shape[2]), outputs(&w, 1, shape[3]));
            let out_shape = [shape[0], shape[1], oh, ow];
            let column_shape = [shape[0], shape[1], w.kernel[0], w.kernel[1], oh, ow];
            for dtype in FLOATS {
                for lie in LIES {
                    let mut values = numbers(1, shape.iter().product());
                    if values.len() > 20 {
                        (values[5], values[7], values[20]) = (3.0, 3.0, f64::NAN);
                    }
                    let x = Twin::lying(lie, &shape, &values, dtype);
                    let g = Twin::random(lie, &out_shape, 2, dtype);
                    let columns = Twin::random(Lie::Plain, &column_shape, 3, dtype);
                    let label = format!("{w:?} over {shape:?} {lie:?}");
                    compare(&label, dtype, 16.0, &[&x, &g, &columns], |side| {
                        let [x, g, cols] = [0, 1, 2].map(|i| side.input(i));
                        let (to, back) = (side.out(&column_shape), side.out(&shape));
                        side.run(kernel::Im2col { x, window: w, out: &to });
                        side.run(kernel::Col2im { cols, window: w, out: &back });
                        let mut all = vec![to, back];
                        for index_dtype in [DType::I64, DType::I32] {
                            let (most, index) = (side.out(&out_shape), side.filled(&out_shape, index_dtype));
                            let grad = side.out(&shape);
                            side.run(kernel::MaxPool { x, window: w, out: &most, index: &index });
                            side.run(kernel::MaxPoolGrad { index: &index, g, window: w, out: &grad });
                            all.extend([most, index, grad]);
                        }
                        for divisor in [PoolDivisor::Inside, PoolDivisor::Padded, PoolDivisor::Fixed(5)] {
                            let (mean, grad) = (side.out(&out_shape), side.out(&shape));
                            side.run(kernel::AvgPool { x, window: w, divisor, out: &mean });
                            side.run(kernel::AvgPoolGrad { g, window: w, divisor, out: &grad });
                            all.extend([mean, grad]);
                        }
                        all
                    });
                }
            }
        }
    }
}
