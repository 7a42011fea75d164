//! Hostile use of the CUDA backend: what is out of range, too long, empty, not finite, from many threads.

use retape_core::ops::attention::AttentionOptions;
use retape_core::{BackwardOptions, DType, Device, Error, MemoryKind, Result, Tape, TapeOptions, Tensor, Var};
use retape_cuda_emulator::device;

/// Numbers in [-1, 1), a pure function of the seed.
fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn tensor(device: &Device, shape: &[usize], values: &[f64], dtype: DType) -> Tensor {
    Tensor::from_slice(device, shape, values).unwrap().cast(dtype, MemoryKind::Input).unwrap()
}

/// The result of `f` of these inputs, and all its inputs' gradients.
fn results(device: &Device, inputs: &[Tensor], f: &dyn Fn(&[&Var]) -> Result<Var>) -> Result<Vec<Vec<f64>>> {
    let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
    let mut leaves = Vec::new();
    for x in inputs {
        leaves.push(if x.dtype().is_float() { tape.leaf(x)? } else { tape.constant(x)? });
    }
    let inputs: Vec<&Var> = leaves.iter().collect();
    let y = f(&inputs)?;
    let seed = Tensor::full(device, &y.shape(), y.dtype(), 1.0)?;
    let mut all = vec![y.tensor()?.to_f64_vec()?];
    let gradients = tape.backward_from(&[(&y, &seed)], BackwardOptions::default())?;
    for leaf in inputs.iter().filter(|x| x.dtype().is_float()) {
        all.push(gradients.of(leaf).map_or_else(|| Ok(Vec::new()), |g| g.to_f64_vec())?);
    }
    Ok(all)
}

/// The same on both devices, of inputs of a dtype: within `tolerance` of the largest, and not finite in the same
/// places.
fn compare(
    label: &str,
    dtype: DType,
    tolerance: f64,
    inputs: &[(&[usize], Vec<f64>)],
    f: &dyn Fn(&[&Var]) -> Result<Var>,
) {
    let on = |device: &Device, dtype| {
        let inputs: Vec<_> = inputs.iter().map(|(shape, values)| tensor(device, shape, values, dtype)).collect();
        results(device, &inputs, f).unwrap_or_else(|e| panic!("{label} {dtype}: {e}"))
    };
    let (ours, theirs) = (on(&device(), dtype), on(&retape_cpu::device(), dtype));
    for (i, (a, e)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(a.len(), e.len(), "{label} {dtype}: result {i}");
        let largest = e.iter().filter(|x| x.is_finite()).fold(0.0, |m: f64, x| m.max(x.abs()));
        for (k, (&a, &e)) in a.iter().zip(e).enumerate() {
            let same = a == e || a.is_nan() && e.is_nan() || (a - e).abs() <= tolerance * largest.max(1e-3);
            assert!(same, "{label} {dtype}: result {i}, element {k} is {a:e}, should be {e:e} (largest {largest:e})");
        }
    }
}

/// Rows far longer than a block's registers.
#[test]
fn long_rows() {
    for dtype in [DType::F32, DType::BF16] {
        let tolerance = if dtype == DType::F32 { 2e-5 } else { 1e-2 };
        for shape in [[1usize, 70_001], [1, 70_000]] {
            let n = shape[0] * shape[1];
            let x = || (&shape[..], numbers(1, n));
            let last = [shape[1]];
            let w = || (&last[..], numbers(2, shape[1]));
            compare("softmax", dtype, tolerance, &[x()], &|x| x[0].clone().softmax()?.mul(x[0]));
            compare("log_softmax", dtype, tolerance, &[x()], &|x| x[0].clone().log_softmax(-1)?.mul(x[0]));
            compare("layer_norm", dtype, tolerance, &[x(), w(), w()], &|x| {
                x[0].clone().layer_norm(Some(x[1].clone()), Some(x[2].clone()), 1e-5)?.mul(x[0])
            });
            compare("sum of rows", dtype, tolerance, &[x()], &|x| x[0].clone().sum_dims(&[-1], false));
            compare("amax", dtype, 0.0, &[x()], &|x| x[0].clone().amax(&[-1], false));
            compare("logsumexp", dtype, tolerance, &[x()], &|x| x[0].clone().logsumexp(&[-1], false));
        }
    }
}

