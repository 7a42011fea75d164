//! The tape's arena: nodes and values, and how a recorded op enters it.
//!
//! A value has two independent facts: how many handles the user holds, and what the tape stores of it. A root (the
//! value that owns its storage) also counts its *reads*, declared by `saves`, and its *recipes*, one per node that
//! may yet be replayed from it.

use super::audit::Fingerprint;
use super::scope::{BlockScopes, Blocks, ScopeFrame};
use super::trace::{Event, Recording};
use super::{ParameterId, Stats, TapeOptions, Var};
use crate::kernel::RandomStream;
use crate::mark::{Decision, Int8Spec, Site};
use crate::ops::{Op, Saves, Slot, Spec};
use crate::{Contents, Device, Error, Mark, Result, Roles, Tensor};
use slotmap::{SlotMap, new_key_type};
use smallvec::{SmallVec, smallvec};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

new_key_type! {
    pub(crate) struct NodeKey;
    pub(crate) struct ValueKey;
}

/// What the tape stores of a root.
#[derive(Debug)]
pub(crate) enum Stored {
    /// Nothing yet: a handle is held.
    Unsettled,
    Full(Tensor),
    Quantized(Quantized),
    /// To be replayed.
    Dropped,
    /// Nobody needs it.
    Freed,
}

/// An int8 store: the integers as bytes, a scale per group, and the shape and dtype of the original.
#[derive(Debug, Clone)]
pub(crate) struct Quantized {
    pub q: Tensor,
    pub scales: Tensor,
    pub group: usize,
    pub spec: Spec,
}

impl Quantized {
    /// Bytes that the tape stores.
    pub fn bytes(&self) -> u64 {
        (self.q.storage_bytes() + self.scales.storage_bytes()) as u64
    }

    /// Bytes that quantizing reads and writes; the same for dequantizing.
    pub fn traffic(&self) -> u64 {
        self.spec.bytes() + self.bytes()
    }
}

/// What becomes of a value by its mark, whatever handles are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disposition {
    Full,
    Quantize,
    Drop,
}

/// Who set a value's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkSource {
    Default,
    Value,
    Scope,
    Rule(usize),
}

#[derive(Debug)]
pub(crate) struct Value {
    /// Unique on the tape, and the same whatever the marks.
    pub id: u64,
    pub node: NodeKey,
    pub output: usize,
    /// The value whose storage this views; itself if it is no view.
    pub root: ValueKey,
    pub spec: Spec,
    pub path: Rc<str>,
    /// Roles of the open scopes around it when it was recorded, or when it last outlived one.
    pub roles: Roles,
    /// Roles of the scopes that it outlived.
    pub output_of: Roles,
    /// The blocks that its path goes through.
    pub blocks: BlockScopes,
    /// Handles on this very value.
    pub handles: u32,
    /// On a root: handles on it and on its views.
    pub root_handles: u32,
    /// The full tensor, as long as a handle holds it (on a root: a handle on any view).
    pub live: Option<Tensor>,
    pub stored: Stored,
    pub mark: Option<Mark>,
    pub source: MarkSource,
    /// Leaves, integers and statistics: kept in full whatever the mark.
    pub exact: bool,
    /// An op reads this value exactly (tiled attention its q and k): int8 is not for it.
    pub read_exactly: bool,
    /// Reads declared by living nodes that backward has not visited.
    pub reads: u32,
    /// A read was ever declared. Not the current count, so that the outcome doesn't depend on when a handle goes.
    pub ever_read: bool,
    pub recipes: u32,
    /// This output needs its node's inputs to stay replayable.
    pub holds_recipe: bool,
    /// While its scope is open: a mark that it would get outside needs the recipe.
    pub may_drop_outside: bool,
    pub requires_grad: bool,
    pub segment: Option<u32>,
    /// It outlived a segment scope.
    pub boundary: bool,
    /// How a pass has read it, where other reads would give other bits: it keeps to this whatever is recorded later.
    pub read_as: Option<Disposition>,
    pub audit: Option<Fingerprint>,
    pub quantization_error: Option<f64>,
}

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
    /// Time in forward kernels, where the tape profiles.
    pub forward_nanos: u64,
    /// Of all passes.
    pub replays: u64,
    pub parameter: Option<ParameterId>,
    /// Outputs that hold this node's recipe.
    pub recipe_holders: u32,
    /// Handles on outputs plus living nodes that consume one.
    pub users: u32,
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
}

