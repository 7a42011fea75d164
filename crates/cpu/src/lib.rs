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

use attention_grad::Saved;
use exec::Exec;
use loss::Scores;
use pool::Pool;
use retape_core::{Backend, Buffer, Device, Kernel, Launch, Result, kernel};

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

// SAFETY: the pool gives what was asked for; kernels go through spans, which are as long as their operand's layout reaches.
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
        match *launch.kernel() {
            Kernel::Fill(kernel::Fill { value, out }) => copy::fill(exec, value, out),
            Kernel::Copy(kernel::Copy { x, out }) => copy::copy(exec, x, out),
            Kernel::Unary(kernel::Unary { f, x, out }) => elementwise::unary(exec, f, x, out)?,
            Kernel::UnaryGrad(kernel::UnaryGrad { f, saved, g, out }) => {
                elementwise::unary_grad(exec, f, saved, g, out)?
            }
            Kernel::Binary(kernel::Binary { f, a, b, out }) => elementwise::binary(exec, f, a, b, out)?,
            Kernel::ExtremumGrad(kernel::ExtremumGrad { f, a, b, g, out }) => {
                elementwise::extremum_grad(exec, f, a, b, g, out)?
            }
            Kernel::Ternary(kernel::Ternary { f, a, b, c, out }) => elementwise::ternary(exec, f, [a, b, c], out)?,
            Kernel::ClampGrad(kernel::ClampGrad { by, x, low, high, g, out }) => {
                elementwise::clamp_grad(exec, by, x, (low, high), g, out)?
            }
            Kernel::Select(kernel::Select { cond, a, b, out }) => elementwise::select(exec, cond, a, b, out)?,
            Kernel::Reduce(kernel::Reduce { f, x, out }) => reduce::reduce(exec, f, x, out)?,
            Kernel::ReduceGrad(kernel::ReduceGrad { f, x, y, g, out }) => groups::reduce_grad(exec, f, (x, y), g, out)?,
            Kernel::MaxIndex(kernel::MaxIndex { x, dim, values, indices }) => {
                groups::max_index(exec, x, dim, values, indices)?
            }
            Kernel::MaxIndexGrad(kernel::MaxIndexGrad { indices, g, dim, out }) => {
                groups::max_index_grad(exec, indices, g, dim, out)?
            }
            Kernel::Scan(kernel::Scan { f, x, dim, out }) => scan::scan(exec, f, x, dim, out)?,
            Kernel::CumprodGrad(kernel::CumprodGrad { x, g, dim, out }) => scan::cumprod_grad(exec, x, g, dim, out)?,
            Kernel::LogSoftmax(kernel::LogSoftmax { x, out }) => softmax::log_softmax(exec, x, out)?,
            Kernel::LogSoftmaxGrad(kernel::LogSoftmaxGrad { y, g, out }) => softmax::log_softmax_grad(exec, y, g, out)?,
            Kernel::SquaredNorm(kernel::SquaredNorm { x, out }) => reduce::squared_norm(exec, x, out)?,
            Kernel::Matmul(kernel::Matmul { a, b, alpha, accumulate, out }) => {
                gemm::matmul(exec, a, b, alpha, accumulate, out)?
            }
            Kernel::Softmax(kernel::Softmax { x, out }) => softmax::softmax(exec, x, out)?,
            Kernel::SoftmaxGrad(kernel::SoftmaxGrad { y, g, out }) => softmax::softmax_grad(exec, y, g, out)?,
            Kernel::Triangle(kernel::Triangle { x, upper, diagonal, value, out }) => {
                softmax::triangle(exec, x, (upper, diagonal), value, out)?
            }
            Kernel::Flip(kernel::Flip { x, dims, out }) => indexing::flip(exec, x, dims, out),
            Kernel::Gather(kernel::Gather { x, indices, wrap, out }) => indexing::gather(exec, x, indices, wrap, out)?,
            Kernel::ScatterAdd(kernel::ScatterAdd { source, indices, wrap, alpha, order, out }) => {
                indexing::scatter_add(exec, (source, alpha), (indices, wrap), order, out)?
            }
            Kernel::LayerNorm(kernel::LayerNorm { x, weight, bias, eps, out, mean, rstd }) => {
                norm::layer_norm(exec, norm::LayerNorm { x, weight, bias, eps, out, mean, rstd })?
            }
            Kernel::LayerNormGrad(kernel::LayerNormGrad { x, weight, mean, rstd, g, out }) => {
                norm::layer_norm_grad(exec, x, weight, (mean, rstd), g, out)?
            }
            Kernel::LayerNormParamGrad(kernel::LayerNormParamGrad { x, mean, rstd, g, dweight, dbias }) => {
                norm::layer_norm_param_grad(exec, x, (mean, rstd), g, dweight, dbias)?
            }
            Kernel::Embedding(kernel::Embedding { table, ids, out }) => embedding::embedding(exec, table, ids, out)?,
            Kernel::EmbeddingGrad(kernel::EmbeddingGrad { ids, g, order, out }) => {
                embedding::embedding_grad(exec, ids, g, order, out)?
            }
            Kernel::Loss(kernel::Loss { f, x, target, weight, out }) => {
                pointwise_loss::loss(exec, f, (x, target, weight), out)?
            }
            Kernel::LossGrad(kernel::LossGrad { f, by, x, target, weight, g, out }) => {
                pointwise_loss::loss_grad(exec, f, by, (x, target, weight), g, out)?
            }
            Kernel::CrossEntropy(kernel::CrossEntropy {
                scores: kernel::ClassScores { logits, target, weight, spec },
                loss,
                stats,
            }) => loss::cross_entropy(exec, Scores { logits, target, weight, spec }, loss, stats)?,
            Kernel::CrossEntropyGrad(kernel::CrossEntropyGrad {
                scores: kernel::ClassScores { logits, target, weight, spec },
                stats,
                g,
                out,
            }) => loss::cross_entropy_grad(exec, Scores { logits, target, weight, spec }, stats, g, out)?,
            Kernel::NllLossGrad(kernel::NllLossGrad { target, weight, g, spec, out }) => {
                loss::nll_loss_grad(exec, Scores { logits: out, target, weight, spec }, g, out)?
            }
            Kernel::CrossEntropyTargetGrad(kernel::CrossEntropyTargetGrad { logits, weight, stats, g, spec, out }) => {
                loss::target_grad(exec, Scores { logits, target: logits, weight, spec }, stats, g, out)?
            }
            Kernel::CrossEntropyWeightGrad(kernel::CrossEntropyWeightGrad {
                scores: kernel::ClassScores { logits, target, weight, spec },
                stats,
                g,
                out,
            }) => loss::weight_grad(Scores { logits, target, weight, spec }, stats, g, out)?,
            Kernel::Im2col(kernel::Im2col { x, window, out }) => window::im2col(exec, x, window, out)?,
            Kernel::Col2im(kernel::Col2im { cols, window, out }) => window::col2im(exec, cols, window, out)?,
            Kernel::MaxPool(kernel::MaxPool { x, window, out, index }) => {
                window::max_pool(exec, x, window, out, index)?
            }
            Kernel::MaxPoolGrad(kernel::MaxPoolGrad { index, g, window, out }) => {
                window::max_pool_grad(exec, index, g, window, out)?
            }
            Kernel::AvgPool(kernel::AvgPool { x, window, divisor, out }) => {
                window::avg_pool(exec, x, (window, divisor), out)?
            }
            Kernel::AvgPoolGrad(kernel::AvgPoolGrad { g, window, divisor, out }) => {
                window::avg_pool_grad(exec, g, (window, divisor), out)?
            }
            Kernel::Attention(kernel::Attention {
                inputs: kernel::AttentionInputs { q, k, v, mask, sequences, spec },
                out,
                stats,
            }) => attention::attention(exec, (q, k, v), mask, (spec, sequences), out, stats)?,
            Kernel::AttentionDelta(kernel::AttentionDelta { o, g, delta }) => {
                attention::attention_delta(exec, o, g, delta)?
            }
            Kernel::AttentionGradKv(kernel::AttentionGradKv {
                inputs:
                    kernel::AttentionGradInputs {
                        forward: kernel::AttentionInputs { q, k, v, mask, sequences, spec },
                        g,
                        stats,
                        delta,
                    },
                dk,
                dv,
            }) => attention_grad::attention_grad_kv(
                exec,
                Saved { q, k, v, mask, sequences, g, stats, delta, spec },
                dk,
                dv,
            )?,
            Kernel::AttentionGradQ(kernel::AttentionGradQ {
                inputs:
                    kernel::AttentionGradInputs {
                        forward: kernel::AttentionInputs { q, k, v, mask, sequences, spec },
                        g,
                        stats,
                        delta,
                    },
                dq,
            }) => {
                attention_grad::attention_grad_q(exec, Saved { q, k, v, mask, sequences, g, stats, delta, spec }, dq)?
            }
            Kernel::AttentionGradMask(kernel::AttentionGradMask {
                inputs:
                    kernel::AttentionGradInputs {
                        forward: kernel::AttentionInputs { q, k, v, mask, sequences, spec },
                        g,
                        stats,
                        delta,
                    },
                dmask,
            }) => attention_grad::attention_grad_mask(
                exec,
                Saved { q, k, v, mask, sequences, g, stats, delta, spec },
                dmask,
            )?,
            Kernel::Quantize(kernel::Quantize { x, group, rounding, q, scales }) => {
                quantize::quantize(exec, x, (group, rounding), q, scales)?
            }
            Kernel::Dequantize(kernel::Dequantize { q, scales, group, out }) => {
                quantize::dequantize(exec, q, scales, group, out)?
            }
            Kernel::Uniform(kernel::Uniform { stream, out }) => random::uniform(exec, stream, out)?,
            Kernel::Normal(kernel::Normal { stream, std, out }) => random::normal(exec, stream, std, out)?,
            Kernel::Dropout(kernel::Dropout { x, p, stream, out }) => random::dropout(exec, x, p, stream, out)?,
            Kernel::AdamW(kernel::AdamW { p, g, m, v, step, config, grad_scale }) => {
                optimizer::adamw(exec, optimizer::AdamW { p, g, m, v, step, config, grad_scale })?
            }
        }
        Ok(())
    }

    fn scratch_bytes(&self) -> u64 {
        self.exec.scratch_bytes()
    }
}
