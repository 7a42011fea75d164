//! The CUDA backend of retape.
//!
//! [`device`] opens a GPU. The kernels are the project's own, in `kernels/` at the root of the repository, one `.cu` file for
//! each family, and each family has a module here, of the same name, that lays out its launches. `device.rs` alone calls the
//! driver. [`retape_core::Kernel`] says what each kernel computes; docs/cuda.md how, and which aren't here.
//!
//! Matrix products go to NVIDIA's cuBLASLt where its library is found, or where the environment variable `RETAPE_CUBLASLT` names
//! it (`none` goes without).
//!
//! A call of a kernel only queues it: errors of the device itself come with a later call, at the latest when something is
//! read back.

mod argument;
mod attention;
mod copy;
mod cross_entropy;
mod cublas;
mod device;
mod elementwise;
mod embedding;
mod indexing;
mod indices;
mod kernels;
mod map;
mod matmul;
mod norm;
mod numbers;
mod optimizer;
mod pointwise_loss;
mod quantize;
mod random;
mod reduce;
mod rows;
mod scan;
mod softmax;
mod sort;
mod window;

use cross_entropy::Scores;
use cublas::CublasLt;
use device::Gpu;
use norm::Normed;
use retape_core::{Backend, Buffer, Device, Error, Kernel, Launch, Result};
use std::path::PathBuf;

/// The GPU with this number, with the driver and the kernels that are found.
///
/// # Errors
/// [`Error::Device`] where there is no driver, no such GPU, or no kernels for it.
pub fn device(ordinal: usize) -> Result<Device> {
    device_with(ordinal, &Options::default())
}

/// As [`device`], with a driver or kernels of one's own.
pub fn device_with(ordinal: usize, options: &Options) -> Result<Device> {
    Ok(Device::new(Cuda { gpu: Gpu::open(ordinal, options)?, cublas: CublasLt::default() }))
}

/// Options of [`device_with`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The driver's library, instead of `libcuda.so.1` or what the environment variable `RETAPE_CUDA_DRIVER` names. A process
    /// has one driver.
    pub driver: Option<PathBuf>,
    /// A folder with an image `*.fatbin` for each file in `kernels/`, instead of the one that `RETAPE_CUDA_KERNELS` names, or
    /// the images in the crate.
    pub kernels: Option<PathBuf>,
}

/// The CUDA backend.
#[derive(Debug)]
struct Cuda {
    gpu: Gpu,
    cublas: CublasLt,
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.cublas.close(&self.gpu);
    }
}

// SAFETY: the driver gives what was asked for; kernels stay inside what their operand's layout reaches.
unsafe impl Backend for Cuda {
    fn name(&self) -> String {
        self.gpu.name().into()
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let address = self.gpu.allocate(bytes)?;
        // SAFETY: the driver's memory is this buffer's until it is released; any bytes of it are numbers.
        Ok(unsafe { Buffer::new(address, bytes) })
    }

    fn release(&self, buffer: Buffer) {
        self.gpu.release(buffer.address())
    }

