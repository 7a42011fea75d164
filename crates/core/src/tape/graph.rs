//! The tape's arena: nodes and values, and how a recorded op enters it.

use super::marking::{MarkSource, Marking};
use super::scope::Place;
use super::settle::Pending;
use super::value::{Exactness, NodeKey, Root, State, Value, ValueKey};
use super::{ParameterId, Stats, TapeOptions, Var};
use crate::kernel::RandomStream;
use crate::ops::{Cost, Op, Saves, Slot, Spec};
use crate::trace::{Event, Recording};
use crate::{Contents, Device, Error, Tensor};
use slotmap::{SecondaryMap, SlotMap};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

#[derive(Debug)]
pub(crate) struct Node {
    /// `None` for a leaf.
    pub op: Option<Rc<Op>>,
    pub inputs: SmallVec<[ValueKey; 3]>,
    pub outputs: SmallVec<[ValueKey; 3]>,
    pub saves: Saves,
    pub needs: SmallVec<[bool; 3]>,
    /// Recording order; arena order is not.
    pub sequence: u64,
    pub segment: Option<u32>,
    pub requires_grad: bool,
    pub flops: u64,
    pub traffic: u64,
    pub parameter: Option<ParameterId>,
    /// Time in forward kernels, where the tape profiles.
    forward_nanos: u64,
    /// Of all passes.
    pub(super) replays: u64,
    /// Outputs that hold this node's recipe.
    pub(super) recipe_holders: u32,
    /// Handles on outputs plus living nodes that consume one.
    pub(super) users: u32,
}

impl Node {
    pub fn op_name(&self) -> &'static str {
        self.op.as_ref().map_or("leaf", |op| op.rule().name())
    }
    pub fn is_leaf(&self) -> bool {
        self.op.is_none()
    }
    pub fn slot(&self, slot: Slot) -> ValueKey {
        match slot {
            Slot::In(i) => self.inputs[i],
            Slot::Out(i) => self.outputs[i],
        }
    }
    pub fn saved(&self) -> SmallVec<[ValueKey; 4]> {
        self.saves.iter().map(|s| self.slot(s.slot)).collect()
    }
    pub fn replays(&self) -> u64 {
        self.replays
    }
}

/// A new node as `record` hands it over.
pub(super) struct NewNode {
    pub op: Option<Rc<Op>>,
    pub inputs: SmallVec<[ValueKey; 3]>,
    pub outputs: SmallVec<[NewValue; 3]>,
    pub saves: Saves,
    pub is_view: bool,
    pub cost: Cost,
    pub requires_grad: bool,
    pub parameter: Option<ParameterId>,
    pub path: Rc<str>,
    pub place: Place,
    pub segment: Option<u32>,
}

pub(super) struct NewValue {
    pub tensor: Tensor,
    pub kept_exactly: bool,
    /// Whether the user gets a handle.
    pub visible: bool,
    pub marking: Marking,
}

#[derive(Debug)]
pub(crate) struct Graph {
    pub device: Device,
    pub options: TapeOptions,
    pub nodes: SlotMap<NodeKey, Node>,
    pub values: SlotMap<ValueKey, Value>,
    /// Of the values that own their storage.
    pub roots: SecondaryMap<ValueKey, Root>,
    pub(super) next_sequence: u64,
    pub(super) next_value: u64,
    /// The latest pass began here: marks of values recorded before are fixed.
    pub(super) marked_before: u64,
    pub(super) consumed: bool,
    /// Handles that the latest op was given by value, in order: they go when the tape is next used.
    pub(super) ended: SmallVec<[ValueKey; 3]>,
    /// The node of the values that the latest op made, or viewed.
    latest: Option<NodeKey>,
    /// An error that had no call to return it, for the next one.
    pub(super) parked: Option<Error>,
    /// The latest leaf of each parameter, which may be gone, and what every leaf of it is like.
    pub(super) parameters: HashMap<ParameterId, (ValueKey, Spec)>,
    /// Values behind a lossy one, whose fingerprint is that of their first replay.
    pub(super) audited_behind_lossy: HashSet<ValueKey>,
    /// Ops of nodes that have left: they may be a user's, and are dropped outside the borrow of the graph.
    pub(super) retired: Vec<Rc<Op>>,
    pub rule_uses: Vec<u64>,
    pub stats: Stats,
    /// The tape's calls, where they are to be run again.
    pub recording: Option<Recording>,
}

impl Graph {
    pub fn new(device: &Device, options: TapeOptions) -> Graph {
        let rules = options.policy.as_ref().map_or(0, |p| p.rules().len());
        Graph {
            device: device.clone(),
            options,
            nodes: SlotMap::with_key(),
            values: SlotMap::with_key(),
            roots: SecondaryMap::new(),
            next_sequence: 0,
            next_value: 0,
            marked_before: 0,
            consumed: false,
            ended: SmallVec::new(),
            latest: None,
            parked: None,
            parameters: HashMap::new(),
            audited_behind_lossy: HashSet::new(),
            retired: Vec::new(),
            rule_uses: vec![0; rules],
            stats: Stats::default(),
            recording: None,
        }
    }

