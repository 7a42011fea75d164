use super::rule;
use crate::{Rule, RuleSet};
use retape_core::Mark;

/// Recomputes the hidden activations of the feed-forward network, before and after its non-linearity, from its input.
/// The input (the second layer norm's output) and the network's output stay unmarked.
pub fn selective_ffn() -> RuleSet {
    RuleSet::preset("selective_ffn", rules())
}

pub(super) fn rules() -> [Rule; 1] {
    [rule("**.mlp.{c_fc,gelu*,activation}", Mark::Recompute)]
}
