use super::rule;
use crate::RuleSet;
use retape_core::{Mark, Role};

/// Recomputes all that lies inside a block. Blocks' outputs stay unmarked, so they are kept: backward replays each block
/// from its input, one at a time.
pub fn full_per_layer() -> RuleSet {
    RuleSet::preset("full_per_layer", [rule("**", Mark::Recompute).role(Role::Block)]).looking_for(
        "full_per_layer",
        "what lies inside scopes of role block",
        "give what the model repeats this role: `scope(\"h.0\").role(Role::Block)`",
    )
}
