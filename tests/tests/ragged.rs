//! Ragged batches: attention within sequences that lie one after the other, against each sequence by itself.

use retape_core::ops::attention::AttentionOptions;
use retape_core::{BackwardOptions, DType, Device, Result, Tape, TapeOptions, Tensor, Var};
use retape_tests::{random, relative_error};

type Lengths<'a> = (&'a [usize], &'a [usize]);

/// The narrow of every sequence, attended by itself, joined again.
fn one_by_one(q: &Var, k: &Var, v: &Var, lengths: Lengths<'_>, options: AttentionOptions) -> Result<Var> {
    let (mut outputs, mut at) = (Vec::new(), [0, 0]);
    let scale = (q.shape()[2] as f64).powf(-0.5);
    for (&tq, &tk) in lengths.0.iter().zip(lengths.1) {
        let part = |x: &Var, from: usize, len: usize| x.clone().narrow(0, from, len)?.unsqueeze(0);
        let (q, k, v) = (part(q, at[0], tq)?, part(k, at[1], tk)?, part(v, at[1], tk)?);
        let o = q.attention(&k, &v, scale, options.causal, 0.0)?;
        outputs.push(o.clone().reshape(&o.shape()[1..])?);
        at = [at[0] + tq, at[1] + tk];
    }
    Var::concat(outputs, 0)
}

/// Output and gradients under a random cotangent.
fn run(device: &Device, inputs: &[Tensor; 3], f: impl Fn(&Var, &Var, &Var) -> Result<Var>) -> Vec<Vec<f64>> {
    let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
    let [q, k, v] = inputs.clone().map(|t| tape.leaf(&t).unwrap());
    let y = f(&q, &k, &v).unwrap();
    let g = random(device, &y.shape(), 9, y.dtype());
    let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
    let of = |x: &Var| gradients.of(x).unwrap().to_f64_vec().unwrap();
    vec![y.tensor().unwrap().to_f64_vec().unwrap(), of(&q), of(&k), of(&v)]
}

#[test]
fn sequences_see_only_themselves() {
    let device = retape_cpu::device_with_threads(2).unwrap();
    let cases: &[Lengths<'_>] = &[
        (&[5, 1, 7], &[5, 1, 7]),
        (&[130, 3, 300, 65], &[130, 3, 300, 65]),
        (&[0, 4, 0, 70], &[3, 9, 0, 2]),
        (&[64, 64], &[256, 256]),
        (&[3], &[5]),
    ];
    for &(queries, keys) in cases {
        for causal in [false, true] {
            let options = AttentionOptions { causal, ..AttentionOptions::default() };
            for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
                let tensor =
                    |seed, lengths: &[usize], heads| random(&device, &[lengths.iter().sum(), heads, 6], seed, dtype);
                let inputs = [tensor(1, queries, 4), tensor(2, keys, 2), tensor(3, keys, 2)];
                let ragged = run(&device, &inputs, |q, k, v| q.clone().attention_ragged(k, v, queries, keys, options));
                let single = run(&device, &inputs, |q, k, v| one_by_one(q, k, v, (queries, keys), options));
                for (what, (r, s)) in ["out", "dq", "dk", "dv"].iter().zip(ragged.iter().zip(&single)) {
                    let error = relative_error(r, s);
                    assert!(error < tolerance, "{what} of {queries:?} x {keys:?}, causal {causal}, {dtype}: {error:e}");
                }
            }
        }
    }
}

/// A window counts within a sequence, and a weight's dropout is that of its place among all queries and keys.
#[test]
fn one_sequence_is_a_batch_of_one() {
    let device = retape_cpu::device_with_threads(2).unwrap();
    let inputs = [1, 2, 3].map(|seed| random(&device, &[90, 2, 4], seed, DType::F64));
    let options = AttentionOptions { causal: true, window: Some(20), dropout: 0.25, ..AttentionOptions::default() };
    let ragged = run(&device, &inputs, |q, k, v| q.clone().attention_ragged(k, v, &[90], &[90], options));
    let dense = run(&device, &inputs, |q, k, v| {
        let [q, k, v] = [q, k, v].map(|x| x.clone().transpose(0, 1).unwrap());
        q.scaled_dot_product_attention(&k, &v, None, options)?.transpose(0, 1)
    });
    assert_eq!(ragged, dense);
}

#[test]
fn lengths_that_don_t_fit_are_refused() {
    let device = retape_cpu::device();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[6, 2, 4], 1, DType::F32)).unwrap();
    let options = AttentionOptions::default();
    let refused = |x: &Var, queries: &[usize], keys: &[usize]| {
        x.clone().attention_ragged(x.clone(), x, queries, keys, options).unwrap_err().to_string()
    };
    assert!(refused(&x, &[2, 4], &[6]).contains("2 lengths of queries and 1 of keys"));
    assert!(refused(&x, &[2, 3], &[2, 4]).contains("5 queries and 6 keys in all"));
    assert!(refused(&x.clone().unsqueeze(0).unwrap(), &[6], &[6]).contains("[time, heads, size]"));
    assert!(refused(&x, &[usize::MAX, 7], &[6, 0]).contains("queries"));
}
