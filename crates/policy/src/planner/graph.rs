//! The decisions that a trace leaves open: values whose mark is free, what each takes, and which are alike.
//!
//! Values of repeated blocks that differ in nothing but the block's number form a *class*. The minimum cut decides for
//! classes, so a model of a hundred blocks is solved as one; only where the search mixes plans do blocks differ.

use super::CostModel;
use retape_core::{Int8Spec, Mark, Moment, Phase, Trace, TraceValue};
use std::collections::HashMap;
use std::rc::Rc;

/// What becomes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Choice {
    Keep,
    Recompute,
    Int8,
}

/// A plan in the making: a choice for each item, and whether repeated scopes are segments.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Draft {
    pub choices: Rc<[Choice]>,
    pub segments: bool,
}

/// A value whose mark is free.
#[derive(Debug)]
pub(super) struct Item {
    /// Its number on the tape.
    pub id: u64,
    /// Index into the trace's values.
    pub value: usize,
    pub class: usize,
    pub bytes: u64,
    /// Bytes as int8, where that is allowed.
    pub int8_bytes: Option<u64>,
    /// Relative error that int8 of all values of its class adds to the gradients.
    pub int8_error: f64,
    /// When it is live at the latest because of handles: the last op that is recorded on it.
    last_use: u64,
    /// The first and last of the nodes whose gradient reads it.
    readers: Option<(u64, u64)>,
}

/// Values alike.
#[derive(Debug, Default)]
pub(super) struct Class {
    /// Indices of items, in recording order.
    pub items: Vec<usize>,
    /// Whether backward reads one.
    pub read: bool,
}

/// Ops alike: what their replay costs, what it fills and what it is computed from.
#[derive(Debug, Default)]
pub(super) struct NodeClass {
    pub seconds: f64,
    pub outputs: Vec<usize>,
    pub inputs: Vec<usize>,
}

/// The decisions.
#[derive(Debug)]
pub(super) struct Graph {
    pub items: Vec<Item>,
    pub classes: Vec<Class>,
    pub nodes: Vec<NodeClass>,
    /// Seconds of one run of each of the trace's nodes.
    pub seconds: Vec<f64>,
    pub spec: Int8Spec,
    /// The error of the int8 that the user gave; infinite where it isn't known.
    pub given_error: f64,
}

/// How int8 may be used.
#[derive(Clone, Copy)]
pub(super) struct Int8Rules<'a> {
    pub spec: Int8Spec,
    /// The error that each value adds, by its path.
    pub error: &'a dyn Fn(&TraceValue) -> f64,
}

