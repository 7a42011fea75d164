use super::rule;
use crate::RuleSet;
use retape_core::Mark;

/// FLOPs per byte up to which an op counts as bound by memory. Ops on elements and rows stay below: at most some 20
/// FLOPs for an element read and written, 2.5 per byte in f32 and 5 in bf16. Products are above from small models on:
/// attention scores of head size 32 over 256 positions take 12.8 in f32, a linear layer of width 128 over 40. A
/// processor core breaks even near 10.
const MEMORY_BOUND: f64 = 8.0;

/// Recomputes the results of ops that memory bandwidth bounds; those of products and tiled attention stay unmarked.
///
/// Sums are kept. A residual stream is a chain of them through the whole model: to replay its end from its beginning
/// would take every block's last product, and hold all links at once.
pub fn balanced() -> RuleSet {
    let sums = rule("**", Mark::Keep).op("add").expect("the patterns of presets are valid");
    RuleSet::preset("balanced", [sums, rule("**", Mark::Recompute).max_intensity(MEMORY_BOUND)])
}
