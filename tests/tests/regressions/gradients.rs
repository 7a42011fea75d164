//! Ops and gradients. Reported in: G1 burn 4063; G2 burn 5568; G3 burn 4694, pytorch 41508; G4 burn 1441; G5 burn 1140,
//! candle 2114; G7 burn 5287, candle 3756, dfdx 846; G8 burn 686; G9 burn 2777; G11 candle 2168, 3011, 3569; G13 candle
//! 3736, 3418; G14 burn 5375; G15 pytorch 41527; G16 candle 534, tinygrad; G17 burn 2333, 4302; G18 burn 5193; G19
//! candle 1241. (G7, G8, G13 are also held for every op by `ops.rs`.)

use retape_core::ops::Op;
use retape_core::{BackwardOptions, DType, Device, Result, Tape, Tensor, Var};
use retape_tests::{floats, random, sample_tensor};

fn cpu() -> Device {
    retape_cpu::device_with_threads(2).unwrap()
}

/// The gradient of sum(f(x) c) with c = 1, 2, 3, ...: never a gradient of ones.
fn gradient(device: &Device, x: &Tensor, f: impl Fn(Var) -> Result<Var>) -> Vec<f64> {
    let tape = Tape::new(device);
    let leaf = tape.leaf(x).unwrap();
    let y = f(leaf.clone()).unwrap();
    let len = y.shape().iter().product::<usize>();
    let c = floats(device, &y.shape(), &(1..=len).map(|i| i as f64).collect::<Vec<_>>(), x.dtype());
    let gradients = tape.backward_from(&[(&y, &c)], BackwardOptions::default()).unwrap();
    gradients.of(&leaf).unwrap().to_f64_vec().unwrap()
}

