use super::{rule_of_op, selective_attention, selective_ffn};
use crate::RuleSet;
use retape_core::{Mark, Role};

/// Recomputes attention's quadratic values, what is inside the feed-forward networks, and the blocks' norms (their
/// statistics are always kept, which leaves one multiply-add an element). The small projections are kept, and so is a norm
/// that makes the block's output: it is no longer inside.
pub fn selective() -> RuleSet {
    let norms = rule_of_op("**", "{layer_norm,rms_norm,group_norm}", Mark::Recompute).role(Role::Block);
    let rules = selective_attention::rules("*").into_iter().chain(selective_ffn::rules()).chain([norms]);
    RuleSet::preset("selective", rules).looking_for(
        "selective",
        "scopes of the roles attention and feed_forward, and norms inside scopes of role block",
        "give scopes these roles: `scope(\"mlp\").role(Role::FeedForward)`",
    )
}