impl Graph {
    pub fn new(trace: &Trace, costs: &CostModel, int8: Option<Int8Rules<'_>>) -> Graph {
        let spec = int8.map_or_else(Int8Spec::default, |rules| rules.spec);
        let mut graph = Graph {
            items: vec![],
            classes: vec![],
            nodes: vec![],
            seconds: costs.of_nodes(trace),
            spec,
            given_error: 0.0,
        };
        let mut item_of: HashMap<usize, usize> = HashMap::new();
        let mut given: HashMap<_, f64> = HashMap::new();
        let mut class_of: HashMap<_, usize> = HashMap::new();
        for (index, value) in trace.values().iter().enumerate() {
            if value.exact || value.given.is_some() {
                if matches!(value.given, Some(Mark::Int8(_))) && !value.exact && !value.read_exactly {
                    let known = int8.map(|rules| (rules.error)(value)).filter(|e| *e > 0.0);
                    let of_kind = given.entry((like(&value.path), value.op)).or_insert(0.0f64);
                    *of_kind = of_kind.max(known.unwrap_or(f64::INFINITY));
                }
                continue;
            }
            let key = (like(&value.path), value.op, value.output, value.dtype, value.shape.clone());
            let class = *class_of.entry(key).or_insert(graph.classes.len());
            if class == graph.classes.len() {
                graph.classes.push(Class::default());
            }
            graph.classes[class].items.push(graph.items.len());
            item_of.insert(index, graph.items.len());
            let int8 = int8.filter(|_| !value.read_exactly && value.dtype.is_float());
            graph.items.push(Item {
                id: value.id,
                value: index,
                class,
                bytes: value.bytes,
                int8_bytes: int8.map(|rules| int8_bytes(value, rules.spec)),
                int8_error: int8.map_or(0.0, |rules| (rules.error)(value)),
                last_use: trace.nodes()[value.node].sequence,
                readers: None,
            });
        }
        graph.given_error = given.values().fold(0.0, |sum, e| sum + e);
        let mut node_of: HashMap<Vec<usize>, usize> = HashMap::new();
        for (index, node) in trace.nodes().iter().enumerate() {
            for input in node.inputs.iter().filter_map(|i| item_of.get(i)) {
                graph.items[*input].last_use = node.sequence;
            }
            for read in node.reads.iter().filter_map(|r| item_of.get(r)) {
                let item = &mut graph.items[*read];
                let first = item.readers.map_or(node.sequence, |(first, _)| first);
                item.readers = Some((first, node.sequence));
                graph.classes[item.class].read = true;
            }
            let class = |v: &usize| item_of.get(v).map(|&i| graph.items[i].class);
            let outputs: Vec<usize> = node.outputs.iter().filter_map(class).collect();
            let inputs: Vec<usize> = node.inputs.iter().filter_map(class).collect();
            if outputs.is_empty() {
                continue;
            }
            let at = *node_of.entry(outputs.clone()).or_insert(graph.nodes.len());
            if at == graph.nodes.len() {
                graph.nodes.push(NodeClass { outputs, ..NodeClass::default() });
            }
            let seconds = graph.seconds[index];
            let same = &mut graph.nodes[at];
            same.seconds += seconds;
            same.inputs.extend(inputs);
            same.inputs.sort_unstable();
            same.inputs.dedup();
        }
        graph
    }

    pub fn mark(&self, choice: Choice) -> Mark {
        match choice {
            Choice::Keep => Mark::Keep,
            Choice::Recompute => Mark::Recompute,
            Choice::Int8 => Mark::Int8(self.spec),
        }
    }

    /// The error that int8 adds to the gradients, the user's own apart: of every class of which a value is int8, that of the
    /// whole class.
    pub fn error(&self, choices: &[Choice]) -> f64 {
        let used = self.classes.iter().filter(|class| class.items.iter().any(|&i| choices[i] == Choice::Int8));
        let worst = |class: &Class| class.items.iter().map(|&i| self.items[i].int8_error).fold(0.0, f64::max);
        used.map(worst).fold(0.0, |sum, e| sum + e)
    }

    /// What a value can be but this.
    pub fn others(&self, item: usize, than: Choice) -> impl Iterator<Item = Choice> {
        let int8 = self.items[item].int8_bytes.map(|_| Choice::Int8);
        [Some(Choice::Keep), Some(Choice::Recompute), int8].into_iter().flatten().filter(move |&c| c != than)
    }
}

impl Item {
    /// Whether its store is live at a moment, if it is stored.
    pub fn stored_at(&self, moment: Moment) -> bool {
        match moment.phase {
            Phase::Forward => self.last_use < moment.node,
            // Freed when backward has passed its first reader in recording order. Without a reader it is replayed from.
            Phase::Backward | Phase::Replay => self.readers.is_none_or(|(first, _)| first <= moment.node),
        }
    }

    /// Whether its replay is live at a moment, if it is replayed.
    pub fn replayed_at(&self, moment: Moment) -> bool {
        moment.phase != Phase::Forward
            && self.readers.is_some_and(|(first, last)| (first..=last).contains(&moment.node))
    }
}

/// Bytes of an int8 store: one per element and a scale per group.
fn int8_bytes(value: &TraceValue, spec: Int8Spec) -> u64 {
    let last = value.shape.last().copied().unwrap_or(1);
    let elements: usize = value.shape.iter().product();
    let groups = elements.checked_div(last).unwrap_or(0) * last.div_ceil(spec.group.max(1));
    (elements + value.dtype.computed_in().size() * groups) as u64
}

/// What the paths of values of repeated blocks have in common: a star for each segment that is a number.
pub(super) fn like(path: &str) -> String {
    let star = |segment| if str::parse::<u64>(segment).is_ok() { "*" } else { segment };
    path.split('.').map(star).collect::<Vec<_>>().join(".")
}