/// A new node as `record` hands it over.
pub(crate) struct NewNode<'a> {
    pub op: Option<Rc<Op>>,
    pub inputs: SmallVec<[ValueKey; 3]>,
    pub outputs: SmallVec<[NewValue; 3]>,
    pub saves: Saves,
    pub is_view: bool,
    pub flops: u64,
    pub traffic: u64,
    pub requires_grad: bool,
    pub parameter: Option<ParameterId>,
    pub name: &'a str,
}

pub(crate) struct NewValue {
    pub tensor: Tensor,
    pub exact: bool,
    /// Whether the user gets a handle.
    pub visible: bool,
}

/// A settling that needs a kernel, which runs outside the borrow of the tape.
pub(crate) struct PendingQuantize {
    pub value: ValueKey,
    pub tensor: Tensor,
    pub spec: Int8Spec,
}

#[derive(Debug)]
pub(crate) struct Graph {
    pub device: Device,
    pub options: TapeOptions,
    pub nodes: SlotMap<NodeKey, Node>,
    pub values: SlotMap<ValueKey, Value>,
    pub scopes: Vec<ScopeFrame>,
    pub blocks: Blocks,
    /// Of all scopes that were opened.
    pub roles_opened: Roles,
    pub next_sequence: u64,
    pub next_value: u64,
    pub next_segment: u32,
    pub next_scope: u64,
    /// The latest pass began here: marks of values recorded before are fixed.
    pub marked_before: u64,
    pub consumed: bool,
    /// Handles that the latest op was given by value, in order: they go when the tape is next used.
    pub ended: SmallVec<[ValueKey; 3]>,
    /// The node of the values that the latest op made, or viewed.
    latest: Option<NodeKey>,
    /// An error of a settling in `Drop`, returned by the next call.
    pub parked: Option<Error>,
    /// The latest leaf of each parameter, which may be gone, and what every leaf of it is like.
    pub parameters: HashMap<ParameterId, (ValueKey, Spec)>,
    /// Values behind an int8 one, whose fingerprint is that of their first replay.
    pub audited_behind_int8: HashSet<ValueKey>,
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
            scopes: vec![ScopeFrame::top()],
            blocks: Blocks::default(),
            roles_opened: Roles::NONE,
            next_sequence: 0,
            next_value: 0,
            next_segment: 0,
            next_scope: 0,
            marked_before: 0,
            consumed: false,
            ended: SmallVec::new(),
            latest: None,
            parked: None,
            parameters: HashMap::new(),
            audited_behind_int8: HashSet::new(),
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

    /// Fails where the tape can't be used any more, and with a parked error.
    pub fn check(&mut self, what: &'static str, on: Option<ValueKey>) -> Result<()> {
        if let Some(error) = self.parked.take() {
            return Err(error);
        }
        if !self.consumed {
            return Ok(());
        }
        let path = on.and_then(|v| Some(self.values.get(v)?.path.to_string()));
        let path = path.unwrap_or_else(|| self.scopes.last().map_or_else(String::new, |scope| scope.path_of(what)));
        Err(Error::TapeConsumed { what, path })
    }

    /// Leaves an error for the next call. Of several the first stays: it is nearest to the cause.
    pub fn park(&mut self, error: Error) {
        self.parked.get_or_insert(error);
    }

    /// Takes the handles that an op was given by value: they go when the tape is next used. `output` is one of its
    /// outputs.
    pub fn end_operands(&mut self, operands: SmallVec<[Var; 3]>, output: ValueKey) {
        self.latest = Some(self.values[self.root(output)].node);
        self.ended.extend(operands.into_iter().map(Var::into_key));
    }

    /// Whether the user holds a handle on this value, or, of a root, on a view of it: those that an op was given don't
    /// count.
    pub fn is_held(&self, value: ValueKey) -> bool {
        let v = &self.values[value];
        let is_of = |ended: ValueKey| if v.root == value { self.root(ended) == value } else { ended == value };
        let ended = self.ended.iter().filter(|&&ended| is_of(ended)).count() as u32;
        (if v.root == value { v.root_handles } else { v.handles }) > ended
    }

    /// Whether this value, or what it is a view of, is of the latest op, whose operands haven't settled yet.
    pub fn made_by_latest(&self, value: ValueKey) -> bool {
        !self.ended.is_empty() && self.latest == Some(self.values[self.root(value)].node)
    }

    pub fn root(&self, value: ValueKey) -> ValueKey {
        self.values[value].root
    }

