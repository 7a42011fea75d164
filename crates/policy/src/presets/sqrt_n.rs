use super::rule;
use crate::RuleSet;
use retape_core::Mark;
use retape_core::glob::Glob;
use std::fmt::Display;

/// Keeps the output of every `every`-th of the `blocks` blocks and recomputes all else in them, and makes each block a
/// segment, so that a replay through several of them doesn't hold them all (Chen et al. 2016, "Training Deep Nets with
/// Sublinear Memory Cost"). The least memory is with about the square root of `blocks`. No output is kept for 0.
pub fn sqrt_n(every: usize, blocks: usize) -> RuleSet {
    let kept: Vec<_> = (1..=blocks).filter(|count| count.is_multiple_of(every)).map(|count| count - 1).collect();
    // Some thousand numbers to a rule: a pattern can't be of any length.
    let keep = kept.chunks(4096).map(|some| rule(&format!("**.blocks.{{{}}}", join(some)), Mark::Keep));
    let recompute = (kept.len() < blocks).then(|| rule("**.blocks.*", Mark::Recompute));
    let inside = rule("**.blocks.*.**", Mark::Recompute);
    RuleSet::preset("sqrt_n", keep.chain(recompute).chain([inside]))
        .with_segments(Glob::new("**.blocks.*").expect("the patterns of presets are valid"))
        .looking_for(
            "sqrt_n",
            "scopes of role block and what lies inside them",
            "give what the model repeats this role: `scope(\"h.0\").role(Role::Block)`",
        )
}

/// The smallest whole number whose square is at least `n`.
pub(super) fn sqrt_rounded_up(n: usize) -> usize {
    let root = n.isqrt();
    root + usize::from(root * root < n)
}

fn join(items: &[impl Display]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
