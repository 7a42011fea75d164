//! Storing a value as int8: symmetric, one scale per group of consecutive elements of the last dimension.
//!
//! With m the largest magnitude of a group, an element x becomes the integer q nearest to 127 x / m, ties to even, and
//! comes back as m q / 127: within m / 254 of x. (Absmax quantization; Dettmers et al. 2022, "8-bit Optimizers via
//! Block-wise Quantization", section 2.) Rounded stochastically, q is the integer below or above, within m / 127, and
//! the mean of many is x. A group of zeros has the scale 0.

use super::{PackedParts, StorageFormat};
use crate::kernel::RandomStream;
use crate::layout::Shape;
use crate::ops::{Exec, Spec};
use crate::{DType, Error, Mark, Result, Tensor, kernel};
use smallvec::smallvec;

/// How a value is stored as int8: symmetric, one scale per `group` consecutive elements of the last dimension. The
/// scale is their largest magnitude: f32, and f64 for f64. Bytes: one per element and four (eight) per group, 1.0625
/// per element at 64. A stored element is within half a step of the true one, or a whole one where it is rounded
/// stochastically; a step is the scale / 127. See [`Quantize`](crate::kernel::Quantize).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Int8Spec {
    /// Elements per scale, at least 1.
    pub group: usize,
    /// How a quotient becomes an integer.
    pub rounding: Rounding,
}

/// Rounding of quantized values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub enum Rounding {
    /// To the nearest integer, ties to even.
    Nearest,
    /// Up with the probability of what would be cut off, else down: the stored value is the true one on average. Seeded
    /// by the tape's seed and the value's number, so that equal tapes store equal bits.
    /// [`Error::Unseeded`](crate::Error) on a tape without a seed.
    Stochastic,
}

impl Int8Spec {
    /// Groups of 64, rounded to nearest.
    pub const DEFAULT: Int8Spec = Int8Spec { group: 64, rounding: Rounding::Nearest };

    /// The scales of a tensor: one for each group of each row.
    fn scales(&self, spec: &Spec) -> Spec {
        let mut shape: Shape = spec.shape.clone();
        match shape.last_mut() {
            Some(last) => *last = last.div_ceil(self.group.max(1)),
            None => shape.push(1),
        }
        Spec::new(shape, spec.dtype.computed_in())
    }
}

impl Default for Int8Spec {
    fn default() -> Int8Spec {
        Int8Spec::DEFAULT
    }
}

impl StorageFormat for Int8Spec {
    fn name(&self) -> &'static str {
        "int8"
    }

    fn about(&self) -> &'static str {
        "saved as int8"
    }

    fn skip_lint(&self) -> &'static str {
        "int8-skipped"
    }

    fn is_lossy(&self) -> bool {
        true
    }

    /// The group is said with any other argument.
    fn arguments(&self) -> Vec<(&'static str, String)> {
        let mut arguments = Vec::new();
        if *self != Int8Spec::DEFAULT {
            arguments.push(("group", self.group.to_string()));
        }
        if self.rounding == Rounding::Stochastic {
            arguments.push(("rounding", "stochastic".into()));
        }
        arguments
    }

    fn with(&self, argument: &str, value: &str) -> Result<Mark, String> {
        match argument {
            "group" => {
                let group = value.parse().ok().filter(|&group| group > 0);
                let group = group.ok_or("write int8:group=N with a whole number N >= 1")?;
                Ok(Mark::Int8(Int8Spec { group, ..*self }))
            }
            "rounding" => {
                let rounding = match value {
                    "nearest" => Rounding::Nearest,
                    "stochastic" => Rounding::Stochastic,
                    _ => return Err("write int8:rounding=nearest or int8:rounding=stochastic".into()),
                };
                Ok(Mark::Int8(Int8Spec { rounding, ..*self }))
            }
            _ => Err("int8 takes group=N and rounding=nearest or rounding=stochastic".into()),
        }
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.group > 0 { Ok(()) } else { Err("a group needs at least 1 element; 64 is usual") }
    }

    fn randomness(&self) -> Option<&'static str> {
        (self.rounding == Rounding::Stochastic).then_some("int8 with stochastic rounding")
    }

    fn bytes(&self, spec: &Spec) -> Option<u64> {
        Some((spec.len() as u64).saturating_add(self.scales(spec).bytes()))
    }

    fn pack(&self, exec: &Exec<'_>, tensor: &Tensor, stream: Option<RandomStream>) -> Result<PackedParts> {
        let rounding = stream.filter(|_| self.randomness().is_some());
        let q = exec.empty(tensor.shape(), DType::U8)?;
        let scales = exec.empty_like(&self.scales(&Spec::of(tensor)))?;
        exec.run(kernel::Quantize { x: tensor, group: self.group, rounding, q: &q, scales: &scales })?;
        if scales.device().computes() && has_nan(&scales)? {
            return Err(Error::NonFinite { path: String::new(), op: "", format: self.name() });
        }
        Ok(smallvec![q, scales])
    }

    fn unpack(&self, exec: &Exec<'_>, parts: &[Tensor], spec: &Spec) -> Result<Tensor> {
        let out = exec.empty_like(spec)?;
        exec.run(kernel::Dequantize { q: &parts[0], scales: &parts[1], group: self.group, out: &out })?;
        Ok(out)
    }

    fn error_bounds(&self, row: &[f64]) -> Vec<f64> {
        let steps = if self.rounding == Rounding::Stochastic { 127.0 } else { 254.0 };
        let groups = row.chunks(self.group.max(1));
        let bounds = groups.map(|group| (group.len(), group.iter().fold(0.0, |m: f64, x| m.max(x.abs())) / steps));
        bounds.flat_map(|(len, bound)| std::iter::repeat_n(bound, len)).collect()
    }
}

/// True where one of these f32 or f64 numbers is NaN. Takes no memory of the device.
fn has_nan(x: &Tensor) -> Result<bool> {
    Ok(match x.dtype() {
        DType::F64 => x.to_vec::<f64>()?.iter().any(|x| x.is_nan()),
        _ => x.to_vec::<f32>()?.iter().any(|x| x.is_nan()),
    })
}
