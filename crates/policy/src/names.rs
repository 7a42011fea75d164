//! The names by which patterns know a value or a scope.

use retape_core::glob::{Candidate, Glob};
use std::cell::OnceCell;

/// What patterns are matched against, made when the first one asks.
pub(crate) struct Names<N> {
    names: N,
    made: OnceCell<Vec<Candidate>>,
}

impl<N: Fn() -> I, I: Iterator<Item = String>> Names<N> {
    pub fn new(names: N) -> Self {
        Names { names, made: OnceCell::new() }
    }

    /// Whether the pattern matches one of them.
    pub fn any(&self, glob: &Glob) -> bool {
        let make = || (self.names)().map(|name| Candidate::new(&name)).collect();
        glob.text() == "**" || self.made.get_or_init(make).iter().any(|name| glob.is_match(name))
    }
}
