//! Computing in bf16 and f16: sums in f32, one rounding at the end, statistics in f32, and which dtype mixed operands
//! take.

use retape_core::kernel::{CrossEntropySpec, PoolDivisor};
use retape_core::ops::pool::Pool;
use retape_core::ops::{attention::AttentionOptions, conv::Conv};
use retape_core::{
    BackwardOptions, DType, Device, Error, Gradients, LedgerEntry, MemoryKind, Result, Tape, Tensor, Trace, Var, meta,
};
use retape_nn::data::ByteText;
use retape_nn::{Gpt, GptConfig, LossScaler, Parameter};
use retape_tests::{floats, random, relative_error};

const HALVES: [DType; 2] = [DType::BF16, DType::F16];

fn cpu() -> Device {
    retape_cpu::device_with_threads(2).unwrap()
}

fn leaf(tape: &Tape, shape: &[usize], values: &[f64], dtype: DType) -> Var {
    tape.leaf(&floats(&tape.device(), shape, values, dtype)).unwrap()
}

fn numbers(y: &Var) -> Vec<f64> {
    y.tensor().unwrap().to_f64_vec().unwrap()
}

/// In bf16 itself a sum of ones stops at 256, in f16 at 2048.
#[test]
fn sums_of_ones() {
    for dtype in HALVES {
        let tape = Tape::new(&cpu());
        let ones = leaf(&tape, &[4096], &[1.0; 4096], dtype);
        assert_eq!(numbers(&ones.clone().sum().unwrap()), [4096.0]);
        assert_eq!(numbers(&ones.clone().dot(&ones).unwrap()), [4096.0]);
        assert_eq!(numbers(&ones.clone().cumsum(0).unwrap())[4095], 4096.0);
        assert_eq!(numbers(&ones.clone().vector_norm(2.0, &[], false).unwrap()), [64.0]);
        let many = ones.clone().reshape(&[1, 64, 64]).unwrap();
        assert_eq!(numbers(&many.clone().sum_dims(&[1], false).unwrap()), [64.0; 64]);
        assert_eq!(numbers(&many.avg_pool2d(Pool::new([64, 64]), PoolDivisor::Fixed(64)).unwrap()), [64.0]);

        // A gradient of 4096 terms: of a repeated value, of a row named again and again, of a weight and a bias.
        let (x, table) = (leaf(&tape, &[1], &[3.0], dtype), leaf(&tape, &[2, 3], &[0.0; 6], dtype));
        let ids = tape.constant(&Tensor::from_slice(&tape.device(), &[4096], &[1i64; 4096]).unwrap()).unwrap();
        let (w, c) = (leaf(&tape, &[1, 1], &[1.0], dtype), leaf(&tape, &[1], &[0.0], dtype));
        let rows = tape.constant(&floats(&tape.device(), &[4096, 1], &[1.0; 4096], dtype)).unwrap();
        let loss = (x.clone().mul(&ones).unwrap().sum().unwrap())
            .add(table.clone().embedding(&ids).unwrap().sum().unwrap())
            .unwrap()
            .add(rows.linear(&w, Some(c.clone())).unwrap().sum().unwrap())
            .unwrap();
        let taken = table.clone().index_select(0, &ids).unwrap().sum().unwrap();
        let of = |gradients: &Gradients, x: &Var| gradients.of(x).unwrap().to_f64_vec().unwrap();
        let gradients = tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        assert_eq!([&x, &w, &c].map(|v| of(&gradients, v)), [[4096.0]; 3]);
        assert_eq!(of(&gradients, &table), [0.0, 0.0, 0.0, 4096.0, 4096.0, 4096.0]);
        assert_eq!(of(&tape.backward(&taken).unwrap(), &table), [0.0, 0.0, 0.0, 4096.0, 4096.0, 4096.0]);
    }
}

