use super::selective_ffn;
use crate::RuleSet;
use crate::glob::{Candidate, Glob};
use retape_core::{Ledger, Lint};

/// The marks of [`selective_ffn`](super::selective_ffn()), meant for a model with tiled attention, which saves nothing
/// quadratic. Marks never swap an op: on explicit attention they are the same, and a lint says so.
pub fn flash_ffn() -> RuleSet {
    RuleSet::preset("flash_ffn", selective_ffn::rules()).with_lint(explicit_attention)
}

fn explicit_attention(ledger: &Ledger) -> Option<Lint> {
    let in_attention = Glob::new("**.attn.**").expect("the patterns of presets are valid");
    let softmax = ledger
        .values
        .iter()
        .find(|value| value.op == "softmax" && in_attention.is_match(&Candidate::new(&value.path)))?;
    Some(Lint {
        code: "meant-for-tiled-attention",
        subject: "flash_ffn".to_owned(),
        message: format!(
            "this model has explicit attention (`{}`), whose quadratic values are kept; build it with tiled attention, or \
             use selective",
            softmax.path
        ),
    })
}
