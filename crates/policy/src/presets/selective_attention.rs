use super::rule;
use crate::{Rule, RuleSet};
use retape_core::Mark;

/// Recomputes the values of explicit attention that grow with the square of the sequence, from the kept q, k and v
/// (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). Tiled attention has none.
pub fn selective_attention() -> RuleSet {
    RuleSet::preset("selective_attention", rules())
}

pub(super) fn rules() -> [Rule; 1] {
    [rule("**.attn.{scores,scale,causal_mask,softmax,dropout}", Mark::Recompute)]
}