/// Partial sums beyond f16's 65504, and a mean whose sum is.
#[test]
fn nothing_overflows_on_the_way() {
    let tape = Tape::new(&cpu());
    let k = 8192;
    let a: Vec<f64> = (0..k).map(|i| if i < k / 2 { 8.0 } else { -8.0 }).collect();
    let b: Vec<f64> = (0..k).map(|i| if i == k - 1 { 7.0 } else { 8.0 }).collect();
    for dtype in HALVES {
        let (x, y) = (leaf(&tape, &[1, k], &a, dtype), leaf(&tape, &[k, 1], &b, dtype));
        assert_eq!(numbers(&x.clone().matmul(&y).unwrap()), [8.0], "{dtype}");
        let c = leaf(&tape, &[1, 1], &[0.5], dtype);
        assert_eq!(numbers(&c.addmm(&x, &y, 3.0, 1.0).unwrap()), [9.5], "{dtype}");
        let large = leaf(&tape, &[4, 1024], &[1000.0; 4096], dtype);
        assert_eq!(numbers(&large.clone().mean().unwrap()), [1000.0]);
        assert_eq!(numbers(&large.clone().softmax().unwrap())[0], 1.0 / 1024.0);
        // A mean of 1000 squared is beyond f16 too.
        assert!(numbers(&large.clone().var(&[], 0.0, false).unwrap())[0] == 0.0);
        let normed = large.clone().layer_norm(None, None, 1e-5).unwrap();
        assert!(numbers(&normed).iter().all(|&x| x == 0.0));
        assert!(numbers(&large.rms_norm(&[1024], None, None).unwrap()).iter().all(|&x| x == 1.0));
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    let tape = Tape::new(&cpu());
    for (dtype, digits) in [(DType::BF16, 8), (DType::F16, 11)] {
        let u = 2f64.powi(-digits);
        let (one, step) = (leaf(&tape, &[], &[1.0], dtype), leaf(&tape, &[3], &[u, 3.0 * u, 1.5 * u], dtype));
        assert_eq!(numbers(&one.add(&step).unwrap()), [1.0, 1.0 + 4.0 * u, 1.0 + 2.0 * u]);
    }
    // Below f16's normal numbers the distance is fixed.
    let tiny = leaf(&tape, &[1], &[2f64.powi(-24)], DType::F16);
    assert_eq!(numbers(&tiny.clone().scale(1.5).unwrap()), [2f64.powi(-23)]);
    assert_eq!(numbers(&tiny.scale(0.5).unwrap()), [0.0]);
    assert_eq!(numbers(&leaf(&tape, &[1], &[6e4], DType::F16).scale(2.0).unwrap()), [f64::INFINITY]);
}

/// A probability that rounds to 1 still has a gradient: p - 1 is taken before it is rounded.
#[test]
fn the_gradient_of_a_sure_class_is_not_lost() {
    for dtype in HALVES {
        let tape = Tape::new(&cpu());
        let logits = leaf(&tape, &[1, 2], &[9.0, 0.0], dtype);
        let target = tape.constant(&Tensor::from_slice(&tape.device(), &[1], &[0i64]).unwrap()).unwrap();
        let loss = logits.clone().cross_entropy_with(&target, None, 1, CrossEntropySpec::default()).unwrap();
        let gradients = tape.backward(&loss).unwrap();
        let g = gradients.of(&logits).unwrap().to_f64_vec().unwrap();
        let exact = 1.0 / (1.0 + 9f64.exp());
        assert!((g[0] + exact).abs() < exact / 100.0 && (g[1] - exact).abs() < exact / 100.0, "{dtype} {g:?}");
    }
}

#[test]
fn mixed_operands_take_the_type_that_holds_them() -> Result<()> {
    use DType::*;
    let tape = Tape::new(&cpu());
    let (vector, scalar) = (|d| leaf(&tape, &[2], &[1.0, 2.0], d), |d| leaf(&tape, &[], &[3.0], d));
    let cond = tape.constant(&Tensor::from_slice(&tape.device(), &[2], &[true, false])?)?;
    for (a, b, expected) in [
        (vector(BF16), vector(BF16), BF16),
        (vector(BF16), vector(F16), F32),
        (vector(BF16), vector(F32), F32),
        (vector(F16), vector(F64), F64),
        // A scalar doesn't widen what has dimensions.
        (vector(BF16), scalar(F32), BF16),
        (vector(F16), scalar(BF16), F16),
        (scalar(F16), scalar(BF16), F32),
    ] {
        for (a, b) in [(&a, &b), (&b, &a)] {
            let y = a.clone().where_(&cond, b)?;
            assert_eq!(y.dtype(), expected, "{} with {}", a.dtype(), b.dtype());
            assert_eq!(a.clone().addcmul(b, a, 1.0)?.dtype(), expected);
            let gradients = tape.backward_with(&y.sum()?, BackwardOptions::RETAIN)?;
            assert_eq!(gradients.of(a).unwrap().dtype(), a.dtype());
        }
    }
    // Elsewhere dtypes must agree, and the error says how.
    let error = vector(BF16).add(vector(F16)).unwrap_err().to_string();
    assert!(error.contains("bf16 and f16") && error.contains("cast"), "{error}");
    let error = vector(BF16).dot(vector(F32)).unwrap_err().to_string();
    assert!(error.contains("bf16 and f32") && error.contains("cast"), "{error}");
    Ok(())
}

type Program = fn(&[Var]) -> Result<Var>;

/// Sizes beyond a kernel's tile, piece or strip, which no sample of an op has: results and gradients against f64 on the
/// same numbers, in f32 too.
#[test]
fn many_tiles_pieces_and_strips() {
    let programs: [(&str, &[&[usize]], Program); 12] = [
        ("matmul", &[&[300, 700], &[700, 450]], |x| x[0].clone().matmul(&x[1])),
        ("matmul of views", &[&[600, 70], &[90, 600]], |x| {
            x[0].clone().transpose(0, 1)?.matmul(&x[1].clone().transpose(0, 1)?)
        }),
        ("linear", &[&[4, 100, 300], &[300, 500], &[500]], |x| x[0].clone().linear(&x[1], Some(x[2].clone()))),
        ("softmax", &[&[3, 5000]], |x| x[0].clone().softmax()),
        ("layer_norm", &[&[300, 1030], &[1030], &[1030]], |x| {
            x[0].clone().layer_norm(Some(x[1].clone()), Some(x[2].clone()), 1e-5)
        }),
        ("group_norm", &[&[3, 4, 30, 30], &[4], &[4]], |x| {
            x[0].clone().group_norm(2, Some(x[1].clone()), Some(x[2].clone()), 1e-5)
        }),
        ("attention", &[&[2, 300, 2, 40], &[2, 300, 1, 40], &[2, 300, 1, 70]], |x| {
            x[0].clone().attention(&x[1], &x[2], 0.15, true, 0.0)
        }),
        ("masked attention", &[&[1, 2, 300, 8], &[1, 2, 290, 8], &[1, 2, 290, 8], &[1, 1, 300, 290]], |x| {
            x[0].clone().scaled_dot_product_attention(&x[1], &x[2], Some(x[3].clone()), AttentionOptions::default())
        }),
        ("sums", &[&[1000, 300]], |x| x[0].clone().sum_dims(&[0], true)?.add(&x[0].clone().sum_dims(&[1], true)?)),
        ("products", &[&[2, 1200]], |x| {
            let near_one = x[0].clone().scale(0.02)?.shift(1.0)?;
            near_one.clone().prod(&[1], true)?.add(&near_one.cumprod(1)?)
        }),
        ("max_pool2d", &[&[1, 1, 300, 301]], |x| x[0].clone().max_pool2d(Pool { stride: [1, 2], ..Pool::new([3, 3]) })),
        ("conv2d", &[&[2, 3, 70, 60], &[40, 3, 3, 3]], |x| x[0].clone().conv2d(&x[1], None, Conv::default())),
    ];
    let device = cpu();
    for (name, shapes, program) in programs {
        let run = |rounded: DType, dtype: DType| -> Vec<Vec<f64>> {
            let tape = Tape::new(&device);
            let cast = |t: Tensor| if rounded == dtype { t } else { t.cast(dtype, MemoryKind::Input).unwrap() };
            let input = |(i, shape): (usize, &&[usize])| {
                tape.leaf(&cast(random(&device, shape, 1 + i as u64, rounded))).unwrap()
            };
            let leaves: Vec<Var> = shapes.iter().enumerate().map(input).collect();
            let y = program(&leaves).unwrap_or_else(|e| panic!("{name} in {dtype}: {e}"));
            let mut all = vec![numbers(&y)];
            let seed = cast(random(&device, &y.shape(), 9, rounded));
            let gradients = tape.backward_from(&[(&y, &seed)], BackwardOptions::default()).unwrap();
            all.extend(leaves.iter().map(|x| gradients.of(x).unwrap().to_f64_vec().unwrap()));
            all
        };
        for (dtype, u) in [(DType::F32, 2f64.powi(-21)), (DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))] {
            for (i, (actual, exact)) in run(dtype, dtype).iter().zip(run(dtype, DType::F64)).enumerate() {
                let error = relative_error(actual, &exact);
                // Products of many numbers near 1 carry the rounding of each.
                let allowed = if name == "products" { 60.0 * u } else { 2.0 * u };
                assert!(error < allowed, "{name} in {dtype}, tensor {i}: {error:e}");
            }
        }
    }
}