    /// Notes a call of the tape, where calls are to be run again.
    pub fn tell(&mut self, event: impl FnOnce(&Graph) -> Event) {
        if self.recording.is_some() {
            self.note_let_go();
            let event = event(self);
            self.push_event(event);
        }
    }

    /// Leaves an error for the next call. Of several the first stays: it is nearest to the cause.
    pub fn park(&mut self, error: Error) {
        self.parked.get_or_insert(error);
    }

    /// Takes the handles that an op was given by value: they go when the tape is next used. `output` is one of its
    /// outputs.
    pub(super) fn end_operands(&mut self, operands: SmallVec<[Var; 3]>, output: ValueKey) {
        self.latest = Some(self.values[self.root(output)].node);
        self.ended.extend(operands.into_iter().map(Var::into_key));
    }

    /// Whether the user holds a handle on this value, or, of a root, on a view of it: those that an op was given don't
    /// count.
    pub(super) fn is_held(&self, value: ValueKey) -> bool {
        let root = self.roots.get(value);
        let is_of = |ended: ValueKey| if root.is_some() { self.root(ended) == value } else { ended == value };
        let ended = self.ended.iter().filter(|&&ended| is_of(ended)).count() as u32;
        root.map_or(self.values[value].handles, |root| root.handles) > ended
    }

    /// Whether an op that is given `given` handles on a value gets the last: those that the op before was given have
    /// gone.
    pub fn is_given(&self, value: ValueKey, given: u32) -> bool {
        let ended = self.ended.iter().filter(|&&ended| ended == value).count() as u32;
        ended + given == self.values[value].handles
    }

    /// Whether the tape holds the tensor of a value.
    pub fn has_tensor(&self, value: ValueKey) -> bool {
        let of_root = || self.roots.get(value).is_some_and(|root| root.full().is_some());
        self.values.get(value).is_some_and(|v| v.view.is_some()) || of_root()
    }

    /// Whether this value, or what it is a view of, is of the latest op, whose operands haven't settled yet.
    pub(super) fn made_by_latest(&self, value: ValueKey) -> bool {
        !self.ended.is_empty() && self.latest == Some(self.values[self.root(value)].node)
    }

    pub fn root(&self, value: ValueKey) -> ValueKey {
        self.values[value].root
    }

    /// The tensor of a value that a handle holds.
    pub fn live(&self, value: ValueKey) -> &Tensor {
        let tensor = self.values[value].view.as_ref().or_else(|| self.roots.get(value)?.live());
        tensor.expect("a value with a handle has its tensor")
    }

    pub fn fate(&self, root: ValueKey) -> super::value::Fate {
        self.roots[root].fate(&self.values[root].spec)
    }

    /// Path and op of a value, for messages.
    pub fn name_of(&self, value: ValueKey) -> (String, &'static str) {
        let v = &self.values[value];
        (v.path.to_string(), self.nodes[v.node].op_name())
    }

    /// Nodes in the order in which they were recorded.
    pub fn in_recording_order(&self) -> Vec<NodeKey> {
        let mut order: Vec<NodeKey> = self.nodes.keys().collect();
        order.sort_unstable_by_key(|&n| self.nodes[n].sequence);
        order
    }

    /// Whether a pass has begun since the value was recorded: its mark is fixed, so that the next pass gives the same
    /// bits.
    pub(super) fn mark_is_fixed(&self, value: ValueKey) -> bool {
        self.nodes[self.values[value].node].sequence < self.marked_before
    }

    /// What decides how a value's packing is rounded: another stream than any op's, whose counters count from 0.
    pub(super) fn rounding_stream(&self, value: ValueKey) -> Option<RandomStream> {
        let seed = self.options.seed?;
        Some(RandomStream { seed, counter: 1 << 63 | self.values[value].id })
    }

    /// A rule decides for one value more or less.
    pub(super) fn count_rule(&mut self, source: MarkSource, change: i64) {
        if let MarkSource::Rule(rule) = source
            && let Some(uses) = self.rule_uses.get_mut(rule)
        {
            *uses = uses.wrapping_add_signed(change);
        }
    }

    /// Adds a node; gives its inputs their reads and recipes; settles outputs that get no handle.
    pub(super) fn insert(&mut self, mut new: NewNode) -> (SmallVec<[ValueKey; 3]>, Vec<Pending>) {
        let values = std::mem::take(&mut new.outputs);
        let node = self.insert_node(&mut new);
        let mut outputs: SmallVec<[ValueKey; 3]> = SmallVec::new();
        for value in values {
            let key = self.insert_value(node, outputs.len(), &new, value);
            self.nodes[node].outputs.push(key);
            outputs.push(key);
        }
        self.count_reads(node);
        let unheld = |graph: &Graph, key| graph.roots.get(key).is_some_and(|root| root.handles == 0);
        let pending = outputs.iter().filter_map(|&key| if unheld(self, key) { self.settle(key) } else { None });
        let pending = pending.collect();
        (outputs, pending)
    }

