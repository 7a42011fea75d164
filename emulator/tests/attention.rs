//! Attention against the CPU in f64, on the same (rounded) inputs: forward, statistics, delta and all gradients; and,
//! where scores are large, against the definition.
//!
//! Tensors lie in storage full of NaN, in several layouts; outputs are NaN before, and what lies around them has to
//! stay.

use half::{bf16, f16};
use retape_core::kernel::{self, AttentionSpec, RandomStream, Sequences};
use retape_core::ops::{Op, OpRule, attention::Attention};
use retape_core::{DType, Device, Tape, Tensor};
use retape_tests::choices::Choices;
use retape_tests::programs::Dice;
use retape_tests::{floats, numbers, sample_tensor, writable};

/// Relative distances (of L2 norms) allowed to results of a dtype. Of 16 bits, the weights and score gradients are
/// rounded as operands of the second product, and the results once: up to 2^-8 and 2^-11 each.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::BF16 => 1e-2,
        _ => 2e-3,
    }
}

/// How a tensor `[batch, time, heads, size]` (or any of rank 4) lies in its storage.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// Row-major, without gaps.
    Plain,
    /// Rows of three times the elements, as if q, k and v were views of one tensor.
    Fused,
    /// Rows that begin at multiples of 16 bytes, with a gap behind each.
    Padded,
    /// Rows that don't begin at multiples of 16 bytes.
    Odd,
    /// As `[batch, heads, time, size]`.
    HeadsFirst,
    /// Elements of a row are not together.
    Columns,
}

const LAYOUTS: [Layout; 6] =
    [Layout::Plain, Layout::Fused, Layout::HeadsFirst, Layout::Padded, Layout::Odd, Layout::Columns];

impl Layout {
    /// How the gradient of an output lies: otherwise than the output, but for one layout.
    fn of_gradient(self) -> Layout {
        let i = LAYOUTS.iter().position(|&layout| layout == self).unwrap();
        if self == Layout::Padded { self } else { LAYOUTS[(i + 1) % LAYOUTS.len()] }
    }

    /// Strides, offset and length of the storage, in elements.
    fn of(self, [b, t, h, d]: [usize; 4]) -> ([usize; 4], usize, usize) {
        let (strides, offset): ([usize; 4], usize) = match self {
            Layout::Plain => ([t * h * d, h * d, d, 1], 0),
            Layout::Fused => ([t * 3 * h * d, 3 * h * d, d, 1], h * d),
            Layout::Padded => {
                let row = d.next_multiple_of(8) + 8;
                ([t * h * row, h * row, row, 1], 16)
            }
            Layout::Odd => ([t * h * (d + 3), h * (d + 3), d + 3, 1], 5),
            Layout::HeadsFirst => ([h * t * d, d, t * d, 1], 0),
            Layout::Columns => ([1, b, t * b, h * t * b], 2),
        };
        let last: usize = [b, t, h, d].iter().zip(strides).map(|(n, s)| n.saturating_sub(1) * s).sum();
        // Plain ones end with their storage.
        let len = if self == Layout::Plain { b * t * h * d } else { offset + last + 1 + 9 };
        (strides, offset, len)
    }
}

fn encode(dtype: DType, x: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        _ => vec![(x != 0.0) as u8],
    }
}

fn decode(dtype: DType, b: &[u8]) -> f64 {
    match dtype {
        DType::F64 => f64::from_le_bytes(b.try_into().unwrap()),
        DType::F32 => f32::from_le_bytes(b.try_into().unwrap()) as f64,
        DType::BF16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f64(),
        DType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f64(),
        _ => b[0] as f64,
    }
}

/// A tensor in storage full of NaN.
struct Placed {
    base: Tensor,
    view: Tensor,
    positions: Vec<usize>,
}

