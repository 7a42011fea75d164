//! Visiting a node in a pass: its rule's backward gets what it declared, and its inputs get their gradients.

use super::graph::Graph;
use super::pass::Pass;
use super::value::{NodeKey, ValueKey};
use crate::ops::{Backward, GradientSum, Op, PassSource, Slot, Spec};
use crate::{Error, MemoryKind, Moment, Phase, Result, Tensor};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::rc::Rc;

/// The node being visited.
struct Visit {
    key: NodeKey,
    name: &'static str,
    path: Rc<str>,
    segment: Option<u32>,
    inputs: SmallVec<[ValueKey; 3]>,
    /// Of the inputs: whether their gradient is wanted, whether they are leaves, and what they are like.
    needs: SmallVec<[bool; 3]>,
    leaves: SmallVec<[bool; 3]>,
    specs: SmallVec<[Spec; 3]>,
    outputs: SmallVec<[ValueKey; 3]>,
    /// What backward may read and hasn't yet.
    untaken: SmallVec<[(Slot, ValueKey); 4]>,
}

/// The gradients that a rule has set, and the inputs to whose sums it has added instead.
type Given = (SmallVec<[Option<Tensor>; 3]>, SmallVec<[bool; 3]>);

impl Pass<'_> {
    /// Runs one node's backward and hands its inputs their gradients.
    pub(super) fn visit(&mut self, key: NodeKey, op: &Op) -> Result<()> {
        let mut visit = self.begin_visit(key);
        let grads: SmallVec<[Option<Tensor>; 1]> =
            visit.outputs.iter().map(|&output| self.take_grad(output)).collect::<Result<_>>()?;
        if grads.iter().any(Option::is_some) {
            let before = (self.tape.0.clock.nanos(), self.replay_nanos + self.quantize_nanos);
            let given = self.backward_of(op, &mut visit, grads)?;
            self.add_given(&visit, given)?;
            self.add_backward_time(&visit, before);
        }
        // What backward didn't ask for.
        for (_, value) in visit.untaken {
            self.end_read(value, visit.segment);
        }
        Ok(())
    }

    fn begin_visit(&mut self, key: NodeKey) -> Visit {
        let graph = self.tape.graph();
        let node = &graph.nodes[key];
        let producers = || node.inputs.iter().map(|&i| graph.values[i].node);
        let leads = producers().map(|producer| self.nodes[producer].leads);
        let visit = Visit {
            key,
            name: node.op_name(),
            path: graph.values[node.outputs[0]].path.clone(),
            segment: node.segment,
            needs: node.needs.iter().zip(leads).map(|(&needed, leads)| needed && leads).collect(),
            leaves: producers().map(|producer| graph.nodes[producer].is_leaf()).collect(),
            specs: node.inputs.iter().map(|&i| graph.values[i].spec.clone()).collect(),
            inputs: node.inputs.clone(),
            outputs: node.outputs.clone(),
            untaken: node.saves.iter().map(|s| (s.slot, node.slot(s.slot))).collect(),
        };
        self.visiting = Moment { phase: Phase::Backward, node: node.sequence };
        self.device.meter().set_moment(self.visiting);
        visit
    }

    /// Runs the rule's backward.
    fn backward_of(&mut self, op: &Op, visit: &mut Visit, grads: SmallVec<[Option<Tensor>; 1]>) -> Result<Given> {
        let (tape, device) = (self.tape, self.device.clone());
        let (name, path, segment) = (visit.name, visit.path.clone(), visit.segment);
        let mut saved = Saved { pass: self, node: visit.key, segment, untaken: &mut visit.untaken };
        let mut cx = Backward {
            device: &device,
            clock: &tape.0.clock,
            pass: &mut saved,
            taken: SmallVec::from_elem(false, visit.outputs.len()),
            output_grads: grads,
            input_grads: visit.inputs.iter().map(|_| None).collect(),
            summed: SmallVec::from_elem(false, visit.inputs.len()),
            needs: &visit.needs,
            leaves: &visit.leaves,
            inputs: &visit.specs,
            fault: RefCell::default(),
        };
        let broken = |reason: String| Error::BrokenRule { op: name, path: path.to_string(), reason };
        let result = op.rule().backward(&mut cx).map_err(|error| match error {
            Error::InvalidTensor { what, reason } => broken(format!("backward: {what}: {reason}")),
            other => other,
        });
        let given = (std::mem::take(&mut cx.input_grads), std::mem::take(&mut cx.summed));
        cx.fault.take().map_or(Ok(()), |reason| Err(broken(reason)))?;
        result.map(|()| given)
    }

    /// Adds the gradients that the rule has given to those of the inputs.
    fn add_given(&mut self, visit: &Visit, (grads, summed): Given) -> Result<()> {
        for (i, grad) in grads.into_iter().enumerate() {
            let (needed, spec) = (visit.needs[i], &visit.specs[i]);
            let wrong = match &grad {
                Some(g) if needed && (Spec::of(g) != *spec || *g.device() != self.device) => {
                    Some(format!("the gradient of input {i} is {g:?}, it must be {spec} on {}", self.device.name()))
                }
                Some(_) if summed[i] => {
                    Some(format!("the gradient of input {i} was both set and added to its sum; do one of these"))
                }
                None if needed && !summed[i] => Some(format!("no gradient was set for input {i}")),
                _ => None,
            };
            if let Some(reason) = wrong {
                return Err(Error::BrokenRule { op: visit.name, path: visit.path.to_string(), reason });
            }
            if let Some(grad) = grad.filter(|_| needed) {
                self.add_grad(visit.inputs[i], grad)?;
            }
        }
        Ok(())
    }

    /// Counts the kernels of a node's backward, replays apart, where the tape profiles.
    fn add_backward_time(&self, visit: &Visit, (kernels_before, replays_before): (u64, u64)) {
        let mut graph = self.tape.graph();
        if graph.options.profile {
            let kernels = self.tape.0.clock.nanos() - kernels_before;
            let replays = self.replay_nanos + self.quantize_nanos - replays_before;
            let time = graph.stats.by_path.entry(visit.path.to_string()).or_default();
            time.backward += kernels.saturating_sub(replays);
        }
    }

    /// A node's read of a value is over.
    fn end_read(&mut self, value: ValueKey, segment: Option<u32>) {
        let mut graph = self.tape.graph();
        let root = graph.root(value);
        let segments = &mut self.values[root].segments;
        if let Some(i) = segments.iter().position(|s| *s == segment) {
            segments.swap_remove(i);
        }
        self.unread(&mut graph, root);
    }

    /// One reader less; a recipe that nobody will need again in this pass lets its inputs go.
    pub(super) fn unread(&mut self, graph: &mut Graph, root: ValueKey) {
        let mut worklist = vec![root];
        while let Some(root) = worklist.pop() {
            let value = &mut self.values[root];
            value.readers -= 1;
            if value.readers > 0 {
                continue;
            }
            value.held = None;
            if !self.retain {
                graph.roots[root].free();
            }
            let key = graph.values[root].node;
            let node = &graph.nodes[key];
            let still_wanted = |o: &ValueKey| self.values[*o].readers > 0 && self.values[*o].replay;
            if self.nodes[key].open && !node.outputs.iter().any(still_wanted) {
                self.nodes[key].open = false;
                worklist.extend(node.inputs.iter().map(|&i| graph.root(i)));
            }
        }
    }
}

