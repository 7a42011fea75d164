//! Kernels are called by safe code: whatever operands they are given, nothing is read or written outside of them, and
//! no value that somebody holds changes. What core lets through, a backend can run.

use super::cpu;
use retape_core::kernel::{
    self, AdamWConfig, AttentionInputs, AttentionSpec, BinaryFn, ClampInput, ClassScores, CrossEntropySpec, LossFn,
    PoolDivisor, RandomStream, ReduceFn, ScanFn, Sequences, TernaryFn, UnaryFn, Window,
};
use retape_core::{DType, Device, Error, MemoryKind, ParameterId, Result, Tape, Tensor, meta};
use std::sync::atomic::{AtomicUsize, Ordering};

fn full(device: &Device, shape: &[usize], dtype: DType) -> Tensor {
    Tensor::full(device, shape, dtype, 1.0).unwrap()
}

type Run = dyn Fn(&Device) -> Result<()>;

/// A kernel on operands that it can't take.
struct Wrong {
    what: &'static str,
    run: Box<Run>,
}

fn wrong(what: &'static str, run: impl Fn(&Device) -> Result<()> + 'static) -> Wrong {
    Wrong { what, run: Box::new(run) }
}

/// Every kernel with an operand of a wrong shape, and what else may be wrong.
fn all() -> Vec<Wrong> {
    const STREAM: RandomStream = RandomStream { seed: 1, counter: 2 };
    const ADAMW: AdamWConfig = AdamWConfig { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 };
    let f = |d: &Device, shape: &[usize]| full(d, shape, DType::F32);
    let ids = |d: &Device, shape: &[usize]| Tensor::full(d, shape, DType::I64, 0.0).unwrap();
    let entropy = CrossEntropySpec::default();
    let window = Window { kernel: [2, 2], stride: [1, 1], before: [0, 0], dilation: [1, 1] };
    let spec = AttentionSpec { scale: 1.0, causal: false, window: None, dropout: 0.0, stream: STREAM };
    let far = Window { stride: [usize::MAX, 1], ..window };
    let none = Window { dilation: [0, 1], ..window };
    let unary = UnaryFn::Exp;
    vec![
        wrong("copy", move |d| d.run(kernel::Copy { x: &f(d, &[3]), out: &f(d, &[4]) })),
        wrong("copy to repeated elements", move |d| {
            d.run(kernel::Copy { x: &f(d, &[4]), out: &f(d, &[1]).expand(&[4]).unwrap() })
        }),
        wrong("copy to overlapping windows", move |d| {
            d.run(kernel::Copy { x: &f(d, &[3, 2]), out: &f(d, &[4]).as_strided(&[3, 2], &[1, 1], 0).unwrap() })
        }),
        wrong("copy within", move |d| {
            let x = f(d, &[4]);
            d.run(kernel::Copy { x: &x.narrow(0, 0, 3).unwrap(), out: &x.narrow(0, 1, 3).unwrap() })
        }),
        wrong("unary", move |d| d.run(kernel::Unary { f: unary, x: &f(d, &[1000]), out: &f(d, &[4]) })),
        wrong("unary to a view with gaps", move |d| {
            d.run(kernel::Unary { f: unary, x: &f(d, &[4]), out: &f(d, &[8]).slice(0, 0, 4, 2).unwrap() })
        }),
        wrong("unary of integers", move |d| d.run(kernel::Unary { f: unary, x: &ids(d, &[4]), out: &f(d, &[4]) })),
        wrong("unary of f64 to f32", move |d| {
            d.run(kernel::Unary { f: unary, x: &full(d, &[4], DType::F64), out: &f(d, &[4]) })
        }),
        wrong("unary in place of another view", move |d| {
            let x = f(d, &[4, 4]);
            d.run(kernel::Unary { f: unary, x: &x.transpose(0, 1).unwrap(), out: &x })
        }),
        wrong("unary_grad", move |d| {
            d.run(kernel::UnaryGrad { f: unary, saved: &f(d, &[4]), g: &f(d, &[5]), out: &f(d, &[5]) })
        }),
        wrong("binary", move |d| {
            d.run(kernel::Binary { f: BinaryFn::Add, a: &f(d, &[4]), b: &f(d, &[1]), out: &f(d, &[4]) })
        }),
        wrong("extremum_grad", move |d| {
            let (a, g) = (f(d, &[4]), f(d, &[3]));
            d.run(kernel::ExtremumGrad { f: BinaryFn::Maximum, a: &a, b: &a, g: &g, out: &f(d, &[4]) })
        }),
        wrong("ternary", move |d| {
            let (a, c) = (f(d, &[4]), f(d, &[4, 1]));
            d.run(kernel::Ternary { f: TernaryFn::Lerp, a: &a, b: &a, c: &c, out: &f(d, &[4]) })
        }),
        wrong("clamp_grad", move |d| {
            let (x, low) = (f(d, &[4]), f(d, &[2]));
            let (low, high) = (Some(&low), None);
            d.run(kernel::ClampGrad { by: ClampInput::X, x: &x, low, high, g: &x, out: &f(d, &[4]) })
        }),
        wrong("select", move |d| {
            let (cond, a) = (full(d, &[4], DType::Bool), f(d, &[4]));
            d.run(kernel::Select { cond: &cond, a: &a, b: &full(d, &[4], DType::F64), out: &f(d, &[4]) })
        }),
        wrong("reduce", move |d| d.run(kernel::Reduce { f: ReduceFn::Sum, x: &f(d, &[4, 3]), out: &f(d, &[2, 1]) })),
        wrong("reduce to another rank", move |d| {
            d.run(kernel::Reduce { f: ReduceFn::Sum, x: &f(d, &[4, 3]), out: &f(d, &[4]) })
        }),
        wrong("reduce_grad", move |d| {
            let (x, y) = (f(d, &[4, 3]), f(d, &[4, 1]));
            d.run(kernel::ReduceGrad { f: ReduceFn::Max, x: &x, y: &y, g: &f(d, &[1, 1]), out: &f(d, &[4, 3]) })
        }),
        wrong("max_index", move |d| {
            let (x, values) = (f(d, &[4, 3]), f(d, &[4, 1]));
            d.run(kernel::MaxIndex { x: &x, dim: 1, values: &values, indices: &ids(d, &[1, 1]) })
        }),
        wrong("max_index of nothing", move |d| {
            let (x, values) = (f(d, &[4, 0]), f(d, &[4, 1]));
            d.run(kernel::MaxIndex { x: &x, dim: 1, values: &values, indices: &ids(d, &[4, 1]) })
        }),
        wrong("max_index_grad", move |d| {
            let (g, out) = (f(d, &[4, 1]), f(d, &[4, 3]));
            d.run(kernel::MaxIndexGrad { indices: &ids(d, &[4, 1]), g: &g, dim: 2, out: &out })
        }),
        wrong("scan", move |d| d.run(kernel::Scan { f: ScanFn::Sum, x: &f(d, &[4]), dim: 1, out: &f(d, &[4]) })),
        wrong("cumprod_grad", move |d| {
            d.run(kernel::CumprodGrad { x: &f(d, &[4]), g: &f(d, &[2]), dim: 0, out: &f(d, &[4]) })
        }),
        wrong("matmul", move |d| {
            let (a, b, out) = (f(d, &[4, 3]), f(d, &[4, 5]), f(d, &[4, 5]));
            d.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out })
        }),
        wrong("matmul of vectors", move |d| {
            let (a, b, out) = (f(d, &[3]), f(d, &[3]), f(d, &[3]));
            d.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &out })
        }),
        wrong("matmul onto its operand", move |d| {
            let (a, b) = (f(d, &[3, 3]), f(d, &[3, 3]));
            d.run(kernel::Matmul { a: &a, b: &b, alpha: 1.0, accumulate: false, out: &a })
        }),
        wrong("softmax", move |d| d.run(kernel::Softmax { x: &f(d, &[4, 3]), out: &f(d, &[3, 4]) })),
        wrong("softmax_grad", move |d| {
            d.run(kernel::SoftmaxGrad { y: &f(d, &[4, 3]), g: &f(d, &[4]), out: &f(d, &[4, 3]) })
        }),
        wrong("log_softmax", move |d| d.run(kernel::LogSoftmax { x: &f(d, &[4]), out: &f(d, &[3]) })),
        wrong("log_softmax_grad", move |d| {
            d.run(kernel::LogSoftmaxGrad { y: &f(d, &[4]), g: &f(d, &[3]), out: &f(d, &[4]) })
        }),
        wrong("triangle", move |d| {
            d.run(kernel::Triangle { x: &f(d, &[4]), upper: true, diagonal: 0, value: 0.0, out: &f(d, &[4]) })
        }),
        wrong("flip", move |d| d.run(kernel::Flip { x: &f(d, &[4]), dims: &[1], out: &f(d, &[4]) })),
        wrong("flip twice", move |d| d.run(kernel::Flip { x: &f(d, &[4]), dims: &[0, 0], out: &f(d, &[4]) })),
        wrong("gather", move |d| {
            let (x, i) = (f(d, &[5, 4]), ids(d, &[3]));
            d.run(kernel::Gather { x: &x, indices: &[&i], wrap: false, out: &f(d, &[4]) })
        }),
        wrong("gather without indices", move |d| {
            d.run(kernel::Gather { x: &f(d, &[4]), indices: &[], wrap: false, out: &f(d, &[4]) })
        }),
        wrong("scatter_add", move |d| {
            let (source, i) = (f(d, &[4]), ids(d, &[4]));
            let (indices, order, out) = (&[&i, &i][..], &ids(d, &[0]), &f(d, &[5, 4]));
            d.run(kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 1.0, order, out })
        }),
        wrong("scatter_add by floats", move |d| {
            let (source, i) = (f(d, &[4]), f(d, &[4]));
            let (indices, order, out) = (&[&i][..], &ids(d, &[0]), &f(d, &[5, 4]));
            d.run(kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 1.0, order, out })
        }),
        wrong("scatter_add with a short workspace", move |d| {
            let (source, i) = (f(d, &[4]), ids(d, &[4]));
            let out = f(d, &[5]).expand(&[4, 5]).unwrap().transpose(0, 1).unwrap();
            let (indices, order, out) = (&[&i][..], &ids(d, &[3]), &out);
            d.run(kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 1.0, order, out })
        }),
        wrong("scatter_add to one place under several numbers", move |d| {
            let (source, i, out) = (f(d, &[4]), ids(d, &[4]), f(d, &[1, 4]).expand(&[3, 4]).unwrap());
            let (indices, order) = (&[&i][..], &ids(d, &[0]));
            d.run(kernel::ScatterAdd { source: &source, indices, wrap: false, alpha: 1.0, order, out: &out })
        }),
        wrong("dropout", move |d| d.run(kernel::Dropout { x: &f(d, &[4]), p: 0.5, stream: STREAM, out: &f(d, &[5]) })),
        wrong("layer_norm", move |d| {
            let (x, out, mean, rstd) = (f(d, &[4, 3]), f(d, &[4, 3]), f(d, &[3]), f(d, &[4]));
            let (weight, bias, mean) = (None, None, Some(&mean));
            d.run(kernel::LayerNorm { x: &x, weight, bias, eps: 1e-5, out: &out, mean, rstd: &rstd })
        }),
        wrong("layer_norm_grad", move |d| {
            let (x, rstd, weight, out) = (f(d, &[4, 3]), f(d, &[4]), f(d, &[2]), f(d, &[4, 3]));
            d.run(kernel::LayerNormGrad { x: &x, weight: Some(&weight), mean: None, rstd: &rstd, g: &x, out: &out })
        }),
        wrong("layer_norm_param_grad", move |d| {
            let (x, rstd, out) = (f(d, &[4, 3]), f(d, &[4]), f(d, &[4]));
            let (dweight, dbias) = (Some(&out), None);
            d.run(kernel::LayerNormParamGrad { x: &x, mean: None, rstd: &rstd, g: &x, dweight, dbias })
        }),
        wrong("embedding", move |d| {
            d.run(kernel::Embedding { table: &f(d, &[5, 3]), ids: &ids(d, &[4]), out: &f(d, &[4, 2]) })
        }),
        wrong("embedding_grad", move |d| {
            let (g, order, out) = (&f(d, &[3, 2]), &ids(d, &[4]), &f(d, &[5, 2]));
            d.run(kernel::EmbeddingGrad { ids: &ids(d, &[4]), g, order, out })
        }),
        wrong("loss", move |d| {
            let (x, target) = (f(d, &[4]), f(d, &[3]));
            d.run(kernel::Loss { f: LossFn::Squared, x: &x, target: &target, weight: None, out: &f(d, &[4]) })
        }),
        wrong("loss_grad by no weight", move |d| {
            let (x, weight) = (f(d, &[4]), None);
            d.run(kernel::LossGrad { f: LossFn::Squared, by: 2, x: &x, target: &x, weight, g: &x, out: &f(d, &[4]) })
        }),
        wrong("cross_entropy", move |d| {
            let (logits, target, loss) = (f(d, &[4, 3]), ids(d, &[3]), f(d, &[]));
            let scores = ClassScores { logits: &logits, target: &target, weight: None, spec: entropy };
            d.run(kernel::CrossEntropy { scores, loss: &loss, stats: None })
        }),
        wrong("cross_entropy of no classes", move |d| {
            let (logits, target, loss) = (f(d, &[4, 0]), ids(d, &[4]), f(d, &[]));
            let scores = ClassScores { logits: &logits, target: &target, weight: None, spec: entropy };
            d.run(kernel::CrossEntropy { scores, loss: &loss, stats: None })
        }),
        wrong("nll_loss_grad", move |d| {
            let (target, g, out, weight) = (ids(d, &[4]), f(d, &[4]), f(d, &[4, 3]), None);
            d.run(kernel::NllLossGrad { target: &target, weight, g: &g, spec: entropy, out: &out })
        }),
        wrong("cross_entropy_weight_grad by no weight", move |d| {
            let (logits, target, g) = (f(d, &[4, 3]), ids(d, &[4]), f(d, &[]));
            let scores = ClassScores { logits: &logits, target: &target, weight: None, spec: entropy };
            d.run(kernel::CrossEntropyWeightGrad { scores, stats: None, g: &g, out: &f(d, &[3]) })
        }),
        wrong("im2col", move |d| {
            d.run(kernel::Im2col { x: &f(d, &[1, 1, 4, 4]), window, out: &f(d, &[1, 1, 2, 3, 3, 3]) })
        }),
        wrong("im2col too far", move |d| {
            d.run(kernel::Im2col { x: &f(d, &[1, 1, 4, 4]), window: far, out: &f(d, &[1, 1, 2, 2, 3, 3]) })
        }),
        wrong("col2im", move |d| {
            d.run(kernel::Col2im { cols: &f(d, &[1, 1, 2, 2, 3, 3]), window, out: &f(d, &[1, 2, 4, 4]) })
        }),
        wrong("max_pool", move |d| {
            let (x, out) = (f(d, &[1, 1, 4, 4]), f(d, &[1, 1, 3, 3]));
            d.run(kernel::MaxPool { x: &x, window, out: &out, index: &ids(d, &[1, 1, 3, 2]) })
        }),
        wrong("max_pool_grad", move |d| {
            let (g, out) = (f(d, &[1, 1, 3, 3]), f(d, &[1, 2, 4, 4]));
            d.run(kernel::MaxPoolGrad { index: &ids(d, &[1, 1, 3, 3]), g: &g, window, out: &out })
        }),
        wrong("avg_pool by steps of nothing", move |d| {
            let (x, out, divisor) = (f(d, &[1, 1, 4, 4]), f(d, &[1, 1, 3, 3]), PoolDivisor::Inside);
            d.run(kernel::AvgPool { x: &x, window: none, divisor, out: &out })
        }),
        wrong("avg_pool_grad", move |d| {
            let (g, out, divisor) = (f(d, &[1, 3, 3]), f(d, &[1, 4, 4]), PoolDivisor::Inside);
            d.run(kernel::AvgPoolGrad { g: &g, window, divisor, out: &out })
        }),
        wrong("attention_delta", move |d| {
            let (o, delta) = (f(d, &[1, 4, 2, 3]), f(d, &[1, 4, 2]));
            d.run(kernel::AttentionDelta { o: &o, g: &o, delta: &delta })
        }),
        wrong("quantize", move |d| {
            let (q, scales, rounding) = (full(d, &[4], DType::U8), f(d, &[2]), None);
            d.run(kernel::Quantize { x: &f(d, &[4]), group: 4, rounding, q: &q, scales: &scales })
        }),
        wrong("quantize by nothing", move |d| {
            let (q, scales, rounding) = (full(d, &[4], DType::U8), f(d, &[1]), None);
            d.run(kernel::Quantize { x: &f(d, &[4]), group: 0, rounding, q: &q, scales: &scales })
        }),
        wrong("dequantize", move |d| {
            let (q, scales) = (f(d, &[4]), f(d, &[1]));
            d.run(kernel::Dequantize { q: &q, scales: &scales, group: 4, out: &f(d, &[4]) })
        }),
        wrong("uniform integers", move |d| d.run(kernel::Uniform { stream: STREAM, out: &ids(d, &[4]) })),
        wrong("adamw", move |d| {
            let (p, g, m) = (f(d, &[4]), f(d, &[3]), f(d, &[4]));
            let (v, config) = (f(d, &[4]), ADAMW);
            d.run(kernel::AdamW { p: &p, g: &g, m: &m, v: &v, step: 1, config, grad_scale: 1.0 })
        }),
        wrong("adamw with one moment", move |d| {
            let (p, g, m) = (f(d, &[4]), f(d, &[4]), f(d, &[4]));
            d.run(kernel::AdamW { p: &p, g: &g, m: &m, v: &m, step: 1, config: ADAMW, grad_scale: 1.0 })
        }),
        wrong("squared_norm", move |d| {
            d.run(kernel::SquaredNorm { x: &f(d, &[4]), out: &f(d, &[]) }) // must be f64
        }),
        wrong("attention bounds", move |d| {
            let (q, out) = (f(d, &[1, 4, 2, 3]), f(d, &[1, 4, 2, 3]));
            let sequences = Some(Sequences { queries: &[0, 9, 4], keys: &[0, 2, 4] });
            let inputs = AttentionInputs { q: &q, k: &q, v: &q, mask: None, sequences, spec };
            d.run(kernel::Attention { inputs, out: &out, stats: &f(d, &[1, 2, 4, 2]) })
        }),
        wrong("another device's tensor", move |d| {
            d.run(kernel::Unary { f: unary, x: &f(&meta(), &[4]), out: &f(d, &[4]) })
        }),
    ]
}

