//! Attention kernels. Reported in: A1 flash-attention 443; A2 flash-attention 2082, flashinfer 4267; A3 SageAttention
//! 376, flashinfer 5090; A4 tiny-flash-attention 12; A5 flash-attention 414, 2244; A6 flash-attention 2611; A7
//! flash-attention 282, 1778; A8 flash-attention 355, pytorch 133671; A9 pytorch 190717. Tiled attention is held to
//! attention spelled out.

use retape_core::{BackwardOptions, DType, Device, Result, Tape, TapeOptions, Tensor, Var};
use retape_tests::{floats, numbers, random, relative_error};

fn cpu() -> Device {
    retape_cpu::device_with_threads(2).unwrap()
}

#[derive(Debug, Clone, Copy)]
struct Case {
    queries: usize,
    keys: usize,
    heads: usize,
    size: usize,
    causal: bool,
    dropout: f64,
}

const PLAIN: Case = Case { queries: 9, keys: 9, heads: 2, size: 8, causal: true, dropout: 0.0 };

/// q, k, v `[1, time, heads, size]`, NaN behind each (they are the front of longer tensors).
fn inputs(device: &Device, case: Case, dtype: DType, spread: f64) -> [Tensor; 3] {
    [(case.queries, 1), (case.keys, 2), (case.keys, 3)].map(|(time, seed)| {
        let row = case.heads * case.size;
        let mut values = numbers(seed, time * row, -spread, spread);
        values.extend(vec![f64::NAN; 3 * row]);
        let long = floats(device, &[1, time + 3, case.heads, case.size], &values, dtype);
        long.narrow(1, 0, time).unwrap()
    })
}

fn tiled(q: &Var, k: &Var, v: &Var, case: Case) -> Result<Var> {
    q.clone().attention(k, v, (case.size as f64).powf(-0.5), case.causal, case.dropout)
}

fn explicit(q: &Var, k: &Var, v: &Var, case: Case) -> Result<Var> {
    let heads_first = |x: &Var| x.clone().permute(&[0, 2, 1, 3]);
    let mut w = heads_first(q)?.matmul(&heads_first(k)?.transpose(-1, -2)?)?.scale((case.size as f64).powf(-0.5))?;
    if case.causal {
        w = w.causal_mask()?;
    }
    w = w.softmax()?;
    if case.dropout > 0.0 {
        w = w.dropout(case.dropout)?;
    }
    w.matmul(&heads_first(v)?)?.permute(&[0, 2, 1, 3])?.contiguous()
}

type Attend = fn(&Var, &Var, &Var, Case) -> Result<Var>;

/// The output and the three gradients under a random cotangent.
fn run(device: &Device, inputs: &[Tensor; 3], case: Case, attend: Attend) -> [Vec<f64>; 4] {
    let tape = Tape::with(device, TapeOptions { seed: Some(3), ..TapeOptions::default() });
    let [q, k, v] = inputs.clone().map(|t| tape.leaf(&t).unwrap());
    let y = attend(&q, &k, &v, case).unwrap();
    let out = y.tensor().unwrap().to_f64_vec().unwrap();
    let g = random(device, &y.shape(), 9, y.dtype());
    let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
    let of = |x: &Var| gradients.of(x).unwrap().to_f64_vec().unwrap();
    [out, of(&q), of(&k), of(&v)]
}

fn agree(case: Case, spread: f64) {
    let device = cpu();
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 3e-5)] {
        let inputs = inputs(&device, case, dtype, spread);
        let (tiled, spelled) = (run(&device, &inputs, case, tiled), run(&device, &inputs, case, explicit));
        for (what, (t, e)) in ["out", "dq", "dk", "dv"].iter().zip(tiled.iter().zip(&spelled)) {
            assert!(t.iter().all(|x| x.is_finite()), "{what} of {case:?} isn't finite");
            let error = relative_error(t, e);
            assert!(error < tolerance, "{what} of {case:?} in {dtype}: {error:e}");
        }
    }
}