impl Placed {
    fn new(device: &Device, dtype: DType, shape: [usize; 4], layout: Layout, values: Option<&[f64]>) -> Placed {
        let layout = if shape.contains(&0) { Layout::Plain } else { layout };
        let (strides, offset, len) = layout.of(shape);
        let [b, t, h, d] = shape;
        let mut positions = Vec::with_capacity(b * t * h * d);
        for i in 0..b * t * h * d {
            let index = [i / (t * h * d), i / (h * d) % t, i / d % h, i % d];
            positions.push(offset + index.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>());
        }
        let mut all = vec![f64::NAN; len];
        for (&at, &x) in positions.iter().zip(values.unwrap_or_default()) {
            all[at] = x;
        }
        let bytes: Vec<u8> = all.iter().flat_map(|&x| encode(dtype, x)).collect();
        let base = writable(&Tensor::from_bytes(device, &[len], dtype, &bytes).unwrap());
        let view = base.as_strided(&shape, &strides, offset).unwrap();
        Placed { base, view, positions }
    }

    fn bytes(&self) -> Vec<u8> {
        self.base.to_bytes().unwrap()
    }

    /// The elements, in row-major order.
    fn read(&self) -> Vec<f64> {
        let (dtype, bytes) = (self.view.dtype(), self.bytes());
        let all: Vec<f64> = bytes.chunks(dtype.size()).map(|b| decode(dtype, b)).collect();
        let mut outside = vec![true; all.len()];
        self.positions.iter().for_each(|&at| outside[at] = false);
        assert!(all.iter().zip(outside).all(|(x, outside)| !outside || x.is_nan()), "written outside of the tensor");
        self.positions.iter().map(|&at| all[at]).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum MaskKind {
    None,
    /// `[batch, 1, Tq, Tk]`, bool.
    Hides,
    /// `[batch, 1, 1, Tk]`, bool.
    HidesKeys,
    /// `[batch, heads, Tq, Tk]`.
    Adds,
    /// `[1, 1, Tq, Tk]`, with -inf here and there.
    AddsToAll,
    /// `[1, heads, 1, Tk]`.
    AddsToKeys,
}

impl MaskKind {
    fn adds(self) -> bool {
        matches!(self, MaskKind::Adds | MaskKind::AddsToAll | MaskKind::AddsToKeys)
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    batch: usize,
    times: (usize, usize),
    heads: (usize, usize),
    /// Of q and k, and of v.
    sizes: (usize, usize),
    causal: bool,
    window: Option<usize>,
    dropout: f64,
    mask: MaskKind,
    layout: Layout,
    /// Factor on q.
    spread: f64,
    /// Factor on the usual scale.
    scale: f64,
    /// Bounds of queries and keys.
    sequences: Option<(&'static [usize], &'static [usize])>,
}

const PLAIN: Case = Case {
    dtype: DType::F32,
    batch: 1,
    times: (65, 65),
    heads: (1, 1),
    sizes: (16, 16),
    causal: false,
    window: None,
    dropout: 0.0,
    mask: MaskKind::None,
    layout: Layout::Plain,
    spread: 1.0,
    scale: 1.0,
    sequences: None,
};

/// Numbers in about [-1.7, 1.7], of variance 1.
fn random(seed: u64, len: usize) -> Vec<f64> {
    let stream = RandomStream { seed, counter: 99 };
    (0..len).map(|i| (stream.word(i as u64) as f64 / 2f64.powi(31) - 1.0) * 3f64.sqrt()).collect()
}

/// Results by name, in row-major order, and all the bytes of the outputs' storage.
struct Results {
    values: Vec<(&'static str, Vec<f64>)>,
    bytes: Vec<u8>,
}

impl Case {
    fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.times.0, self.heads.0, self.sizes.0]
    }
    fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.times.1, self.heads.1, self.sizes.0]
    }
    fn v_shape(&self) -> [usize; 4] {
        [self.batch, self.times.1, self.heads.1, self.sizes.1]
    }
    fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.times.0, self.heads.0, self.sizes.1]
    }

    fn mask_shape(&self) -> Option<[usize; 4]> {
        let (b, h, (tq, tk)) = (self.batch, self.heads.0, self.times);
        match self.mask {
            MaskKind::None => None,
            MaskKind::Hides => Some([b, 1, tq, tk]),
            MaskKind::HidesKeys => Some([b, 1, 1, tk]),
            MaskKind::Adds => Some([b, h, tq, tk]),
            MaskKind::AddsToAll => Some([1, 1, tq, tk]),
            MaskKind::AddsToKeys => Some([1, h, 1, tk]),
        }
    }

    fn mask(&self, device: &Device, dtype: DType) -> Option<Placed> {
        let shape = self.mask_shape()?;
        let hides = !self.mask.adds();
        let mut values = random(5, shape.iter().product());
        for (i, x) in values.iter_mut().enumerate() {
            if hides {
                *x = (*x > -1.0) as u8 as f64;
            } else if self.mask == MaskKind::AddsToAll && i % 7 == 3 {
                *x = f64::NEG_INFINITY;
            } else {
                *x = self.round(*x);
            }
        }
        let dtype = if hides { DType::Bool } else { dtype };
        Some(Placed::new(device, dtype, shape, Layout::Plain, Some(&values)))
    }

    fn round(&self, x: f64) -> f64 {
        decode(self.dtype, &encode(self.dtype, x))
    }

    /// Runs all kernels on a device, in `dtype`, on inputs rounded to the case's dtype. With `subtract` false, backward
    /// is told that delta is 0: gradients of the size of what is subtracted from each other, by which they are compared
    /// (a row that sees one key has gradient 0, but for rounding).
    fn run(&self, device: &Device, dtype: DType, layout: Layout, subtract: bool) -> Results {
        let place = |seed: u64, shape: [usize; 4], factor: f64, layout: Layout| {
            let values = random(seed, shape.iter().product());
            let values: Vec<f64> = values.into_iter().map(|x| self.round(x * factor)).collect();
            Placed::new(device, dtype, shape, layout, Some(&values))
        };
        let (q, k) = (place(1, self.q_shape(), self.spread, layout), place(2, self.k_shape(), 1.0, layout));
        // The gradient of the output needn't lie as the output.
        let (v, g) = (place(3, self.v_shape(), 1.0, layout), place(4, self.out_shape(), 1.0, layout.of_gradient()));
        let output = |shape| Placed::new(device, dtype, shape, layout, None);
        let (out, dq) = (output(self.out_shape()), output(self.q_shape()));
        let (dk, dv) = (output(self.k_shape()), output(self.v_shape()));
        let statistic = || {
            let values = vec![f64::NAN; self.batch * self.heads.0 * self.times.0];
            let shape = [1, self.batch, self.heads.0, self.times.0];
            let placed = Placed::new(device, dtype.computed_in(), shape, Layout::Plain, Some(&values));
            let view = placed.base.view_as(&shape[1..]).unwrap().unwrap();
            Placed { view, ..placed }
        };
        let shape = [self.batch, self.heads.0, self.times.0, 2];
        let stats = Placed::new(device, dtype.computed_in(), shape, Layout::Plain, None);
        let delta = statistic();
        let mask = self.mask(device, dtype);
        let scores = [self.batch, self.heads.0, self.times.0, self.times.1];
        let repeated = mask.map(|mask| mask.view.expand(&scores).unwrap());
        let sequences = self.sequences.map(|(queries, keys)| Sequences { queries, keys });
        let spec = AttentionSpec {
            scale: self.scale / (self.sizes.0 as f64).sqrt(),
            causal: self.causal,
            window: self.window,
            dropout: self.dropout,
            stream: RandomStream { seed: 0x1234_5678_9abc, counter: 3 },
        };
        // Only masks that are added have a gradient.
        let dmask = self.mask_shape().filter(|_| self.mask.adds()).map(output);
        {
            let [q, k, v, g] = [&q.view, &k.view, &v.view, &g.view];
            let [out, stats, delta] = [&out.view, &stats.view, &delta.view];
            let [dq, dk, dv] = [&dq.view, &dk.view, &dv.view];
            let mask = repeated.as_ref();
            let forward = kernel::AttentionInputs { q, k, v, mask, sequences, spec };
            device.run(kernel::Attention { inputs: forward, out, stats }).unwrap();
            let inputs = kernel::AttentionGradInputs { forward, g, stats, delta };
            device.run(kernel::AttentionDelta { o: out, g, delta }).unwrap();
            if !subtract {
                device.run(kernel::Fill { value: 0.0, out: delta }).unwrap();
            }
            device.run(kernel::AttentionGradKv { inputs, dk, dv }).unwrap();
            device.run(kernel::AttentionGradQ { inputs, dq }).unwrap();
            if let Some(dmask) = &dmask {
                let dmask = &dmask.view;
                device.run(kernel::AttentionGradMask { inputs, dmask }).unwrap();
            }
        }
        let mut outputs = vec![("out", out), ("stats", stats), ("delta", delta), ("dq", dq), ("dk", dk), ("dv", dv)];
        outputs.extend(dmask.map(|dmask| ("dmask", dmask)));
        Results {
            values: outputs.iter().map(|(name, placed)| (*name, placed.read())).collect(),
            bytes: outputs.iter().flat_map(|(_, placed)| placed.bytes()).collect(),
        }
    }

    /// delta of this output.
    fn delta(&self, out: &[f64]) -> Vec<f64> {
        let ([b, t, h, d], g) = (self.out_shape(), random(4, out.len()));
        let mut delta = vec![0.0; b * h * t];
        for (i, (o, g)) in out.iter().zip(g).enumerate() {
            let (head, time, batch) = (i / d % h, i / d / h % t, i / d / h / t);
            delta[(batch * h + head) * t + time] += o * self.round(g);
        }
        delta
    }

    fn check(&self, device: &Device) {
        let ours = self.run(device, self.dtype, self.layout, true);
        let [theirs, sizes] =
            [true, false].map(|delta| self.run(&retape_cpu::device(), DType::F64, Layout::Plain, delta).values);
        for (i, (name, x)) in ours.values.iter().enumerate() {
            let (mut y, size) = (theirs[i].1.clone(), &sizes[i].1);
            let (mut allowed, mut least) = (tolerance(self.dtype), 1e-6);
            if matches!(*name, "stats" | "delta") {
                allowed = allowed.min(1e-5); // never of 16 bits
            }
            if *name == "delta" {
                // Of the output as it was rounded.
                y = self.delta(&ours.values[0].1);
                least = 0.1 * (self.sizes.1 as f64).sqrt();
            }
            let norm = norm(&y).max(norm(size)).max(least * (y.len() as f64).sqrt());
            let distance = distance(x, &y).unwrap_or_else(|reason| panic!("{name} {reason}; {self:?}"));
            assert!(
                distance <= allowed * norm,
                "{name} differs by {:.1e}, more than {allowed:.1e}; {self:?}",
                distance / norm
            );
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).map(|x| x * x).sum::<f64>().sqrt()
}

