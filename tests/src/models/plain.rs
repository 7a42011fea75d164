use super::Source;
use retape_core::{Result, Role, Tape, Var, scope};

/// A user's own net: gated blocks in closures, with names of their own and no role but a block's.
pub fn loss(tape: &Tape) -> Result<Var> {
    let from = Source::new(tape);
    let mut x = from.linear(from.input(&[32, 20])?, 64)?;
    for name in ["below", "middle", "above"] {
        x = x.within(scope(name).role(Role::Block), |x| {
            let gate = from.linear(x.clone(), 64)?.sigmoid()?;
            let y = from.linear(x.clone(), 64)?.tanh()?;
            x + (gate * y)?
        })?;
    }
    from.linear(x, 1)?.square()?.mean()
}
