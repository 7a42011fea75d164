//! What fresh parameters hold.

use crate::{Error, Result};
use retape_core::kernel::{self, RandomStream, UnaryFn};
use retape_core::{DType, Device, MemoryKind, Tensor};

/// What a fresh parameter holds. bf16 and f16 are drawn in f32 and rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// Normal numbers of mean 0.
    Normal {
        /// Their standard deviation.
        std: f64,
    },
    /// Numbers spread evenly over [low, high).
    Uniform {
        /// The lowest.
        low: f64,
        /// What all are below, up to rounding.
        high: f64,
    },
    /// This number in every element.
    Constant(f64),
}

impl Init {
    /// Zeros, as for biases.
    pub const ZEROS: Init = Init::Constant(0.0);
    /// Ones, as for the weights of norms.
    pub const ONES: Init = Init::Constant(1.0);

    /// Fails where the settings are out of their range; `path` is the parameter's.
    pub(crate) fn check(self, path: &str, dtype: DType) -> Result<()> {
        let wrong = |reason: String| {
            let reason = format!("parameter `{path}`: {reason}");
            Err(Error::Input { layer: "Builder", reason })
        };
        match self {
            _ if !dtype.is_float() => wrong(format!("its dtype is {dtype}; a parameter needs a float type")),
            Init::Normal { std } if !(std.is_finite() && std >= 0.0) => {
                wrong(format!("std = {std} must be finite and at least 0"))
            }
            Init::Uniform { low, high } if !((high - low).is_finite() && low <= high) => {
                wrong(format!("low = {low} and high = {high} must be finite, and low at most high"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn tensor(self, device: &Device, dtype: DType, shape: &[usize], stream: RandomStream) -> Result<Tensor> {
        let empty = |dtype| Tensor::uninit(device, shape, dtype, MemoryKind::Parameter);
        let drawn = dtype.computed_in();
        let tensor = match self {
            Init::Constant(value) => {
                let out = empty(dtype)?;
                device.run(kernel::Fill { value, out: &out })?;
                return Ok(out);
            }
            Init::Normal { std } => {
                let out = empty(drawn)?;
                device.run(kernel::Normal { stream, std, out: &out })?;
                out
            }
            Init::Uniform { low, high } => {
                let out = empty(drawn)?;
                device.run(kernel::Uniform { stream, out: &out })?;
                device.run(kernel::Unary { f: UnaryFn::Scale(high - low), x: &out, out: &out })?;
                device.run(kernel::Unary { f: UnaryFn::Shift(low), x: &out, out: &out })?;
                out
            }
        };
        if drawn == dtype { Ok(tensor) } else { Ok(tensor.cast(dtype, MemoryKind::Parameter)?) }
    }
}
