use super::selective_attention;
use crate::RuleSet;

/// The marks of [`selective_attention`](super::selective_attention()) where the sequence, the last dimension of
/// attention's `[.., time, time]` values, is longer than `threshold`. Shorter ones are kept.
pub fn length_adaptive(threshold: usize) -> RuleSet {
    let longer = format!(">{threshold}");
    let rules =
        selective_attention::rules().map(|rule| rule.shape(["*", &longer]).expect("a number constrains a dimension"));
    RuleSet::preset("length_adaptive", rules)
}
