//! Flip, gather, scatter-add and triangles against plain loops, in every kind of view and on any number of threads.

mod common;

use common::*;
use retape_core::{DType, Device, Error, MemoryKind, Tensor, kernel};

fn ids(device: &Device, shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_slice(device, shape, values).unwrap()
}

/// `n` positions below `below`, some of them equal.
fn positions(n: usize, below: usize, seed: u64) -> Vec<i64> {
    values(n, seed).iter().map(|v| (v.abs() * 1e6) as i64 % below as i64).collect()
}

#[test]
fn flips_of_every_dtype() {
    let device = device(2);
    let (shape, x) = ([3, 4, 70], values(3 * 4 * 70, 1));
    for dims in [&[][..], &[0], &[2], &[2, 0, 1]] {
        let place = |i: usize| {
            let index = [i / 280, i / 70 % 4, i % 70];
            let from = |d: usize| if dims.contains(&d) { shape[d] - 1 - index[d] } else { index[d] };
            (from(0) * 4 + from(1)) * 70 + from(2)
        };
        let want: Vec<f64> = (0..x.len()).map(|i| x[place(i)]).collect();
        for dtype in FLOATS {
            for x in views(&device, dtype, &shape, &x) {
                let out = poisoned(&device, dtype, &shape);
                run(&device, kernel::Flip { x: &x, dims, out: &out });
                close("flip", &out, &want, 0.0);
            }
        }
    }
    for dtype in DType::ALL {
        let x = tensor(&device, dtype, &[3], &[0.0, 1.0, 1.0]);
        let out = tensor(&device, dtype, &[3], &[0.0; 3]);
        run(&device, kernel::Flip { x: &x, dims: &[0], out: &out });
        close("flip", &out, &[1.0, 1.0, 0.0], 0.0);
    }
}

/// Rows by id (the ids repeat along the row), and pairs of ids.
#[test]
fn gathers_and_their_counterparts() {
    let device = device(2);
    let (rows, width, n) = (7, 130, 40);
    let (table, source, at) = (values(rows * width, 1), values(n * width, 2), positions(n, rows, 3));
    let id = ids(&device, &[n, 1], &at).expand(&[n, width]).unwrap();
    let row = |i: usize| at[i / width] as usize * width + i % width;
    let taken: Vec<f64> = (0..n * width).map(|i| table[row(i)]).collect();
    let mut sums = table.clone();
    (0..n * width).for_each(|i| sums[row(i)] += 0.5 * source[i]);
    for dtype in FLOATS {
        // [rows, (n times), width]: the table with the rows first and the ids' dimension repeated.
        let indexed = |x: &Tensor| x.expand(&[n, rows, width]).unwrap().transpose(0, 1).unwrap();
        for x in views(&device, dtype, &[rows, width], &table) {
            let out = poisoned(&device, dtype, &[n, width]);
            run(&device, kernel::Gather { x: &indexed(&x), indices: &[&id], wrap: false, out: &out });
            close("gather", &out, &taken, 0.0);
        }
        for source in views(&device, dtype, &[n, width], &source) {
            let out = tensor(&device, dtype, &[rows, width], &table);
            let view = indexed(&out);
            let (indices, order) = (&[&id][..], &order_of(&source, &[&id], &view));
            let scatter = kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 0.5, order, out: &view };
            run(&device, scatter);
            close("scatter add", &out, &sums, tolerance(dtype));
        }
        let x = tensor(&device, dtype, &[rows, width], &table);
        let (i, j) = (ids(&device, &[2], &[-1, 2]), ids(&device, &[2], &[0, -130]));
        let out = poisoned(&device, dtype, &[2]);
        let pairs = x.expand(&[2, rows, width]).unwrap().permute(&[1, 2, 0]).unwrap();
        run(&device, kernel::Gather { x: &pairs, indices: &[&i, &j], wrap: true, out: &out });
        close("pairs", &out, &[table[6 * width], table[2 * width]], 0.0);
        let error = device.run(kernel::Gather { x: &pairs, indices: &[&i, &j], wrap: false, out: &out });
        assert!(matches!(error, Err(Error::InvalidValue { .. })), "{error:?}");
    }
}

#[test]
fn sums_that_meet_do_not_depend_on_threads() {
    let (rows, width, n) = (5, 1000, 300);
    let (source, at) = (values(n * width, 1), positions(n * width, rows, 2));
    same_bits("scatter add", |device| {
        let source = tensor(device, DType::F32, &[n, width], &source);
        let id = ids(device, &[n, width], &at);
        let out = tensor(device, DType::F32, &[rows, width], &vec![f64::from(0.1f32); rows * width]);
        let view = out.expand(&[n, rows, width]).unwrap().transpose(0, 1).unwrap();
        let (indices, order) = (&[&id][..], &order_of(&source, &[&id], &view));
        run(device, kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 1.0, order, out: &view });
        let mut want = vec![0.1f32 as f64; rows * width];
        let added = source.to_f64_vec().unwrap();
        (0..n * width).for_each(|i| want[at[i] as usize * width + i % width] += added[i]);
        close("scatter add", &out, &want, 2e-5);
        vec![out.copy(MemoryKind::Input).unwrap()]
    });
}

#[test]
fn triangles() {
    let device = device(2);
    let (rows, columns) = (5, 70);
    let x = values(2 * rows * columns, 1);
    for (upper, diagonal) in [(false, 0), (true, 0), (false, 64), (true, -2), (true, isize::MAX), (false, isize::MIN)] {
        let kept = |i: usize| {
            let on = (i % columns) as isize - (i / columns % rows) as isize;
            if upper { on >= diagonal } else { on <= diagonal }
        };
        let want: Vec<f64> = (0..x.len()).map(|i| if kept(i) { x[i] } else { -1.0 }).collect();
        for dtype in FLOATS {
            for x in views(&device, dtype, &[2, rows, columns], &x) {
                let out = poisoned(&device, dtype, &[2, rows, columns]);
                run(&device, kernel::Triangle { x: &x, upper, diagonal, value: -1.0, out: &out });
                close("triangle", &out, &want, 0.0);
            }
        }
    }
}