/// Targets and ids out of range: the CPU's error, and the device goes on.
#[test]
fn values_out_of_range_are_errors() {
    let run = |device: &Device, id: i64, target: i64| {
        let tape = Tape::new(device);
        let table = tape.leaf(&tensor(device, &[5, 4], &numbers(1, 20), DType::F32))?;
        let ids = tape.constant(&Tensor::from_slice(device, &[3], &[0i64, id, 4])?)?;
        let targets = tape.constant(&Tensor::from_slice(device, &[3], &[3i64, -100, target])?)?;
        let loss = table.embedding(&ids)?.cross_entropy(&targets, -100)?;
        tape.backward(&loss)?;
        loss.item()
    };
    let (ours, theirs) = (device(), retape_cpu::device());
    for (id, target) in [(5, 0), (-1, 0), (i64::MAX, 0), (i64::MIN, 0), (0, 4), (0, -1), (0, i64::MAX), (0, 1 << 32)] {
        let (a, b) = (run(&ours, id, target).unwrap_err(), run(&theirs, id, target).unwrap_err());
        assert_eq!(a.to_string(), b.to_string(), "{id} {target}");
        assert!((run(&ours, 1, 2).unwrap() - run(&theirs, 1, 2).unwrap()).abs() < 1e-6);
    }
}

/// Without elements in any dimension.
#[test]
fn empty_tensors() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for shape in [[0usize, 3], [3, 0], [0, 0]] {
            let x = || (&shape[..], vec![]);
            let turned = [shape[1], shape[0]];
            let t = || (&turned[..], vec![]);
            let last = [shape[1]];
            let w = || (&last[..], numbers(3, shape[1]));
            let check = |label: &str, inputs: &[(&[usize], Vec<f64>)], f: &dyn Fn(&[&Var]) -> Result<Var>| {
                let on = |device: &Device| {
                    let inputs: Vec<_> = inputs.iter().map(|(s, v)| tensor(device, s, v, dtype)).collect();
                    results(device, &inputs, f).map_err(|e| e.to_string())
                };
                let (a, b) = (on(&device()), on(&retape_cpu::device()));
                assert_eq!(format!("{a:?}"), format!("{b:?}"), "{label} {shape:?} {dtype}");
            };
            check("sum", &[x()], &|x| x[0].clone().sum());
            check("mean", &[x()], &|x| x[0].clone().mean());
            check("sum rows", &[x()], &|x| x[0].clone().sum_dims(&[-1], false));
            check("sum columns", &[x()], &|x| x[0].clone().sum_dims(&[0], false));
            check("prod", &[x()], &|x| x[0].clone().prod(&[1], false));
            check("amax", &[x()], &|x| x[0].clone().amax(&[1], false));
            check("amax 0", &[x()], &|x| x[0].clone().amax(&[0], false));
            check("logsumexp", &[x()], &|x| x[0].clone().logsumexp(&[1], false));
            check("var", &[x()], &|x| x[0].clone().var(&[1], 1.0, false));
            check("softmax", &[x()], &|x| x[0].clone().softmax());
            check("log_softmax", &[x()], &|x| x[0].clone().log_softmax(-1));
            check("cumsum", &[x()], &|x| x[0].clone().cumsum(-1));
            check("cumprod", &[x()], &|x| x[0].clone().cumprod(0));
            check("layer_norm", &[x(), w(), w()], &|x| {
                x[0].clone().layer_norm(Some(x[1].clone()), Some(x[2].clone()), 1e-5)
            });
            check("matmul", &[x(), t()], &|x| x[0].clone().matmul(x[1]));
            check("matmul", &[t(), x()], &|x| x[0].clone().matmul(x[1]));
        }
        for (tq, tk, heads, size, batch) in
            [(0, 3, 2, 4, 1), (3, 0, 2, 4, 1), (3, 3, 0, 4, 1), (3, 3, 2, 0, 1), (3, 3, 2, 4, 0), (0, 0, 2, 4, 2)]
        {
            let q = [batch, tq, heads, size];
            let k = [batch, tk, heads, size];
            let count = |s: &[usize]| s.iter().product::<usize>();
            let on = |device: &Device| {
                let inputs = [(1, &q), (2, &k), (3, &k)];
                let inputs = inputs.map(|(seed, s)| tensor(device, s, &numbers(seed, count(s)), dtype));
                results(device, &inputs, &|x| x[0].clone().attention(x[1], x[2], 1.0, false, 0.0))
                    .map_err(|e| e.to_string())
            };
            let (a, b) = (on(&device()), on(&retape_cpu::device()));
            let sizes = |r: &std::result::Result<Vec<Vec<f64>>, String>| {
                r.as_ref().map(|all| all.iter().map(Vec::len).collect::<Vec<_>>()).map_err(String::clone)
            };
            assert_eq!(sizes(&a), sizes(&b), "attention {q:?} {k:?}");
            if tk == 0 {
                assert_eq!(format!("{a:?}"), format!("{b:?}"), "attention {q:?} {k:?} {dtype}");
            }
        }
    }
}

