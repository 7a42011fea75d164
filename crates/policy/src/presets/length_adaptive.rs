use super::selective_attention;
use crate::RuleSet;

/// The marks of [`selective_attention`](super::selective_attention()) where the sequence, the last dimension of
/// attention's `[.., time, time]` values, is longer than `threshold`. Shorter ones are kept.
pub fn length_adaptive(threshold: usize) -> RuleSet {
    let rules = selective_attention::rules(&format!(">{threshold}"));
    RuleSet::preset("length_adaptive", rules).looking_for(
        "length_adaptive",
        &format!("{} with more than {threshold} keys", selective_attention::LOOKS_FOR),
        &format!("set threshold below the sequence's length for shorter ones; or {}", selective_attention::ADVICE),
    )
}