/// Norm of the difference. Infinities have to be in the same places.
fn distance(x: &[f64], y: &[f64]) -> Result<f64, String> {
    let mut sum = 0.0;
    for (i, (&x, &y)) in x.iter().zip(y).enumerate() {
        if x.is_nan() || y.is_nan() || (x.is_infinite() || y.is_infinite()) && x != y {
            return Err(format!("has {x} for {y} at {i}"));
        }
        sum += if x == y { 0.0 } else { (x - y) * (x - y) };
    }
    Ok(sum.sqrt())
}

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const HALVES: [DType; 2] = [DType::BF16, DType::F16];
const TIMES: [(usize, usize); 9] =
    [(64, 64), (65, 130), (130, 65), (63, 63), (1, 65), (3, 1), (130, 130), (64, 3), (1, 1)];

/// Every head size with every dtype, and with options that go round so that each meets many others.
#[test]
fn head_sizes() {
    let device = retape_cuda_emulator::device();
    let mut n = 0;
    for size in [1, 5, 16, 32, 48, 64, 80, 96, 128, 160, 256, 300] {
        for dtype in DTYPES {
            let case = Case {
                dtype,
                times: TIMES[n % TIMES.len()],
                heads: [(1, 1), (2, 1), (2, 2)][n % 3],
                batch: 1 + n % 2,
                sizes: (size, size),
                causal: n % 5 < 3,
                window: [None, Some(1), Some(40), Some(1000)][n % 4].filter(|_| n % 5 < 3),
                layout: LAYOUTS[n / 2 % LAYOUTS.len()],
                ..PLAIN
            };
            case.check(&device);
            n += 1;
        }
    }
}

