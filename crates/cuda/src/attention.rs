//! Attention: kernels/attention_simt.cu for all that the contract allows, kernels/attention_mma_*.cu where tensor
//! cores can.

use crate::argument::{TensorArg, blocks, kernel_for};
use crate::device::{Gpu, Launch, Parameters, Tables};
use retape_core::kernel::{self, AttentionGradInputs, AttentionInputs, RandomStream};
use retape_core::{DType, Error, Result, Tensor};

/// Queries or keys of a tile of the SIMT kernels, and their threads.
const TILE: usize = 64;
const THREADS: u32 = 256;
/// Threads of the mma kernels.
const MMA_THREADS: u32 = 128;

#[derive(Clone, Copy)]
#[repr(C)]
struct Attention {
    q: TensorArg,
    k: TensorArg,
    v: TensorArg,
    mask: TensorArg,
    out: TensorArg,
    g: TensorArg,
    stats: TensorArg,
    delta: TensorArg,
    dq: TensorArg,
    dk: TensorArg,
    dv: TensorArg,
    dmask: TensorArg,
    cumulative_q: u64,
    cumulative_k: u64,
    sequences: i64,
    longest_q: i64,
    longest_k: i64,
    stream: [u64; 2],
    threshold: u64,
    scale: f64,
    keep: f64,
    window: i64,
    causal: i32,
    drops: i32,
    aligned: i32,
}
// SAFETY: the fields of `Attention` in kernels/attention.cuh.
unsafe impl Parameters for Attention {}

#[derive(Clone, Copy)]
#[repr(C)]
struct Delta {
    out: TensorArg,
    g: TensorArg,
    delta: TensorArg,
    packed: i32,
}
// SAFETY: the fields of `AttentionDelta` in kernels/attention_simt.cu.
unsafe impl Parameters for Delta {}

/// One call of a kernel in the making.
struct Call<'a> {
    gpu: &'a Gpu,
    name: &'static str,
    inputs: AttentionInputs<'a>,
    parameters: Attention,
    /// Whether all operands but the mask and the statistics have one dtype.
    uniform: bool,
    /// The bounds of sequences, kept until the launches are queued.
    _tables: Option<Tables<'a, 2>>,
}

impl<'a> Call<'a> {
    fn new(gpu: &'a Gpu, name: &'static str, inputs: AttentionInputs<'a>) -> Result<Call<'a>> {
        let AttentionInputs { q, k, v, mask, sequences, spec } = inputs;
        let absent = TensorArg::ABSENT;
        let RandomStream { seed, counter } = spec.stream;
        // Times are 32-bit numbers in the kernels, with room to add a window and a tile.
        const LONGEST: usize = 1 << 29;
        if q.shape()[1].max(k.shape()[1]) > LONGEST {
            let reason = format!("sequences of more than {LONGEST} times");
            return Err(Error::Unsupported { kernel: name, device: gpu.name().into(), reason });
        }
        let mut parameters = Attention {
            q: absent,
            k: absent,
            v: absent,
            mask: TensorArg::optional(gpu, name, mask)?,
            out: absent,
            g: absent,
            stats: absent,
            delta: absent,
            dq: absent,
            dk: absent,
            dv: absent,
            dmask: absent,
            cumulative_q: 0,
            cumulative_k: 0,
            sequences: q.shape()[0] as i64,
            longest_q: q.shape()[1] as i64,
            longest_k: k.shape()[1] as i64,
            stream: [seed, counter],
            threshold: RandomStream::threshold(spec.dropout),
            scale: spec.scale,
            keep: 1.0 / (1.0 - spec.dropout),
            // One that hides nothing is none.
            window: spec.window.filter(|&window| window < k.shape()[1]).map_or(-1, |window| window as i64),
            causal: spec.causal.into(),
            drops: (spec.dropout > 0.0).into(),
            aligned: 0,
        };
        let mut tables = None;
        if let Some(sequences) = sequences {
            let table = |bounds: &[usize]| bounds.iter().map(|&bound| bound as i32).collect::<Vec<_>>();
            let longest = |bounds: &[usize]| bounds.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0) as i64;
            let both = gpu.tables([&table(sequences.queries), &table(sequences.keys)])?;
            [parameters.cumulative_q, parameters.cumulative_k] = both.addresses;
            tables = Some(both);
            parameters.sequences = sequences.queries.len() as i64 - 1;
            parameters.longest_q = longest(sequences.queries);
            parameters.longest_k = longest(sequences.keys);
        }
        let mut call = Call { gpu, name, inputs, parameters, uniform: true, _tables: tables };
        for (bit, tensor) in [(0, q), (1, k), (2, v)] {
            call.rows(bit, tensor, |p| [&mut p.q, &mut p.k, &mut p.v][bit])?;
        }
        Ok(call)
    }

