//! How a value settles: handles, recipes, and what is stored, packed, dropped or freed when the last handle goes.
//!
//! Users of a value are added only while a handle exists; afterwards they only fall, so the order in which handles go
//! doesn't matter. Every release is a worklist, never recursion: graphs are deep.

use super::audit::Fingerprint;
use super::graph::Graph;
use super::marking::{MarkSource, Marking};
use super::storage::Packed;
use super::value::{Exactness, Fate, NodeKey, Root, State, Stored, ValueKey};
use super::{NonFinite, Tape, Var, Verify};
use crate::ops::Spec;
use crate::trace::Event;
use crate::{Contents, DType, Device, Error, Mark, MemoryKind, Result, Tensor};
use smallvec::SmallVec;
use std::time::Instant;

/// A settling that needs a kernel, which runs outside the borrow of the graph.
pub(super) struct Pending {
    value: ValueKey,
    tensor: Tensor,
    mark: Mark,
}

impl Tape {
    /// Lets go of the handles that the latest op was given by value.
    pub(crate) fn settle_operands(&self) {
        let ended = std::mem::take(&mut self.graph().ended);
        if !ended.is_empty() {
            self.let_go(ended);
        }
    }

    /// Handles go, in order, all before any of their values is packed.
    pub(super) fn let_go(&self, values: impl IntoIterator<Item = ValueKey>) {
        let mut graph = self.graph();
        let pending = graph.release_handles(values);
        let retired = std::mem::take(&mut graph.retired);
        drop(graph);
        self.pack(pending);
        drop(retired);
    }

    /// Handles go, in order, after those that the latest op was given.
    pub(crate) fn let_go_all(&self, vars: impl Iterator<Item = Var>) {
        let keys: SmallVec<[ValueKey; 3]> = vars.map(Var::into_key).collect();
        self.settle_operands();
        self.let_go(keys);
    }

    /// Runs the kernels of settlings.
    pub(super) fn pack(&self, pending: Vec<Pending>) {
        pending.into_iter().for_each(|pending| self.pack_one(pending));
    }

    fn pack_one(&self, Pending { value, tensor, mark }: Pending) {
        let start = Instant::now();
        let graph = self.graph();
        let (device, measure) = (graph.device.clone(), graph.options.measure_quantization);
        let (stream, (path, op)) = (graph.rounding_stream(value), graph.name_of(value));
        drop(graph);
        let packed = Packed::new(mark, &self.exec(&device, MemoryKind::Quantized), &tensor, stream);
        let error = match &packed {
            Ok(packed) if measure => self.packing_error(&device, &tensor, packed).ok(),
            _ => None,
        };
        let mut graph = self.graph();
        if let Ok(packed) = &packed {
            graph.stats.quantize_traffic += packed.traffic();
        }
        drop(tensor);
        graph.finish_packing(value, packed.map_err(|error| error.of_value(&path, op)), error);
        graph.stats.quantize_nanos += start.elapsed().as_nanos() as u64;
    }

    /// Relative L2 distance of what is stored from the original.
    fn packing_error(&self, device: &Device, original: &Tensor, packed: &Packed) -> Result<f64> {
        // Both tensors on every device, so that a dry run takes the same memory.
        let stored =
            packed.unpack(&self.exec(device, MemoryKind::Workspace))?.cast(DType::F64, MemoryKind::Workspace)?;
        let original = original.cast(DType::F64, MemoryKind::Workspace)?;
        let (mut error, mut norm) = (0.0, 0.0);
        for (x, y) in original.to_vec::<f64>()?.into_iter().zip(stored.to_vec::<f64>()?) {
            error += (x - y) * (x - y);
            norm += x * x;
        }
        Ok(if norm == 0.0 { 0.0 } else { (error / norm).sqrt() })
    }
}

impl Graph {
    pub(super) fn count_handle(&mut self, value: ValueKey, change: i32) {
        let v = &self.values[value];
        let (handles, users) = (&mut self.roots[v.root].handles, &mut self.nodes[v.node].users);
        *handles = handles.wrapping_add_signed(change);
        *users = users.wrapping_add_signed(change);
    }

    /// One handle more.
    pub(super) fn retain_handle(&mut self, value: ValueKey) {
        self.values[value].handles += 1;
        self.count_handle(value, 1);
    }

    /// A new handle on a leaf of this tensor; false where the leaf is gone or of another one (a parameter that was
    /// updated since, another view of it, frozen or not).
    pub(super) fn reopen_leaf(&mut self, leaf: ValueKey, tensor: &Tensor, requires_grad: bool) -> bool {
        let (Some(v), Some(root)) = (self.values.get(leaf), self.roots.get_mut(leaf)) else { return false };
        let same = match root.full() {
            Some(own) => own.shares_storage(tensor) && own.layout() == tensor.layout() && own.dtype() == tensor.dtype(),
            None => v.spec == Spec::of(tensor),
        };
        if !same || v.requires_grad != requires_grad {
            return false;
        }
        root.state = State::Live(tensor.clone().sealed());
        let id = v.id;
        self.tell(|_| Event::Reopen(id));
        self.retain_handle(leaf);
        true
    }

