//! The CPU backend of retape: SIMD chosen at run time, a thread pool of its own, and a pool of recycled memory.
//!
//! Each module is one family of kernels with its mathematics on top; [`retape_core::Kernel`] says what each computes.
//! Results have the same bits for any number of threads: work is cut by shapes alone and combined in a fixed order.

mod attention;
mod attention_grad;
mod copy;
mod elementwise;
mod embedding;
mod exec;
mod gemm;
mod groups;
mod halves;
mod indexing;
mod loss;
mod math;
mod norm;
mod optimizer;
mod pointwise_loss;
mod pool;
mod quantize;
mod random;
mod reduce;
mod scan;
mod softmax;
mod view;
mod window;

use exec::Exec;
use pool::Pool;
use retape_core::{Backend, Buffer, Device, Kernel, Launch, Result};

/// A CPU device with one thread for each core that the machine offers.
pub fn device() -> Device {
    Device::new(Cpu::default())
}

/// A CPU device with `threads` threads; 0 takes the number that the machine offers.
pub fn device_with_threads(threads: usize) -> Result<Device> {
    Ok(Device::new(Cpu::new(threads)?))
}

/// The CPU backend.
#[derive(Debug)]
pub struct Cpu {
    exec: Exec,
    pool: Pool,
}

impl Cpu {
    /// A backend with its own `threads` threads; 0 takes the number that the machine offers.
    pub fn new(threads: usize) -> Result<Cpu> {
        Ok(Cpu { exec: Exec::new(threads)?, pool: Pool::default() })
    }

    /// Number of threads that kernels run on.
    pub fn threads(&self) -> usize {
        self.exec.thread_count()
    }
}

/// With the number of threads that the machine offers, or on the calling thread alone if no other can be started.
impl Default for Cpu {
    fn default() -> Cpu {
        Cpu { exec: Exec::new(0).unwrap_or_else(|_| Exec::single()), pool: Pool::default() }
    }
}

// SAFETY: the pool gives what was asked for; kernels go through spans, which are as long as their operand's layout
// reaches.
unsafe impl Backend for Cpu {
    fn name(&self) -> String {
        "cpu".into()
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.pool.allocate(bytes)
    }

    fn release(&self, buffer: Buffer) {
        self.pool.release(buffer)
    }

    fn upload(&self, buffer: &mut Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.pool.owns("upload", buffer)?;
        view::host_range("upload", buffer, offset, bytes.len())?.as_mut_slice().copy_from_slice(bytes);
        Ok(())
    }

    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.pool.owns("download", buffer)?;
        bytes.copy_from_slice(view::host_range("download", buffer, offset, bytes.len())?.as_slice());
        Ok(())
    }

    fn run(&self, launch: &Launch<'_>) -> Result<()> {
        let exec = &self.exec;
        match launch.kernel() {
            Kernel::Fill(k) => copy::fill(exec, k),
            Kernel::Copy(k) => copy::copy(exec, k),
            Kernel::Unary(k) => elementwise::unary(exec, k)?,
            Kernel::UnaryGrad(k) => elementwise::unary_grad(exec, k)?,
            Kernel::Binary(k) => elementwise::binary(exec, k)?,
            Kernel::ExtremumGrad(k) => elementwise::extremum_grad(exec, k)?,
            Kernel::Ternary(k) => elementwise::ternary(exec, k)?,
            Kernel::ClampGrad(k) => elementwise::clamp_grad(exec, k)?,
            Kernel::Select(k) => elementwise::select(exec, k)?,
            Kernel::Loss(k) => pointwise_loss::loss(exec, k)?,
            Kernel::LossGrad(k) => pointwise_loss::loss_grad(exec, k)?,
            Kernel::Reduce(k) => reduce::reduce(exec, k)?,
            Kernel::ReduceGrad(k) => groups::reduce_grad(exec, k)?,
            Kernel::SquaredNorm(k) => reduce::squared_norm(exec, k)?,
            Kernel::Scan(k) => scan::scan(exec, k)?,
            Kernel::CumprodGrad(k) => scan::cumprod_grad(exec, k)?,
            Kernel::Matmul(k) => gemm::matmul(exec, k)?,
            Kernel::Softmax(k) => softmax::softmax(exec, k)?,
            Kernel::SoftmaxGrad(k) => softmax::softmax_grad(exec, k)?,
            Kernel::LogSoftmax(k) => softmax::log_softmax(exec, k)?,
            Kernel::LogSoftmaxGrad(k) => softmax::log_softmax_grad(exec, k)?,
            Kernel::Triangle(k) => softmax::triangle(exec, k)?,
            Kernel::CrossEntropy(k) => loss::cross_entropy(exec, k)?,
            Kernel::CrossEntropyGrad(k) => loss::cross_entropy_grad(exec, k)?,
            Kernel::NllLossGrad(k) => loss::nll_loss_grad(exec, k)?,
            Kernel::CrossEntropyTargetGrad(k) => loss::target_grad(exec, k)?,
            Kernel::CrossEntropyWeightGrad(k) => loss::weight_grad(k)?,
            Kernel::LayerNorm(k) => norm::layer_norm(exec, k)?,
            Kernel::LayerNormGrad(k) => norm::layer_norm_grad(exec, k)?,
            Kernel::LayerNormParamGrad(k) => norm::layer_norm_param_grad(exec, k)?,
            Kernel::Embedding(k) => embedding::embedding(exec, k)?,
            Kernel::EmbeddingGrad(k) => embedding::embedding_grad(exec, k)?,
            Kernel::Flip(k) => indexing::flip(exec, k),
            Kernel::Gather(k) => indexing::gather(exec, k)?,
            Kernel::ScatterAdd(k) => indexing::scatter_add(exec, k)?,
            Kernel::MaxIndex(k) => groups::max_index(exec, k)?,
            Kernel::MaxIndexGrad(k) => groups::max_index_grad(exec, k)?,
            Kernel::Im2col(k) => window::im2col(exec, k)?,
            Kernel::Col2im(k) => window::col2im(exec, k)?,
            Kernel::MaxPool(k) => window::max_pool(exec, k)?,
            Kernel::MaxPoolGrad(k) => window::max_pool_grad(exec, k)?,
            Kernel::AvgPool(k) => window::avg_pool(exec, k)?,
            Kernel::AvgPoolGrad(k) => window::avg_pool_grad(exec, k)?,
            Kernel::Attention(k) => attention::attention(exec, k)?,
            Kernel::AttentionDelta(k) => attention::attention_delta(exec, k)?,
            Kernel::AttentionGradKv(k) => attention_grad::attention_grad_kv(exec, k)?,
            Kernel::AttentionGradQ(k) => attention_grad::attention_grad_q(exec, k)?,
            Kernel::AttentionGradMask(k) => attention_grad::attention_grad_mask(exec, k)?,
            Kernel::Quantize(k) => quantize::quantize(exec, k)?,
            Kernel::Dequantize(k) => quantize::dequantize(exec, k)?,
            Kernel::Uniform(k) => random::uniform(exec, k)?,
            Kernel::Normal(k) => random::normal(exec, k)?,
            Kernel::Dropout(k) => random::dropout(exec, k)?,
            Kernel::AdamW(k) => optimizer::adamw(exec, k)?,
        }
        Ok(())
    }

    fn scratch_bytes(&self) -> u64 {
        self.exec.scratch_bytes()
    }
}
