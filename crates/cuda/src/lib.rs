//! The CUDA backend of retape.
//!
//! [`device`] opens a GPU. The kernels are the project's own, in `kernels/` at the root of the repository, one `.cu`
//! file for each family, and each family has a module here, of the same name, that lays out its launches. `device.rs`
//! alone calls the driver. [`retape_core::Kernel`] says what each kernel computes; docs/cuda.md how, and which aren't
//! here.
//!
//! Matrix products go to NVIDIA's cuBLASLt where its library is found, or where the environment variable
//! `RETAPE_CUBLASLT` names it (`none` goes without).
//!
//! A call of a kernel only queues it: errors of the device itself come with a later call, at the latest when
//! something is read back.

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

use cublas::CublasLt;
use device::Gpu;
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
    /// The driver's library, instead of `libcuda.so.1` or what the environment variable `RETAPE_CUDA_DRIVER` names. A
    /// process has one driver.
    pub driver: Option<PathBuf>,
    /// A folder with an image `*.fatbin` for each file in `kernels/`, instead of the one that `RETAPE_CUDA_KERNELS`
    /// names, or the images in the crate.
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
        match launch.kernel() {
            Kernel::Fill(k) => copy::fill(gpu, k),
            Kernel::Copy(k) => copy::copy(gpu, k),
            Kernel::Unary(k) => elementwise::unary(gpu, k),
            Kernel::UnaryGrad(k) => elementwise::unary_grad(gpu, k),
            Kernel::Binary(k) => elementwise::binary(gpu, k),
            Kernel::ExtremumGrad(k) => elementwise::extremum_grad(gpu, k),
            Kernel::Ternary(k) => elementwise::ternary(gpu, k),
            Kernel::ClampGrad(k) => elementwise::clamp_grad(gpu, k),
            Kernel::Select(k) => elementwise::select(gpu, k),
            Kernel::Loss(k) => pointwise_loss::loss(gpu, k),
            Kernel::LossGrad(k) => pointwise_loss::loss_grad(gpu, k),
            Kernel::Reduce(k) => reduce::reduce(gpu, k),
            Kernel::ReduceGrad(k) => reduce::reduce_grad(gpu, k),
            Kernel::SquaredNorm(k) => reduce::squared_norm(gpu, k),
            Kernel::Scan(k) => scan::scan(gpu, k),
            Kernel::CumprodGrad(k) => scan::cumprod_grad(gpu, k),
            Kernel::Matmul(k) => matmul::matmul(gpu, &self.cublas, k),
            Kernel::Softmax(k) => softmax::softmax(gpu, k),
            Kernel::SoftmaxGrad(k) => softmax::softmax_grad(gpu, k),
            Kernel::LogSoftmax(k) => softmax::log_softmax(gpu, k),
            Kernel::LogSoftmaxGrad(k) => softmax::log_softmax_grad(gpu, k),
            Kernel::Triangle(k) => softmax::triangle(gpu, k),
            Kernel::CrossEntropy(k) => cross_entropy::cross_entropy(gpu, k),
            Kernel::CrossEntropyGrad(k) => cross_entropy::cross_entropy_grad(gpu, k),
            Kernel::NllLossGrad(k) => cross_entropy::nll_loss_grad(gpu, k),
            Kernel::CrossEntropyTargetGrad(k) => cross_entropy::target_grad(gpu, k),
            Kernel::CrossEntropyWeightGrad(k) => cross_entropy::weight_grad(gpu, k),
            Kernel::LayerNorm(k) => norm::layer_norm(gpu, k),
            Kernel::LayerNormGrad(k) => norm::layer_norm_grad(gpu, k),
            Kernel::LayerNormParamGrad(k) => norm::layer_norm_param_grad(gpu, k),
            Kernel::Embedding(k) => embedding::embedding(gpu, k),
            Kernel::EmbeddingGrad(k) => embedding::embedding_grad(gpu, k),
            Kernel::Flip(k) => indexing::flip(gpu, k),
            Kernel::Gather(k) => indexing::gather(gpu, k),
            Kernel::ScatterAdd(k) => indexing::scatter_add(gpu, k),
            Kernel::MaxIndex(k) => indexing::max_index(gpu, k),
            Kernel::MaxIndexGrad(k) => indexing::max_index_grad(gpu, k),
            Kernel::Im2col(k) => window::im2col(gpu, k),
            Kernel::Col2im(k) => window::col2im(gpu, k),
            Kernel::MaxPool(k) => window::max_pool(gpu, k),
            Kernel::MaxPoolGrad(k) => window::max_pool_grad(gpu, k),
            Kernel::AvgPool(k) => window::avg_pool(gpu, k),
            Kernel::AvgPoolGrad(k) => window::avg_pool_grad(gpu, k),
            Kernel::Attention(k) => attention::attention(gpu, k),
            Kernel::AttentionDelta(k) => attention::attention_delta(gpu, k),
            Kernel::AttentionGradKv(k) => attention::attention_grad_kv(gpu, k),
            Kernel::AttentionGradQ(k) => attention::attention_grad_q(gpu, k),
            Kernel::AttentionGradMask(k) => attention::attention_grad_mask(gpu, k),
            Kernel::Quantize(k) => quantize::quantize(gpu, k),
            Kernel::Dequantize(k) => quantize::dequantize(gpu, k),
            Kernel::Uniform(k) => random::uniform(gpu, k),
            Kernel::Normal(k) => random::normal(gpu, k),
            Kernel::Dropout(k) => random::dropout(gpu, k),
            Kernel::AdamW(k) => optimizer::adamw(gpu, k),
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