    fn of_gradient(gpu: &'a Gpu, name: &'static str, inputs: AttentionGradInputs<'a>) -> Result<Call<'a>> {
        let mut call = Call::new(gpu, name, inputs.forward)?;
        call.rows(3, inputs.g, |p| &mut p.g)?;
        call.parameters.stats = TensorArg::plain(gpu, name, inputs.stats)?;
        call.parameters.delta = TensorArg::plain(gpu, name, inputs.delta)?;
        Ok(call)
    }

    /// Adds an operand `[batch, time, heads, head size]`; `bit` is that of its `ALIGNED_` constant.
    fn rows(
        &mut self,
        bit: usize,
        tensor: &Tensor,
        field: impl FnOnce(&mut Attention) -> &mut TensorArg,
    ) -> Result<()> {
        let arg = TensorArg::plain(self.gpu, self.name, tensor)?;
        self.parameters.aligned |= i32::from(is_aligned(&arg)) << bit;
        *field(&mut self.parameters) = arg;
        self.uniform &= tensor.dtype() == self.inputs.q.dtype();
        Ok(())
    }

    fn launch(&self, kernel: &str, blocks: usize, block: u32, shared: usize) -> Result<()> {
        let grid = u32::try_from(blocks).ok().filter(|&n| n < 1 << 31).ok_or_else(|| Error::Unsupported {
            kernel: self.name,
            device: self.gpu.name().into(),
            reason: format!("{blocks} blocks are more than a launch can have"),
        })?;
        self.gpu.launch(Launch { kernel, grid: [grid, 1, 1], block, shared: shared as u32 }, &self.parameters)
    }

    /// The mma kernels that can make this call, if any.
    fn mma(&self) -> Option<Mma> {
        let AttentionInputs { q, v, mask, spec, .. } = self.inputs;
        let dtype = match q.dtype() {
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            _ => return None,
        };
        let size = q.shape()[3].max(v.shape()[3]);
        let padded = [32, 64, 128, 256].into_iter().find(|&padded| size <= padded)?;
        self.uniform.then_some(Mma { dtype, padded, extra: mask.is_some() || spec.dropout > 0.0 })
    }

    /// Launches an mma kernel that takes `tile` rows a block, of this many, unless the device lacks the shared memory.
    /// Returns false then.
    fn launch_mma(
        &self,
        mma: &Mma,
        base: &str,
        (rows, tile, heads): (usize, usize, usize),
        shared: usize,
    ) -> Result<bool> {
        if shared > self.gpu.properties().shared as usize {
            return Ok(false);
        }
        let kernel = format!("{base}_{}_{}{}", mma.dtype, mma.padded, if mma.extra { "_extra" } else { "" });
        self.launch(&kernel, rows.div_ceil(tile) * heads * self.sequences(), MMA_THREADS, shared)?;
        Ok(true)
    }

    /// Launches the SIMT kernel with these many blocks.
    fn simt(&self, blocks: usize) -> Result<()> {
        let element = if self.inputs.q.dtype() == DType::F64 { 8 } else { 4 };
        // `OPERANDS` and the weights in kernels/attention_simt.cu.
        let shared = (2 * TILE * 33 + TILE * (TILE + 1)) * element;
        self.launch(&kernel_for(self.name, self.inputs.q), blocks, THREADS, shared)
    }

    /// Tiles of columns that the SIMT kernels split a result of this head size into.
    fn column_blocks(&self, size: usize) -> usize {
        let chunks = if self.inputs.q.dtype() == DType::F64 { 1 } else { 2 };
        size.div_ceil(chunks * TILE)
    }

    fn sequences(&self) -> usize {
        self.parameters.sequences as usize
    }
    fn longest_q(&self) -> usize {
        self.parameters.longest_q as usize
    }
    fn longest_k(&self) -> usize {
        self.parameters.longest_k as usize
    }
}

/// The instantiation of an mma kernel, and its tiles: those in the tables of kernels/attention_mma_*.cu.
struct Mma {
    dtype: &'static str,
    /// The head size that it has in shared memory.
    padded: usize,
    /// Takes a mask or drops weights.
    extra: bool,
}

impl Mma {
    /// Queries and keys of a tile of the forward kernel.
    fn forward(&self) -> (usize, usize) {
        (if self.extra || self.padded == 256 { 64 } else { 128 }, if self.padded <= 64 { 64 } else { 32 })
    }
    /// Of dq's.
    fn grad_q(&self) -> (usize, usize) {
        (64, if self.padded <= 64 { 64 } else { 32 })
    }
    /// Of the kernel for dk and dv.
    fn grad_kv(&self) -> (usize, usize) {
        match (self.padded, self.extra) {
            (32 | 64, false) => (64, 64),
            (32 | 64, true) | (128 | 256, false) => (32, 64),
            _ => (16, 64),
        }
    }
    /// Bytes of `rows` rows in shared memory.
    fn rows(&self, rows: usize) -> usize {
        rows * self.padded * 2
    }
}

/// True where rows of a tensor `[batch, time, heads, head size]` can be copied 8 elements at a time.
fn is_aligned(arg: &TensorArg) -> bool {
    let rows = (0..3).all(|d| arg.shape[d] <= 1 || arg.strides[d] % 8 == 0);
    arg.data.is_multiple_of(16) && rows && (arg.strides[3] == 1 || arg.shape[3] <= 1)
}

pub(crate) fn attention(gpu: &Gpu, k: &kernel::Attention<'_>) -> Result<()> {
    let mut call = Call::new(gpu, "attention", k.inputs)?;
    call.rows(4, k.out, |p| &mut p.out)?;
    call.parameters.stats = TensorArg::plain(gpu, call.name, k.stats)?;
    let heads = k.inputs.q.shape()[2];
    if let Some(mma) = call.mma() {
        let (queries, keys) = mma.forward();
        let shared = mma.rows(queries + 4 * keys);
        if call.launch_mma(&mma, "attention", (call.longest_q(), queries, heads), shared)? {
            return Ok(());
        }
    }
    let columns = call.column_blocks(k.inputs.v.shape()[3]).max(1);
    call.simt(call.longest_q().div_ceil(TILE) * columns * heads * call.sequences())
}

/// delta `[batch, heads, Tq]` = sum over the head size of g o.
pub(crate) fn attention_delta(gpu: &Gpu, k: &kernel::AttentionDelta<'_>) -> Result<()> {
    let name = "attention_delta";
    let [out, g] = [TensorArg::plain(gpu, name, k.o)?, TensorArg::plain(gpu, name, k.g)?];
    let packed = (is_aligned(&out) && is_aligned(&g)).into();
    let parameters = Delta { out, g, delta: TensorArg::plain(gpu, name, k.delta)?, packed };
    let grid = blocks(k.delta.len(), THREADS as usize / 32);
    gpu.launch(Launch { kernel: &kernel_for(name, k.o), grid, block: THREADS, shared: 0 }, &parameters)
}

pub(crate) fn attention_grad_kv(gpu: &Gpu, k: &kernel::AttentionGradKv<'_>) -> Result<()> {
    let mut call = Call::of_gradient(gpu, "attention_grad_kv", k.inputs)?;
    call.rows(6, k.dk, |p| &mut p.dk)?;
    call.rows(7, k.dv, |p| &mut p.dv)?;
    let heads = k.dk.shape()[2];
    if let Some(mma) = call.mma() {
        let (queries, keys) = mma.grad_kv();
        // Two times stats and delta besides.
        let shared = mma.rows(2 * keys + 4 * queries) + 6 * queries * size_of::<f32>();
        let blocks = (call.longest_k(), keys, heads);
        // Where the results of both would not fit the registers, each has a kernel.
        let kernels: &[&str] =
            if mma.padded == 256 { &["attention_grad_k", "attention_grad_v"] } else { &["attention_grad_kv"] };
        let mut done = true;
        for kernel in kernels {
            done &= call.launch_mma(&mma, kernel, blocks, shared)?;
        }
        if done {
            return Ok(());
        }
    }
    let columns = call.column_blocks(k.dk.shape()[3].max(k.dv.shape()[3]));
    call.simt(call.longest_k().div_ceil(TILE) * columns * heads * call.sequences())
}

pub(crate) fn attention_grad_q(gpu: &Gpu, k: &kernel::AttentionGradQ<'_>) -> Result<()> {
    let mut call = Call::of_gradient(gpu, "attention_grad_q", k.inputs)?;
    call.rows(5, k.dq, |p| &mut p.dq)?;
    let heads = k.dq.shape()[2];
    if let Some(mma) = call.mma() {
        let (queries, keys) = mma.grad_q();
        let shared = mma.rows(2 * queries + 4 * keys);
        if call.launch_mma(&mma, "attention_grad_q", (call.longest_q(), queries, heads), shared)? {
            return Ok(());
        }
    }
    let columns = call.column_blocks(k.dq.shape()[3]);
    call.simt(call.longest_q().div_ceil(TILE) * columns * heads * call.sequences())
}

pub(crate) fn attention_grad_mask(gpu: &Gpu, k: &kernel::AttentionGradMask<'_>) -> Result<()> {
    let mut call = Call::of_gradient(gpu, "attention_grad_mask", k.inputs)?;
    call.parameters.dmask = TensorArg::plain(gpu, call.name, k.dmask)?;
    let shape = k.dmask.shape();
    call.simt(shape[3].div_ceil(TILE) * shape[2].div_ceil(TILE) * shape[0] * shape[1])
}
