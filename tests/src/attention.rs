//! Attention by its definition, pair by pair in f64; random attention that is held to it, with large scores, masks that
//! saturate, options at their extremes, and numbers that aren't finite in rows that nothing may read.

use crate::choices::Choices;
use crate::{floats, numbers};
use retape_core::kernel::{AttentionSpec, RandomStream};
use retape_core::ops::attention::{Attention, Ragged};
use retape_core::{BackwardOptions, DType, Device, Result, Tape, Tensor, Var};
use std::rc::Rc;

/// A number that attention should give.
#[derive(Debug, Clone, Copy, Default)]
struct Number {
    value: f64,
    /// The sum of its terms' magnitudes, by which an error is judged.
    size: f64,
    /// Whether it depends on a row that isn't finite.
    unknown: bool,
}

impl Number {
    fn add(&mut self, factor: f64, other: (f64, f64), unknown: bool) {
        self.value += factor * other.0;
        self.size += factor.abs() * other.1;
        self.unknown |= unknown;
    }
}

/// Times whose rows of q, k, v and g (the gradient of the output) aren't finite.
#[derive(Debug, Clone, Default)]
struct Poison {
    value: f64,
    /// Whether only other sequences are held to be free of it (CUDA multiplies what is hidden in a tile by 0).
    whole: bool,
    times: [Vec<usize>; 4],
}

impl Poison {
    fn is_in(&self, operand: usize, time: usize) -> bool {
        self.times[operand].contains(&time)
    }
}

/// One call of attention.
#[derive(Debug, Clone)]
pub struct Case {
    op: Attention,
    /// q, k and v as `[batch, time, heads, size]`.
    shapes: [[usize; 4]; 3],
    mask: Option<Mask>,
    /// Factor on q and on k, which are small integers otherwise, so that their products are exact.
    factors: [f64; 2],
    seed: u64,
    poison: Poison,
}

#[derive(Clone)]
enum Mask {
    Hides([usize; 4], Vec<bool>),
    Adds([usize; 4], Vec<f64>),
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Mask::Hides(shape, values) => write!(f, "hides {shape:?} {:?}..", &values[..values.len().min(8)]),
            Mask::Adds(shape, values) => write!(f, "adds {shape:?} {:?}..", &values[..values.len().min(8)]),
        }
    }
}

/// Numbers of the score: added to it, so that its own are lost, or that hide.
const LARGE: [f64; 6] = [-1e9, -1e4, -1e5, f32::MIN as f64, f64::NEG_INFINITY, 1e9];

impl Case {
    /// Any spec and sizes. With `whole`, what isn't finite is a whole sequence of a ragged batch.
    pub fn random(choices: &mut impl Choices, whole: bool) -> Case {
        let mut spec = AttentionSpec {
            scale: choices.pick(&[0.5, 0.25, 0.3]),
            causal: choices.throw(3) > 0,
            window: None,
            dropout: choices.pick(&[0.0, 0.0, 0.0, 0.25]),
            stream: RandomStream { seed: 5, counter: 1 },
        };
        const LENGTHS: [usize; 12] = [5, 1, 2, 9, 0, 33, 64, 65, 3, 130, 128, 300];
        let (mut batch, mut times) = (1 + choices.throw(2), [choices.pick(&LENGTHS), choices.pick(&LENGTHS)]);
        let mut lengths = None;
        if choices.throw(3) == 1 {
            let pairs: Vec<_> =
                (0..1 + choices.throw(4)).map(|_| [choices.pick(&LENGTHS[..9]), choices.pick(&LENGTHS[..9])]).collect();
            let of = |n: usize| pairs.iter().map(|pair| pair[n]).collect::<Vec<_>>();
            (batch, times) = (1, [of(0).iter().sum(), of(1).iter().sum()]);
            lengths = Some([of(0), of(1)]);
        } else if choices.throw(2) == 0 {
            times[1] = times[0];
        }
        let [queries, keys] = times;
        if spec.causal && choices.throw(2) == 1 {
            let extremes = [0, 1, 2, keys.saturating_sub(1), keys, keys + 1, 1 << 63, usize::MAX - 1, usize::MAX];
            spec.window = Some(choices.pick(&extremes));
        }
        let (heads, kv_heads) = choices.pick(&[(1, 1), (2, 1), (2, 2), (4, 2)]);
        let (size, v_size) = choices.pick(&[(8, 8), (1, 1), (16, 16), (64, 64), (2, 5), (33, 12)]);
        let shapes = [[batch, queries, heads, size], [batch, keys, kv_heads, size], [batch, keys, kv_heads, v_size]];
        let mask = (choices.throw(2) == 1).then(|| Mask::random(choices, [batch, heads, queries, keys]));
        let factor = |choices: &mut dyn FnMut(usize) -> usize| [1.0, 1.0, 32.0, 4096.0][choices(4)];
        let factors = [factor(&mut |n| choices.throw(n)), factor(&mut |n| choices.throw(n))];
        let mut poison = Poison { value: choices.pick(&[f64::NAN, f64::INFINITY, 3e38]), whole, ..Poison::default() };
        let poisoned = choices.throw(16);
        for operand in (0..4).filter(|operand| poisoned >> operand & 1 == 1) {
            let side = usize::from(operand == 1 || operand == 2);
            poison.times[operand] = match &lengths {
                Some(lengths) if whole || choices.throw(2) == 0 => {
                    let sequence = choices.throw(lengths[side].len());
                    let first: usize = lengths[side][..sequence].iter().sum();
                    (first..first + lengths[side][sequence]).collect()
                }
                _ if whole || times[side] == 0 => Vec::new(),
                _ => vec![choices.throw(times[side])],
            };
        }
        let ragged = lengths.map(|[queries, keys]| Rc::new(Ragged::new(&queries, &keys).unwrap()));
        let op = Attention { spec, mask: mask.is_some(), ragged };
        Case { op, shapes, mask, factors, seed: choices.throw(256) as u64, poison }
    }

