//! Tiled attention against explicit f64 attention: lengths and head sizes off the tile, shared heads, dropout, views
//! with NaN around them, rows that see nothing, extreme scores.

mod common;
use common::*;
use retape_core::kernel::{self, AttentionSpec, RandomStream};
use retape_core::{DType, Device, Tensor};

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    tq: usize,
    tk: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    causal: bool,
    /// How many keys a query sees, the last ones; causal attention alone.
    window: Option<usize>,
    dropout: f64,
}

/// out, stats, dq, dk, dv by the definition.
fn reference(c: Case, q: &[f64], k: &[f64], v: &[f64], g: &[f64], spec: AttentionSpec) -> [Vec<f64>; 5] {
    let d = c.size;
    let mut out = vec![0.0; q.len()];
    let mut stats = [f64::NEG_INFINITY, 0.0].repeat(c.batch * c.heads * c.tq);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for (b, h, i) in (0..c.batch).flat_map(|b| (0..c.heads).flat_map(move |h| (0..c.tq).map(move |i| (b, h, i)))) {
        let kv = h / (c.heads / c.kv_heads);
        let at_q = ((b * c.tq + i) * c.heads + h) * d;
        let at_k = |j: usize| ((b * c.tk + j) * c.kv_heads + kv) * d;
        let seen = if c.causal { (i + 1 + c.tk).saturating_sub(c.tq).min(c.tk) } else { c.tk };
        let first = c.window.map_or(0, |w| (i + 1 + c.tk).saturating_sub(c.tq).saturating_sub(w));
        let score = |j: usize| spec.scale * dot(&q[at_q..][..d], &k[at_k(j)..][..d]);
        let scores: Vec<f64> = (0..seen).map(|j| if j < first { f64::NEG_INFINITY } else { score(j) }).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        if seen == first.min(seen) {
            continue;
        }
        let row = (b * c.heads + h) * c.tq + i;
        stats[2 * row..][..2].copy_from_slice(&[max, log_sum]);
        let z = |j: usize| {
            let word = spec.stream.word((row * c.tk + j) as u64) as u64;
            if word < RandomStream::threshold(spec.dropout) { 0.0 } else { 1.0 / (1.0 - spec.dropout) }
        };
        let p: Vec<f64> = scores.iter().map(|s| (s - max - log_sum).exp()).collect();
        for j in 0..seen {
            (0..d).for_each(|x| out[at_q + x] += z(j) * p[j] * v[at_k(j) + x]);
        }
        let delta = dot(&g[at_q..][..d], &out[at_q..][..d]);
        for j in 0..seen {
            let ds = p[j] * (z(j) * dot(&g[at_q..][..d], &v[at_k(j)..][..d]) - delta) * spec.scale;
            for x in 0..d {
                dq[at_q + x] += ds * k[at_k(j) + x];
                dk[at_k(j) + x] += ds * q[at_q + x];
                dv[at_k(j) + x] += z(j) * p[j] * g[at_q + x];
            }
        }
    }
    [out, stats, dq, dk, dv]
}

/// The same by the kernels.
fn computed(device: &Device, dtype: DType, c: Case, [q, k, v, g]: [&Tensor; 4], spec: AttentionSpec) -> [Tensor; 5] {
    let poison = |shape: &[usize]| poisoned(device, dtype, shape);
    let statistic = [c.batch, c.heads, c.tq, 2];
    let (out, stats, delta) = (poison(q.shape()), poison(&statistic), poison(&statistic[..3]));
    let (dq, dk, dv) = (poison(q.shape()), poison(k.shape()), poison(v.shape()));
    let forward = kernel::AttentionInputs { q, k, v, mask: None, sequences: None, spec };
    run(device, kernel::Attention { inputs: forward, out: &out, stats: &stats });
    run(device, kernel::AttentionDelta { o: &out, g, delta: &delta });
    let inputs = kernel::AttentionGradInputs { forward, g, stats: &stats, delta: &delta };
    run(device, kernel::AttentionGradKv { inputs, dk: &dk, dv: &dv });
    run(device, kernel::AttentionGradQ { inputs, dq: &dq });
    [out, stats, dq, dk, dv]
}

