use crate::RuleSet;

/// Marks nothing, so that all that backward reads is kept.
pub fn none() -> RuleSet {
    RuleSet::default()
}