#[test]
fn wrong_operands_are_errors() {
    for device in [cpu(), meta()] {
        for Wrong { what, run } in all() {
            let error = run(&device).expect_err(what);
            let typed =
                matches!(error, Error::InvalidTensor { .. } | Error::Unsupported { .. } | Error::DeviceMismatch { .. });
            assert!(typed && !error.to_string().contains("another thread"), "{what}: {error:?}");
        }
        assert_eq!(device.meter().live(), 0);
    }
}

/// A tensor changes only while nobody but its maker holds it.
#[test]
fn values_don_t_change() {
    let device = cpu();
    let fill = |out: &Tensor| device.run(kernel::Fill { value: 7.0, out });
    let numbers = |t: &Tensor| t.to_vec::<f32>().unwrap();
    // Of his own, a user may overwrite what nobody else holds, and all of what he is making.
    let own = Tensor::from_slice(&device, &[2], &[1f32, 2.0]).unwrap();
    fill(&own).unwrap();
    let making = Tensor::uninit(&device, &[2], DType::F32, MemoryKind::Input).unwrap();
    fill(&making.narrow(0, 0, 1).unwrap()).unwrap();
    fill(&making.clone()).unwrap();
    assert_eq!((numbers(&own), numbers(&making)), (vec![7.0; 2], vec![7.0; 2]));
    // Not what a tape has been given, what comes from it, or what another handle shows.
    let tape = Tape::new(&device);
    let x = tape.leaf(&making).unwrap();
    let y = x.clone().scale(2.0).unwrap();
    let gradients = tape.backward(&y.clone().square().unwrap().sum().unwrap()).unwrap();
    let gradient = gradients.of(&x).unwrap().clone();
    // The gradient of a parameter that was recorded twice is a sum of its leaves'.
    let (tape, id) = (Tape::new(&device), ParameterId::unique());
    let twice = [1.0, 2.0].map(|value| {
        let tensor = Tensor::full(&device, &[2], DType::F32, value).unwrap();
        tape.parameter(id, &tensor, true).unwrap().square().unwrap().sum().unwrap()
    });
    let of_both = tape.backward(&twice[0].clone().add(&twice[1]).unwrap()).unwrap();
    let sum = of_both.parameter(id).unwrap().clone();
    let shared = Tensor::from_slice(&device, &[2], &[1f32, 2.0]).unwrap();
    let cast = shared.cast(DType::F32, MemoryKind::Input).unwrap();
    let _others = (shared.clone(), cast.narrow(0, 0, 1).unwrap());
    for value in [&making, &x.tensor().unwrap(), &y.tensor().unwrap(), &gradient, &sum, &shared, &cast] {
        let before = numbers(value);
        let error = fill(value).unwrap_err().to_string();
        assert!(error.contains("fill: `out` is a value that others hold"), "{error}");
        assert_eq!(numbers(value), before);
    }
}

