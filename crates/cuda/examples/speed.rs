//! What the kernels reach on a GPU: attention, products, and what only moves memory against a copy of the same number
//! of bytes.
//!
//! `speed [--small] [--json FILE]`. Every figure is the median of several timed runs of some launches each, after a
//! warm-up, with random data and operands that rotate through more memory than the caches hold. With `--small` the
//! sizes are tiny: a rehearsal, whose times mean nothing.

use retape_core::kernel::{self, AdamWConfig, AttentionSpec, CrossEntropySpec, RandomStream};
use retape_core::{DType, Device, MemoryKind, Result, Tensor};
use serde_json::{Value, json};
use std::time::Instant;

const STREAM: RandomStream = RandomStream { seed: 1, counter: 0 };
/// Bytes that operands rotate through: twice an H200's second-level cache.
const ROTATION: usize = 128 << 20;

struct Bench {
    device: Device,
    small: bool,
    rows: Vec<Value>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let small = arguments.iter().any(|a| a == "--small");
    let file = arguments.iter().position(|a| a == "--json").and_then(|i| arguments.get(i + 1));
    let mut bench = Bench { device: retape_cuda::device(0)?, small, rows: Vec::new() };
    bench.memory_bound()?;
    bench.products()?;
    bench.attention()?;
    if let Some(file) = file {
        let document = json!({ "device": bench.device.name(), "small": small, "rows": bench.rows });
        std::fs::write(file, format!("{document:#}\n")).unwrap_or_else(|error| eprintln!("{file}: {error}"));
    }
    Ok(())
}

impl Bench {
    fn tensor(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let out = Tensor::uninit(&self.device, shape, dtype, MemoryKind::Input)?;
        if dtype.is_float() {
            self.device.run(kernel::Normal { stream: STREAM, std: 1.0, out: &out })?;
        } else {
            self.device.run(kernel::Fill { value: 1.0, out: &out })?;
        }
        Ok(out)
    }

    /// Copies of some operands, of `bytes` each: the number that the rotation wants.
    fn rotate<T>(&self, bytes: usize, make: impl Fn() -> Result<T>) -> Result<Vec<T>> {
        let copies = if self.small { 2 } else { (ROTATION / bytes.max(1)).clamp(2, 16) };
        (0..copies).map(|_| make()).collect()
    }