    /// One handle less on each of these values, in order. What is to be packed is for the caller, when all have gone:
    /// so a weight that was cast for an op is free before the op's input is packed.
    fn release_handles(&mut self, values: impl IntoIterator<Item = ValueKey>) -> Vec<Pending> {
        let mut handles: SmallVec<[(ValueKey, bool); 3]> = SmallVec::new();
        let mut gone = SmallVec::new();
        for value in values {
            let Some(v) = self.values.get_mut(value) else { continue };
            v.handles -= 1;
            handles.push((value, v.handles == 0));
            gone.extend((v.handles == 0).then_some(v.id));
        }
        if !gone.is_empty() {
            self.tell(|_| Event::Release(gone));
        }
        let mut pending: Vec<Pending> =
            handles.into_iter().filter_map(|(value, last)| self.release_handle(value, last)).collect();
        // A later handle's going may have taken the only reader of an earlier value, and the value with it.
        pending.retain(|p| self.is_stored_full(p.value));
        pending
    }

    fn is_stored_full(&self, value: ValueKey) -> bool {
        self.roots.get(value).is_some_and(|root| matches!(root.state, State::Stored(Stored::Full(_))))
    }

    /// Nodes that nothing uses any more leave the tape, and with its last handle the root settles.
    fn release_handle(&mut self, value: ValueKey, last: bool) -> Option<Pending> {
        let v = &mut self.values[value];
        let (root, node) = (v.root, v.node);
        if last {
            v.view = None;
        }
        self.count_handle(value, -1);
        if !self.consumed {
            // First, so that a dead value, which only its own node would read, isn't stored on the way out.
            self.remove_dead(node);
        }
        let state = &mut self.roots.get_mut(root).filter(|root| root.handles == 0)?.state;
        match state {
            State::Live(_) => self.settle(root),
            State::Freed(tensor) => {
                *tensor = None;
                None
            }
            State::Stored(_) => None,
        }
    }

    pub(super) fn hold_recipe(&mut self, value: ValueKey) {
        if std::mem::replace(&mut self.roots[value].holds_recipe, true) {
            return;
        }
        let node = &mut self.nodes[self.values[value].node];
        node.recipe_holders += 1;
        if node.recipe_holders == 1 {
            for &input in &node.inputs {
                self.roots[self.values[input].root].recipes += 1;
            }
        }
    }

    fn drop_recipe(&mut self, value: ValueKey, released: &mut Vec<ValueKey>) {
        let Some(root) = self.roots.get_mut(value) else { return };
        if !std::mem::replace(&mut root.holds_recipe, false) {
            return;
        }
        let node = &mut self.nodes[self.values[value].node];
        node.recipe_holders -= 1;
        if node.recipe_holders == 0 {
            for &input in &node.inputs {
                let root = self.values[input].root;
                self.roots[root].recipes -= 1;
                released.push(root);
            }
        }
    }

    /// Takes or gives back the recipe as the current mark asks.
    pub(super) fn update_recipe(&mut self, value: ValueKey) {
        if self.roots[value].wants_recipe() {
            self.hold_recipe(value);
        } else {
            let mut released = Vec::new();
            self.drop_recipe(value, &mut released);
            self.free_unused(released);
        }
    }

    /// The input of a value's op that is gone, where the value has given up its recipe.
    pub(super) fn gone_input(&self, value: ValueKey) -> Option<ValueKey> {
        let inputs = self.nodes[self.values[value].node].inputs.iter();
        let mut roots = inputs.map(|&input| self.root(input)).filter(|_| !self.roots[value].holds_recipe);
        roots.find(|&root| self.roots[root].is_freed())
    }

    /// As [`update_recipe`](Self::update_recipe), where the mark may have changed to one that needs a recipe which was
    /// given up: then the value is kept, and a mark that asked to drop it is an error, parked.
    pub(super) fn require_recipe(&mut self, value: ValueKey) {
        if self.roots[value].wants_recipe() && self.gone_input(value).is_some() {
            let marking = &mut self.roots[value].marking;
            let (mark, source) = (marking.mark, marking.source);
            *marking = Marking { source, ..Marking::by_value(Mark::Keep) };
            if mark == Some(Mark::Recompute) {
                let (path, op) = self.name_of(value);
                let reason =
                    "its inputs were freed before its scope closed; mark scopes before recording in them".into();
                self.park(Error::MarkTooLate { mark: "recompute", path, op, reason });
            }
        }
        self.update_recipe(value);
    }