/// Each option by itself and pairs of them, at lengths around the tiles.
#[test]
fn options() {
    let device = retape_cuda_emulator::device();
    let masks = [
        MaskKind::None,
        MaskKind::Hides,
        MaskKind::HidesKeys,
        MaskKind::Adds,
        MaskKind::AddsToAll,
        MaskKind::AddsToKeys,
    ];
    let mut n = 0;
    for mask in masks {
        for dropout in [0.0, 0.3] {
            for causal in [false, true] {
                for dtype in DTYPES {
                    let case = Case {
                        dtype,
                        times: TIMES[n % TIMES.len()],
                        heads: [(2, 1), (1, 1), (3, 1)][n % 3],
                        batch: 1 + n / 3 % 2,
                        sizes: [(16, 16), (64, 64), (40, 24), (128, 128), (8, 72)][n % 5],
                        causal,
                        window: [None, Some(33)][n / 2 % 2].filter(|_| causal),
                        mask,
                        dropout,
                        layout: LAYOUTS[n % LAYOUTS.len()],
                        ..PLAIN
                    };
                    case.check(&device);
                    n += 1;
                }
            }
        }
    }
}

/// All tiles of every instantiation: full tiles in the middle, edges behind, and several steps.
#[test]
fn every_mma_kernel() {
    let device = retape_cuda_emulator::device();
    for dtype in HALVES {
        for size in [32, 64, 128, 256] {
            for dropout in [0.0, 0.1] {
                let case = Case { dtype, times: (150, 200), sizes: (size, size), causal: true, dropout, ..PLAIN };
                case.check(&device);
            }
        }
    }
}

