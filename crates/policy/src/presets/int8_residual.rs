use super::{rule, rule_of_op};
use crate::RuleSet;
use retape_core::{Int8Spec, Mark, Role};

/// Stores the residual stream as int8: embeddings, blocks' outputs, and the sums inside a block that belong to none of its
/// layers, as the one after attention.
pub fn int8_residual(spec: Int8Spec) -> RuleSet {
    let mark = Mark::Int8(spec);
    let embeddings = rule("**", mark).output_of(Role::Embedding);
    let blocks = rule("**", mark).output_of(Role::Block);
    RuleSet::preset("int8_residual", [embeddings, blocks, rule_of_op("**.blocks.*.*", "add", mark)]).looking_for(
        "int8_residual",
        "outputs of scopes of the roles embedding and block, and sums directly inside blocks",
        "give what the model repeats the role of a block: `scope(\"h.0\").role(Role::Block)`",
    )
}
