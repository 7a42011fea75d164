//! Times each kind of kernel on the shapes of a small transformer's step: `cargo run --release --example kernels
//! [filter]`.

use retape_core::kernel::{
    self, AdamWConfig, AttentionSpec, BinaryFn, CrossEntropySpec, RandomStream, ReduceFn, UnaryFn,
};
use retape_core::{DType, Device, Kernel, MemoryKind, Result, Tensor};
use std::time::Instant;

fn main() -> Result<()> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    for threads in [1, 2] {
        let device = retape_cpu::device_with_threads(threads)?;
        println!("-- {threads} thread(s)");
        Bench { device, filter: filter.clone() }.all()?;
    }
    Ok(())
}

struct Bench {
    device: Device,
    filter: String,
}

const SEED: RandomStream = RandomStream { seed: 1, counter: 0 };

impl Bench {
    fn normal(&self, shape: &[usize]) -> Result<Tensor> {
        let out = self.empty(shape)?;
        self.device.run(kernel::Normal { stream: SEED, std: 1.0, out: &out })?;
        Ok(out)
    }

    fn empty(&self, shape: &[usize]) -> Result<Tensor> {
        Tensor::uninit(&self.device, shape, DType::F32, MemoryKind::Input)
    }

    /// Prints the best time, and `amount` (billions of something) a second.
    fn time<'a>(&self, name: &str, amount: f64, unit: &str, kernels: &[impl Into<Kernel<'a>> + Copy]) -> Result<()> {
        if !name.contains(&self.filter) {
            return Ok(());
        }
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < 9 || start.elapsed().as_secs_f64() < 0.15 {
            let t = Instant::now();
            for &kernel in kernels {
                self.device.run(kernel)?;
            }
            times.push(t.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let t = times[0];
        println!("{name:34} {:9.1} us {:8.1} {unit}", t * 1e6, amount / t / 1e9);
        Ok(())
    }

    fn all(&self) -> Result<()> {
        self.gemm()?;
        self.elementwise()?;
        for (b, t) in [(2, 512), (1, 2048)] {
            self.attention(b, t)?;
        }
        Ok(())
    }

    fn gemm(&self) -> Result<()> {
        let shapes = [
            ("qkv", 1, 1024, 1152, 384),
            ("proj", 1, 1024, 384, 384),
            ("up", 1, 1024, 1536, 384),
            ("down", 1, 1024, 384, 1536),
            ("head", 1, 1024, 256, 384),
            ("d qkv", 1, 384, 1152, 1024),
            ("d proj", 1, 384, 384, 1024),
            ("d up", 1, 384, 1536, 1024),
            ("d down", 1, 1536, 384, 1024),
            ("scores", 12, 512, 512, 64),
            ("values", 12, 512, 64, 512),
        ];
        for (name, batch, m, n, k) in shapes {
            let (a, at) = (self.normal(&[batch, m, k])?, self.normal(&[batch, k, m])?.transpose(1, 2)?);
            let (b, bt) = (self.normal(&[batch, k, n])?, self.normal(&[batch, n, k])?.transpose(1, 2)?);
            let out = self.empty(&[batch, m, n])?;
            for (kind, a, b) in [("nn", &a, &b), ("nt", &a, &bt), ("tn", &at, &b)] {
                let kernel = kernel::Matmul { a, b, alpha: 1.0, accumulate: false, out: &out };
                let name = format!("gemm {name} {batch}x({m},{n},{k}) {kind}");
                self.time(&name, 2.0 * (batch * m * n * k) as f64, "GFLOP/s", &[kernel])?;
            }
        }
        Ok(())
    }

    fn elementwise(&self) -> Result<()> {
        let (rows, n) = (1024, 1536);
        let x = self.normal(&[rows, n])?;
        let g = self.normal(&[rows, n])?;
        let out = self.empty(&[rows, n])?;
        let bias = self.normal(&[n])?;
        let wide = bias.expand(&[rows, n])?;
        let bytes = (rows * n * 4) as f64;
        for f in [UnaryFn::Scale(2.0), UnaryFn::Exp, UnaryFn::Tanh, UnaryFn::Silu, UnaryFn::Gelu, UnaryFn::GeluTanh] {
            self.time(&format!("{f:?}"), 2.0 * bytes, "GB/s", &[kernel::Unary { f, x: &x, out: &out }])?;
            let grad = kernel::UnaryGrad { f, saved: &x, g: &g, out: &out };
            self.time(&format!("{f:?} grad"), 3.0 * bytes, "GB/s", &[grad])?;
        }
        let add = |a, b| kernel::Binary { f: BinaryFn::Add, a, b, out: &out };
        self.time("add", 3.0 * bytes, "GB/s", &[add(&x, &g)])?;
        self.time("add bias", 2.0 * bytes, "GB/s", &[add(&x, &wide)])?;
        self.time("copy", 2.0 * bytes, "GB/s", &[kernel::Copy { x: &x, out: &out }])?;
        let turned = self.normal(&[n, rows])?.transpose(0, 1)?;
        self.time("copy transposed", 2.0 * bytes, "GB/s", &[kernel::Copy { x: &turned, out: &out }])?;
        let half = Tensor::uninit(&self.device, &[rows, n], DType::BF16, MemoryKind::Input)?;
        self.time("copy f32 to bf16", 1.5 * bytes, "GB/s", &[kernel::Copy { x: &x, out: &half }])?;
        self.time("copy bf16 to f32", 1.5 * bytes, "GB/s", &[kernel::Copy { x: &half, out: &out }])?;
        self.time("softmax", 2.0 * bytes, "GB/s", &[kernel::Softmax { x: &x, out: &out }])?;
        self.time("softmax grad", 3.0 * bytes, "GB/s", &[kernel::SoftmaxGrad { y: &x, g: &g, out: &out }])?;
        self.time("dropout", 2.0 * bytes, "GB/s", &[kernel::Dropout { x: &x, p: 0.1, stream: SEED, out: &out }])?;
        self.time("uniform", bytes, "GB/s", &[kernel::Uniform { stream: SEED, out: &out }])?;
        self.time("normal", bytes, "GB/s", &[kernel::Normal { stream: SEED, std: 1.0, out: &out }])?;
        let (column, row, all) = (self.empty(&[1, n])?, self.empty(&[rows, 1])?, self.empty(&[1, 1])?);
        for (name, out) in [("sum columns", &column), ("sum rows", &row), ("sum all", &all)] {
            self.time(name, bytes, "GB/s", &[kernel::Reduce { f: ReduceFn::Sum, x: &x, out }])?;
        }
        let (mean, rstd) = (self.normal(&[rows])?, self.normal(&[rows])?);
        let (weight, dw, db) = (self.normal(&[n])?, self.empty(&[n])?, self.empty(&[n])?);
        let (w, b) = (Some(&weight), Some(&bias));
        let norm =
            kernel::LayerNorm { x: &x, weight: w, bias: b, eps: 1e-5, out: &out, mean: Some(&mean), rstd: &rstd };
        self.time("layer norm", 2.0 * bytes, "GB/s", &[norm])?;
        let grad = kernel::LayerNormGrad { x: &x, weight: w, mean: Some(&mean), rstd: &rstd, g: &g, out: &out };
        self.time("layer norm grad", 3.0 * bytes, "GB/s", &[grad])?;
        let (dweight, dbias) = (Some(&dw), Some(&db));
        let param = kernel::LayerNormParamGrad { x: &x, mean: Some(&mean), rstd: &rstd, g: &g, dweight, dbias };
        self.time("layer norm param grad", 2.0 * bytes, "GB/s", &[param])?;
        let target = Tensor::from_slice(&self.device, &[rows], &vec![3i64; rows])?;
        let (loss, one, stats) = (self.empty(&[])?, self.normal(&[])?, self.empty(&[rows, 2])?);
        let spec = CrossEntropySpec { ignore: -1, ..CrossEntropySpec::default() };
        let scores = kernel::ClassScores { logits: &x, target: &target, weight: None, spec };
        let ce = kernel::CrossEntropy { scores, loss: &loss, stats: Some(&stats) };
        self.time("cross entropy", bytes, "GB/s", &[ce])?;
        let (stats, g1) = (&stats, &one);
        let ceg = kernel::CrossEntropyGrad { scores, stats, g: g1, out: &out };
        self.time("cross entropy grad", 2.0 * bytes, "GB/s", &[ceg])?;
        let ids = Tensor::from_slice(&self.device, &[8192], &(0..8192i64).map(|i| i * 7 % 1024).collect::<Vec<_>>())?;
        let rows_out = self.normal(&[8192, n])?;
        let order = &Tensor::uninit(&self.device, &[8192], DType::I64, MemoryKind::Workspace)?;
        self.time(
            "embedding grad",
            8192.0 / 1024.0 * bytes,
            "GB/s",
            &[kernel::EmbeddingGrad { ids: &ids, g: &rows_out, order, out: &out }],
        )?;
        let q = Tensor::uninit(&self.device, &[rows, n], DType::U8, MemoryKind::Input)?;
        let scales = self.empty(&[rows, n / 64])?;
        self.time(
            "quantize",
            1.25 * bytes,
            "GB/s",
            &[kernel::Quantize { x: &x, group: 64, rounding: None, q: &q, scales: &scales }],
        )?;
        let back = kernel::Dequantize { q: &q, scales: &scales, group: 64, out: &out };
        self.time("dequantize", 1.25 * bytes, "GB/s", &[back])?;
        let config = AdamWConfig { lr: 1e-9, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 };
        let (m, v) = (self.normal(&[rows, n])?, self.empty(&[rows, n])?);
        self.device.run(kernel::Fill { value: 1.0, out: &v })?;
        let adamw = kernel::AdamW { p: &x, g: &g, m: &m, v: &v, step: 3, config, grad_scale: 1.0 };
        self.time("adamw", 7.0 * bytes, "GB/s", &[adamw])?;
        Ok(())
    }

    fn attention(&self, b: usize, t: usize) -> Result<()> {
        let (h, d) = (6, 64);
        let qkv = self.normal(&[b, t, 3, h, d])?;
        let part = |i| -> Result<Tensor> {
            let view = qkv.narrow(2, i, 1)?.view_as(&[b, t, h, d])?;
            Ok(view.unwrap_or_else(|| unreachable!("a dimension of size 1 is dropped")))
        };
        let (q, k, v) = (&part(0)?, &part(1)?, &part(2)?);
        let (out, g) = (&self.empty(&[b, t, h, d])?, &self.normal(&[b, t, h, d])?);
        let (stats, delta) = (&self.empty(&[b, h, t, 2])?, &self.empty(&[b, h, t])?);
        let [dq, dk, dv] = [&self.empty(&[b, t, h, d])?, &self.empty(&[b, t, h, d])?, &self.empty(&[b, t, h, d])?];
        let product = (b * h * t * t * d) as f64; // 2 FLOPs, half the tiles
        for dropout in [0.0, 0.1] {
            let spec = AttentionSpec { scale: 0.125, causal: true, window: None, dropout, stream: SEED };
            let read = kernel::AttentionInputs { q, k, v, mask: None, sequences: None, spec };
            let inputs = kernel::AttentionGradInputs { forward: read, g, stats, delta };
            let forward = Kernel::from(kernel::Attention { inputs: read, out, stats });
            let kv = Kernel::from(kernel::AttentionGradKv { inputs, dk, dv });
            let del = Kernel::from(kernel::AttentionDelta { o: out, g, delta });
            let gq = Kernel::from(kernel::AttentionGradQ { inputs, dq });
            let name = format!("attention {b}x{t} dropout {dropout}");
            self.time(&format!("{name} forward"), 2.0 * product, "GFLOP/s", &[forward])?;
            self.time(&format!("{name} delta"), 2.0 * (b * t * h * d * 4) as f64, "GB/s", &[del])?;
            self.time(&format!("{name} grad kv"), 4.0 * product, "GFLOP/s", &[kv])?;
            self.time(&format!("{name} grad q"), 3.0 * product, "GFLOP/s", &[gq])?;
            self.time(&format!("{name} all"), 9.0 * product, "GFLOP/s", &[forward, del, kv, gq])?;
        }
        Ok(())
    }
}
