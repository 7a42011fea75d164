//! Elements by their position: embedding, gather, scatter-add, flip, the largest; running folds.

use crate::twins::{FLOATS, LIES, Lie, Twin, compare, compare_errors, cuda, numbers};
use retape_core::kernel::{self, ScanFn, meeting};
use retape_core::{DType, MemoryKind, Tensor};

/// A workspace of `len` integers on `out`'s device.
fn order(out: &Tensor, len: usize) -> Tensor {
    Tensor::uninit(out.device(), &[len], DType::I64, MemoryKind::Workspace).unwrap()
}

/// Integers 0..n, a pure function of the seed.
fn ids(seed: u64, len: usize, n: usize) -> Vec<i64> {
    numbers(seed, len).iter().map(|v| (((v + 1.0) / 2.0 * n as f64) as i64).min(n as i64 - 1)).collect()
}

#[test]
fn embeddings() {
    for (shape, rows, width) in [
        (&[2, 3][..], 5, 4),
        (&[], 3, 7),
        (&[40], 3, 33),
        (&[7], 300, 257),
        (&[2, 0], 3, 4),
        (&[3], 4, 0),
        (&[3000], 50, 3),
    ] {
        let count = shape.iter().product();
        for dtype in FLOATS {
            for lie in [Lie::Plain, Lie::Turned, Lie::Inside] {
                let table = Twin::random(lie, &[rows, width], 1, dtype);
                let ids = Twin::integers(
                    shape,
                    &ids(2, count, rows),
                    if lie == Lie::Plain { DType::I64 } else { DType::I32 },
                );
                let out_shape = [shape, &[width]].concat();
                let g = Twin::random(lie, &out_shape, 3, dtype);
                compare("embedding", dtype, 64.0, &[&table, &ids, &g], |side| {
                    let (out, grad) = (side.out(&out_shape), side.out(&[rows, width]));
                    let [table, ids, g] = [0, 1, 2].map(|i| side.input(i));
                    side.run(kernel::Embedding { table, ids, out: &out });
                    let order = &order(&grad, ids.len());
                    side.run(kernel::EmbeddingGrad { ids, g, order, out: &grad });
                    vec![out, grad]
                });
            }
        }
    }
}

/// One id for all: a sum of many.
#[test]
fn a_sum_in_the_order_of_ids() {
    let ids = Twin::integers(&[5000], &[1; 5000], DType::I64);
    for dtype in [DType::F32, DType::BF16] {
        let g = Twin::random(Lie::Plain, &[5000, 3], 4, dtype);
        compare("one id", dtype, 1000.0, &[&ids, &g], |side| {
            let out = side.out(&[3, 3]);
            let order = &order(&out, 5000);
            side.run(kernel::EmbeddingGrad { ids: side.input(0), g: side.input(1), order, out: &out });
            vec![out]
        });
    }
    // In f32 the sums have the very bits of the CPU's.
    let values = numbers(5, 200);
    let on = |device: &retape_core::Device| {
        let g: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        let g = Tensor::from_slice(device, &[200, 1], &g).unwrap();
        let ids = Tensor::from_slice(device, &[200], &(0..200).map(|i| i64::from(i % 3)).collect::<Vec<_>>()).unwrap();
        let out = Tensor::full(device, &[3, 1], DType::F32, f64::NAN).unwrap();
        let order = &order(&out, 200);
        device.run(kernel::EmbeddingGrad { ids: &ids, g: &g, order, out: &out }).unwrap();
        out.to_bytes().unwrap()
    };
    assert_eq!(on(&cuda()), on(&retape_cpu::device()));
}

#[test]
fn ids_out_of_range() {
    let table = Twin::random(Lie::Plain, &[3, 4], 1, DType::F32);
    for (bad, dtype) in [(3, DType::I64), (-1, DType::I32), (i64::MIN, DType::I64)] {
        let mut values = vec![0; 600];
        (values[500], values[599]) = (bad, 9);
        let ids = Twin::integers(&[600], &values, dtype);
        compare_errors("ids", &[&table, &ids], |side| {
            let out = side.out(&[600, 4]);
            let error = side.error(kernel::Embedding { table: side.input(0), ids: side.input(1), out: &out });
            assert!(out.to_f64_vec().unwrap().iter().all(|v| v.is_nan()));
            error
        });
    }
}

/// x and out as `Gather` wants them for an index along dimension `dim`.
fn indexed(x: &Tensor, dim: usize, index: &[usize]) -> Tensor {
    let shape = [&[index[dim]], x.shape()].concat();
    let x = x.expand(&shape).unwrap().transpose(0, dim + 1).unwrap();
    (0..index.len()).filter(|&d| d != dim).fold(x, |x, d| x.narrow(d + 1, 0, index[d]).unwrap())
}