    /// The mark of a site in scope `level`: the innermost marked scope around it, else the policy.
    pub fn decide(&self, level: usize, site: &Site<'_>) -> (Option<Mark>, MarkSource) {
        if let Some(mark) = self.scopes[..=level].iter().rev().find_map(|s| s.mark) {
            return (Some(mark), MarkSource::Scope);
        }
        match self.options.policy.as_ref().and_then(|p| p.mark(site)) {
            Some(Decision { mark, rule }) => (Some(mark), MarkSource::Rule(rule)),
            None => (None, MarkSource::Default),
        }
    }

    /// Whether a pass has begun since the value was recorded: its mark is fixed, so that the next pass gives the same bits.
    pub fn mark_is_fixed(&self, value: ValueKey) -> bool {
        self.nodes[self.values[value].node].sequence < self.marked_before
    }

    /// What decides how a value's int8 is rounded: another stream than any op's, whose counters count from 0.
    pub fn rounding_stream(&self, value: ValueKey) -> Option<RandomStream> {
        let seed = self.options.seed?;
        Some(RandomStream { seed, counter: 1 << 63 | self.values[value].id })
    }

    /// What a policy sees of a value, under this path.
    pub fn site<'a>(&'a self, value: ValueKey, path: &'a str) -> Site<'a> {
        let (v, node) = (&self.values[value], &self.nodes[self.values[value].node]);
        Site {
            id: v.id,
            path,
            op: node.op_name(),
            roles: v.roles,
            output_of: v.output_of,
            blocks: &v.blocks,
            output: v.output,
            shape: &v.spec.shape,
            dtype: v.spec.dtype,
            bytes: v.spec.bytes(),
            flops: node.flops,
            traffic: node.traffic,
        }
    }

    /// Gives a value the mark that scopes and policy have for it in scope `level`.
    pub fn assign_mark(&mut self, value: ValueKey, level: usize, path: &str) {
        let site = self.site(value, path);
        let (mark, source) = self.decide(level, &site);
        let may_drop_outside = self.may_drop_outside(level, &site);
        self.count_rule(source, 1);
        let v = &mut self.values[value];
        (v.mark, v.source, v.may_drop_outside) = (mark, source, may_drop_outside);
    }

    /// A rule decides for one value more or less.
    pub fn count_rule(&mut self, source: MarkSource, change: i64) {
        if let MarkSource::Rule(rule) = source
            && let Some(uses) = self.rule_uses.get_mut(rule)
        {
            *uses = uses.wrapping_add_signed(change);
        }
    }

    /// Whether a value of scope `level` may come to be dropped by belonging to a scope further out: until its scopes
    /// close, it may outlive any of them.
    pub fn may_drop_outside(&self, level: usize, site: &Site<'_>) -> bool {
        let mut output_of = site.output_of;
        (0..level).rev().any(|outer| {
            let (left, roles) = (&self.scopes[outer + 1], self.scopes[outer].roles);
            output_of = output_of.and(left.role);
            let site = Site { path: &left.path, roles, output_of, blocks: &left.blocks, ..*site };
            !matches!(self.decide(outer, &site).0, Some(Mark::Keep | Mark::Int8(_)))
        })
    }