    fn upload(&self, buffer: &mut Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.upload(range("upload", buffer, offset, bytes.len())?, bytes)
    }

    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.gpu.download(range("download", buffer, offset, bytes.len())?, bytes)
    }

    fn synchronize(&self) -> Result<()> {
        self.gpu.synchronize()
    }

    fn scratch_bytes(&self) -> u64 {
        self.gpu.workspace_bytes() as u64 + self.gpu.table_bytes() + self.cublas.scratch_bytes()
    }

    fn run(&self, launch: &Launch<'_>) -> Result<()> {
        let gpu = &self.gpu;
        match *launch.kernel() {
            Kernel::Fill { value, out } => copy::fill(gpu, value, out),
            Kernel::Copy { x, out } => copy::copy(gpu, x, out),
            Kernel::Unary { f, x, out } => elementwise::unary(gpu, f, x, out),
            Kernel::UnaryGrad { f, saved, g, out } => elementwise::unary_grad(gpu, f, saved, g, out),
            Kernel::Binary { f, a, b, out } => elementwise::binary(gpu, f, a, b, out),
            Kernel::ExtremumGrad { f, a, b, g, out } => elementwise::extremum_grad(gpu, f, a, b, g, out),
            Kernel::Ternary { f, a, b, c, out } => elementwise::ternary(gpu, f, [a, b, c], out),
            Kernel::ClampGrad { by, x, low, high, g, out } => elementwise::clamp_grad(gpu, by, x, (low, high), g, out),
            Kernel::Select { cond, a, b, out } => elementwise::select(gpu, cond, a, b, out),
            Kernel::Loss { f, x, target, weight, out } => pointwise_loss::loss(gpu, f, (x, target, weight), out),
            Kernel::LossGrad { f, by, x, target, weight, g, out } => {
                pointwise_loss::loss_grad(gpu, f, by, (x, target, weight), g, out)
            }
            Kernel::Attention { q, k, v, mask, sequences, spec, out, stats } => {
                let operands = attention::Operands { q, k, v, mask, spec, sequences };
                attention::attention(gpu, operands, out, stats)
            }
            Kernel::AttentionDelta { o, g, delta } => attention::attention_delta(gpu, o, g, delta),
            Kernel::AttentionGradKv { q, k, v, mask, sequences, g, stats, delta, spec, dk, dv } => {
                let operands = attention::Operands { q, k, v, mask, spec, sequences };
                attention::attention_grad_kv(gpu, operands, attention::Saved { g, stats, delta }, dk, dv)
            }
            Kernel::AttentionGradQ { q, k, v, mask, sequences, g, stats, delta, spec, dq } => {
                let operands = attention::Operands { q, k, v, mask, spec, sequences };
                attention::attention_grad_q(gpu, operands, attention::Saved { g, stats, delta }, dq)
            }
            Kernel::AttentionGradMask { q, k, v, mask, sequences, g, stats, delta, spec, dmask } => {
                let operands = attention::Operands { q, k, v, mask, spec, sequences };
                attention::attention_grad_mask(gpu, operands, attention::Saved { g, stats, delta }, dmask)
            }
            Kernel::Reduce { f, x, out } => reduce::reduce(gpu, f, x, out),
            Kernel::ReduceGrad { f, x, y, g, out } => reduce::reduce_grad(gpu, f, (x, y), g, out),
            Kernel::SquaredNorm { x, out } => reduce::squared_norm(gpu, x, out),
            Kernel::LayerNorm { x, weight, bias, eps, out, mean, rstd } => {
                norm::layer_norm(gpu, Normed { x, weight, mean, rstd }, bias, eps, out)
            }
            Kernel::LayerNormGrad { x, weight, mean, rstd, g, out } => {
                norm::layer_norm_grad(gpu, Normed { x, weight, mean, rstd }, g, out)
            }
            Kernel::LayerNormParamGrad { x, mean, rstd, g, dweight, dbias } => {
                norm::layer_norm_param_grad(gpu, Normed { x, weight: None, mean, rstd }, g, dweight, dbias)
            }
            Kernel::Softmax { x, out } => softmax::softmax(gpu, x, out),
            Kernel::SoftmaxGrad { y, g, out } => softmax::softmax_grad(gpu, y, g, out),
            Kernel::LogSoftmax { x, out } => softmax::log_softmax(gpu, x, out),
            Kernel::LogSoftmaxGrad { y, g, out } => softmax::log_softmax_grad(gpu, y, g, out),
            Kernel::Triangle { x, upper, diagonal, value, out } => {
                softmax::triangle(gpu, x, (upper, diagonal), value, out)
            }
            Kernel::CrossEntropy { logits, target, weight, spec, loss, stats } => {
                cross_entropy::cross_entropy(gpu, Scores { logits, target: Some(target), weight, spec }, loss, stats)
            }
            Kernel::CrossEntropyGrad { logits, target, weight, stats, g, spec, out } => {
                let scores = Scores { logits, target: Some(target), weight, spec };
                cross_entropy::cross_entropy_grad(gpu, scores, stats, g, out)
            }
            Kernel::NllLossGrad { target, weight, g, spec, out } => {
                let scores = Scores { logits: out, target: Some(target), weight, spec };
                cross_entropy::nll_loss_grad(gpu, scores, g, out)
            }
            Kernel::CrossEntropyTargetGrad { logits, weight, stats, g, spec, out } => {
                cross_entropy::target_grad(gpu, Scores { logits, target: None, weight, spec }, stats, g, out)
            }
            Kernel::CrossEntropyWeightGrad { logits, target, weight, stats, g, spec, out } => {
                let scores = Scores { logits, target: Some(target), weight: Some(weight), spec };
                cross_entropy::weight_grad(gpu, scores, stats, g, out)
            }
            Kernel::Embedding { table, ids, out } => embedding::embedding(gpu, table, ids, out),
            Kernel::EmbeddingGrad { ids, g, order, out } => embedding::embedding_grad(gpu, ids, g, order, out),
            Kernel::Gather { x, indices, wrap, out } => indexing::gather(gpu, x, indices, wrap, out),
            Kernel::ScatterAdd { source, indices, wrap, alpha, order, out } => {
                indexing::scatter_add(gpu, (source, alpha), (indices, wrap), order, out)
            }
            Kernel::Flip { x, dims, out } => indexing::flip(gpu, x, dims, out),
            Kernel::MaxIndex { x, dim, values, indices } => indexing::max_index(gpu, x, dim, values, indices),
            Kernel::MaxIndexGrad { indices, g, dim, out } => indexing::max_index_grad(gpu, indices, g, dim, out),
            Kernel::Matmul { a, b, alpha, accumulate, out } => {
                matmul::matmul(gpu, &self.cublas, (a, b), alpha, accumulate, out)
            }
            Kernel::Quantize { x, group, rounding, q, scales } => {
                quantize::quantize(gpu, x, (group, rounding), q, scales)
            }
            Kernel::Dequantize { q, scales, group, out } => quantize::dequantize(gpu, q, scales, group, out),
            Kernel::Uniform { stream, out } => random::uniform(gpu, stream, out),
            Kernel::Normal { stream, std, out } => random::normal(gpu, stream, std, out),
            Kernel::Dropout { x, p, stream, out } => random::dropout(gpu, x, p, stream, out),
            Kernel::AdamW { p, g, m, v, step, config, grad_scale } => {
                optimizer::adamw(gpu, [p, g, m, v], step, config, grad_scale)
            }
            Kernel::Scan { f, x, dim, out } => scan::scan(gpu, f, x, dim, out),
            Kernel::CumprodGrad { x, g, dim, out } => scan::cumprod_grad(gpu, x, g, dim, out),
            Kernel::Im2col { x, window, out } => window::im2col(gpu, x, window, out),
            Kernel::Col2im { cols, window, out } => window::col2im(gpu, cols, window, out),
            Kernel::MaxPool { x, window, out, index } => window::max_pool(gpu, x, window, out, index),
            Kernel::MaxPoolGrad { index, g, window, out } => window::max_pool_grad(gpu, index, g, window, out),
            Kernel::AvgPool { x, window, divisor, out } => window::avg_pool(gpu, x, window, divisor, out),
            Kernel::AvgPoolGrad { g, window, divisor, out } => window::avg_pool_grad(gpu, g, window, divisor, out),
        }
    }
}

/// The address of `bytes` bytes at `offset`, which lie in the buffer.
fn range(what: &'static str, buffer: &Buffer, offset: usize, bytes: usize) -> Result<usize> {
    if offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes()) {
        return Ok(buffer.address() + offset);
    }
    Err(Error::InvalidTensor {
        what,
        reason: format!("{bytes} bytes at {offset} are not inside a buffer of {} bytes", buffer.bytes()),
    })
}
