use super::selective_ffn;
use crate::RuleSet;
use retape_core::{Ledger, LedgerEntry, Lint, Role};

/// The marks of [`selective_ffn`](super::selective_ffn()), meant for a model with tiled attention, which saves nothing
/// quadratic. Marks never swap an op: on explicit attention they are the same, and a lint says so.
pub fn flash_ffn() -> RuleSet {
    RuleSet::preset("flash_ffn", selective_ffn::rules())
        .looking_for("flash_ffn", selective_ffn::LOOKS_FOR, selective_ffn::ADVICE)
        .with_lint(explicit_attention)
}

fn explicit_attention(ledger: &Ledger) -> Option<Lint> {
    let explicit = |value: &&LedgerEntry| value.op == "softmax" && value.roles.contains(Role::Attention);
    let softmax = ledger.values.iter().find(explicit)?;
    Some(Lint {
        code: "meant-for-tiled-attention",
        subject: "flash_ffn".to_owned(),
        message: format!(
            "this model has explicit attention (`{}`), whose quadratic values are kept; build it with tiled attention, \
             or use selective",
            softmax.path
        ),
    })
}
