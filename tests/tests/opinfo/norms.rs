//! Norms, attention and gated units.

use crate::call::{Call, one};
use retape_core::ops::attention::AttentionOptions;
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let weight_and_bias = || Ok((a.opt_var((2, "weight"))?, a.opt_var((3, "bias"))?));
    match op {
        "layer_norm" => {
            let shape = a.sizes((1, "normalized_shape"))?.unwrap_or_default();
            let (weight, bias) = weight_and_bias()?;
            let eps = a.float((4, "eps"))?.unwrap_or(1e-5);
            one(a.var(0)?.layer_norm_over(&shape, weight, bias, eps))
        }
        "rms_norm" => {
            let shape = a.sizes((1, "normalized_shape"))?.unwrap_or_default();
            one(a.var(0)?.rms_norm(&shape, a.opt_var((2, "weight"))?.clone(), a.float((3, "eps"))?))
        }
        "group_norm" => {
            let groups = a.sizes((1, "num_groups"))?.map_or(0, |g| g[0]);
            let (weight, bias) = weight_and_bias()?;
            let eps = a.float((4, "eps"))?.unwrap_or(1e-5);
            one(a.var(0)?.group_norm(groups, weight, bias, eps))
        }
        "normalize" => {
            let (p, eps) = (a.float((1, "p"))?.unwrap_or(2.0), a.float((3, "eps"))?.unwrap_or(1e-12));
            one(a.var(0)?.normalize(p, a.int((2, "dim"))?.unwrap_or(1) as isize, eps))
        }
        "scaled_dot_product_attention" => {
            let options = AttentionOptions {
                scale: a.float((6, "scale"))?,
                causal: a.flag((5, "is_causal"))?,
                window: None,
                dropout: a.float((4, "dropout_p"))?.unwrap_or(0.0),
                grouped: a.flag((7, "enable_gqa"))?,
            };
            let mask = a.opt_var((3, "attn_mask"))?;
            let (q, k, v) = (a.var((0, "query"))?, a.var((1, "key"))?, a.var((2, "value"))?);
            one(q.scaled_dot_product_attention(&k, &v, mask.clone(), options))
        }
        _ => Ok(None),
    }
}