/// A1, A7: rows that see nothing are zeros; alignment is bottom-right where Tq and Tk differ.
#[test]
fn a01_a07_unequal_lengths() {
    for (queries, keys) in [(5, 3), (3, 5), (70, 9), (9, 70), (1, 300), (300, 1)] {
        for causal in [false, true] {
            agree(Case { queries, keys, causal, ..PLAIN }, 1.0);
        }
    }
}

/// A2: rows of very negative scores still sum to 1.
#[test]
fn a02_very_negative_scores() {
    let device = cpu();
    for score in [-200.0, -1e5] {
        let case = Case { queries: 70, keys: 70, heads: 1, size: 1, causal: true, dropout: 0.0 };
        let tensor = |value: f64| floats(&device, &[1, 70, 1, 1], &[value; 70], DType::F32);
        let out = run(&device, &[tensor(score), tensor(1.0), tensor(1.0)], case, tiled);
        assert!(out[0].iter().all(|o| (o - 1.0).abs() < 1e-6), "weights of scores near {score} don't sum to 1");
    }
}

/// A3: lengths that aren't a multiple of a tile, with NaN behind the tensors.
#[test]
fn a03_tails() {
    for length in [1, 9, 63, 65, 257, 1001] {
        agree(Case { queries: length, keys: length, heads: 1, ..PLAIN }, 1.0);
    }
}

/// A4: head sizes that aren't a multiple of a tile.
#[test]
fn a04_head_sizes() {
    for size in [1, 40, 63, 72, 80, 96] {
        agree(Case { queries: 33, keys: 33, size, ..PLAIN }, 1.0);
    }
}

/// A5: the same bytes on every run.
#[test]
fn a05_the_same_bytes_on_every_run() {
    let device = cpu();
    let case = Case { queries: 300, keys: 300, heads: 3, ..PLAIN };
    let inputs = inputs(&device, case, DType::F32, 1.0);
    let first = run(&device, &inputs, case, tiled);
    assert!((0..20).all(|_| run(&device, &inputs, case, tiled) == first));
}

/// A8: a gradient of the output with other strides than the output.
#[test]
fn a08_strided_output_gradient() {
    let device = cpu();
    let case = Case { queries: 33, keys: 33, heads: 4, ..PLAIN };
    let [q, k, v] = inputs(&device, case, DType::F32, 1.0);
    let run = |strided: bool| {
        let tape = Tape::new(&device);
        let [q, k, v] = [&q, &k, &v].map(|t| tape.leaf(t).unwrap());
        let y = tiled(&q, &k, &v, case).unwrap();
        // [1, time, heads, size] with heads outermost in memory.
        let g = random(&device, &[1, 4, 33, 8], 5, DType::F32).permute(&[0, 2, 1, 3]).unwrap();
        let g = if strided { g } else { g.copy(retape_core::MemoryKind::Input).unwrap() };
        let gradients = tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap();
        [&q, &k, &v].map(|x| gradients.of(x).unwrap().to_bytes().unwrap())
    };
    assert_eq!(run(true), run(false));
}

/// A9: the dropout mask of backward is forward's, and the same as on weights spelled out.
#[test]
fn a09_dropout_is_the_explicit_one() {
    for length in [9, 65, 300] {
        agree(Case { queries: length, keys: length, dropout: 0.3, ..PLAIN }, 1.0);
    }
    agree(Case { queries: 40, keys: 70, dropout: 0.5, ..PLAIN }, 1.0);
}

/// A6: 64-bit offsets: a stride of more than 2^32 elements is only arithmetic on a repeated dimension.
#[test]
fn a06_large_offsets() {
    let device = cpu();
    let row = random(&device, &[1, 1, 1, 8], 1, DType::F32);
    let huge = row.expand(&[1, 1 << 33, 1, 8]).unwrap();
    let far = huge.narrow(1, (1 << 33) - 9, 9).unwrap();
    let case = Case { heads: 1, ..PLAIN };
    let out = run(&device, &[far.clone(), far.clone(), far], case, tiled);
    let expected = row.to_f64_vec().unwrap();
    assert!(out[0].chunks(8).all(|o| relative_error(o, &expected) < 1e-6));
}