    /// Decides what is stored of a root whose last handle has gone (or which never had one).
    pub(super) fn settle(&mut self, value: ValueKey) -> Option<Pending> {
        let fate = self.fate(value);
        let root = &mut self.roots[value];
        root.marking.may_drop_outside = false;
        let State::Live(tensor) = std::mem::replace(&mut root.state, State::Freed(None)) else { return None };
        let (mut released, mut pending) = (Vec::new(), None);
        match fate {
            _ if !root.is_needed() => self.drop_recipe(value, &mut released),
            Fate::Dropped => {
                self.fingerprint(value, &tensor);
                self.roots[value].state = State::Stored(Stored::Dropped);
                self.hold_recipe(value);
            }
            Fate::Full => {
                self.store_full(value, tensor);
                self.drop_recipe(value, &mut released);
            }
            Fate::Packed(mark) => {
                // Full until the kernel has run; a failure leaves it so.
                self.store_full(value, tensor.clone());
                pending = Some(Pending { value, tensor, mark });
                self.drop_recipe(value, &mut released);
            }
        }
        self.free_unused(released);
        pending
    }

    /// Notes the bits of a value that is about to be dropped, where replays are checked.
    fn fingerprint(&mut self, value: ValueKey, tensor: &Tensor) {
        // A pass before this that replayed it behind a lossy value has left what later replays must equal.
        let audited = self.roots[value].audit.is_some();
        let node = &self.nodes[self.values[value].node];
        if self.options.verify == Verify::Bits && node.requires_grad && !audited {
            self.roots[value].audit = Fingerprint::of(tensor).ok();
        }
    }

    fn store_full(&mut self, value: ValueKey, tensor: Tensor) {
        let is_leaf = self.nodes[self.values[value].node].is_leaf();
        // A parameter's: `commit` has made it a state meanwhile.
        if !is_leaf && tensor.storage().kind() != MemoryKind::Parameter {
            tensor.storage().set_kind(MemoryKind::Saved);
        }
        self.roots[value].state = State::Stored(Stored::Full(tensor));
    }

    /// Frees settled roots that nothing uses any more, and what only they used.
    fn free_unused(&mut self, mut worklist: Vec<ValueKey>) {
        while let Some(value) = worklist.pop() {
            let unused = |root: &&mut Root| !root.is_needed() && matches!(root.state, State::Stored(_));
            let Some(root) = self.roots.get_mut(value).filter(unused) else { continue };
            root.free();
            self.drop_recipe(value, &mut worklist);
        }
    }

    /// Removes the node if no output has a handle and no living node consumes one; then those before it.
    fn remove_dead(&mut self, node: NodeKey) {
        let mut worklist = vec![node];
        while let Some(key) = worklist.pop() {
            let Some(node) = self.nodes.get(key).filter(|node| node.users == 0) else { continue };
            let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
            let mut released: Vec<ValueKey> = node.saved().iter().map(|&v| self.root(v)).collect();
            released.iter().for_each(|&root| self.roots[root].reads -= 1);
            self.free_unused(std::mem::take(&mut released));
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
                self.roots.remove(output);
            }
            self.retired.extend(self.nodes.remove(key).and_then(|node| node.op));
        }
    }

    /// The result of packing a value. A failure leaves the value in full, parked or counted.
    fn finish_packing(&mut self, value: ValueKey, result: Result<Packed>, error: Option<f64>) {
        if !self.values.contains_key(value) {
            return;
        }
        match result {
            // The user may have freed it, or a pass may have ended, while the kernel ran.
            Ok(packed) if self.is_stored_full(value) => {
                let id = self.values[value].id;
                packed.parts().iter().for_each(|part| part.storage().note_contents(Contents::Value(id)));
                let root = &mut self.roots[value];
                (root.state, root.packing_error) = (State::Stored(Stored::Packed(Box::new(packed))), error);
                self.stats.quantized += 1;
            }
            Ok(_) => {}
            Err(Error::NonFinite { .. }) if self.keep_full(value) => {}
            Err(error) => self.park(error),
        }
    }

    /// Where the tape's options say so, a value that its format can't hold is from here on as if marked Keep; a pass
    /// reads it so.
    pub(super) fn keep_full(&mut self, value: ValueKey) -> bool {
        if self.options.non_finite == NonFinite::Error {
            return false;
        }
        let root = &mut self.roots[value];
        (root.marking.mark, root.read_as) = (Some(Mark::Keep), None);
        self.stats.full_precision_fallbacks += 1;
        true
    }
}

impl Graph {
    /// Whether an op that reads a value exactly comes too late: the user has marked it otherwise, or a pass has read it
    /// otherwise. Then the value's root, and whether by a pass.
    pub(super) fn not_exact(&self, value: ValueKey) -> Option<(ValueKey, Mark, bool)> {
        let key = self.root(value);
        let root = &self.roots[key];
        if let Some(Fate::Packed(mark)) = root.read_as {
            return Some((key, mark, true));
        }
        let by_user = root.marking.source == MarkSource::Value && root.exactness == Exactness::Free;
        let packs = |mark: &Mark| mark.is_lossy() && mark.packs(&self.values[key].spec);
        let mark = root.marking.mark.filter(|mark| by_user && packs(mark));
        mark.map(|mark| (key, mark, false))
    }
}
