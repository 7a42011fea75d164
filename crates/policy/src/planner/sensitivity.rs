//! How much the gradients change where a value is stored by a lossy format.
//!
//! Each kind of value (the same of all blocks) is stored so alone, and the gradients are compared with the exact
//! ones. A plan that stores any value of a kind so counts the error of all of them, and adds up the kinds. That is an
//! estimate: of one batch, and of values that nothing is replayed from. So measure the plan, too
//! ([`Sensitivity::calibrated`]).

use super::graph::{like, spec};
use retape_core::serde_float::Float;
use retape_core::{
    Decision, Device, Gradients, Mark, Origin, Policy, RuleInfo, Site, Tape, TapeOptions, Trace, TraceValue, Var,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The relative error of the gradients that a lossy mark on all values of a kind adds, by kind.
///
/// A kind that the format can't hold has an infinite one, which is text in a file: JSON has no infinity.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sensitivity(BTreeMap<String, f64>);

impl Serialize for Sensitivity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(kind, error)| (kind, Float(*error))))
    }
}

impl<'de> Deserialize<'de> for Sensitivity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sensitivity, D::Error> {
        let kinds = BTreeMap::<String, Float>::deserialize(deserializer)?;
        Ok(Sensitivity(kinds.into_iter().map(|(kind, error)| (kind, error.0)).collect()))
    }
}

impl Sensitivity {
    /// Measures it on a device that computes: `forward` is run there with the mark on every kind of value that
    /// `trace`, the same forward pass, has room for. `tick` is called before each.
    ///
    /// # Errors
    /// Those of `forward` and of backward.
    pub fn measure<E: From<retape_core::Error>>(
        device: &Device,
        trace: &Trace,
        mark: Mark,
        forward: impl Fn(&Tape) -> Result<Var, E>,
        mut tick: impl FnMut(&str),
    ) -> Result<Sensitivity, E> {
        let mut kinds: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let mut read = vec![false; trace.values().len()];
        trace.nodes().iter().flat_map(|n| &n.reads).for_each(|&v| read[v] = true);
        for (value, _) in trace.values().iter().zip(read).filter(|(_, read)| *read) {
            let packs = mark.bytes(&spec(value)).is_some();
            if packs && !value.exact && !value.read_exactly && value.given.is_none() {
                kinds.entry(kind(value)).or_default().push(value.id);
            }
        }
        let gradients = |ids: &[u64]| -> Result<Gradients, E> {
            let policy = MarkOf { ids: ids.to_vec(), mark, rules: [rule()] };
            // One seed for all, so that the mark is all that differs.
            let options = TapeOptions { policy: Some(Rc::new(policy)), seed: Some(0), ..TapeOptions::default() };
            let tape = Tape::with(device, options);
            let loss = forward(&tape)?;
            Ok(tape.backward(&loss)?)
        };
        tick("none");
        let exact = gradients(&[])?;
        let mut errors = BTreeMap::new();
        for (kind, ids) in kinds {
            tick(&kind);
            // A kind that the format can't hold (not all is finite) is never to be stored so.
            let error = match gradients(&ids) {
                Ok(gradients) => gradients.distance(&exact)?,
                Err(_) => f64::INFINITY,
            };
            errors.insert(kind, if error.is_nan() { f64::INFINITY } else { error });
        }
        Ok(Sensitivity(errors))
    }

    /// With every error times `measured / bound`, where a plan's measured error was above its bound; the same else.
    pub fn calibrated(&self, bound: f64, measured: f64) -> Sensitivity {
        let factor = if measured > bound && bound > 0.0 { measured / bound } else { 1.0 };
        Sensitivity(self.0.iter().map(|(kind, error)| (kind.clone(), error * factor)).collect())
    }

    /// The error of a value's kind. One of a kind that wasn't measured counts as the worst that was; `None` where
    /// nothing was.
    pub fn of(&self, value: &TraceValue) -> Option<f64> {
        // No number is no knowledge, and no error is below nothing.
        let known = |e: &f64| if e.is_nan() { f64::INFINITY } else { e.max(0.0) };
        let worst = || self.0.values().map(known).max_by(f64::total_cmp);
        self.0.get(&kind(value)).map(known).or_else(worst)
    }

    /// The kinds with their errors.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(kind, error)| (kind.as_str(), *error))
    }
}

/// From kinds as [`Sensitivity::iter`] gives them: the path with a star for each number, a space, and the op.
impl FromIterator<(String, f64)> for Sensitivity {
    fn from_iter<I: IntoIterator<Item = (String, f64)>>(kinds: I) -> Sensitivity {
        Sensitivity(kinds.into_iter().collect())
    }
}

fn kind(value: &TraceValue) -> String {
    format!("{} {}", like(&value.path), value.op)
}

fn rule() -> RuleInfo {
    RuleInfo { name: "sensitivity".into(), origin: Origin::Preset }
}

/// A mark for some values, by number.
#[derive(Debug)]
struct MarkOf {
    ids: Vec<u64>,
    mark: Mark,
    rules: [RuleInfo; 1],
}

impl Policy for MarkOf {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        let mark = if self.ids.contains(&site.id) { self.mark } else { Mark::Keep };
        Some(Decision { mark, rule: 0 })
    }

    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }
}