    /// Median seconds of one call of `run` on operands in turn.
    fn time<T>(&self, operands: &[T], run: impl Fn(&T) -> Result<()>) -> Result<f64> {
        let (rounds, calls) = if self.small { (1, 1) } else { (7, 10) };
        for operand in operands {
            run(operand)?;
        }
        self.device.synchronize()?;
        let mut times = Vec::new();
        for round in 0..rounds {
            let start = Instant::now();
            for call in 0..calls {
                run(&operands[(round * calls + call) % operands.len()])?;
            }
            self.device.synchronize()?;
            times.push(start.elapsed().as_secs_f64() / calls as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn report(&mut self, what: &str, shape: &str, seconds: f64, amount: f64, unit: &str) {
        let rate = amount / seconds / 1e12;
        println!("{what:<28} {shape:<32} {:>10.4} ms {rate:>9.3} {unit}", seconds * 1e3);
        self.rows.push(json!({ "what": what, "shape": shape, "ms": seconds * 1e3, "rate": rate, "unit": unit }));
    }

    /// Kernels that are bound by memory: terabytes a second of what they must read and write.
    fn memory_bound(&mut self) -> Result<()> {
        let (rows, columns) = if self.small { (64, 256) } else { (16384, 4096) };
        let shape = format!("{rows} x {columns} bf16");
        let (dtype, elements) = (DType::BF16, rows * columns);
        let bytes = elements * 2;
        let device = &self.device;

        let pairs = self
            .rotate(2 * bytes, || Ok((self.tensor(&[rows, columns], dtype)?, self.tensor(&[rows, columns], dtype)?)))?;
        let copy = self.time(&pairs, |(x, out)| device.run(kernel::Copy { x, out }))?;
        let softmax = self.time(&pairs, |(x, out)| device.run(kernel::Softmax { x, out }))?;
        let unary = retape_core::kernel::UnaryFn::GeluTanh;
        let gelu = self.time(&pairs, |(x, out)| device.run(kernel::Unary { f: unary, x, out }))?;

        let weight = self.tensor(&[columns], DType::F32)?;
        let (mean, rstd) = (self.tensor(&[rows, 1], DType::F32)?, self.tensor(&[rows, 1], DType::F32)?);
        let norm = self.time(&pairs, |(x, out)| {
            let (weight, bias) = (Some(&weight), Some(&weight));
            device.run(kernel::LayerNorm { x, weight, bias, eps: 1e-5, out, mean: Some(&mean), rstd: &rstd })
        })?;

        let (q, scales) = (self.tensor(&[rows, columns], DType::U8)?, self.tensor(&[rows, columns / 64], DType::F32)?);
        let quantize = self.time(&pairs, |(x, _)| {
            device.run(kernel::Quantize { x, group: 64, rounding: None, q: &q, scales: &scales })
        })?;
        let dequantize =
            self.time(&pairs, |(_, out)| device.run(kernel::Dequantize { q: &q, scales: &scales, group: 64, out }))?;

        let target = Tensor::full(&self.device, &[rows], DType::I64, 3.0)?;
        let (loss, stats) = (self.tensor(&[], DType::F32)?, self.tensor(&[rows, 2], DType::F32)?);
        let spec = CrossEntropySpec::default();
        let cross_entropy = self.time(&pairs, |(x, _)| {
            device.run(kernel::CrossEntropy {
                scores: kernel::ClassScores { logits: x, target: &target, weight: None, spec },
                loss: &loss,
                stats: Some(&stats),
            })
        })?;

        let states: Vec<Tensor> = (0..4).map(|_| self.tensor(&[elements / 4], DType::F32)).collect::<Result<_>>()?;
        let config = AdamWConfig { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let adamw = self.time(&[states], |s| {
            let (p, g, m, v) = (&s[0], &s[1], &s[2], &s[3]);
            device.run(kernel::AdamW { p, g, m, v, step: 10, config, grad_scale: 1.0 })
        })?;

        let moved = bytes as f64;
        self.report("copy", &shape, copy, 2.0 * moved, "TB/s");
        self.report("gelu_tanh", &shape, gelu, 2.0 * moved, "TB/s");
        self.report("softmax", &shape, softmax, 2.0 * moved, "TB/s");
        self.report("layer_norm", &shape, norm, 2.0 * moved, "TB/s");
        self.report("quantize", &shape, quantize, 1.5 * moved, "TB/s");
        self.report("dequantize", &shape, dequantize, 1.5 * moved, "TB/s");
        self.report("cross_entropy", &shape, cross_entropy, moved, "TB/s");
        self.report("adamw f32", &format!("{}", elements / 4), adamw, (elements / 4 * 28) as f64, "TB/s");
        Ok(())
    }

    fn products(&mut self) -> Result<()> {
        let sizes: &[[usize; 3]] =
            if self.small { &[[64, 64, 64]] } else { &[[4096, 4096, 4096], [8192, 3072, 768], [8192, 50304, 768]] };
        for &[m, n, k] in sizes {
            for dtype in [DType::BF16, DType::F32] {
                let operands = self.rotate((m * k + k * n + m * n) * dtype.size(), || {
                    Ok([self.tensor(&[m, k], dtype)?, self.tensor(&[k, n], dtype)?, self.tensor(&[m, n], dtype)?])
                })?;
                let seconds = self.time(&operands, |[a, b, out]| {
                    self.device.run(kernel::Matmul { a, b, alpha: 1.0, accumulate: false, out })
                })?;
                let flops = 2.0 * m as f64 * n as f64 * k as f64;
                self.report("matmul", &format!("{m} x {n} x {k} {dtype}"), seconds, flops, "TFLOP/s");
            }
        }
        Ok(())
    }

    /// FLOPs as usual: 4 T^2 heads size forward, 2.5 times that backward, half if causal.
    fn attention(&mut self) -> Result<()> {
        let lengths: &[usize] = if self.small { &[128] } else { &[1024, 2048, 4096, 8192, 16384] };
        for size in [64, 128] {
            for &time in lengths {
                for causal in [false, true] {
                    let (batch, heads) = if self.small { (1, 1) } else { (16384 / time, 2048 / size) };
                    self.attention_case([batch, time, heads, size], causal)?;
                }
            }
        }
        Ok(())
    }

    fn attention_case(&mut self, shape: [usize; 4], causal: bool) -> Result<()> {
        let [batch, time, heads, size] = shape;
        let dtype = DType::BF16;
        let scale = (size as f64).powf(-0.5);
        let spec = AttentionSpec { scale, causal, window: None, dropout: 0.0, stream: STREAM };
        let bytes = batch * time * heads * size * 2;
        let operands = self.rotate(8 * bytes, || {
            let tensors = (0..8).map(|_| self.tensor(&shape, dtype)).collect::<Result<Vec<_>>>()?;
            let stats = self.tensor(&[batch, heads, time, 2], DType::F32)?;
            Ok((tensors, [stats, self.tensor(&[batch, heads, time], DType::F32)?]))
        })?;
        let device = &self.device;
        let (mask, sequences) = (None, None);
        let forward = self.time(&operands, |(t, s)| {
            let (q, k, v, out, stats) = (&t[0], &t[1], &t[2], &t[3], &s[0]);
            device.run(kernel::Attention {
                inputs: kernel::AttentionInputs { q, k, v, mask, sequences, spec },
                out,
                stats,
            })
        })?;
        let backward = self.time(&operands, |(t, s)| {
            let (q, k, v, o, g, dq, dk, dv) = (&t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
            let (stats, delta) = (&s[0], &s[1]);
            let forward = kernel::AttentionInputs { q, k, v, mask, sequences, spec };
            let inputs = kernel::AttentionGradInputs { forward, g, stats, delta };
            device.run(kernel::AttentionDelta { o, g, delta })?;
            device.run(kernel::AttentionGradKv { inputs, dk, dv })?;
            device.run(kernel::AttentionGradQ { inputs, dq })
        })?;
        let flops = 4.0 * (batch * heads * size) as f64 * (time * time) as f64 * if causal { 0.5 } else { 1.0 };
        let label = format!("{batch}x{time}x{heads}x{size}{}", if causal { " causal" } else { "" });
        self.report("attention forward", &label, forward, flops, "TFLOP/s");
        self.report("attention backward", &label, backward, 2.5 * flops, "TFLOP/s");
        Ok(())
    }
}