    /// Runs it on the device in this dtype, and compares outputs and gradients with the definition.
    pub fn check(&self, device: &Device, dtype: DType) {
        let integers = |seed: u64, shape: [usize; 4], factor: f64| -> Vec<f64> {
            let len = shape.iter().product();
            numbers(self.seed << 3 | seed, len, -2.0, 3.0).iter().map(|x| x.floor() * factor).collect()
        };
        let eighths = |seed: u64, shape: [usize; 4]| integers(seed, shape, 0.125);
        let [q_shape, k_shape, v_shape] = self.shapes;
        let g_shape = [q_shape[0], q_shape[1], q_shape[2], v_shape[3]];
        let clean = [
            (q_shape, integers(1, q_shape, self.factors[0])),
            (k_shape, integers(2, k_shape, self.factors[1])),
            (v_shape, eighths(3, v_shape)),
            (g_shape, eighths(4, g_shape)),
        ];
        let tensors = |poison: &Poison| -> [Tensor; 4] {
            std::array::from_fn(|i| {
                let (shape, mut values) = clean[i].clone();
                let row = shape[2] * shape[3];
                for (r, row) in values.chunks_mut(row.max(1)).enumerate() {
                    if poison.is_in(i, r % shape[1]) {
                        row.fill(poison.value);
                    }
                }
                floats(device, &shape, &values, dtype)
            })
        };
        let mask = self.mask.as_ref().map(|mask| match mask {
            Mask::Hides(shape, values) => Tensor::from_slice(device, shape, values).unwrap(),
            Mask::Adds(shape, values) => floats(device, shape, values, dtype),
        });
        let [q, k, v, g] = tensors(&Poison::default());
        let inputs: Vec<Tensor> = [q, k, v].into_iter().chain(mask.clone()).collect();
        let expected = expected(&self.op, &inputs, &g.to_f64_vec().unwrap(), &self.poison);
        let [q, k, v, g] = tensors(&self.poison);
        let inputs: Vec<Tensor> = [q, k, v].into_iter().chain(mask).collect();
        compare(&computed(device, &self.op, &inputs, &g).unwrap(), &expected, dtype, &format!("{self:?}"));
    }
}

impl Mask {
    fn random(choices: &mut impl Choices, scores: [usize; 4]) -> Mask {
        let repeated = choices.throw(16);
        let shape = std::array::from_fn(|d| if repeated >> d & 1 == 1 { 1 } else { scores[d] });
        let len = shape.iter().product();
        let (kind, large) = (choices.throw(4), choices.pick(&LARGE));
        let dice = numbers(choices.throw(256) as u64, len, 0.0, 4.0);
        let row = |i: usize| dice[i / shape[3].max(1) * shape[3]];
        match kind {
            0 => Mask::Hides(shape, dice.iter().map(|&x| x > 1.0).collect()),
            1 => Mask::Adds(shape, vec![large; len]),
            2 => Mask::Adds(shape, dice.iter().map(|&x| if x < 2.0 { large } else { x.floor() }).collect()),
            // Whole rows.
            _ => Mask::Adds(shape, (0..len).map(|i| if row(i) < 2.0 { large } else { -1.0 }).collect()),
        }
    }
}