/// Threads that read and write one tensor at a time: each kernel or copy works alone, or fails and says why.
#[test]
fn threads_don_t_race() {
    let device = retape_cpu::device_with_threads(2).unwrap();
    let shared = Tensor::full(&device, &[1 << 16], DType::F32, 0.0).unwrap();
    let [writes, reads] = [AtomicUsize::new(0), AtomicUsize::new(0)];
    std::thread::scope(|scope| {
        for value in 0..3 {
            let (device, shared, writes, reads) = (&device, &shared, &writes, &reads);
            scope.spawn(move || {
                for _ in 0..200 {
                    let written = device.run(kernel::Fill { value: f64::from(value), out: shared });
                    let read = shared.to_vec::<f32>();
                    writes.fetch_add(usize::from(written.is_ok()), Ordering::Relaxed);
                    reads.fetch_add(usize::from(read.is_ok()), Ordering::Relaxed);
                    for error in [written.err(), read.as_ref().err().cloned()].into_iter().flatten() {
                        assert!(error.to_string().contains("another thread"), "{error}");
                    }
                    assert!(!read.is_ok_and(|numbers| numbers.iter().any(|&n| n != numbers[0])), "half written");
                }
            });
        }
    });
    assert!(writes.into_inner() > 0 && reads.into_inner() > 0);
}

/// Places that no pooling has made are nobody's: not another plane's, either.
#[test]
fn places_outside_a_plane_get_nothing() {
    let device = cpu();
    let window = Window { kernel: [2, 2], stride: [2, 2], before: [0, 0], dilation: [1, 1] };
    for dtype in [DType::F32, DType::BF16] {
        let index = Tensor::from_slice(&device, &[1, 2, 1, 2], &[0i64, 4, -1, i64::MAX]).unwrap();
        let (g, out) = (full(&device, &[1, 2, 1, 2], dtype), full(&device, &[1, 2, 2, 2], dtype));
        device.run(kernel::MaxPoolGrad { index: &index, g: &g, window, out: &out }).unwrap();
        assert_eq!(out.to_f64_vec().unwrap(), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "{dtype}");
    }
}