/// NaN and both infinities in each place of a row.
#[test]
fn what_is_not_finite_stays_where_the_cpu_has_it() {
    const WIDTH: usize = 37;
    let bad = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for at in [0, 7, 31, 32, WIDTH - 1] {
        for value in bad {
            let mut row = numbers(at as u64, WIDTH);
            row[at] = value;
            rows.push(row.clone());
            row[(at + 5) % WIDTH] = bad[at % 3];
            rows.push(row);
        }
    }
    rows.extend(bad.map(|value| vec![value; WIDTH]));
    let shape = [rows.len(), WIDTH];
    let values: Vec<f64> = rows.concat();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let tolerance = match dtype {
            DType::F64 => 1e-12,
            DType::F32 => 1e-5,
            _ => 2e-2,
        };
        let check = |label: &str, f: &dyn Fn(&[&Var]) -> Result<Var>| {
            compare(label, dtype, tolerance, &[(&shape, values.clone())], f);
        };
        check("sum", &|x| x[0].clone().sum_dims(&[1], false));
        check("sum 0", &|x| x[0].clone().sum_dims(&[0], false));
        check("mean", &|x| x[0].clone().mean_dims(&[1], false));
        check("amax", &|x| x[0].clone().amax(&[1], false));
        check("amin", &|x| x[0].clone().amin(&[1], false));
        check("amax 0", &|x| x[0].clone().amax(&[0], false));
        check("logsumexp", &|x| x[0].clone().logsumexp(&[1], false));
        check("var", &|x| x[0].clone().var(&[1], 1.0, false));
        check("std", &|x| x[0].clone().std(&[1], 1.0, false));
        check("norm 2", &|x| x[0].clone().vector_norm(2.0, &[1], false));
        check("norm 1", &|x| x[0].clone().vector_norm(1.0, &[1], false));
        check("norm inf", &|x| x[0].clone().vector_norm(f64::INFINITY, &[1], false));
        check("softmax", &|x| x[0].clone().softmax());
        check("softmax 0", &|x| x[0].clone().softmax_dim(0));
        check("log_softmax", &|x| x[0].clone().log_softmax(-1));
        check("layer_norm", &|x| x[0].clone().layer_norm(None, None, 1e-5));
        check("cumsum", &|x| x[0].clone().cumsum(1));
        let on = |device: &Device| {
            let x = tensor(device, &shape, &values, dtype);
            let targets: Vec<i64> = (0..shape[0] as i64).map(|i| i * 7 % WIDTH as i64).collect();
            let target = Tensor::from_slice(device, &shape[..1], &targets).unwrap();
            results(device, &[x, target], &|x| x[0].clone().cross_entropy(x[1], -100)).unwrap()
        };
        let (a, b) = (on(&device()), on(&retape_cpu::device()));
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            for (k, (&a, &b)) in a.iter().zip(b).enumerate() {
                assert!(a == b || a.is_nan() && b.is_nan() || (a - b).abs() < tolerance, "{dtype} {i} {k}: {a} {b}");
            }
        }
    }
}

