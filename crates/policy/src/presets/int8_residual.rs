use super::rule;
use crate::RuleSet;
use retape_core::{Int8Spec, Mark};

/// Stores the residual stream as int8: the embeddings, and each block's sum after attention and output.
pub fn int8_residual(spec: Int8Spec) -> RuleSet {
    let stream = ["**.embed", "**.blocks.*", "**.blocks.*.add"];
    RuleSet::preset("int8_residual", stream.map(|pattern| rule(pattern, Mark::Int8(spec))))
}
