//! Shared by the benchmarks: inputs on a CPU device.

use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Device, MemoryKind, Result, Tensor};

/// A tensor of normal numbers, a pure function of the seed.
pub fn normal(device: &Device, shape: &[usize], seed: u64) -> Result<Tensor> {
    let out = Tensor::uninit(device, shape, DType::F32, MemoryKind::Input)?;
    device.run(kernel::Normal { stream: RandomStream { seed, counter: 0 }, std: 1.0, out: &out })?;
    Ok(out)
}
