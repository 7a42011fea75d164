//! Attention against its definition: the registry's samples, and random specs with large scores, masks that saturate,
//! options at their extremes, and rows that nothing may read.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use retape_core::ops::attention::AttentionOptions;
use retape_core::ops::{Op, OpRule, attention::Attention};
use retape_core::{BackwardOptions, DType, Device, MemoryKind, Result, Tape, Tensor, Var};
use retape_tests::attention::{Case, check_sample};
use retape_tests::choices::Bytes;
use retape_tests::{floats, numbers, random, relative_error, sample_tensor};

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

#[test]
fn samples_are_what_the_definition_says() {
    let device = cpu();
    for dtype in FLOATS {
        for sample in Attention::samples() {
            let Op::Attention(op) = &sample.op else { unreachable!("a sample of attention") };
            let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(&device, i, dtype)).collect();
            check_sample(&device, op, &inputs, sample.name);
        }
    }
}

#[test]
fn random_specs_are_what_the_definition_says() {
    let number = |variable: &str| std::env::var(variable).ok()?.parse::<u64>().ok();
    let config = ProptestConfig {
        cases: number("RETAPE_CASES").map_or(300, |n| n as u32 * 2),
        rng_seed: RngSeed::Fixed(number("RETAPE_SEED").unwrap_or(1)),
        failure_persistence: None,
        max_shrink_iters: 500,
        ..ProptestConfig::default()
    };
    let device = cpu();
    proptest!(config, |(bytes in vec(any::<u8>(), 0..50))| {
        let case = Case::random(&mut Bytes::new(&bytes), false);
        for dtype in FLOATS {
            case.check(&device, dtype);
        }
    });
}

/// Output and gradients of q, k and v under a random cotangent.
fn run(inputs: [&Tensor; 3], attend: impl Fn(&Var, &Var, &Var) -> Result<Var>) -> Vec<Vec<f64>> {
    masked([inputs[0], inputs[1], inputs[2], inputs[0]], |q, k, v, _| attend(q, k, v))
}

/// The same with a mask, the last of the inputs.
fn masked(inputs: [&Tensor; 4], attend: impl Fn(&Var, &Var, &Var, &Var) -> Result<Var>) -> Vec<Vec<f64>> {
    let tape = Tape::new(inputs[0].device());
    let [q, k, v] = [0, 1, 2].map(|i| tape.leaf(inputs[i]).unwrap());
    let mask = tape.constant(inputs[3]).unwrap();
    let y = attend(&q, &k, &v, &mask).unwrap();
    let g = random(&tape.device(), &y.shape(), 9, y.dtype());
    let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
    let of = |x: &Var| gradients.of(x).unwrap().to_f64_vec().unwrap();
    vec![y.tensor().unwrap().to_f64_vec().unwrap(), of(&q), of(&k), of(&v)]
}