/// Head sizes that aren't multiples of the 8 elements of a copy, in every layout.
#[test]
fn layouts() {
    let device = retape_cuda_emulator::device();
    for dtype in DTYPES {
        for layout in LAYOUTS {
            Case { dtype, times: (70, 33), heads: (2, 1), sizes: (20, 12), layout, ..PLAIN }.check(&device);
        }
    }
}

/// Sequences of many lengths in one, some empty, some without keys.
#[test]
fn ragged() {
    let device = retape_cuda_emulator::device();
    let bounds: [(&[usize], &[usize]); 2] =
        [(&[0, 70, 70, 73, 140], &[0, 65, 80, 80, 150]), (&[0, 5, 135, 140, 140], &[0, 5, 135, 140, 150])];
    let mut n = 0;
    for dtype in DTYPES {
        for sequences in bounds {
            for (mask, dropout) in [(MaskKind::None, 0.0), (MaskKind::Adds, 0.0), (MaskKind::AddsToKeys, 0.2)] {
                let case = Case {
                    dtype,
                    times: (140, 150),
                    heads: (2, 1 + n % 2),
                    sizes: [(16, 16), (64, 64), (20, 20), (136, 136)][n % 4],
                    causal: (n + n / 3) % 3 > 0,
                    window: Some(50).filter(|_| (n + n / 3) % 3 > 1),
                    mask,
                    dropout,
                    layout: LAYOUTS[n % LAYOUTS.len()],
                    sequences: Some(sequences),
                    ..PLAIN
                };
                case.check(&device);
                n += 1;
            }
        }
    }
}

/// Rows before all keys, and masks that hide all: zeros, statistics of nothing, and no gradient.
#[test]
fn rows_that_see_nothing() {
    let device = retape_cuda_emulator::device();
    for dtype in DTYPES {
        for size in [8, 64, 200] {
            let case = Case { dtype, times: (90, 20), sizes: (size, size), causal: true, ..PLAIN };
            case.check(&device);
            let results = case.run(&device, dtype, Layout::Plain, true);
            for (name, values) in &results.values {
                let unseen = match *name {
                    "out" | "dq" => &values[..70 * size],
                    "stats" => &values[..140],
                    "delta" => &values[..70],
                    _ => continue,
                };
                let expected = |i: usize| if *name == "stats" && i.is_multiple_of(2) { f64::NEG_INFINITY } else { 0.0 };
                assert!(unseen.iter().enumerate().all(|(i, &x)| x == expected(i)), "{name} {dtype}");
            }
        }
        Case { dtype, times: (70, 0), sizes: (16, 16), ..PLAIN }.check(&device);
        Case { dtype, times: (0, 70), sizes: (16, 16), ..PLAIN }.check(&device);
    }
}