/// Ragged batches with odd lengths, windows and dropout; far more of them than tables of lengths are kept, with as many
/// tables of one list (where queries' and keys' lengths are the same) as of two.
#[test]
fn ragged_attention() {
    let (ours, theirs) = (device(), retape_cpu::device());
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % below) as usize
    };
    for round in 0..80 {
        let count = 1 + random(4);
        let queries: Vec<usize> = (0..count).map(|_| random(if round % 8 == 0 { 90 } else { 9 })).collect();
        let keys: Vec<usize> = if round % 3 == 0 { queries.clone() } else { (0..count).map(|_| random(12)).collect() };
        let options = AttentionOptions {
            scale: None,
            causal: round % 2 == 0,
            window: (round % 4 == 0).then_some(1 + round % 5),
            dropout: if round % 5 == 0 { 0.3 } else { 0.0 },
            grouped: true,
        };
        let size = [1, 8, 33, 16][round % 4];
        let dtype = [DType::F32, DType::BF16][round / 2 % 2];
        let (tq, tk) = (queries.iter().sum::<usize>(), keys.iter().sum::<usize>());
        let shapes = [[tq, 4, size], [tk, 2, size], [tk, 2, size]];
        let on = |device: &Device, dtype| {
            let x: Vec<_> = (1..)
                .zip(&shapes)
                .map(|(seed, s)| tensor(device, s, &numbers(seed, s.iter().product()), dtype))
                .collect();
            results(device, &x, &|x| x[0].clone().attention_ragged(x[1], x[2], &queries, &keys, options)).unwrap()
        };
        let (a, b) = (on(&ours, dtype), on(&theirs, dtype));
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 3e-2 };
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            let largest = b.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (k, (&a, &b)) in a.iter().zip(b).enumerate() {
                assert!(
                    (a - b).abs() <= tolerance * largest + 1e-7,
                    "round {round} {dtype} {queries:?} {keys:?} {options:?}: result {i}, element {k}: {a} should be {b}"
                );
            }
        }
    }
}

#[test]
fn odd_head_sizes() {
    for size in [1usize, 257, 300] {
        for dtype in [DType::BF16, DType::F64] {
            let shape = [1, 19, 2, size];
            let x = |seed| (&shape[..], numbers(seed, 38 * size));
            let tolerance = if dtype == DType::F64 { 1e-12 } else { 3e-2 };
            let scale = 1.0 / (size as f64).sqrt();
            compare("attention", dtype, tolerance, &[x(1), x(2), x(3)], &|x| {
                x[0].clone().attention(x[1], x[2], scale, true, 0.1)
            });
        }
    }
}

/// Nine dimensions, each 2, in an order that lets none be merged.
#[test]
fn nine_dimensions() {
    let shape = [2usize; 9];
    let order = [8, 6, 4, 2, 0, 7, 5, 3, 1];
    let run = |device: &Device| {
        let x = tensor(device, &shape, &numbers(1, 512), DType::F32).permute(&order).unwrap();
        let copied = x.copy(MemoryKind::Input).map(|y| y.to_f64_vec().unwrap());
        copied.map(|copied| {
            (copied, results(device, &[x], &|x| x[0].clone().exp()?.sum_dims(&[0, 3, 8], false)).unwrap())
        })
    };
    match run(&device()) {
        Ok(ours) => {
            let theirs = run(&retape_cpu::device()).unwrap();
            assert_eq!(ours.0, theirs.0);
        }
        Err(Error::Unsupported { reason, .. }) => assert!(reason.contains("make it contiguous"), "{reason}"),
        Err(error) => panic!("{error}"),
    }
}

