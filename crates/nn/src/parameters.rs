//! The parameters of a model, in order.

use crate::{Error, Parameter, Result};
use retape_core::glob::{Candidate, Glob, shortened};
use std::collections::HashSet;
use std::ops::Deref;

/// The parameters of a model, each once, in the order in which they were made: a slice that also knows their names.
/// What takes `&[Parameter]` takes `&Parameters`.
#[derive(Debug, Clone, Default)]
pub struct Parameters(Vec<Parameter>);

impl Parameters {
    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.iter().find(|p| p.name() == name)
    }

    /// Elements of all together.
    pub fn elements(&self) -> usize {
        self.iter().map(Parameter::len).sum()
    }

    /// Bytes of all together.
    pub fn bytes(&self) -> usize {
        self.iter().map(|p| p.len() * p.dtype().size()).sum()
    }

    /// Lets no gradient be computed for the parameters whose name matches a pattern, and returns how many do. The
    /// pattern is one of policies' rules: `transformer.h.*.attn.**`, `**.bias`.
    ///
    /// # Errors
    /// [`Error::Pattern`] for a pattern that can't be read or matches no name; then it lists near ones.
    pub fn freeze(&self, pattern: &str) -> Result<usize> {
        self.set_requires_grad(pattern, false)
    }

    /// Undoes [`freeze`](Parameters::freeze), in the same way.
    pub fn unfreeze(&self, pattern: &str) -> Result<usize> {
        self.set_requires_grad(pattern, true)
    }

    fn set_requires_grad(&self, pattern: &str, requires_grad: bool) -> Result<usize> {
        let wrong = |reason| Err(Error::Pattern { pattern: shortened(pattern), reason });
        let glob = match Glob::new(pattern) {
            Ok(glob) => glob,
            Err(reason) => return wrong(reason),
        };
        let matching: Vec<&Parameter> = self.iter().filter(|p| glob.is_match(&Candidate::new(p.name()))).collect();
        if matching.is_empty() {
            let near = self.near(pattern);
            return wrong(format!("the pattern `{}` matches no parameter{near}", shortened(pattern)));
        }
        matching.iter().for_each(|p| p.set_requires_grad(requires_grad));
        Ok(matching.len())
    }

    /// The names that have most pairs of letters in common with a pattern, for a message.
    fn near(&self, pattern: &str) -> String {
        let wanted = pairs(pattern);
        let likeness = |name: &str| {
            let has = pairs(name);
            2.0 * has.intersection(&wanted).count() as f64 / (has.len() + wanted.len()).max(1) as f64
        };
        let mut names: Vec<(f64, &str)> = self.iter().map(|p| (likeness(p.name()), p.name())).collect();
        names.sort_by(|a, b| b.0.total_cmp(&a.0));
        let nearest: Vec<String> = names.iter().take(3).map(|(_, name)| format!("`{name}`")).collect();
        if nearest.is_empty() { "; there are none".into() } else { format!("; near ones are {}", nearest.join(", ")) }
    }

    pub(crate) fn push(&mut self, parameter: Parameter) {
        self.0.push(parameter);
    }
}

fn pairs(text: &str) -> HashSet<(char, char)> {
    text.chars().zip(text.chars().skip(1)).collect()
}

impl Deref for Parameters {
    type Target = [Parameter];

    fn deref(&self) -> &[Parameter] {
        &self.0
    }
}

/// Of a parameter that comes several times, as a tied one of two layers, the first stays.
impl FromIterator<Parameter> for Parameters {
    fn from_iter<I: IntoIterator<Item = Parameter>>(parameters: I) -> Parameters {
        let mut seen = HashSet::new();
        Parameters(parameters.into_iter().filter(|p| seen.insert(p.id())).collect())
    }
}

impl IntoIterator for Parameters {
    type Item = Parameter;
    type IntoIter = std::vec::IntoIter<Parameter>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Parameters {
    type Item = &'a Parameter;
    type IntoIter = std::slice::Iter<'a, Parameter>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}
