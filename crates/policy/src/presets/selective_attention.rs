use super::rule_of_op;
use crate::{Rule, RuleSet};
use retape_core::{Mark, Role};

/// Recomputes the values of explicit attention that grow with the square of the sequence, from the kept q, k and v
/// (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"). Tiled attention has
/// none.
///
/// They are known by their ops inside scopes of role attention. `softmax`, `dropout`, `scale`, `causal_mask` and
/// `where` (a mask) make scores of scores, of however many dimensions. `matmul` and `add` make projections too, so
/// theirs count from four dimensions on: scores have one for the heads, and a projection `[batch, time, width]` has
/// not. Two other kinds of values have four. Scaled or rotated q and k are cheap to make again. The context is mostly
/// read by nothing but the copy that joins the heads, so it isn't stored, marked or not.
///
/// The scope's output isn't inside: the last projection, its dropout or its sum with a bias stays unmarked.
pub fn selective_attention() -> RuleSet {
    RuleSet::preset("selective_attention", rules("*")).looking_for("selective_attention", LOOKS_FOR, ADVICE)
}

pub(super) const LOOKS_FOR: &str = "scores, softmax and dropout of explicit attention inside scopes of role attention";
pub(super) const ADVICE: &str = "give attention this role: `scope(\"attn\").role(Role::Attention)`; tiled attention \
                                 stores none of these values, so set selective_ffn for a model that has it";

/// The rules, where the last dimension is so.
pub(super) fn rules(last: &str) -> [Rule; 2] {
    let by_op = |op, dims: &[&str]| {
        let rule = rule_of_op("**", op, Mark::Recompute).role(Role::Attention);
        rule.shape(dims.iter().copied()).expect("the dimensions of presets are valid")
    };
    [by_op("{softmax,dropout,scale,causal_mask,where}", &["*", last]), by_op("{matmul,add}", &["*", "*", "*", last])]
}