/// Large scores: nearly all the weight on one key. Score gradients are differences of nearly equal numbers then.
#[test]
fn large_scores() {
    let device = retape_cuda_emulator::device();
    for dtype in DTYPES {
        for size in [24, 64, 128] {
            let case = Case { dtype, times: (65, 100), sizes: (size, size), causal: true, spread: 20.0, ..PLAIN };
            case.check(&device);
        }
    }
}

/// Scales that are 0 in f32, are negative, or aren't there.
#[test]
fn odd_scales() {
    let device = retape_cuda_emulator::device();
    for dtype in DTYPES {
        for scale in [0.0, 1e-60, -1.5] {
            Case { dtype, times: (65, 70), sizes: (32, 32), causal: true, scale, ..PLAIN }.check(&device);
            Case { dtype, times: (65, 70), sizes: (64, 64), scale, ..PLAIN }.check(&device);
        }
    }
}

/// A maximum that stays is no reason to shrink what was gathered: over many tiles of equal, large scores, keys count
/// alike.
#[test]
fn equal_scores_over_many_tiles() {
    let device = retape_cuda_emulator::device();
    let (keys, size) = (4096, 32);
    for dtype in DTYPES {
        let make = |times: usize, f: &dyn Fn(usize) -> f64| {
            let bytes: Vec<u8> = (0..times * size).flat_map(|i| encode(dtype, f(i / size))).collect();
            Tensor::from_bytes(&device, &[1, times, 1, size], dtype, &bytes).unwrap()
        };
        // Scores of 900 size / sqrt(size), and a bit more or less for each query.
        let (q, k) = (make(16, &|i| 30.0 + i as f64 / 4.0), make(keys, &|_| 30.0));
        let v = make(keys, &|j| if j < keys / 2 { 1.0 } else { 0.0 });
        let out = make(16, &|_| f64::NAN);
        let stats = Tensor::full(&device, &[1, 1, 16, 2], dtype.computed_in(), f64::NAN).unwrap();
        let stream = RandomStream { seed: 0, counter: 0 };
        let scale = 1.0 / (size as f64).sqrt();
        let spec = AttentionSpec { scale, causal: false, window: None, dropout: 0.0, stream };
        let (mask, sequences) = (None, None);
        let inputs = kernel::AttentionInputs { q: &q, k: &k, v: &v, mask, sequences, spec };
        device.run(kernel::Attention { inputs, out: &out, stats: &stats }).unwrap();
        for b in out.to_bytes().unwrap().chunks(dtype.size()) {
            let x = decode(dtype, b);
            assert!((x - 0.5).abs() < 1e-3, "{dtype}: {x}");
        }
    }
}

/// Rows whose keys are all hidden by a large negative number rather than by -inf: whatever their weights, gradients are
/// small.
#[test]
fn rows_hidden_by_large_numbers() {
    let device = retape_cuda_emulator::device();
    for dtype in [DType::F32, DType::BF16] {
        for hidden in [-1e5, -3e7, -3e8, -1e9, -2e9, -7e9, -1e12] {
            let shape = [1, 40, 1, 16];
            let make = |seed: u64, shape: &[usize]| {
                let bytes: Vec<u8> =
                    random(seed, shape.iter().product()).into_iter().flat_map(|x| encode(dtype, x)).collect();
                Tensor::from_bytes(&device, shape, dtype, &bytes).unwrap()
            };
            let [q, k, v, g, out, dq, dk, dv] = std::array::from_fn(|i| make(i as u64, &shape));
            // Every other row sees nothing.
            let mask: Vec<u8> =
                (0..1600).flat_map(|i| encode(dtype, if i / 40 % 2 == 0 { 0.0 } else { hidden })).collect();
            let mask = Tensor::from_bytes(&device, &[1, 1, 40, 40], dtype, &mask).unwrap();
            let statistic = |shape: &[usize]| Tensor::full(&device, shape, dtype.computed_in(), 0.0).unwrap();
            let (stats, delta) = (statistic(&[1, 1, 40, 2]), statistic(&[1, 1, 40]));
            let stream = RandomStream { seed: 0, counter: 0 };
            let spec = AttentionSpec { scale: 0.25, causal: false, window: None, dropout: 0.0, stream };
            let (q, k, v, g, out, stats, delta) = (&q, &k, &v, &g, &out, &stats, &delta);
            let (mask, sequences) = (Some(&mask), None);

            let forward = kernel::AttentionInputs { q, k, v, mask, sequences, spec };
            device.run(kernel::Attention { inputs: forward, out, stats }).unwrap();
            let inputs = kernel::AttentionGradInputs { forward, g, stats, delta };
            device.run(kernel::AttentionDelta { o: out, g, delta }).unwrap();
            device.run(kernel::AttentionGradKv { inputs, dk: &dk, dv: &dv }).unwrap();
            device.run(kernel::AttentionGradQ { inputs, dq: &dq }).unwrap();
            for (name, tensor) in [("out", out), ("dq", &dq), ("dk", &dk), ("dv", &dv)] {
                let bytes = tensor.to_bytes().unwrap();
                // No weight is above 1, and no number is above 2.
                let small = bytes.chunks(dtype.size()).all(|b| decode(dtype, b).abs() < 40.0 * 16.0 * 4.0);
                assert!(small, "{name} {dtype} {hidden:e}");
            }
        }
    }
}