#[test]
fn gather_and_scatter_along_a_dimension() {
    for (shape, dim, index_shape, repeat) in [
        (&[3, 4][..], 0, &[5, 4][..], false),
        (&[3, 4], 1, &[3, 6], false),
        (&[3, 4], 1, &[2, 6], false),
        (&[6, 33], 0, &[50, 33], true),
        (&[2, 3, 5], 1, &[2, 7, 5], true),
        (&[5, 3], 0, &[2500, 1], false),
        (&[4], 0, &[40], false),
        (&[3, 4], 1, &[3, 0], false),
    ] {
        let len = index_shape.iter().product();
        let values = ids(6, len, shape[dim]);
        let index = if repeat {
            // One index for whole rows.
            let mut one = vec![1; index_shape.len()];
            one[dim] = index_shape[dim];
            let one = Twin::integers(&one, &values[..index_shape[dim]], DType::I64);
            one.map(|t| t.expand(index_shape).unwrap())
        } else {
            Twin::integers(index_shape, &values, DType::I32)
        };
        for dtype in FLOATS {
            for lie in LIES {
                let x = Twin::random(lie, shape, 7, dtype);
                let source = Twin::random(lie, index_shape, 8, dtype);
                let label = format!("along {dim} of {shape:?} at {index_shape:?} {lie:?}");
                compare(&label, dtype, 64.0, &[&x, &index, &source], |side| {
                    let (gathered, added) = (side.out(index_shape), side.copy_of(0));
                    let [x, index, source] = [0, 1, 2].map(|i| side.input(i));
                    if len > 0 {
                        let (from, to) = (indexed(x, dim, index_shape), indexed(&added, dim, index_shape));
                        let indices = &[index][..];
                        side.run(kernel::Gather { x: &from, indices, wrap: false, out: &gathered });
                        let order = &order(&to, meeting(source, indices, &to));
                        side.run(kernel::ScatterAdd { source, indices, wrap: false, alpha: -0.5, order, out: &to });
                    }
                    vec![gathered, added]
                });
            }
        }
    }
}

/// Two index tensors, negative indices, whole rows behind them.
#[test]
fn several_indices() {
    let first = Twin::integers(&[4, 2], &[0, -1, 2, 1, 1, 1, -3, 0], DType::I64);
    let second = Twin::integers(&[4, 2], &[0, -4, 3, 1, 1, 1, 2, 0], DType::I32);
    for dtype in FLOATS {
        let x = Twin::random(Lie::Turned, &[3, 4, 5], 1, dtype);
        let source = Twin::random(Lie::Inside, &[4, 2, 5], 2, dtype);
        compare("two indices", dtype, 16.0, &[&x, &first, &second, &source], |side| {
            let (gathered, added) = (side.out(&[4, 2, 5]), side.copy_of(0));
            let repeat = |i| side.input(i).as_strided(&[4, 2, 5], &[2, 1, 0], 0).unwrap();
            let (first, second) = (repeat(1), repeat(2));
            let indices = &[&first, &second][..];
            // The dimensions of the indices repeat.
            let behind = |t: &Tensor| {
                let s = &t.layout().strides;
                t.as_strided(&[3, 4, 4, 2, 5], &[s[0], s[1], 0, 0, s[2]], t.layout().offset).unwrap()
            };
            side.run(kernel::Gather { x: &behind(side.input(0)), indices, wrap: true, out: &gathered });
            let source = side.input(3);
            let out = &behind(&added);
            let order = &order(out, meeting(source, indices, out));
            side.run(kernel::ScatterAdd { source, indices, wrap: true, alpha: 2.0, order, out });
            vec![gathered, added]
        });
    }
}

#[test]
fn any_dtype_is_moved() {
    let index = Twin::integers(&[3], &[2, 0, 2], DType::I64);
    let x = Twin::integers(&[3], &[7, -8, 9], DType::I64);
    compare("integers", DType::F32, 0.0, &[&x, &index], |side| {
        [DType::I64, DType::I32, DType::U8, DType::Bool, DType::F16]
            .into_iter()
            .flat_map(|dtype| {
                let x = side.input(0).cast(dtype, retape_core::MemoryKind::Input).unwrap();
                let (gathered, flipped) = (side.filled(&[3], dtype), side.filled(&[3], dtype));
                let from = indexed(&x, 0, &[3]);
                side.run(kernel::Gather { x: &from, indices: &[side.input(1)], wrap: false, out: &gathered });
                side.run(kernel::Flip { x: &x, dims: &[0], out: &flipped });
                [gathered, flipped]
            })
            .collect()
    });
}

