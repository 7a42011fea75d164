use super::rule;
use crate::{Rule, RuleSet};
use retape_core::{Mark, Role};

/// Recomputes all inside feed-forward networks, from their input: the hidden activations before and after the
/// non-linearity, gates, dropout. The input and the network's output stay unmarked.
pub fn selective_ffn() -> RuleSet {
    RuleSet::preset("selective_ffn", rules()).looking_for("selective_ffn", LOOKS_FOR, ADVICE)
}

pub(super) const LOOKS_FOR: &str = "what lies inside scopes of role feed_forward";
pub(super) const ADVICE: &str = "give feed-forward networks this role: `scope(\"mlp\").role(Role::FeedForward)`";

pub(super) fn rules() -> [Rule; 1] {
    [rule("**", Mark::Recompute).role(Role::FeedForward)]
}
