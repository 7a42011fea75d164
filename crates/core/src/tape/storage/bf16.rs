//! Storing a value as bf16: the upper half of f32, rounded to nearest even.
//!
//! Eight bits of a significand are kept, so what comes back of an element x is within |x| 2^-8 of it (half a unit in
//! the last of 8 places). Below the smallest normal number, 2^-126, it is within 2^-134, half the distance of subnormal
//! ones.
//! An element that rounds to 2^128 or beyond has no such number: from 3.396e38 on, where the largest is 3.390e38.

use super::{PackedParts, StorageFormat};
use crate::kernel::{self, RandomStream, ReduceFn};
use crate::layout::Shape;
use crate::ops::{Exec, Spec};
use crate::{DType, Error, Result, Tensor};
use smallvec::smallvec;

/// The least magnitude that rounds to infinity: half a step above the largest bf16 number, 2^128 - 2^120.
const BEYOND: f64 =
    340_282_366_920_938_463_463_374_607_431_768_211_456.0 - 664_613_997_892_457_936_451_903_530_140_172_288.0;

/// Two bytes an element. A value that is of 16 bits already is stored as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bf16;

impl StorageFormat for Bf16 {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn about(&self) -> &'static str {
        "saved as bf16"
    }

    fn skip_lint(&self) -> &'static str {
        "bf16-skipped"
    }

    fn is_lossy(&self) -> bool {
        true
    }

    fn bytes(&self, spec: &Spec) -> Option<u64> {
        let bytes = Spec::new(spec.shape.clone(), DType::BF16).bytes();
        (spec.dtype.size() > DType::BF16.size()).then_some(bytes)
    }

    fn pack(&self, exec: &Exec<'_>, tensor: &Tensor, _stream: Option<RandomStream>) -> Result<PackedParts> {
        let shape: Shape = tensor.shape().iter().map(|_| 1).collect();
        let largest = exec.workspace(&shape, tensor.dtype().computed_in())?;
        exec.run(kernel::Reduce { f: ReduceFn::Norm { ord: f64::INFINITY }, x: tensor, out: &largest })?;
        // A NaN is no less than anything.
        let holds = !largest.device().computes() || number(&largest)? < BEYOND;
        if !holds {
            return Err(Error::NonFinite { path: String::new(), op: "", format: self.name() });
        }
        let half = exec.empty(tensor.shape(), DType::BF16)?;
        exec.run(kernel::Copy { x: tensor, out: &half })?;
        Ok(smallvec![half])
    }

    fn unpack(&self, exec: &Exec<'_>, parts: &[Tensor], spec: &Spec) -> Result<Tensor> {
        let out = exec.empty_like(spec)?;
        exec.run(kernel::Copy { x: &parts[0], out: &out })?;
        Ok(out)
    }

    fn error_bounds(&self, row: &[f64]) -> Vec<f64> {
        row.iter().map(|x| (x.abs() * 2f64.powi(-8)).max(2f64.powi(-134))).collect()
    }
}

/// The f32 or f64 number of a tensor of one. Takes no memory of the device, as a dry run takes none.
fn number(x: &Tensor) -> Result<f64> {
    Ok(match x.dtype() {
        DType::F64 => x.to_vec::<f64>()?[0],
        _ => x.to_vec::<f32>()?[0].into(),
    })
}
