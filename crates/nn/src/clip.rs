//! Clipping gradients by their norm (Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
//! networks", 2013).

use crate::{Error, Parameter, Result};
use retape_core::{DType, Gradients, Kernel, Kind, Tensor};

/// The norm of all gradients together, and the factor that brings it to the bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// The L2 norm before clipping; NaN on the meta device.
    pub norm: f64,
    /// min(1, max / norm): what [`AdamW::step`](crate::AdamW::step) multiplies the gradients by. The gradients
    /// themselves stay as they are.
    pub scale: f64,
}

/// The L2 norm of the gradients of `parameters` together, accumulated in f64 in their order, and the factor that makes
/// it at most `max_norm` (infinite: only measure). Parameters without a gradient count 0. A norm that isn't finite is
/// an error that names the first parameter at fault.
pub fn clip_grad_norm(gradients: &Gradients, parameters: &[Parameter], max_norm: f64) -> Result<Clip> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::Optimizer { reason: format!("the gradient norm's bound must be above 0, got {max_norm}") });
    }
    let (mut sum, mut computes) = (0.0, true);
    for parameter in parameters {
        let Some(g) = gradients.parameter(parameter.id()) else { continue };
        let out = Tensor::uninit(g.device(), &[], DType::F64, Kind::Workspace)?;
        g.device().run(&Kernel::SquaredNorm { x: g, out: &out })?;
        computes = g.device().computes();
        if computes {
            let square = out.item()?;
            if !square.is_finite() {
                return Err(Error::NonFiniteNorm { norm: square.sqrt(), parameter: parameter.name().into() });
            }
            sum += square;
        }
    }
    let norm = if computes { f64::sqrt(sum) } else { f64::NAN };
    Ok(Clip { norm, scale: if norm > max_norm { max_norm / norm } else { 1.0 } })
}