/// Where a mask is all that is left of the scores, weights are equal, forward and backward. Op by op in f32 for 16
/// bits, which would round the scores.
#[test]
fn large_masks_are_as_op_by_op() {
    let device = cpu();
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 3e-2), (DType::F16, 4e-3)] {
        for hidden in [-1e4, -1e5, -1e6, -1e9, -1e30, f32::MIN as f64] {
            for keys in [8, 300] {
                let inputs =
                    [(8, 1), (keys, 2), (keys, 3)].map(|(t, seed)| random(&device, &[1, 1, t, 16], seed, dtype));
                let [q, k, v] = &inputs;
                let mask = floats(&device, &[1, 1, 8, keys], &vec![hidden; 8 * keys], dtype);
                let tiled = masked([q, k, v, &mask], |q, k, v, mask| {
                    q.clone().scaled_dot_product_attention(k, v, Some(mask.clone()), AttentionOptions::default())
                });
                let wide = [q, k, v, &mask].map(|t| match dtype {
                    DType::F64 => t.clone(),
                    _ => t.cast(DType::F32, MemoryKind::Input).unwrap(),
                });
                let spelled = masked(wide.each_ref(), |q, k, v, mask| {
                    q.clone().matmul(&k.clone().transpose(-1, -2)?)?.scale(0.25)?.add(mask)?.softmax()?.matmul(v)
                });
                for (name, (a, b)) in ["out", "dq", "dk", "dv"].iter().zip(tiled.iter().zip(&spelled)) {
                    // Gradients of equal scores are small differences: of the size of those of v.
                    let error = if name.ends_with(['q', 'k']) { difference(a, b) } else { relative_error(a, b) };
                    assert!(error < tolerance, "{name} of {dtype}, {hidden:e}, {keys} keys: {error:e}");
                }
            }
        }
    }
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// With g = 1, dv of all keys together is 1 for each query: weights that backward rebuilds have the sum that they had,
/// however large the scores are from which rounding has taken what tells them apart.
#[test]
fn rebuilt_weights_sum_to_one() {
    let device = cpu();
    for (queries, keys, size) in [(1, 300, 64), (65, 257, 16), (130, 1, 40), (129, 129, 33)] {
        for spread in [1.0, 1e2, 1e4, 3e5, 1e10] {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let tensor = |seed, t: usize, spread: f64| {
                    floats(&device, &[1, t, 1, size], &numbers(seed, t * size, -spread, spread), dtype)
                };
                let tape = Tape::new(&device);
                let [q, k, v] = [tensor(1, queries, spread), tensor(2, keys, 1.0), tensor(3, keys, 1.0)]
                    .map(|t| tape.leaf(&t).unwrap());
                let y = q.attention(&k, &v, 0.3, false, 0.0).unwrap();
                let dv = tape.backward(&y.sum().unwrap()).unwrap().of(&v).unwrap().to_f64_vec().unwrap();
                let sum: f64 = dv.chunks(size).map(|row| row[0]).sum();
                let error = (sum / queries as f64 - 1.0).abs();
                let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-4 };
                assert!(error < tolerance, "{dtype} {queries} x {keys} x {size}, scores of {spread:e}: {sum}");
            }
        }
    }
}

/// Sequences of one batch: whatever one of them holds, the others have the bits that they have without.
#[test]
fn nothing_crosses_between_sequences() {
    let device = cpu();
    let lengths = [5, 7, 9];
    let options = |causal, window| AttentionOptions { causal, window, ..AttentionOptions::default() };
    for dtype in FLOATS {
        for options in [options(false, None), options(true, None), options(true, Some(2))] {
            let clean = [1, 2, 3].map(|seed| random(&device, &[21, 2, 4], seed, dtype));
            let attend = |q: &Var, k: &Var, v: &Var| q.clone().attention_ragged(k, v, &lengths, &lengths, options);
            let expected = run(clean.each_ref(), attend);
            for poison in [f64::NAN, f64::INFINITY, -f64::INFINITY, 3e38] {
                for (which, sequence) in (0..3).flat_map(|which| [0..5, 5..12, 12..21].map(move |s| (which, s))) {
                    let mut inputs = clean.clone();
                    let mut values = inputs[which].to_f64_vec().unwrap();
                    values[sequence.start * 8..sequence.end * 8].fill(poison);
                    inputs[which] = floats(&device, &[21, 2, 4], &values, dtype);
                    let actual = run(inputs.each_ref(), attend);
                    for (a, e) in actual.iter().zip(&expected) {
                        for row in (0..21).filter(|row| !sequence.contains(row)) {
                            assert_eq!(a[row * 8..][..8], e[row * 8..][..8], "{dtype} {poison} in {which}: row {row}");
                        }
                    }
                }
            }
        }
    }
}

