//! The tape's arena: nodes, values, and the rules by which a value settles.
//!
//! A value has two independent facts: how many handles the user holds, and what the tape stores of it. A root (the
//! value that owns its storage) also counts its *reads*, declared by `saves`, and its *recipes*, one per node that
//! may yet be replayed from it. Users are added only while a handle exists; afterwards they only fall, so the order in
//! which handles go doesn't matter. Every release is a worklist, never recursion: graphs are deep.

use super::audit::Fingerprint;
use super::scope::ScopeFrame;
use super::{NonFinite, ParameterId, Stats, TapeOptions};
use crate::mark::{Decision, Site};
use crate::ops::{Op, Saves, Slot, Spec};
use crate::{Device, Error, Mark, Result, Tensor};
use slotmap::{SlotMap, new_key_type};
use smallvec::SmallVec;
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
    pub parameter: Option<ParameterId>,
    /// Outputs that hold this node's recipe.
    recipe_holders: u32,
    /// Handles on outputs plus living nodes that consume one.
    users: u32,
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
    pub group: usize,
}

#[derive(Debug)]
pub(crate) struct Graph {
    pub device: Device,
    pub options: TapeOptions,
    pub nodes: SlotMap<NodeKey, Node>,
    pub values: SlotMap<ValueKey, Value>,
    pub scopes: Vec<ScopeFrame>,
    pub next_sequence: u64,
    pub next_value: u64,
    pub next_segment: u32,
    pub next_scope: u64,
    pub random_counter: u64,
    /// The latest pass began here: marks of values recorded before are fixed.
    pub marked_before: u64,
    pub consumed: bool,
    /// An error of a settling in `Drop`, returned by the next call.
    pub parked: Option<Error>,
    pub parameters: HashMap<ParameterId, ValueKey>,
    /// Values behind an int8 one, whose fingerprint is that of their first replay.
    pub audited_behind_int8: HashSet<ValueKey>,
    pub rule_uses: Vec<u64>,
    pub stats: Stats,
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
            next_sequence: 0,
            next_value: 0,
            next_segment: 0,
            next_scope: 0,
            random_counter: 0,
            marked_before: 0,
            consumed: false,
            parked: None,
            parameters: HashMap::new(),
            audited_behind_int8: HashSet::new(),
            rule_uses: vec![0; rules],
            stats: Stats::default(),
        }
    }

    /// Fails where the tape can't be used any more, and with a parked error.
    pub fn check(&mut self, what: &'static str) -> Result<()> {
        if let Some(error) = self.parked.take() {
            return Err(error);
        }
        if self.consumed { Err(Error::TapeConsumed { what }) } else { Ok(()) }
    }

    /// Leaves an error for the next call. Of several the first stays: it is nearest to the cause.
    pub fn park(&mut self, error: Error) {
        self.parked.get_or_insert(error);
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
        (0..level).any(|outer| {
            let site = Site { path: &self.scopes[outer + 1].path, ..*site };
            !matches!(self.decide(outer, &site).0, Some(Mark::Keep | Mark::Int8(_)))
        })
    }

    /// Adds a node; gives its inputs their reads and recipes; settles outputs that get no handle.
    pub fn insert(&mut self, new: NewNode<'_>) -> (SmallVec<[ValueKey; 3]>, Vec<PendingQuantize>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let needs: SmallVec<[bool; 3]> = new.inputs.iter().map(|&v| self.values[v].requires_grad).collect();
        let requires_grad = new.requires_grad;
        let saves = match &new.op {
            Some(op) if requires_grad => op.rule().saves(&needs),
            _ => Saves::new(),
        };
        let level = self.scopes.len() - 1;
        let segment = self.scopes[level].segment;
        let name = self.scopes[level].unique_name(new.name);
        let op_name = new.op.as_ref().map_or("leaf", |op| op.rule().name());
        for &input in &new.inputs {
            let producer = self.values[input].node;
            self.nodes[producer].users += 1;
        }
        let node = self.nodes.insert(Node {
            op: new.op,
            inputs: new.inputs,
            outputs: SmallVec::new(),
            saves,
            needs,
            sequence,
            segment,
            requires_grad,
            flops: new.flops,
            traffic: new.traffic,
            forward_nanos: 0,
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
            let site = Site {
                path: &path,
                op: op_name,
                output,
                shape: &spec.shape,
                dtype: spec.dtype,
                bytes: spec.bytes(),
                flops: new.flops,
                traffic: new.traffic,
            };
            let exact = leaf || value.exact || !spec.dtype.is_float();
            let (mut mark, mut source, mut may_drop_outside) = (None, MarkSource::Default, false);
            if !new.is_view && !exact {
                (mark, source) = self.decide(level, &site);
                self.count_rule(source, 1);
                may_drop_outside = self.may_drop_outside(level, &site);
            }
            let id = self.next_value;
            self.next_value += 1;
            let key = self.values.insert(Value {
                id,
                node,
                output,
                root: ValueKey::default(),
                spec: spec.clone(),
                path: path.clone(),
                handles: value.visible as u32,
                root_handles: 0,
                live: Some(value.tensor),
                stored: Stored::Unsettled,
                mark,
                source,
                exact,
                read_exactly: false,
                reads: 0,
                ever_read: false,
                recipes: 0,
                holds_recipe: false,
                may_drop_outside,
                requires_grad: requires_grad && spec.dtype.is_float(),
                segment,
                boundary: false,
                read_as: None,
                audit: None,
                quantization_error: None,
            });
            let root = if new.is_view { self.root(self.nodes[node].inputs[0]) } else { key };
            self.values[key].root = root;
            self.nodes[node].outputs.push(key);
            outputs.push(key);
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

    fn count_handle(&mut self, value: ValueKey, change: i32) {
        let (root, node) = (self.values[value].root, self.values[value].node);
        let handles = &mut self.values[root].root_handles;
        *handles = handles.wrapping_add_signed(change);
        let users = &mut self.nodes[node].users;
        *users = users.wrapping_add_signed(change);
    }

    /// One handle more.
    pub fn retain_handle(&mut self, value: ValueKey) {
        self.values[value].handles += 1;
        self.count_handle(value, 1);
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

    /// A new handle on a leaf of this tensor; false where the leaf is of another one (a parameter that was updated since,
    /// another view of it, frozen or not).
    pub fn reopen_leaf(&mut self, leaf: ValueKey, tensor: &Tensor, requires_grad: bool) -> bool {
        let v = &mut self.values[leaf];
        let same = match (&v.live, &v.stored) {
            (Some(own), _) | (None, Stored::Full(own)) => {
                own.shares_storage(tensor) && own.layout() == tensor.layout() && own.dtype() == tensor.dtype()
            }
            _ => v.spec == Spec::of(tensor),
        };
        if !same || v.requires_grad != requires_grad {
            return false;
        }
        v.live = Some(tensor.clone());
        v.stored = Stored::Unsettled;
        self.retain_handle(leaf);
        true
    }

    /// One handle less: nodes that nothing uses any more leave the tape, and with its last handle the root settles.
    pub fn release_handle(&mut self, value: ValueKey) -> Option<PendingQuantize> {
        let v = self.values.get_mut(value)?;
        v.handles -= 1;
        let (root, node, last) = (v.root, v.node, v.handles == 0);
        self.count_handle(value, -1);
        if last && root != value {
            self.values[value].live = None;
        }
        if !self.consumed {
            // First, so that a dead value, which only its own node would read, isn't stored on the way out.
            self.remove_dead(node);
        }
        let v = self.values.get(root).filter(|v| v.root_handles == 0)?;
        let pending = match v.stored {
            Stored::Unsettled if !self.consumed => self.settle(root),
            _ => None,
        };
        self.values[root].live = None;
        pending
    }

    /// What the mark asks for. Never a function of handles.
    pub fn disposition(&self, value: ValueKey) -> Disposition {
        let v = &self.values[value];
        if let Some(fixed) = v.read_as {
            return fixed;
        }
        match v.mark {
            _ if v.exact => Disposition::Full,
            Some(Mark::Keep) => Disposition::Full,
            Some(Mark::Int8(_)) if v.read_exactly => Disposition::Full,
            Some(Mark::Int8(_)) => Disposition::Quantize,
            Some(Mark::Recompute) => Disposition::Drop,
            None if v.ever_read => Disposition::Full,
            None => Disposition::Drop,
        }
    }

    /// Whether the value may yet be dropped, so that its node's inputs must stay.
    pub fn wants_recipe(&self, value: ValueKey) -> bool {
        let v = &self.values[value];
        v.root == value && !v.exact && (v.may_drop_outside || matches!(v.mark, None | Some(Mark::Recompute)))
    }

    pub fn hold_recipe(&mut self, value: ValueKey) {
        let v = &mut self.values[value];
        if std::mem::replace(&mut v.holds_recipe, true) {
            return;
        }
        let node = v.node;
        self.nodes[node].recipe_holders += 1;
        if self.nodes[node].recipe_holders == 1 {
            for input in self.nodes[node].inputs.clone() {
                let root = self.root(input);
                self.values[root].recipes += 1;
            }
        }
    }

    fn drop_recipe(&mut self, value: ValueKey, released: &mut Vec<ValueKey>) {
        let v = &mut self.values[value];
        if !std::mem::replace(&mut v.holds_recipe, false) {
            return;
        }
        let node = v.node;
        self.nodes[node].recipe_holders -= 1;
        if self.nodes[node].recipe_holders == 0 {
            for input in self.nodes[node].inputs.clone() {
                let root = self.root(input);
                self.values[root].recipes -= 1;
                released.push(root);
            }
        }
    }

    /// Takes or gives back the recipe as the current mark asks.
    pub fn update_recipe(&mut self, value: ValueKey) {
        if self.wants_recipe(value) {
            self.hold_recipe(value);
        } else {
            let mut released = Vec::new();
            self.drop_recipe(value, &mut released);
            self.free_unused(released);
        }
    }

    /// As [`update_recipe`](Self::update_recipe), where the mark may have changed to one that needs a recipe which was
    /// given up: then the value is kept, and a mark that asked to drop it is an error, parked.
    pub fn require_recipe(&mut self, value: ValueKey) {
        let gone = |g: &Graph| {
            let inputs = &g.nodes[g.values[value].node].inputs;
            inputs.iter().any(|&i| matches!(g.values[g.root(i)].stored, Stored::Freed))
        };
        if self.wants_recipe(value) && !self.values[value].holds_recipe && gone(self) {
            let op = self.nodes[self.values[value].node].op_name();
            let v = &self.values[value];
            if v.mark == Some(Mark::Recompute) {
                let reason =
                    "its inputs were freed before its scope closed; mark scopes before recording in them".into();
                let error = Error::MarkTooLate { mark: "recompute", path: v.path.to_string(), op, reason };
                self.park(error);
            }
            let v = &mut self.values[value];
            (v.mark, v.may_drop_outside) = (Some(Mark::Keep), false);
        }
        self.update_recipe(value);
    }

    /// Decides what is stored of a root whose last handle has gone (or which never had one).
    fn settle(&mut self, value: ValueKey) -> Option<PendingQuantize> {
        let mut released = Vec::new();
        let mut pending = None;
        self.values[value].may_drop_outside = false;
        let v = &self.values[value];
        let tensor = v.live.clone();
        if v.reads + v.recipes == 0 {
            self.values[value].stored = Stored::Freed;
            self.drop_recipe(value, &mut released);
        } else {
            let tensor = tensor.expect("an unsettled root has its tensor");
            match self.disposition(value) {
                Disposition::Full => {
                    self.store_full(value, tensor);
                    self.drop_recipe(value, &mut released);
                }
                Disposition::Quantize => {
                    let Some(Mark::Int8(spec)) = self.values[value].mark else { unreachable!("only Int8 quantizes") };
                    // Full until the kernel has run; a failure leaves it so.
                    self.store_full(value, tensor.clone());
                    pending = Some(PendingQuantize { value, tensor, group: spec.group });
                    self.drop_recipe(value, &mut released);
                }
                Disposition::Drop => {
                    // A pass before this that replayed it behind an int8 value has left what later replays must equal.
                    let audited = v.audit.is_some();
                    if self.options.verify == super::Verify::Bits && self.nodes[v.node].requires_grad && !audited {
                        self.values[value].audit = Fingerprint::of(&tensor).ok();
                    }
                    self.values[value].stored = Stored::Dropped;
                    self.hold_recipe(value);
                }
            }
        }
        if self.values[value].root_handles == 0 {
            self.values[value].live = None;
        }
        self.free_unused(released);
        pending
    }

    fn store_full(&mut self, value: ValueKey, tensor: Tensor) {
        if !self.nodes[self.values[value].node].is_leaf() {
            tensor.storage().set_kind(crate::Kind::Saved);
        }
        self.values[value].stored = Stored::Full(tensor);
    }

    /// Frees settled roots that nothing uses any more, and what only they used.
    pub fn free_unused(&mut self, mut worklist: Vec<ValueKey>) {
        while let Some(value) = worklist.pop() {
            let Some(v) = self.values.get_mut(value) else { continue };
            if v.reads + v.recipes > 0 || matches!(v.stored, Stored::Unsettled | Stored::Freed) {
                continue;
            }
            v.stored = Stored::Freed;
            self.drop_recipe(value, &mut worklist);
        }
    }

    /// Removes the node if no output has a handle and no living node consumes one; then those before it.
    pub fn remove_dead(&mut self, node: NodeKey) {
        let mut worklist = vec![node];
        while let Some(key) = worklist.pop() {
            let Some(node) = self.nodes.get(key) else { continue };
            if node.users > 0 {
                continue;
            }
            let (inputs, outputs, parameter) = (node.inputs.clone(), node.outputs.clone(), node.parameter);
            let roots: Vec<ValueKey> = node.saved().iter().map(|&v| self.root(v)).collect();
            for &root in &roots {
                self.values[root].reads -= 1;
            }
            self.free_unused(roots);
            let mut released = Vec::new();
            for &output in &outputs {
                self.drop_recipe(output, &mut released);
            }
            self.free_unused(released);
            for &input in &inputs {
                let producer = self.values[input].node;
                self.nodes[producer].users -= 1;
                worklist.push(producer);
            }
            for &output in &outputs {
                self.values.remove(output);
            }
            self.nodes.remove(key);
            if let Some(id) = parameter
                && self.parameters.get(&id) == outputs.first()
            {
                self.parameters.remove(&id);
            }
        }
    }

    /// The result of a pending quantization. A failure leaves the value in full, parked or counted.
    pub fn finish_quantize(&mut self, value: ValueKey, result: Result<Quantized>, error: Option<f64>) {
        let Some(v) = self.values.get_mut(value) else { return };
        match result {
            // The user may have freed it, or a pass may have ended, while the kernel ran.
            Ok(quantized) if matches!(v.stored, Stored::Full(_)) => {
                v.stored = Stored::Quantized(quantized);
                v.quantization_error = error;
                self.stats.quantized += 1;
            }
            Ok(_) => {}
            Err(Error::NonFinite { .. }) if self.keep_full(value) => {}
            Err(error) => self.park(error),
        }
    }

    /// Where the tape was told so, a value that int8 can't hold is from here on as if marked Keep; a pass reads it so.
    pub fn keep_full(&mut self, value: ValueKey) -> bool {
        if self.options.non_finite == NonFinite::Error {
            return false;
        }
        let v = &mut self.values[value];
        (v.mark, v.read_as) = (Some(Mark::Keep), None);
        self.stats.full_precision_fallbacks += 1;
        true
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
            Stored::Quantized(q) => (q.q.storage_bytes() + q.scales.storage_bytes()) as u64,
            Stored::Unsettled | Stored::Dropped | Stored::Freed => 0,
        }
    }
}