/// The gradients of model tiny, by 2 threads or 1: f32 parameters, computing in `dtype`.
fn model_gradients(dtype: DType, threads: usize) -> (f64, Vec<f64>, u64) {
    let device = retape_cpu::device_with_threads(threads).unwrap();
    let config = GptConfig { dtype, ..GptConfig::named("tiny").unwrap() };
    let model = Gpt::new(&device, &config, 1).unwrap();
    let batch = ByteText::moby_dick().batches(config.seq, config.batch, 2).unwrap().batch(0);
    let (tokens, targets) = batch.tensors(&device).unwrap();
    let tape = Tape::new(&device);
    let loss = model.loss(&tape, &tokens, &targets).unwrap();
    let (value, saved) = (loss.item().unwrap(), tape.saved_bytes());
    // The residual stream's start is a cast too.
    let held = |e: &LedgerEntry| e.op == "cast" && e.path != "transformer.embed" && e.stored_bytes > 0;
    assert!(!tape.ledger().unwrap().values.iter().any(held), "16-bit weights are held");
    let scaler = LossScaler::default();
    let gradients = scaler.backward(&tape, &loss).unwrap();
    let of = |p: &Parameter| gradients.parameter(p.id()).unwrap().to_f64_vec().unwrap();
    let all = model.parameters().iter().flat_map(of).map(|g| g / scaler.scale()).collect();
    (value, all, saved)
}