/// Output and gradients of q, k, v and the mask, in row-major order.
fn computed(device: &Device, op: &Attention, inputs: &[Tensor], g: &Tensor) -> Result<Vec<Vec<f64>>> {
    let tape = Tape::new(device);
    let leaf = |t: &Tensor| if t.dtype().is_float() { tape.leaf(t) } else { tape.constant(t) };
    let leaves = inputs.iter().map(leaf).collect::<Result<Vec<Var>>>()?;
    let y = leaves[0].clone().apply(op.clone(), leaves[1..].iter().cloned())?;
    let mut results = vec![y.tensor()?.to_f64_vec()?];
    let gradients = tape.backward_from(&[(&y, g)], BackwardOptions::default())?;
    for leaf in leaves.iter().filter(|leaf| leaf.dtype().is_float()) {
        results.push(gradients.of(leaf).unwrap().to_f64_vec()?);
    }
    Ok(results)
}

/// An attention op of the registry on these inputs, compared with the definition.
pub fn check_sample(device: &Device, op: &Attention, inputs: &[Tensor], label: &str) {
    let (q, v) = (inputs[0].shape(), inputs[2].shape());
    let (dtype, shape) = (inputs[0].dtype(), [q[0], q[1], q[2], v[3]]);
    let g = floats(device, &shape, &numbers(6, shape.iter().product(), -1.0, 1.0), dtype);
    let expected = expected(op, inputs, &g.to_f64_vec().unwrap(), &Poison::default());
    compare(&computed(device, op, inputs, &g).unwrap(), &expected, dtype, label);
}

/// Each number within the tolerance of its dtype, times the sum of its terms' magnitudes.
fn compare(computed: &[Vec<f64>], expected: &[Vec<Number>], dtype: DType, label: &str) {
    // 16 bits: tensor cores take weights and gradients of scores rounded to them, too.
    let (tolerance, least, most) = match dtype {
        DType::F64 => (1e-12, 1e-300, f64::INFINITY),
        DType::F32 => (1e-5, 1e-37, 1e38),
        DType::BF16 => (1e-2, 1e-37, 1e38),
        _ => (2e-3, 2f64.powi(-24), 3e4),
    };
    assert_eq!(computed.len(), expected.len(), "{label}");
    for ((name, computed), expected) in ["out", "dq", "dk", "dv", "dmask"].iter().zip(computed).zip(expected) {
        assert_eq!(computed.len(), expected.len(), "{name} of {dtype} {label}");
        for (i, (&x, e)) in computed.iter().zip(expected).enumerate() {
            let beyond = e.size.is_nan() || e.size > most;
            let near = (x - e.value).abs() <= tolerance * e.size + least;
            assert!(near || beyond || e.unknown, "{name} of {dtype} {label}: {x} at {i}, expected {e:?}");
        }
    }
}

