//! The CUDA backend of retape.
//!
//! [`device`] opens a GPU. The kernels are the project's own, in `kernels/` at the root of the repository, one `.cu` file for
//! each family, and each family has a module here, of the same name, that lays out its launches. `device.rs` alone calls the
//! driver. [`retape_core::Kernel`] says what each kernel computes; docs/cuda.md how, and which aren't here.
//!
//! A call of a kernel only queues it: errors of the device itself come with a later call, at the latest when something is
//! read back.

mod argument;
mod copy;
mod cublas;
mod device;
mod kernels;
mod matmul;
mod optimizer;
mod quantize;
mod random;

use cublas::CublasLt;
use device::Gpu;
use retape_core::{Backend, Buffer, Device, Error, Kernel, Result};
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

/// What [`device_with`] may be told.
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

impl Backend for Cuda {
    fn name(&self) -> String {
        self.gpu.name().into()
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer { address: self.gpu.allocate(bytes)?, bytes })
    }

    fn release(&self, buffer: Buffer) {
        self.gpu.release(buffer.address)
    }

    fn upload(&self, buffer: &Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.gpu.upload(range("upload", buffer, offset, bytes.len())?, bytes)
    }

    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.gpu.download(range("download", buffer, offset, bytes.len())?, bytes)
    }

    fn run(&self, kernel: &Kernel<'_>) -> Result<()> {
        let gpu = &self.gpu;
        match *kernel {
            Kernel::Fill { value, out } => copy::fill(gpu, value, out),
            Kernel::Copy { x, out } => copy::copy(gpu, x, out),
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
            _ => Err(Error::Unsupported {
                kernel: kernel.name(),
                device: self.name(),
                reason: "there is no CUDA kernel for it; run this op on the cpu device".into(),
            }),
        }
    }

    fn scratch_bytes(&self) -> u64 {
        self.cublas.scratch_bytes()
    }
}

/// The address of `bytes` bytes at `offset`, which lie in the buffer.
fn range(what: &'static str, buffer: &Buffer, offset: usize, bytes: usize) -> Result<usize> {
    if offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes) {
        return Ok(buffer.address + offset);
    }
    Err(Error::InvalidTensor {
        what,
        reason: format!("{bytes} bytes at {offset} are not inside a buffer of {} bytes", buffer.bytes),
    })
}
