//! How a value settles: handles, recipes, and what is stored, quantized, dropped or freed when the last handle goes.
//!
//! Users of a value are added only while a handle exists; afterwards they only fall, so the order in which handles go
//! doesn't matter. Every release is a worklist, never recursion: graphs are deep.

use super::NonFinite;
use super::audit::Fingerprint;
use super::graph::{Disposition, Graph, NodeKey, PendingQuantize, Quantized, Stored, ValueKey};
use super::trace::Event;
use crate::ops::Spec;
use crate::{Contents, Error, Mark, Result, Tensor};
use smallvec::SmallVec;

impl Graph {
    pub(super) fn count_handle(&mut self, value: ValueKey, change: i32) {
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

    /// A new handle on a leaf of this tensor; false where the leaf is gone or of another one (a parameter that was updated
    /// since, another view of it, frozen or not).
    pub fn reopen_leaf(&mut self, leaf: ValueKey, tensor: &Tensor, requires_grad: bool) -> bool {
        let Some(v) = self.values.get_mut(leaf) else { return false };
        let same = match (&v.live, &v.stored) {
            (Some(own), _) | (None, Stored::Full(own)) => {
                own.shares_storage(tensor) && own.layout() == tensor.layout() && own.dtype() == tensor.dtype()
            }
            _ => v.spec == Spec::of(tensor),
        };
        if !same || v.requires_grad != requires_grad {
            return false;
        }
        v.live = Some(tensor.clone().sealed());
        v.stored = Stored::Unsettled;
        let id = v.id;
        self.tell(|_| Event::Reopen(id));
        self.retain_handle(leaf);
        true
    }

    /// One handle less on each of these values, in order. What is to be quantized is for the caller, when all have
    /// gone: so a weight that was cast for an op is free before the op's input is stored as int8.
    pub fn release_handles(&mut self, values: impl IntoIterator<Item = ValueKey>) -> Vec<PendingQuantize> {
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
        let mut pending: Vec<PendingQuantize> =
            handles.into_iter().filter_map(|(value, last)| self.release_handle(value, last)).collect();
        // A later handle's going may have taken the only reader of an earlier value, and the value with it.
        pending.retain(|p| self.values.get(p.value).is_some_and(|v| matches!(v.stored, Stored::Full(_))));
        pending
    }

    /// Nodes that nothing uses any more leave the tape, and with its last handle the root settles.
    fn release_handle(&mut self, value: ValueKey, last: bool) -> Option<PendingQuantize> {
        let (root, node) = (self.values[value].root, self.values[value].node);
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
    pub(super) fn settle(&mut self, value: ValueKey) -> Option<PendingQuantize> {
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
                    pending = Some(PendingQuantize { value, tensor, spec });
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
        let is_leaf = self.nodes[self.values[value].node].is_leaf();
        // A parameter's: `commit` has made it a state meanwhile.
        if !is_leaf && tensor.storage().kind() != crate::MemoryKind::Parameter {
            tensor.storage().set_kind(crate::MemoryKind::Saved);
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
            let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
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
        }
    }

    /// The result of a pending quantization. A failure leaves the value in full, parked or counted.
    pub fn finish_quantize(&mut self, value: ValueKey, result: Result<Quantized>, error: Option<f64>) {
        let Some(v) = self.values.get_mut(value) else { return };
        match result {
            // The user may have freed it, or a pass may have ended, while the kernel ran.
            Ok(quantized) if matches!(v.stored, Stored::Full(_)) => {
                for part in [&quantized.q, &quantized.scales] {
                    part.storage().note_contents(Contents::Value(v.id));
                }
                v.stored = Stored::Quantized(quantized);
                v.quantization_error = error;
                self.stats.quantized += 1;
            }
            Ok(_) => {}
            Err(Error::NonFinite { .. }) if self.keep_full(value) => {}
            Err(error) => self.park(error),
        }
    }

    /// Where the tape's options say so, a value that int8 can't hold is from here on as if marked Keep; a pass reads it so.
    pub fn keep_full(&mut self, value: ValueKey) -> bool {
        if self.options.non_finite == NonFinite::Error {
            return false;
        }
        let v = &mut self.values[value];
        (v.mark, v.read_as) = (Some(Mark::Keep), None);
        self.stats.full_precision_fallbacks += 1;
        true
    }
}