    fn insert_node(&mut self, new: &mut NewNode) -> NodeKey {
        for &input in &new.inputs {
            let producer = self.values[input].node;
            self.nodes[producer].users += 1;
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.nodes.insert(Node {
            op: new.op.take(),
            needs: new.inputs.iter().map(|&v| self.values[v].requires_grad).collect(),
            inputs: std::mem::take(&mut new.inputs),
            outputs: SmallVec::new(),
            saves: std::mem::take(&mut new.saves),
            sequence,
            segment: new.segment,
            requires_grad: new.requires_grad,
            flops: new.cost.flops,
            traffic: new.cost.traffic,
            parameter: new.parameter,
            forward_nanos: 0,
            replays: 0,
            recipe_holders: 0,
            users: 0,
        })
    }

    fn insert_value(&mut self, node: NodeKey, output: usize, of: &NewNode, new: NewValue) -> ValueKey {
        let (id, spec) = (self.next_value, Spec::of(&new.tensor));
        self.next_value += 1;
        let storage = new.tensor.storage().number();
        let path = if output == 0 { of.path.clone() } else { format!("{}#{output}", of.path).into() };
        let key = self.values.insert(Value {
            id,
            node,
            output,
            root: ValueKey::default(),
            requires_grad: of.requires_grad && spec.dtype.is_float(),
            spec,
            path,
            place: of.place.clone(),
            handles: new.visible as u32,
            view: of.is_view.then(|| new.tensor.clone()),
        });
        self.values[key].root = if of.is_view { self.root(self.nodes[node].inputs[0]) } else { key };
        if let Some(recording) = &mut self.recording {
            recording.note_value(storage, key);
        }
        if !of.is_view {
            new.tensor.storage().note_contents(Contents::Value(id));
            self.insert_root(key, of.segment, new);
        } else if new.visible {
            self.count_handle(key, 1);
        }
        key
    }

    fn insert_root(&mut self, key: ValueKey, segment: Option<u32>, new: NewValue) {
        let exactness = if new.kept_exactly { Exactness::KeptExactly } else { Exactness::Free };
        self.count_rule(new.marking.source, 1);
        let root = Root {
            handles: 0,
            state: State::Live(new.tensor),
            marking: new.marking,
            exactness,
            reads: 0,
            ever_read: false,
            recipes: 0,
            holds_recipe: false,
            segment,
            boundary: false,
            read_as: None,
            audit: None,
            packing_error: None,
        };
        let wants_recipe = root.wants_recipe();
        self.roots.insert(key, root);
        if new.visible {
            self.count_handle(key, 1);
        }
        if wants_recipe {
            self.hold_recipe(key);
        }
    }

    /// Counts what a new node's gradient reads.
    fn count_reads(&mut self, node: NodeKey) {
        let node = &self.nodes[node];
        for save in &node.saves {
            let root = &mut self.roots[self.values[node.slot(save.slot)].root];
            root.reads += 1;
            root.ever_read = true;
            if save.exact && root.exactness == Exactness::Free {
                root.exactness = Exactness::ReadExactly;
            }
        }
    }

    /// Adds a leaf.
    pub(super) fn insert_leaf(
        &mut self,
        (path, place): (Rc<str>, Place),
        tensor: Tensor,
        requires_grad: bool,
        parameter: Option<ParameterId>,
    ) -> ValueKey {
        let value = NewValue { tensor, kept_exactly: true, visible: true, marking: Marking::NONE };
        let new = NewNode {
            op: None,
            inputs: SmallVec::new(),
            outputs: SmallVec::from_iter([value]),
            saves: Saves::new(),
            is_view: false,
            cost: Cost::default(),
            requires_grad,
            parameter,
            path,
            place,
            segment: None,
        };
        self.insert(new).0[0]
    }

    /// Counts a node's forward time under the path of its first output.
    pub(super) fn add_forward_time(&mut self, output: ValueKey, nanos: u64) {
        let value = &self.values[output];
        self.nodes[value.node].forward_nanos = nanos;
        self.stats.by_path.entry(value.path.to_string()).or_default().forward += nanos;
    }

    /// Moves a node's forward time to the path that its first output gets when it outlives its scope.
    pub(super) fn move_forward_time(&mut self, output: ValueKey, path: &str) {
        let value = &self.values[output];
        let nanos = self.nodes[value.node].forward_nanos;
        if value.output != 0 || nanos == 0 {
            return;
        }
        if let Some(time) = self.stats.by_path.get_mut(&*value.path) {
            time.forward -= nanos;
            if *time == Default::default() {
                self.stats.by_path.remove(&*value.path);
            }
        }
        self.stats.by_path.entry(path.to_string()).or_default().forward += nanos;
    }

    /// Bytes that the tape stores for backward, each storage once; leaves, which the user owns, apart.
    pub fn saved_bytes(&self) -> u64 {
        let roots = self.roots.iter().filter(|(key, _)| !self.nodes[self.values[*key].node].is_leaf());
        roots.map(|(_, root)| root.stored_bytes()).sum()
    }
}
