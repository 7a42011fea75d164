use super::rule;
use crate::RuleSet;
use retape_core::{Int8Spec, Mark};

/// Stores every value as int8 that may be. What must stay exact is skipped by the tape.
pub fn int8_all(spec: Int8Spec) -> RuleSet {
    RuleSet::preset("int8_all", [rule("**", Mark::Int8(spec))])
}