/// Two devices of one GPU don't mix, and one may go while the other stays.
#[test]
fn two_devices() {
    let (one, other) = (device(), device());
    let tape = Tape::new(&one);
    let x = tape.leaf(&tensor(&one, &[3], &[1.0, 2.0, 3.0], DType::F32)).unwrap();
    let y = tensor(&other, &[3], &[1.0, 2.0, 3.0], DType::F32);
    let mixed = tape.constant(&y).and_then(|y| x.clone().add(&y));
    assert!(matches!(mixed, Err(Error::DeviceMismatch { .. })), "{mixed:?}");
    drop(one);
    drop((x, tape));
    let z = y.cast(DType::F64, MemoryKind::Input).unwrap();
    assert_eq!(z.to_f64_vec().unwrap(), [1.0, 2.0, 3.0]);
}

/// One device in many threads, each with steps and gradients of its own.
#[test]
fn many_threads() {
    let ours = device();
    let expected = {
        let theirs = retape_cpu::device();
        let x = tensor(&theirs, &[20, 40], &numbers(7, 800), DType::F32);
        results(&theirs, &[x], &|x| x[0].clone().softmax()?.mul(x[0])?.sum_dims(&[0], false)).unwrap()
    };
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (ours, expected) = (ours.clone(), &expected);
            scope.spawn(move || {
                for round in 0..12usize {
                    let x = tensor(&ours, &[20, 40], &numbers(7, 800), DType::F32);
                    let f = |x: &[&Var]| x[0].clone().softmax()?.mul(x[0])?.sum_dims(&[0], false);
                    let all = results(&ours, &[x], &f).unwrap();
                    for (a, b) in all.concat().iter().zip(expected.concat()) {
                        assert!((a - b).abs() < 1e-5, "{a} {b}");
                    }
                    // Tables of lengths, more than are kept.
                    let lengths = [thread + 1, round + 1, thread];
                    let total: usize = lengths.iter().sum();
                    let q = tensor(&ours, &[total, 1, 8], &numbers(1, total * 8), DType::F32);
                    let f = |x: &[&Var]| {
                        x[0].clone().attention_ragged(x[0], x[0], &lengths, &lengths, AttentionOptions::default())
                    };
                    let all = results(&ours, &[q], &f).unwrap();
                    assert!(all.concat().iter().all(|x| x.is_finite()));
                }
            });
        }
    });
    std::thread::spawn(move || drop(ours)).join().unwrap();
}

/// The lengths of queries and of keys hold together, however many others were asked for before.
#[test]
fn tables_of_lengths_are_not_mixed_up() {
    let run = |device: &Device, earlier: usize| {
        let attend = |queries: &[usize], keys: &[usize]| {
            let of = |lengths: &[usize], seed| {
                let time: usize = lengths.iter().sum();
                tensor(device, &[time, 1, 4], &numbers(seed, time * 4), DType::F32)
            };
            let inputs = [of(queries, 1), of(keys, 2), of(keys, 3)];
            let options = AttentionOptions::default();
            results(device, &inputs, &|x| x[0].clone().attention_ragged(x[1], x[2], queries, keys, options))
                .unwrap()
                .concat()
        };
        (0..earlier).for_each(|i| drop(attend(&[1 + i % 8, i / 8], &[1 + i % 8, i / 8])));
        attend(&[20, 3], &[4, 9])
    };
    let expected = run(&retape_cpu::device(), 0);
    for earlier in 62..65 {
        let all = run(&device(), earlier);
        assert!(all.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{earlier}");
    }
}