/// What no query sees isn't read: keys that a mask hides, and keys of the future in a query's own tile.
#[test]
fn hidden_rows_may_hold_anything() {
    let device = cpu();
    for dtype in FLOATS {
        let tensor = |seed, poisoned: &[usize]| {
            let mut values = numbers(seed, 9 * 4, -1.0, 1.0);
            poisoned.iter().for_each(|&t| values[t * 4..][..4].fill(f64::NAN));
            floats(&device, &[1, 1, 9, 4], &values, dtype)
        };
        let bools: Vec<bool> = (0..9).map(|j| j != 4).collect();
        let adds: Vec<f64> = (0..9).map(|j| if j == 4 { f64::NEG_INFINITY } else { 0.5 }).collect();
        let masks =
            [Tensor::from_slice(&device, &[1, 1, 1, 9], &bools).unwrap(), floats(&device, &[1, 1, 1, 9], &adds, dtype)];
        for mask in &masks {
            let attend = |q: &Var, k: &Var, v: &Var, mask: &Var| {
                q.clone().scaled_dot_product_attention(k, v, Some(mask.clone()), AttentionOptions::default())
            };
            let results = masked([&tensor(1, &[]), &tensor(2, &[4]), &tensor(3, &[4]), mask], attend);
            assert_eq!(results, masked([&tensor(1, &[]), &tensor(2, &[]), &tensor(3, &[]), mask], attend));
            assert!(results[2][16..20].iter().chain(&results[3][16..20]).all(|&x| x == 0.0));
        }
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let attend = |q: &Var, k: &Var, v: &Var| q.clone().scaled_dot_product_attention(k, v, None, causal);
        let clean = run([&tensor(1, &[]), &tensor(2, &[]), &tensor(3, &[])], attend);
        for poisoned in [[vec![], vec![6], vec![]], [vec![], vec![], vec![6]], [vec![], vec![6], vec![6]]] {
            let [q, k, v] = [1, 2, 3].map(|seed| tensor(seed, &poisoned[seed as usize - 1]));
            let results = run([&q, &k, &v], attend);
            // Queries before it, forward and backward.
            assert_eq!((&results[0][..24], &results[1][..24]), (&clean[0][..24], &clean[1][..24]), "{dtype}");
            assert!(results[0][24..].iter().all(|x| x.is_nan()));
        }
        let results = run([&tensor(1, &[2]), &tensor(2, &[]), &tensor(3, &[])], attend);
        // Keys behind a query that isn't finite.
        assert_eq!((&results[2][12..], &results[3][12..]), (&clean[2][12..], &clean[3][12..]), "{dtype}");
    }
}

/// A window of all keys or more is none; one of 0 hides all.
#[test]
fn windows_at_their_extremes() {
    let device = cpu();
    let [q, k, v] = [(5, 1), (7, 2), (7, 3)].map(|(t, seed)| random(&device, &[1, 2, t, 4], seed, DType::F32));
    let with = |window| {
        let options = AttentionOptions { causal: true, window, ..AttentionOptions::default() };
        run([&q, &k, &v], |q, k, v| q.clone().scaled_dot_product_attention(k, v, None, options))
    };
    for window in [7, 8, 1 << 31, 1 << 32, 1 << 63, usize::MAX - 7, usize::MAX] {
        assert_eq!(with(Some(window)), with(None), "{window}");
    }
    assert!(with(Some(0)).concat().iter().all(|&x| x == 0.0));
    let lengths = ([5, 0, 2], [7, 3, 1]);
    let [q, k, v] = [(7, 1), (11, 2), (11, 3)].map(|(t, seed)| random(&device, &[t, 2, 4], seed, DType::F32));
    let ragged = |window| {
        let options = AttentionOptions { causal: true, window, ..AttentionOptions::default() };
        run([&q, &k, &v], |q, k, v| q.clone().attention_ragged(k, v, &lengths.0, &lengths.1, options))
    };
    for window in [7, 11, 1 << 63, usize::MAX] {
        assert_eq!(ragged(Some(window)), ragged(None), "{window}");
    }
}
