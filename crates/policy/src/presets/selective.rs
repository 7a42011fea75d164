use super::{rule, selective_attention, selective_ffn};
use crate::RuleSet;
use retape_core::Mark;

/// Recomputes attention's quadratic values, the feed-forward network's hidden ones, and the layer norms before both
/// (their statistics are always kept, which leaves one multiply-add an element). The small projections are kept.
pub fn selective() -> RuleSet {
    let norms = rule("**.{ln_1,ln_2}", Mark::Recompute);
    RuleSet::preset("selective", selective_attention::rules().into_iter().chain(selective_ffn::rules()).chain([norms]))
}