    /// Adds a node; gives its inputs their reads and recipes; settles outputs that get no handle.
    pub fn insert(&mut self, new: NewNode<'_>) -> (SmallVec<[ValueKey; 3]>, Vec<PendingQuantize>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let needs: SmallVec<[bool; 3]> = new.inputs.iter().map(|&v| self.values[v].requires_grad).collect();
        let requires_grad = new.requires_grad;
        let level = self.scopes.len() - 1;
        let segment = self.scopes[level].segment;
        let name = self.scopes[level].unique_name(new.name);
        for &input in &new.inputs {
            let producer = self.values[input].node;
            self.nodes[producer].users += 1;
        }
        let node = self.nodes.insert(Node {
            op: new.op,
            inputs: new.inputs,
            outputs: SmallVec::new(),
            saves: new.saves,
            needs,
            sequence,
            segment,
            requires_grad,
            flops: new.flops,
            traffic: new.traffic,
            forward_nanos: 0,
            replays: 0,
            parameter: new.parameter,
            recipe_holders: 0,
            users: 0,
        });
        let leaf = self.nodes[node].is_leaf();
        let mut outputs: SmallVec<[ValueKey; 3]> = SmallVec::new();
        for (output, value) in new.outputs.into_iter().enumerate() {
            let spec = Spec::of(&value.tensor);
            let name = if output == 0 { name.clone() } else { format!("{name}#{output}") };
            let path: Rc<str> = self.scopes[level].path_of(&name).into();
            let exact = leaf || value.exact || !spec.dtype.is_float();
            let id = self.next_value;
            self.next_value += 1;
            if !new.is_view {
                value.tensor.storage().note_contents(Contents::Value(id));
            }
            let storage = value.tensor.storage().number();
            let key = self.values.insert(Value {
                id,
                node,
                output,
                root: ValueKey::default(),
                spec: spec.clone(),
                path: path.clone(),
                roles: self.scopes[level].roles,
                output_of: Roles::NONE,
                blocks: self.scopes[level].blocks.clone(),
                handles: value.visible as u32,
                root_handles: 0,
                live: Some(value.tensor),
                stored: Stored::Unsettled,
                mark: None,
                source: MarkSource::Default,
                exact,
                read_exactly: false,
                reads: 0,
                ever_read: false,
                recipes: 0,
                holds_recipe: false,
                may_drop_outside: false,
                requires_grad: requires_grad && spec.dtype.is_float(),
                segment,
                boundary: false,
                read_as: None,
                audit: None,
                quantization_error: None,
            });
            let root = if new.is_view { self.root(self.nodes[node].inputs[0]) } else { key };
            self.values[key].root = root;
            if let Some(recording) = &mut self.recording {
                recording.note_value(storage, key);
            }
            self.nodes[node].outputs.push(key);
            outputs.push(key);
            if !new.is_view && !exact {
                self.assign_mark(key, level, &path);
            }
            if value.visible {
                self.count_handle(key, 1);
                self.scopes[level].note(key);
            }
            if self.wants_recipe(key) {
                self.hold_recipe(key);
            }
        }
        for (save, value) in self.nodes[node].saves.clone().into_iter().zip(self.nodes[node].saved()) {
            let root = self.root(value);
            let root = &mut self.values[root];
            root.reads += 1;
            root.ever_read = true;
            root.read_exactly |= save.exact;
        }
        let mut pending = Vec::new();
        for &key in &outputs {
            if self.values[key].root == key && self.values[key].root_handles == 0 {
                pending.extend(self.settle(key));
            }
        }
        (outputs, pending)
    }

    /// Adds the visible ones of these values as leaves without a gradient.
    pub fn insert_constants(&mut self, name: &str, values: SmallVec<[NewValue; 3]>) -> SmallVec<[ValueKey; 3]> {
        let mut keys = SmallVec::new();
        for value in values.into_iter().filter(|v| v.visible) {
            keys.extend(self.insert_leaf(name, value.tensor, false, None));
        }
        keys
    }

    /// Adds a leaf.
    pub fn insert_leaf(
        &mut self,
        name: &str,
        tensor: Tensor,
        requires_grad: bool,
        parameter: Option<ParameterId>,
    ) -> SmallVec<[ValueKey; 3]> {
        let outputs = smallvec![NewValue { tensor, exact: true, visible: true }];
        let (op, inputs, saves, is_view, flops, traffic) = (None, smallvec![], Saves::new(), false, 0, 0);
        self.insert(NewNode { op, inputs, outputs, saves, is_view, flops, traffic, requires_grad, parameter, name }).0
    }

    /// Counts a node's forward time under the path of its first output.
    pub fn add_forward_time(&mut self, output: ValueKey, nanos: u64) {
        let value = &self.values[output];
        self.nodes[value.node].forward_nanos = nanos;
        self.stats.by_path.entry(value.path.to_string()).or_default().forward += nanos;
    }

    /// Moves a node's forward time to the path that its first output gets when it outlives its scope.
    pub fn move_forward_time(&mut self, output: ValueKey, path: &str) {
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
        self.values.values().filter(|v| !self.nodes[v.node].is_leaf()).map(Value::stored_bytes).sum()
    }
}

impl Value {
    /// Bytes that the tape stores of this root.
    pub fn stored_bytes(&self) -> u64 {
        match &self.stored {
            Stored::Full(tensor) => tensor.storage_bytes() as u64,
            Stored::Quantized(quantized) => quantized.bytes(),
            Stored::Unsettled | Stored::Dropped | Stored::Freed => 0,
        }
    }

    /// How many times it holds its tensor's storage.
    pub fn holds(&self) -> usize {
        self.live.is_some() as usize + matches!(self.stored, Stored::Full(_)) as usize
    }
}