/// G1: the gradient of scattered values has the values' shape, whatever the target's and the index's.
#[test]
fn g01_scattered_values_have_their_own_gradient() {
    let device = cpu();
    let (target, values) = (random(&device, &[2, 5], 1, DType::F64), random(&device, &[4, 3], 2, DType::F64));
    let index = Tensor::from_slice(&device, &[2, 2], &[4i64, 0, 1, 1]).unwrap();
    let scattered = |target: &Var, values: &Var| {
        let index = target.tape().constant(&index)?;
        target.clone().scatter_add(1, &index, values)
    };
    let to_values = gradient(&device, &values, |v| scattered(&v.tape().constant(&target)?, &v));
    assert_eq!(to_values, [5.0, 1.0, 0.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let to_target = gradient(&device, &target, |t| scattered(&t, &t.tape().constant(&values)?));
    assert_eq!(to_target, (1..=10).map(f64::from).collect::<Vec<_>>());
}

/// G9: the gradient of a repeated value is the sum over the repeats.
#[test]
fn g09_repeats_are_summed() {
    let device = cpu();
    let x = random(&device, &[1, 2], 1, DType::F64);
    let repeated = |times: &[usize]| gradient(&device, &x, |x| x.clone().repeat(times));
    assert_eq!(repeated(&[3, 1]), [1.0 + 3.0 + 5.0, 2.0 + 4.0 + 6.0]);
    assert_eq!(repeated(&[1, 2]), [1.0 + 3.0, 2.0 + 4.0]);
    assert_eq!(repeated(&[2, 2, 1]), [1.0 + 3.0 + 5.0 + 7.0, 2.0 + 4.0 + 6.0 + 8.0]);
    assert_eq!(gradient(&device, &x, |x| x.clone().expand(&[3, -1])), repeated(&[3, 1]));
}

/// G2: ignored tokens don't count in the mean.
#[test]
fn g02_ignored_tokens_don_t_count() {
    let device = cpu();
    let logits = [0.5, -1.0, 2.0, 0.1, 0.2, 0.3, 1.0, 1.0, -1.0];
    let loss = |rows: usize, targets: &[i64]| {
        let tape = Tape::new(&device);
        let x = tape.leaf(&floats(&device, &[rows, 3], &logits[..rows * 3], DType::F64)).unwrap();
        let t = tape.constant(&Tensor::from_slice(&device, &[rows], targets).unwrap()).unwrap();
        x.cross_entropy(&t, -100).unwrap().item().unwrap()
    };
    approx::assert_relative_eq!(loss(3, &[2, 0, -100]), loss(2, &[2, 0]), epsilon = 1e-15);
}

/// G3: a row that sees nothing gives zeros and zero gradients, in softmax and in both forms of attention.
#[test]
fn g03_fully_masked_rows_are_zero() {
    let device = cpu();
    let inf = f64::NEG_INFINITY;
    let x = floats(&device, &[2, 2], &[inf, inf, 0.0, 1.0], DType::F64);
    let tape = Tape::new(&device);
    let y = tape.leaf(&x).unwrap().softmax().unwrap().tensor().unwrap().to_vec::<f64>().unwrap();
    assert_eq!(y[..2], [0.0, 0.0]);
    assert_eq!(gradient(&device, &x, Var::softmax)[..2], [0.0, 0.0]);
    let q = random(&device, &[1, 3, 1, 4], 1, DType::F64);
    let k = random(&device, &[1, 2, 1, 4], 2, DType::F64);
    let dq = gradient(&device, &q, |q| {
        let k = q.tape().constant(&k)?;
        q.attention(&k, &k, 0.5, true, 0.0)
    });
    assert_eq!(dq[..4], [0.0; 4]);
    assert!(dq[4..].iter().all(|g| g.is_finite()));
}

/// G4: the gradient of abs at 0 is 0.
#[test]
fn g04_abs_at_zero() {
    let device = cpu();
    for dtype in [DType::F64, DType::F32] {
        let x = floats(&device, &[4], &[-2.0, -0.0, 0.0, 3.0], dtype);
        assert_eq!(gradient(&device, &x, Var::abs), [-1.0, 0.0, 0.0, 4.0]);
    }
}

/// G5: activations and their gradients are finite and have the right limits far from 0.
#[test]
fn g05_activations_far_from_zero() {
    let device = cpu();
    type Unary = fn(Var) -> Result<Var>;
    let limits: [(Unary, f64, f64); 6] = [
        (Var::sigmoid, 0.0, 0.0),
        (Var::tanh, 0.0, 0.0),
        (Var::silu, 0.0, 1.0),
        (Var::gelu, 0.0, 1.0),
        (Var::gelu_tanh, 0.0, 1.0),
        (Var::relu, 0.0, 1.0),
    ];
    for dtype in [DType::F64, DType::F32] {
        for far in [100.0, 1e4, 1e30] {
            let x = floats(&device, &[2], &[-far, far], dtype);
            for (f, low, high) in limits {
                let g = gradient(&device, &x, f);
                assert!((g[0] - low).abs() < 1e-20 && (g[1] - 2.0 * high).abs() < 1e-6, "{g:?} at {far}");
            }
        }
    }
}

/// G7: zero-sized dimensions are ordinary.
#[test]
fn g07_zero_sized() {
    let device = cpu();
    let tape = Tape::new(&device);
    let empty = tape.leaf(&floats(&device, &[3, 0], &[], DType::F32)).unwrap();
    assert_eq!(empty.clone().sum().unwrap().item().unwrap(), 0.0);
    let right = tape.leaf(&floats(&device, &[0, 2], &[], DType::F32)).unwrap();
    let product = empty.matmul(&right).unwrap();
    assert_eq!(product.tensor().unwrap().to_vec::<f32>().unwrap(), [0.0; 6]);
    assert!(tape.backward(&product.sum().unwrap()).is_ok());
}

/// G8: the gradient of a broadcast is summed over what was repeated.
#[test]
fn g08_broadcast_gradients_are_summed() {
    let device = cpu();
    let tape = Tape::new(&device);
    let a = tape.leaf(&floats(&device, &[3, 1], &[1.0, 2.0, 3.0], DType::F64)).unwrap();
    let b = tape.leaf(&floats(&device, &[1, 4], &[1.0, 10.0, 100.0, 1000.0], DType::F64)).unwrap();
    let loss = a.clone().mul(&b).unwrap().sum().unwrap();
    let g = tape.backward(&loss).unwrap();
    assert_eq!(g.of(&a).unwrap().to_vec::<f64>().unwrap(), [1111.0; 3]);
    assert_eq!(g.of(&b).unwrap().to_vec::<f64>().unwrap(), [6.0; 4]);
    assert_eq!((g.of(&a).unwrap().shape(), g.of(&b).unwrap().shape()), (&[3, 1][..], &[1, 4][..]));
}

/// G11: no op cuts the gradient: each float input of each op gets one, wherever its output is a float.
#[test]
fn g11_no_op_cuts_the_gradient() {
    let device = cpu();
    for sample in Op::all_samples() {
        let tape = Tape::new(&device);
        let leaves: Vec<Var> = sample
            .inputs
            .iter()
            .map(|i| sample_tensor(&device, i, DType::F32))
            .map(|t| if t.dtype().is_float() { tape.leaf(&t) } else { tape.constant(&t) })
            .collect::<Result<_>>()
            .unwrap();
        let outputs = leaves[0].clone().apply_all(sample.op.clone(), leaves[1..].iter().cloned()).unwrap();
        if !outputs.iter().any(|y| y.dtype().is_float()) {
            continue;
        }
        let outputs: Vec<&Var> = outputs.iter().filter(|y| y.dtype().is_float()).collect();
        let seeds: Vec<Tensor> =
            outputs.iter().map(|y| Tensor::full(&device, &y.shape(), y.dtype(), 1.0).unwrap()).collect();
        let pairs: Vec<(&Var, &Tensor)> = outputs.into_iter().zip(&seeds).collect();
        let gradients = tape.backward_from(&pairs, BackwardOptions::default()).unwrap();
        for leaf in leaves.iter().filter(|l| l.requires_grad()) {
            assert!(gradients.of(leaf).is_some(), "{:?} ({})", sample.op, sample.name);
        }
    }
}

/// G14, G13: a view shares what it views, and nothing that a user can call changes either.
#[test]
fn g14_views_can_t_be_written_through() {
    let device = cpu();
    let x = random(&device, &[4, 4], 1, DType::F32);
    let before = x.to_bytes().unwrap();
    let tape = Tape::new(&device);
    let leaf = tape.leaf(&x).unwrap();
    let view = leaf.transpose(0, 1).unwrap();
    let y = view.clone().exp().unwrap().add(&view).unwrap();
    let loss = y.clone().square().unwrap().sum().unwrap();
    drop(y);
    tape.backward(&loss).unwrap();
    assert_eq!(x.to_bytes().unwrap(), before);
}

/// G15: an eps that f16 can't hold doesn't vanish. Statistics are f32: rows of zeros stay zeros, and other rows are
/// those of f64, to the rounding of the input and the result.
#[test]
fn g15_a_tiny_eps_in_f16() {
    let device = cpu();
    let values: Vec<f64> = (0..24).map(|i| if i < 8 { 0.0 } else { ((i * 7) % 11) as f64 / 8.0 - 0.5 }).collect();
    type Norm = fn(&Var) -> Result<Var>;
    let norms: [(&str, Norm); 4] = [
        ("layer_norm", |x| x.clone().layer_norm(None, None, 1e-12)),
        ("rms_norm", |x| x.clone().rms_norm(&[8], None, Some(1e-12))),
        ("group_norm", |x| x.clone().reshape(&[3, 2, 4])?.group_norm(1, None, None, 1e-12)?.reshape(&[3, 8])),
        ("normalize", |x| x.clone().normalize(2.0, -1, 1e-12)),
    ];
    for (name, norm) in norms {
        for (dtype, u) in [(DType::F16, 2f64.powi(-11)), (DType::BF16, 2f64.powi(-8))] {
            let x = floats(&device, &[3, 8], &values, dtype);
            let wide = x.cast(DType::F64, retape_core::MemoryKind::Input).unwrap();
            let y = |x: &Tensor| {
                norm(&Tape::new(&device).leaf(x).unwrap()).unwrap().tensor().unwrap().to_f64_vec().unwrap()
            };
            let (actual, expected) = (y(&x), y(&wide));
            assert_eq!(actual[..8], [0.0; 8], "{name} {dtype}");
            // `normalize` divides by norms that are rounded themselves.
            assert!(actual.iter().zip(&expected).all(|(a, e)| (a - e).abs() <= 3.0 * u * e.abs()), "{name} {dtype}");
            // At the zeros the derivative is beyond f16, but it is a number or an infinity.
            let (actual, expected) = (gradient(&device, &x, |x| norm(&x)), gradient(&device, &wide, |x| norm(&x)));
            assert!(actual.iter().all(|g| !g.is_nan()), "{name} {dtype}: {actual:?}");
            let scale = expected[8..].iter().fold(24.0, |m: f64, g| m.max(g.abs()));
            let near = actual[8..].iter().zip(&expected[8..]).all(|(a, e)| (a - e).abs() <= 4.0 * u * scale);
            assert!(near, "{name} {dtype}: {actual:?}, {expected:?}");
        }
    }
}

/// G16: ties share the gradient, so that its sum is preserved.
#[test]
fn g16_ties_share_the_gradient() {
    let device = cpu();
    let x = floats(&device, &[2, 3], &[5.0, 5.0, 1.0, 2.0, 2.0, 2.0], DType::F64);
    let g = gradient(&device, &x, |x| x.clone().amax(&[1], false));
    approx::assert_relative_eq!(g[..], [0.5, 0.5, 0.0, 2.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0][..], epsilon = 1e-15);
    let y = floats(&device, &[2, 3], &[5.0, 0.0, 9.0, 2.0, 3.0, 1.0], DType::F64);
    let g = gradient(&device, &x, |x| x.clone().maximum(&x.tape().constant(&y)?));
    assert_eq!(g, [0.5, 2.0, 0.0, 2.0, 0.0, 6.0]);
}

/// G17: live bytes are flat over a thousand steps, with and without backward.
#[test]
fn g17_a_thousand_steps_are_flat() {
    let device = cpu();
    let x = random(&device, &[8, 8], 1, DType::F32);
    let base = device.meter().live();
    for i in 0..1000 {
        let tape = Tape::new(&device);
        let h = tape.leaf(&x).unwrap().gelu().unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        if i % 2 == 0 {
            tape.backward(&loss).unwrap();
        }
        drop((h, loss, tape));
        assert_eq!(device.meter().live(), base);
    }
}

/// G18: a backward inside another tape's life, and tapes on several threads, don't block each other.
#[test]
fn g18_no_global_lock() {
    let run = || {
        let device = cpu();
        let outer = Tape::new(&device);
        let x = outer.leaf(&random(&device, &[4, 4], 1, DType::F32)).unwrap();
        let loss = x.clone().gelu().unwrap().sum().unwrap();
        let inner = Tape::new(&device);
        let y = inner.leaf(&x.tensor().unwrap()).unwrap();
        let inner_loss = y.square().unwrap().sum().unwrap();
        inner.backward(&inner_loss).unwrap();
        outer.backward(&loss).unwrap().of(&x).unwrap().to_bytes().unwrap()
    };
    let expected = run();
    let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(run)).collect();
    assert!(threads.into_iter().all(|t| t.join().unwrap() == expected));
}

/// G19: no gradient is computed for what needs none.
#[test]
fn g19_no_gradient_for_what_needs_none() {
    let device = cpu();
    let work = |frozen: bool| {
        let tape = Tape::new(&device);
        let x = tape.constant(&random(&device, &[16, 16], 1, DType::F32)).unwrap();
        let w = random(&device, &[16, 16], 2, DType::F32);
        let w = if frozen { tape.constant(&w) } else { tape.leaf(&w) }.unwrap();
        let v = tape.leaf(&random(&device, &[16, 16], 3, DType::F32)).unwrap();
        let y = x.clone().matmul(&w).unwrap().matmul(&v).unwrap();
        let loss = y.sum().unwrap();
        let gradients = tape.backward(&loss).unwrap();
        assert!(gradients.of(&x).is_none());
        gradients.len()
    };
    assert_eq!((work(true), work(false)), (1, 2));
}

/// G6 (burn 5141): the gradients of products are exact at inputs of zero.
#[test]
fn g06_products_with_zeros() {
    let device = cpu();
    let x = floats(&device, &[4], &[2.0, 0.0, 3.0, 5.0], DType::F64);
    // prod: only the zero's own gradient isn't 0.
    assert_eq!(gradient(&device, &x, |x| x.clone().prod(&[0], false)), [0.0, 30.0, 0.0, 0.0]);
    // cumprod under 1, 2, 3, 4: y = 2, 0, 0, 0; dy/dx1 reaches 2 2 + 3 (2 3) + 4 (2 3 5).
    assert_eq!(gradient(&device, &x, |x| x.clone().cumprod(0)), [1.0, 2.0 * 2.0 + 3.0 * 6.0 + 4.0 * 30.0, 0.0, 0.0]);
}

/// G10 (burn 1224): pow with one operand that needs no gradient.
#[test]
fn g10_pow_of_one_tracked_operand() {
    let device = cpu();
    let x = floats(&device, &[2], &[2.0, 3.0], DType::F64);
    let y = floats(&device, &[2], &[3.0, 2.0], DType::F64);
    let base = gradient(&device, &x, |x| x.clone().pow(&x.tape().constant(&y)?));
    approx::assert_relative_eq!(base[..], [12.0, 2.0 * 6.0][..], epsilon = 1e-12);
    let exponent = gradient(&device, &y, |y| y.tape().constant(&x)?.pow(y));
    approx::assert_relative_eq!(exponent[..], [8.0 * 2f64.ln(), 2.0 * 9.0 * 3f64.ln()][..], epsilon = 1e-12);
}

/// G12 (candle 1212): the gradient of a strided convolution has the input's size, whatever the stride leaves over.
#[test]
fn g12_convolution_with_a_remainder() {
    use retape_core::ops::conv::{Conv, Padding};
    let device = cpu();
    for size in [7, 8, 9, 10] {
        let x = random(&device, &[1, 2, size, size], 1, DType::F64);
        let w = random(&device, &[3, 2, 3, 3], 2, DType::F64);
        let conv = Conv { stride: [3, 2], padding: Padding::Zeros([0, 1]), dilation: [1, 1], groups: 1 };
        let check =
            retape_core::check_gradients(&device, &[x, w], 3, |_, v| Ok(vec![v[0].clone().conv2d(&v[1], None, conv)?]));
        assert!(check.unwrap().worst() < 1e-7, "size {size}");
    }
}