/// Output and gradients by the definition, in f64 but for the scores, which are rounded as the dtype's arithmetic
/// rounds them: the product, the scale, and the sum with the mask.
fn expected(op: &Attention, inputs: &[Tensor], g: &[f64], poison: &Poison) -> Vec<Vec<Number>> {
    let numbers = |t: &Tensor| match t.dtype() {
        DType::Bool => t.to_vec::<bool>().unwrap().iter().map(|&x| f64::from(x)).collect(),
        _ => t.to_f64_vec().unwrap(),
    };
    let shape = |i: usize| -> [usize; 4] { inputs[i].shape().try_into().unwrap() };
    let ([batch, tq, heads, size], [_, tk, kv_heads, v_size]) = (shape(0), shape(2));
    let dtype = inputs[0].dtype();
    let round = |x: f64| if dtype == DType::F64 { x } else { x as f32 as f64 };
    // f16 holds no number below 2^-24, of the output or, on tensor cores, of a weight; here divided by the tolerance.
    let least = if dtype == DType::F16 { 2f64.powi(-15) } else { 0.0 };
    let values: Vec<Vec<f64>> = inputs.iter().map(numbers).collect();
    let (q, k, v) = (&values[0], &values[1], &values[2]);
    let mask = inputs.get(3).map(|t| (t.dtype() == DType::Bool, shape(3), &values[3]));
    let of = |shape: [usize; 4]| vec![Number::default(); shape.iter().product()];
    let mut results = vec![of([batch, tq, heads, v_size]), of(shape(0)), of(shape(1)), of(shape(2))];
    if let Some((false, shape, _)) = mask {
        results.push(of(shape));
    }
    let one = ([0, tq], [0, tk]);
    let sequences: Vec<([usize; 2], [usize; 2])> = match &op.ragged {
        None => vec![one],
        Some(ragged) => {
            let (queries, keys) = (ragged.sequences().queries, ragged.sequences().keys);
            (1..queries.len()).map(|s| ([queries[s - 1], queries[s]], [keys[s - 1], keys[s]])).collect()
        }
    };
    let scale = round(op.spec.scale);
    let threshold = RandomStream::threshold(op.spec.dropout);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let magnitude = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let kv = h / (heads / kv_heads);
        let q_at = |i: usize| (b * tq + i) * heads + h;
        let k_at = |j: usize| (b * tk + j) * kv_heads + kv;
        let row = |x: &'_ [f64], at: usize, size: usize| -> Vec<f64> { x[at * size..][..size].to_vec() };
        for (queries, keys) in &sequences {
            let poisoned = |[from, end]: [usize; 2], operand| (from..end).any(|t| poison.is_in(operand, t));
            if poison.whole && (0..4).any(|o| poisoned(if o == 1 || o == 2 { *keys } else { *queries }, o)) {
                let all = results.iter_mut().skip(4).flatten();
                all.for_each(|x| x.unknown = true);
                for i in queries[0]..queries[1] {
                    results[0][q_at(i) * v_size..][..v_size].iter_mut().for_each(|x| x.unknown = true);
                    results[1][q_at(i) * size..][..size].iter_mut().for_each(|x| x.unknown = true);
                }
                for j in keys[0]..keys[1] {
                    results[2][k_at(j) * size..][..size].iter_mut().for_each(|x| x.unknown = true);
                    results[3][k_at(j) * v_size..][..v_size].iter_mut().for_each(|x| x.unknown = true);
                }
            }
            for i in queries[0]..queries[1] {
                // Of this sequence: the query stands at key `place`.
                let place = (i - queries[0]) as i128 + (keys[1] - keys[0]) as i128 - (queries[1] - queries[0]) as i128;
                let mask_at = |j: usize| {
                    mask.map(|(bool, shape, values)| {
                        let index = [b, h, i, j];
                        (bool, (0..4).fold(0, |at, d| at * shape[d] + index[d].min(shape[d] - 1)), values)
                    })
                };
                let sees = |j: usize| {
                    let key = (j - keys[0]) as i128;
                    let causal = !op.spec.causal || key <= place;
                    let window = op.spec.window.is_none_or(|window| key > place - window as i128);
                    let hidden = mask_at(j).is_some_and(|(bool, at, values)| match bool {
                        true => values[at] == 0.0,
                        false => values[at] == f64::NEG_INFINITY,
                    });
                    causal && window && !hidden
                };
                let (query, gradient) = (row(q, q_at(i), size), row(g, q_at(i), v_size));
                let seen: Vec<(usize, f64)> = (keys[0]..keys[1])
                    .filter(|&j| sees(j))
                    .map(|j| {
                        let score = round(scale * round(dot(&query, &row(k, k_at(j), size))));
                        let added = mask_at(j).filter(|(bool, ..)| !bool).map(|(_, at, values)| values[at]);
                        (j, added.map_or(score, |added| round(score + added)))
                    })
                    .collect();
                let most = seen.iter().map(|&(_, s)| s).fold(f64::NEG_INFINITY, f64::max);
                if most == f64::NEG_INFINITY {
                    continue;
                }
                let total: f64 = seen.iter().map(|&(_, s)| (s - most).exp()).sum();
                let bad_key = seen.iter().any(|&(j, _)| poison.is_in(1, j) || poison.is_in(2, j));
                let bad_out = bad_key || poison.is_in(0, i);
                let bad = bad_out || poison.is_in(3, i);
                let kept = |j: usize| {
                    let element = ((b * heads + h) * tq + i) * tk + j;
                    match op.spec.stream.word(element as u64) as u64 >= threshold {
                        true => 1.0 / (1.0 - op.spec.dropout),
                        false => 0.0,
                    }
                };
                let mut delta = (0.0, 0.0);
                for &(j, s) in &seen {
                    let (p, value) = ((s - most).exp() / total, row(v, k_at(j), v_size));
                    for c in 0..v_size {
                        let term = (p * value[c], (p + least) * value[c].abs());
                        results[0][q_at(i) * v_size + c].add(kept(j), term, bad_out);
                    }
                    delta.0 += kept(j) * p * dot(&gradient, &value);
                    delta.1 += kept(j) * p * magnitude(&gradient, &value);
                }
                delta.1 += least * gradient.iter().map(|g| g.abs()).sum::<f64>();
                for &(j, s) in &seen {
                    let (p, z, key) = ((s - most).exp() / total, kept(j), row(k, k_at(j), size));
                    let value = row(v, k_at(j), v_size);
                    let dp = (z * dot(&gradient, &value), z * magnitude(&gradient, &value));
                    let ds = (p * (dp.0 - delta.0), (p + least) * (dp.1 + delta.1) + least);
                    for c in 0..size {
                        let (by_key, by_query) = (scale * key[c], scale * query[c]);
                        results[1][q_at(i) * size + c].add(by_key, ds, bad);
                        results[2][k_at(j) * size + c].add(by_query, ds, bad);
                    }
                    for c in 0..v_size {
                        results[3][k_at(j) * v_size + c].add(z * gradient[c], (p, p + least), bad);
                    }
                    if let Some((false, at, _)) = mask_at(j) {
                        results[4][at].add(1.0, ds, bad);
                    }
                }
            }
        }
    }
    results
}