#[test]
fn indices_out_of_range() {
    let x = Twin::random(Lie::Plain, &[3, 4], 1, DType::F32);
    for (wrap, bad) in [(false, 3), (false, -1), (true, 3), (true, -4)] {
        let index = Twin::integers(&[2, 4], &[0, 1, 2, 0, 0, bad, 1, 9], DType::I64);
        let source = Twin::random(Lie::Plain, &[2, 4], 2, DType::F32);
        compare_errors("gather", &[&x, &index], |side| {
            let (from, out) = (indexed(side.input(0), 0, &[2, 4]), side.out(&[2, 4]));
            side.error(kernel::Gather { x: &from, indices: &[side.input(1)], wrap, out: &out })
        });
        compare_errors("scatter_add", &[&x, &index, &source], |side| {
            let out = side.copy_of(0);
            let to = indexed(&out, 0, &[2, 4]);
            let (source, indices) = (side.input(2), &[side.input(1)][..]);
            let order = &order(&to, meeting(source, indices, &to));
            let error = side.error(kernel::ScatterAdd { source, indices, wrap, alpha: 1.0, order, out: &to });
            assert_eq!(out.to_bytes().unwrap(), side.input(0).to_bytes().unwrap());
            error
        });
    }
}

#[test]
fn flips() {
    for (shape, dims) in [
        (&[3, 5][..], &[1][..]),
        (&[3, 5], &[0]),
        (&[2, 3, 4], &[0, 2]),
        (&[7], &[0]),
        (&[], &[]),
        (&[0, 3], &[1]),
        (&[4, 2], &[]),
    ] {
        for dtype in FLOATS {
            for lie in LIES {
                let x = Twin::random(lie, shape, 1, dtype);
                compare(&format!("flip of {shape:?}"), dtype, 0.0, &[&x], |side| {
                    let out = side.out(shape);
                    side.run(kernel::Flip { x: side.input(0), dims, out: &out });
                    vec![out]
                });
            }
        }
    }
}

#[test]
fn largest_and_its_index() {
    for (shape, dim) in
        [(&[3, 5][..], 1), (&[3, 5], 0), (&[2, 70], 1), (&[40, 33], 0), (&[2, 3, 64], 1), (&[3, 1], 1), (&[0, 2], 1)]
    {
        for dtype in FLOATS {
            for lie in LIES {
                let mut values = numbers(3, shape.iter().product());
                // Ties, and NaN that is not the first.
                let n = values.len();
                if n > 14 {
                    (values[1], values[3]) = (2.0, 2.0);
                    (values[7], values[9], values[14]) = (f64::NAN, f64::NAN, f64::INFINITY);
                }
                values.iter_mut().skip(20).step_by(3).for_each(|v| *v = f64::NEG_INFINITY);
                let x = Twin::lying(lie, shape, &values, dtype);
                let mut kept = shape.to_vec();
                kept[dim] = 1;
                let g = Twin::random(lie, &kept, 4, dtype);
                compare(&format!("largest of {shape:?} along {dim}"), dtype, 0.0, &[&x, &g], |side| {
                    let (values, indices, out) = (side.out(&kept), side.filled(&kept, DType::I64), side.out(shape));
                    side.run(kernel::MaxIndex { x: side.input(0), dim, values: &values, indices: &indices });
                    side.run(kernel::MaxIndexGrad { indices: &indices, g: side.input(1), dim, out: &out });
                    vec![values, indices, out]
                });
            }
        }
    }
}

#[test]
fn running_folds() {
    for (shape, dim) in [
        (&[3, 5][..], 1),
        (&[3, 5], 0),
        (&[2, 70], 1),
        (&[40, 33], 0),
        (&[2, 3, 64], 1),
        (&[3, 1], 1),
        (&[0, 2], 0),
        (&[1100], 0),
    ] {
        for dtype in FLOATS {
            for lie in LIES {
                let mut values: Vec<f64> = numbers(5, shape.iter().product()).iter().map(|v| 1.0 + v / 8.0).collect();
                if values.len() > 12 {
                    (values[4], values[12]) = (0.0, 0.0);
                }
                let x = Twin::lying(lie, shape, &values, dtype);
                let g = Twin::random(lie, shape, 6, dtype);
                compare(&format!("scan of {shape:?} along {dim} {lie:?}"), dtype, 1024.0, &[&x, &g], |side| {
                    let [x, g] = [0, 1].map(|i| side.input(i));
                    let mut outputs = Vec::new();
                    for f in [ScanFn::Sum, ScanFn::SumToEnd, ScanFn::Prod] {
                        let (out, own) = (side.out(shape), side.copy_of(0));
                        side.run(kernel::Scan { f, x, dim, out: &out });
                        side.run(kernel::Scan { f, x: &own, dim, out: &own });
                        outputs.extend([out, own]);
                    }
                    let out = side.out(shape);
                    side.run(kernel::CumprodGrad { x, g, dim, out: &out });
                    outputs.push(out);
                    outputs
                });
            }
        }
    }
}