#[test]
fn a_model_in_sixteen_bits_is_near_the_one_in_f32() {
    let (loss, exact, saved) = model_gradients(DType::F32, 2);
    for (dtype, bound) in [(DType::BF16, 0.01), (DType::F16, 0.002)] {
        let (own_loss, own, own_saved) = model_gradients(dtype, 2);
        let error = relative_error(&own, &exact);
        println!("{dtype}: gradient error {error:.5}, loss {own_loss} for {loss}, saved {own_saved} of {saved} bytes");
        assert!(error < bound, "{dtype}: {error}");
        assert!((own_loss - loss).abs() < 2e-3 * loss);
        assert!(own_saved as f64 <= 0.52 * saved as f64, "statistics aside, half the bytes are saved");
        assert!(model_gradients(dtype, 1).1 == own, "other bits by another number of threads");
    }
}

/// Scratch is of tiles: it doesn't grow with the tensors.
#[test]
fn kernels_hold_tiles_in_f32_not_tensors() {
    let scratch = |size: usize| {
        let device = cpu();
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[size, 64], &vec![0.5; size * 64], DType::BF16);
        let y = x.clone().transpose(0, 1).unwrap().matmul(&x).unwrap();
        let q = x.clone().reshape(&[1, size, 2, 32]).unwrap();
        let o = q.clone().attention(&q, &q, 0.2, true, 0.0).unwrap();
        let images = x.clone().reshape(&[1, 1, size, 64]).unwrap().max_pool2d(Pool::new([2, 2])).unwrap();
        let z = o.sum().unwrap().add(y.sum().unwrap()).unwrap().add(images.sum().unwrap()).unwrap();
        tape.backward(&z.add(x.softmax().unwrap().sum().unwrap()).unwrap()).unwrap();
        device.scratch_bytes()
    };
    assert_eq!(scratch(4096), scratch(16384));
}

