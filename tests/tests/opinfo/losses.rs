//! Losses.

use crate::call::{Call, one, wrong};
use retape_core::kernel::{CrossEntropySpec, LossReduction};
use retape_core::{Result, Var};

/// Ops of the golden folder that this family still lacks.
pub const NOT_YET: &[&str] = &[];

/// Calls an op of this family; `None` for one of another.
pub fn call(op: &str, a: &Call) -> Option<Result<Vec<Var>>> {
    run(op, a).transpose()
}

fn run(op: &str, a: &Call) -> Result<Option<Vec<Var>>> {
    let reduction = || match a.text("reduction")? {
        None | Some("mean") => Ok(LossReduction::Mean),
        Some("sum") => Ok(LossReduction::Sum),
        Some("none") => Ok(LossReduction::None),
        Some(other) => Err(wrong("a reduction: none, sum or mean", &other.into())),
    };
    let (x, target) = (|| a.var((0, "input")), || a.var((1, "target")));
    let weight = || a.opt_var((2, "weight"));
    match op {
        "cross_entropy" | "nll_loss" => {
            let spec = CrossEntropySpec {
                ignore: a.int("ignore_index")?.unwrap_or(-100),
                reduction: reduction()?,
                smoothing: a.float("label_smoothing")?.unwrap_or(0.0),
            };
            let (x, weight) = (x()?, weight()?);
            let dim = if x.shape().len() > 1 { 1 } else { 0 };
            match op {
                "nll_loss" => one(x.nll_loss(&target()?, weight.clone(), dim, spec)),
                _ => one(x.cross_entropy_with(&target()?, weight.clone(), dim, spec)),
            }
        }
        "mse_loss" => one(x()?.mse_loss(&target()?, reduction()?)),
        "l1_loss" => one(x()?.l1_loss(&target()?, reduction()?)),
        "smooth_l1_loss" => one(x()?.smooth_l1_loss(&target()?, a.float("beta")?.unwrap_or(1.0), reduction()?)),
        "huber_loss" => one(x()?.huber_loss(&target()?, a.float("delta")?.unwrap_or(1.0), reduction()?)),
        "kl_div" => {
            let log_target = a.flag("log_target")?;
            match a.text("reduction")? {
                Some("batchmean") => one(x()?.kl_div_batchmean(&target()?, log_target)),
                _ => one(x()?.kl_div(&target()?, log_target, reduction()?)),
            }
        }
        "binary_cross_entropy_with_logits" => {
            let (weight, pos_weight) = (weight()?, a.opt_var("pos_weight")?);
            one(x()?.binary_cross_entropy_with_logits(&target()?, weight, pos_weight, reduction()?))
        }
        _ => Ok(None),
    }
}
