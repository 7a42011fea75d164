use super::rule;
use crate::RuleSet;
use retape_core::Mark;

/// Recomputes all that lies strictly inside a block. Blocks' outputs stay unmarked, so they are kept: backward replays
/// each block from its input, one at a time.
pub fn full_per_layer() -> RuleSet {
    RuleSet::preset("full_per_layer", [rule("**.blocks.*.**", Mark::Recompute)])
}