fn check(device: &Device, dtype: DType, c: Case, factor: f64) {
    let (q_shape, k_shape) = ([c.batch, c.tq, c.heads, c.size], [c.batch, c.tk, c.kv_heads, c.size]);
    let (nq, nk) = (q_shape.iter().product(), k_shape.iter().product());
    let q: Vec<f64> = values(nq, 1).iter().map(|x| (x * factor) as f32 as f64).collect();
    let (k, v, g) = (values(nk, 2), values(nk, 3), values(nq, 4));
    let scale = 1.0 / (c.size as f64).sqrt();
    let spec = AttentionSpec { scale, causal: c.causal, window: c.window, dropout: c.dropout, stream: STREAM };
    let want = reference(c, &q, &k, &v, &g, spec);
    let all = |shape: &[usize], x: &[f64]| views(device, dtype, shape, x);
    let (qs, ks, vs, gs) = (all(&q_shape, &q), all(&k_shape, &k), all(&k_shape, &v), all(&q_shape, &g));
    for n in 0..3 {
        let got = computed(device, dtype, c, [&qs[n], &ks[n], &vs[(n + 2) % 3], &gs[(n + 1) % 3]], spec);
        for (name, (got, want)) in ["out", "stats", "dq", "dk", "dv"].iter().zip(got.iter().zip(&want)) {
            close(&format!("{name} of {dtype} {c:?}, view {n}"), got, want, tolerance(dtype) * 20.0 * factor.max(1.0));
        }
    }
}

const PLAIN: Case =
    Case { batch: 1, tq: 65, tk: 65, heads: 2, kv_heads: 2, size: 16, causal: true, window: None, dropout: 0.0 };

#[test]
fn lengths_and_alignment() {
    let device = device(2);
    for (tq, tk) in [(1, 1), (9, 9), (65, 65), (130, 300), (300, 130), (1, 70), (0, 4), (4, 0)] {
        for causal in [true, false] {
            check(&device, DType::F32, Case { tq, tk, causal, ..PLAIN }, 1.0);
            check(&device, DType::F64, Case { tq, tk, causal, ..PLAIN }, 1.0);
        }
    }
}

#[test]
fn long_sequence() {
    check(&device(2), DType::F32, Case { tq: 1001, tk: 1001, heads: 1, kv_heads: 1, size: 40, ..PLAIN }, 1.0);
}

#[test]
fn head_sizes() {
    let device = device(2);
    for size in [1, 40, 63, 72, 80, 96] {
        check(&device, DType::F32, Case { size, ..PLAIN }, 1.0);
    }
}

#[test]
fn shared_heads_and_dropout() {
    let device = device(2);
    for dtype in FLOATS {
        check(&device, dtype, Case { batch: 2, heads: 6, kv_heads: 2, tq: 70, tk: 75, ..PLAIN }, 1.0);
        check(&device, dtype, Case { dropout: 0.25, heads: 4, kv_heads: 1, tk: 131, ..PLAIN }, 1.0);
    }
}

#[test]
fn sliding_windows() {
    let device = device(2);
    for (tq, tk) in [(9, 9), (300, 300), (130, 300), (300, 130)] {
        for window in [0, 1, 7, 64, 200, tk - 1, tk, 1000, usize::MAX] {
            check(&device, DType::F32, Case { tq, tk, window: Some(window), ..PLAIN }, 1.0);
        }
    }
    check(&device, DType::F64, Case { tq: 150, tk: 150, window: Some(33), dropout: 0.2, ..PLAIN }, 1.0);
}

#[test]
fn very_negative_scores_still_sum_to_one() {
    let device = device(2);
    let ones = vec![1.0; 70 * 16];
    for score in [-200.0, -1e5, 1e4] {
        let q = tensor(&device, DType::F32, &[1, 70, 1, 16], &vec![score / 16.0; 70 * 16]);
        let k = tensor(&device, DType::F32, &[1, 70, 1, 16], &ones);
        let (out, stats) = (poisoned(&device, DType::F32, q.shape()), poisoned(&device, DType::F32, &[1, 1, 70, 2]));
        let spec = AttentionSpec { scale: 1.0, causal: true, window: None, dropout: 0.0, stream: STREAM };
        let (q, k, out, stats) = (&q, &k, &out, &stats);
        let inputs = kernel::AttentionInputs { q, k, v: k, mask: None, sequences: None, spec };
        run(&device, kernel::Attention { inputs, out, stats });
        close("out", out, &ones, 1e-6);
    }
    check(&device, DType::F64, PLAIN, 100.0);
}

#[test]
fn bits_do_not_depend_on_threads() {
    let c = Case { heads: 3, kv_heads: 1, tq: 300, tk: 300, dropout: 0.1, ..PLAIN };
    let spec = AttentionSpec { scale: 0.25, causal: true, window: None, dropout: 0.1, stream: STREAM };
    same_bits("attention", |device| {
        let make = |heads, seed| tensor(device, DType::F32, &[1, 300, heads, 16], &values(300 * heads * 16, seed));
        let (q, k, v, g) = (make(3, 1), make(1, 2), make(1, 3), make(3, 4));
        computed(device, DType::F32, c, [&q, &k, &v, &g], spec).into()
    });
}
