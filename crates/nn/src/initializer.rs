//! Fresh parameters, drawn from a seed.

use crate::{Parameter, Result};
use retape_core::kernel::RandomStream;
use retape_core::{DType, Device, Kernel, Kind, Tensor};

/// Makes parameters in a fixed order. The n-th one is drawn from stream n of the seed, so a model's initial numbers are
/// a pure function of its shape and the seed, on every device. On the meta device it only allocates.
#[derive(Debug)]
pub struct Initializer {
    device: Device,
    dtype: DType,
    seed: u64,
    next: u64,
}

impl Initializer {
    /// Parameters of one dtype on one device.
    pub fn new(device: &Device, dtype: DType, seed: u64) -> Initializer {
        Initializer { device: device.clone(), dtype, seed, next: 0 }
    }

    /// Normal numbers of mean 0 and standard deviation `std`. bf16 and f16 are drawn in f32 and rounded.
    pub fn normal(&mut self, name: impl Into<String>, shape: &[usize], std: f64) -> Result<Parameter> {
        let stream = self.stream();
        let drawn = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut tensor = Tensor::uninit(&self.device, shape, drawn, Kind::Parameter)?;
        self.device.run(&Kernel::Normal { stream, std, out: &tensor })?;
        if drawn != self.dtype {
            tensor = tensor.cast(self.dtype, Kind::Parameter)?;
        }
        Parameter::new(name, tensor)
    }

    /// All elements `value`.
    pub fn constant(&mut self, name: impl Into<String>, shape: &[usize], value: f64) -> Result<Parameter> {
        self.stream();
        let tensor = Tensor::uninit(&self.device, shape, self.dtype, Kind::Parameter)?;
        self.device.run(&Kernel::Fill { value, out: &tensor })?;
        Parameter::new(name, tensor)
    }

    fn stream(&mut self) -> RandomStream {
        self.next += 1;
        RandomStream { seed: self.seed, counter: self.next - 1 }
    }
}