/// A step that scales its loss takes what the dry run of one that doesn't promises.
#[test]
fn scaling_the_loss_takes_no_memory() {
    let promised = |config: &GptConfig| {
        let (device, model, tokens) = model(meta(), config);
        let forward = |tape: &Tape| Ok::<_, Error>(model.loss(tape, &tokens, &tokens).unwrap());
        Trace::record(&device, None, forward).unwrap().run(None).unwrap()
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let config = GptConfig { dtype, layers: 2, dim: 64, seq: 32, batch: 2, ..GptConfig::named("tiny").unwrap() };
        let promised = promised(&config);
        for scaler in [None, Some(LossScaler::default())] {
            let (device, model, tokens) = model(cpu(), &config);
            device.meter().reset_peak();
            let tape = Tape::new(&device);
            let loss = model.loss(&tape, &tokens, &tokens).unwrap();
            let _gradients = match scaler {
                Some(scaler) => scaler.backward(&tape, &loss).unwrap(),
                None => tape.backward(&loss).unwrap(),
            };
            let scaled = scaler.is_some();
            assert_eq!(device.meter().step_peak(), promised.peak_bytes, "{dtype}, scaled: {scaled}");
            assert_eq!(device.meter().fingerprint(), promised.fingerprint, "{dtype}, scaled: {scaled}");
        }
    }
}

fn model(device: Device, config: &GptConfig) -> (Device, Gpt, Tensor) {
    let model = Gpt::new(&device, config, 1).unwrap();
    let tokens = Tensor::full(&device, &[config.batch, config.seq], DType::I64, 1.0).unwrap();
    (device, model, tokens)
}

#[test]
fn a_scaled_backward_is_backward_times_the_scale() {
    let run = |dtype: DType, scale: Option<f64>| {
        let device = cpu();
        let x0 = random(&device, &[16, 32], 1, dtype);
        device.meter().reset_peak();
        let tape = Tape::new(&device);
        let x = tape.leaf(&x0).unwrap();
        let loss = x.clone().gelu().unwrap().recompute().unwrap().square().unwrap().mean().unwrap();
        let gradients = match scale {
            Some(scale) => tape.backward_with(&loss, BackwardOptions::scaled(scale)).unwrap(),
            None => tape.backward(&loss).unwrap(),
        };
        let meter = device.meter();
        let of_x = gradients.of(&x).unwrap().to_f64_vec().unwrap();
        assert!(matches!(tape.backward(&loss), Err(Error::TapeConsumed { .. })));
        (of_x, meter.step_peak(), meter.fingerprint())
    };
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let (plain, scaled) = (run(dtype, None), run(dtype, Some(1024.0)));
        assert_eq!(run(dtype, Some(1.0)), plain);
        assert_eq!((scaled.1, scaled.2), (plain.1, plain.2), "{dtype}");
        assert_eq!(scaled.0, plain.0.iter().map(|g| 1024.0 * g).collect::<Vec<_>>(), "{dtype}");
    }
    let tape = Tape::new(&cpu());
    let x = leaf(&tape, &[2], &[1.0, 2.0], DType::F32);
    assert!(matches!(tape.backward_with(&x, BackwardOptions::scaled(2.0)), Err(Error::NoGradient { .. })));
}