/// The saved tensors of the node being visited, and the sums of its inputs' gradients.
struct Saved<'p, 'a> {
    pass: &'p mut Pass<'a>,
    node: NodeKey,
    segment: Option<u32>,
    untaken: &'p mut SmallVec<[(Slot, ValueKey); 4]>,
}

impl PassSource for Saved<'_, '_> {
    fn sum(&mut self, input: usize) -> Result<GradientSum> {
        let value = self.pass.tape.graph().nodes[self.node].inputs[input];
        self.pass.sum(value)
    }

    fn take(&mut self, slot: Slot) -> Result<Tensor> {
        let Some(i) = self.untaken.iter().position(|(s, _)| *s == slot) else {
            let graph = self.pass.tape.graph();
            let (path, op) = graph.name_of(graph.nodes[self.node].outputs[0]);
            let reason = format!("backward asked for {slot:?}, which `saves` doesn't declare, or twice");
            return Err(Error::BrokenRule { op, path, reason });
        };
        let (_, value) = self.untaken.remove(i);
        let tensor = self.pass.read(value, self.segment)?;
        self.pass.end_read(value, self.segment);
        if tensor.is_sole_owner() {
            // The op owns it now, and may overwrite it.
            tensor.storage().set_kind(MemoryKind::Activation);
        }
        Ok(tensor)
    }
}
