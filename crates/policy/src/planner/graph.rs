//! The decisions that a trace leaves open: values whose mark is free, what each takes, and which are alike.
//!
//! Values of repeated blocks that differ in nothing but the block's number form a *class*. The minimum cut decides for
//! classes, so a model of a hundred blocks is solved as one; only where the search mixes plans do blocks differ.

use super::CostModel;
use super::{LossyFormat, LossyUse};
use retape_core::ops::Spec;
use retape_core::{Mark, Moment, Phase, Trace, TraceValue};
use std::collections::HashMap;
use std::rc::Rc;

/// What becomes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Choice {
    Keep,
    Recompute,
    /// Stored by one of the planner's lossy formats.
    Packed(usize),
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
    /// By format, where that is allowed.
    pub packed: Vec<Option<PackedItem>>,
    /// When it is live at the latest because of handles: the last op that is recorded on it.
    last_use: u64,
    /// The first and last of the nodes whose gradient reads it.
    readers: Option<(u64, u64)>,
}

/// A value as a lossy format stores it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedItem {
    pub bytes: u64,
    /// Relative error that storing all values of its class so adds to the gradients.
    pub error: f64,
}

/// Values alike.
#[derive(Debug, Default)]
pub(super) struct Class {
    /// Indices of items, in recording order.
    pub items: Vec<usize>,
    /// Whether backward reads one.
    pub read: bool,
    /// By format: the relative error that storing all of them so adds to the gradients.
    errors: Vec<f64>,
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
    /// The lossy formats that a plan may use.
    pub formats: Vec<Mark>,
    /// The error of the lossy marks that the user gave; infinite where it isn't known.
    pub given_error: f64,
}

impl Graph {
    pub fn new(trace: &Trace, costs: &CostModel, lossy: &LossyUse) -> Graph {
        let mut graph = Graph {
            items: vec![],
            classes: vec![],
            nodes: vec![],
            seconds: costs.of_nodes(trace),
            formats: lossy.formats.iter().map(|format| format.mark).collect(),
            given_error: 0.0,
        };
        let item_of = graph.list_items(trace, lossy);
        graph.list_nodes(trace, &item_of);
        graph
    }

    /// Lists the values that are free to be marked, by their index in the trace.
    fn list_items(&mut self, trace: &Trace, lossy: &LossyUse) -> HashMap<usize, usize> {
        let mut item_of: HashMap<usize, usize> = HashMap::new();
        let mut given: HashMap<_, f64> = HashMap::new();
        let mut class_of: HashMap<_, usize> = HashMap::new();
        for (index, value) in trace.values().iter().enumerate() {
            if value.exact || value.given.is_some() {
                let packs = |mark: &Mark| mark.is_lossy() && mark.bytes(&spec(value)).is_some();
                if let Some(mark) = value.given.filter(|mark| packs(mark) && !value.exact && !value.read_exactly) {
                    let of_kind = given.entry((like(&value.path), value.op)).or_insert(0.0f64);
                    *of_kind = of_kind.max(lossy.error_of(mark, value).unwrap_or(f64::INFINITY));
                }
                continue;
            }
            let key = (like(&value.path), value.op, value.output, value.dtype, value.shape.clone());
            let class = *class_of.entry(key).or_insert(self.classes.len());
            if class == self.classes.len() {
                self.classes.push(Class { errors: vec![0.0; lossy.formats.len()], ..Class::default() });
            }
            self.classes[class].items.push(self.items.len());
            item_of.insert(index, self.items.len());
            let packed = |format: &LossyFormat| {
                let bytes = format.mark.bytes(&spec(value)).filter(|_| !value.read_exactly)?;
                Some(PackedItem { bytes, error: lossy.error(format, value) })
            };
            let packed: Vec<Option<PackedItem>> = lossy.formats.iter().map(packed).collect();
            for (worst, packed) in self.classes[class].errors.iter_mut().zip(&packed) {
                *worst = worst.max(packed.map_or(0.0, |packed| packed.error));
            }
            self.items.push(Item {
                id: value.id,
                value: index,
                class,
                bytes: value.bytes,
                packed,
                last_use: trace.nodes()[value.node].sequence,
                readers: None,
            });
        }
        self.given_error = given.values().fold(0.0, |sum, e| sum + e);
        item_of
    }

    /// Lists the ops that replays may run, and who reads what.
    fn list_nodes(&mut self, trace: &Trace, item_of: &HashMap<usize, usize>) {
        let mut node_of: HashMap<Vec<usize>, usize> = HashMap::new();
        for (index, node) in trace.nodes().iter().enumerate() {
            for input in node.inputs.iter().filter_map(|i| item_of.get(i)) {
                self.items[*input].last_use = node.sequence;
            }
            for read in node.reads.iter().filter_map(|r| item_of.get(r)) {
                let item = &mut self.items[*read];
                let first = item.readers.map_or(node.sequence, |(first, _)| first);
                item.readers = Some((first, node.sequence));
                self.classes[item.class].read = true;
            }
            let class = |v: &usize| item_of.get(v).map(|&i| self.items[i].class);
            let outputs: Vec<usize> = node.outputs.iter().filter_map(class).collect();
            let inputs: Vec<usize> = node.inputs.iter().filter_map(class).collect();
            if outputs.is_empty() {
                continue;
            }
            let at = *node_of.entry(outputs.clone()).or_insert(self.nodes.len());
            if at == self.nodes.len() {
                self.nodes.push(NodeClass { outputs, ..NodeClass::default() });
            }
            let seconds = self.seconds[index];
            let same = &mut self.nodes[at];
            same.seconds += seconds;
            same.inputs.extend(inputs);
            same.inputs.sort_unstable();
            same.inputs.dedup();
        }
    }

    pub fn mark(&self, choice: Choice) -> Mark {
        match choice {
            Choice::Keep => Mark::Keep,
            Choice::Recompute => Mark::Recompute,
            Choice::Packed(format) => self.formats[format],
        }
    }

    /// The error that lossy marks add to the gradients, the user's own apart: of every class of which a value is
    /// stored by a format, that of the whole class; of several formats the worst.
    pub fn error(&self, choices: &[Choice]) -> f64 {
        let of_class = |class: &Class| {
            let of_item = |&i: &usize| match choices[i] {
                Choice::Packed(format) => class.errors[format],
                _ => 0.0,
            };
            class.items.iter().map(of_item).fold(0.0, f64::max)
        };
        self.classes.iter().map(of_class).fold(0.0, |sum, e| sum + e)
    }

    /// All that a value can be, allowed or not.
    pub fn choices(&self) -> impl Iterator<Item = Choice> + use<> {
        [Choice::Keep, Choice::Recompute].into_iter().chain((0..self.formats.len()).map(Choice::Packed))
    }

    /// What a value can be but this.
    pub fn others(&self, item: usize, than: Choice) -> impl Iterator<Item = Choice> {
        let allowed = move |choice: &Choice| match choice {
            Choice::Packed(format) => self.items[item].packed[*format].is_some(),
            _ => true,
        };
        self.choices().filter(move |choice| *choice != than && allowed(choice))
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

/// Shape and dtype.
pub(super) fn spec(value: &TraceValue) -> Spec {
    Spec::new(value.shape.clone(), value.dtype)
}

/// What the paths of values of repeated blocks have in common: a star for each segment that is a number.
pub(super) fn like(path: &str) -> String {
    let star = |segment| if str::parse::<u64>(segment).is_ok() { "*" } else { segment };
    path.split('.').map(star).collect::<Vec<_>>().join(".")
}