/// More bounds of sequences than are kept on the device at a time: none goes before its launch.
#[test]
fn many_segments() {
    let device = retape_cuda_emulator::device();
    let bounds = |first: usize| -> &'static [usize] { Box::leak(Box::new([0, first, 90])) };
    let case = Case { times: (90, 90), sizes: (8, 8), ..PLAIN };
    // One list for queries and keys first, then two at a time: an odd number of them.
    Case { sequences: Some((bounds(45), bounds(45))), ..case }.check(&device);
    for i in 0..40 {
        Case { sequences: Some((bounds(i), bounds(90 - i))), ..case }.check(&device);
    }
}

/// The same bits each time, and in whatever order blocks and threads run (the emulator's order is the environment's).
#[test]
fn same_bits_each_time() {
    let device = retape_cuda_emulator::device();
    for dtype in DTYPES {
        let case = Case {
            dtype,
            times: (130, 100),
            heads: (4, 2),
            sizes: (64, 64),
            causal: true,
            dropout: 0.2,
            mask: MaskKind::AddsToKeys,
            ..PLAIN
        };
        let first = case.run(&device, dtype, Layout::Plain, true);
        let second = case.run(&device, dtype, Layout::Plain, true);
        assert_eq!(first.bytes, second.bytes, "{dtype}");
    }
}

/// The registry's samples: scores of 5e8, masks of -1e9 and the least number, windows at their extremes.
#[test]
fn samples_are_what_the_definition_says() {
    let device = retape_cuda_emulator::device();
    for (dtype, sample) in
        DTYPES.into_iter().flat_map(|dtype| Attention::samples().into_iter().map(move |s| (dtype, s)))
    {
        let Op::Attention(op) = &sample.op else { unreachable!("a sample of attention") };
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|i| sample_tensor(&device, i, dtype)).collect();
        retape_tests::attention::check_sample(&device, op, &inputs, sample.name);
    }
}

/// Random specs, with large scores, masks that saturate, and sequences of NaN, infinities or large numbers in a ragged
/// batch.
#[test]
fn random_specs_are_what_the_definition_says() {
    let device = retape_cuda_emulator::device();
    let mut dice = Dice::new(1);
    for _ in 0..60 {
        let case = retape_tests::attention::Case::random(&mut dice, true);
        case.check(&device, DTYPES[Choices::throw(&mut dice, 4)]);
    }
}

/// With g = 1, dv of all keys together is 1 for each query: weights that backward rebuilds have the sum that they had,
/// however large the scores are from which rounding has taken what tells them apart.
#[test]
fn rebuilt_weights_sum_to_one() {
    let device = retape_cuda_emulator::device();
    for (queries, keys, size) in [(1, 130, 64), (65, 100, 32), (70, 1, 40), (33, 65, 128), (20, 20, 200)] {
        for spread in [1.0, 1e2, 1e4, 3e5, 1e10] {
            for dtype in DTYPES.into_iter().filter(|&dtype| dtype != DType::F16 || spread < 6e4) {
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
                assert!(error < 5e-3, "{dtype} {queries} x {keys} x {size}, scores of {spread:e}: {sum}");
            }
        }
    }
}
