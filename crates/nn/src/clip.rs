//! Clipping gradients by their norm (Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
//! networks", 2013).

use crate::{Error, Parameter, Result};
use retape_core::{DType, Gradients, MemoryKind, Tensor, kernel};
use std::collections::HashSet;

/// The norm of all gradients together, and the factor that brings it to the bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// The L2 norm before clipping; NaN on the meta device.
    pub norm: f64,
    /// min(1, max / norm): what [`AdamW::step`](crate::AdamW::step) multiplies the gradients by. The gradients
    /// themselves stay as they are.
    pub scale: f64,
}

/// Below this a sum of squares may lack some that were too small for f64.
const SMALLEST_SUM: f64 = 1e-280;

/// The L2 norm of the gradients of `parameters` together, accumulated in f64 in their order, and the factor that makes
/// it at most `max_norm` (infinite: only measure). A parameter that is listed twice counts once, one without a gradient
/// 0.
///
/// # Errors
/// [`Error::NonFiniteNorm`] where a gradient holds an infinity or NaN, or the norm is beyond f64; it names the first
/// parameter at fault. [`Error::Optimizer`] where `max_norm` isn't above 0, or the factor is too small for f64.
pub fn clip_grad_norm(gradients: &Gradients, parameters: &[Parameter], max_norm: f64) -> Result<Clip> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::Optimizer { reason: format!("the gradient norm's bound must be above 0, got {max_norm}") });
    }
    let mut seen = HashSet::new();
    let given: Vec<(&Parameter, &Tensor)> = (parameters.iter().filter(|p| seen.insert(p.id())))
        .filter_map(|p| Some((p, gradients.parameter(p.id())?)))
        .collect();
    let (mut sum, mut computes) = (0.0, true);
    for (_, g) in &given {
        let out = Tensor::uninit(g.device(), &[], DType::F64, MemoryKind::Workspace)?;
        g.device().run(kernel::SquaredNorm { x: g, out: &out })?;
        computes = g.device().computes();
        if computes {
            sum += out.item()?;
        }
    }
    if !computes {
        return Ok(Clip { norm: f64::NAN, scale: 1.0 });
    }
    let norm = if (SMALLEST_SUM..f64::INFINITY).contains(&sum) { sum.sqrt() } else { scaled_norm(&given)? };
    let scale = if norm > max_norm { max_norm / norm } else { 1.0 };
    if scale == 0.0 {
        let reason = format!("a gradient norm of {norm:e} can't be brought to {max_norm:e}: f64 has no such factor");
        return Err(Error::Optimizer { reason });
    }
    Ok(Clip { norm, scale })
}

/// The norm where squares leave the range of f64: the largest magnitude times the norm of all relative to it.
fn scaled_norm(given: &[(&Parameter, &Tensor)]) -> Result<f64> {
    let mut largest: f64 = 0.0;
    for (parameter, g) in given {
        for x in g.to_f64_vec()? {
            if !x.is_finite() {
                return Err(Error::NonFiniteNorm { norm: x.abs(), parameter: parameter.name().into() });
            }
            largest = largest.max(x.abs());
        }
    }
    let mut sum = 0.0;
    for (parameter, g) in given.iter().filter(|_| largest > 0.0) {
        sum += g.to_f64_vec()?.into_iter().map(|x| (x / largest) * (x / largest)).sum::<f64>();
        let norm = largest * sum.sqrt();
        if !norm.is_finite() {
            return Err(Error::NonFiniteNorm { norm, parameter: parameter.name().into() });
        }
    }
    Ok(largest * sum.sqrt())
}
