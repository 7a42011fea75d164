//! Backward: one loop over the nodes in reverse, replaying what was dropped when it is first asked for.
//!
//! A pass settles nothing. What the user still holds is read as its mark says, so gradients never depend on handles.
//! Readers are counted for the pass over the nodes reachable from the seeds; a replayed or dequantized value is freed
//! after its last reader, and so is, in a consuming pass, what the tape stores.

use super::graph::{Disposition, Graph, NodeKey, Stored, ValueKey};
use super::sums::is_part;
use super::{Gradients, ParameterId, Tape, Var, Verify};
use crate::device::same_device;
use crate::ops::{Backward, GradientSum, Op, PassSource, Slot, Spec};
use crate::{Device, Error, MemoryKind, Moment, Phase, Result, Tensor, kernel};
use slotmap::SecondaryMap;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A root's part in a pass.
#[derive(Debug, Default)]
pub(super) struct PassValue {
    /// Reads by nodes yet to be visited, and by recipes that may yet be replayed in this pass.
    pub(super) readers: u32,
    /// Int8 lies in its replay chain.
    pub(super) tainted: bool,
    /// Not there: to be replayed.
    pub(super) replay: bool,
    /// Replayed or dequantized, until its last reader.
    pub(super) held: Option<Tensor>,
    /// Segments of the nodes that will read it.
    pub(super) segments: SmallVec<[Option<u32>; 2]>,
    /// Of a value, root or not: how many gradients add up to its own, those that the pass starts from included.
    pub(super) uses: u32,
}

#[derive(Debug, Default)]
pub(super) struct PassNode {
    pub(super) reachable: bool,
    /// A wanted value is an output of it or comes before it.
    pub(super) leads: bool,
    /// Its gradient is computed: one of its inputs leads on.
    pub(super) visited: bool,
    /// Its inputs have a reader for its replay.
    pub(super) open: bool,
    pub(super) replays: u64,
}

pub(super) struct Pass<'a> {
    pub(super) tape: &'a Tape,
    pub(super) device: Device,
    pub(super) retain: bool,
    pub(super) verify: bool,
    pub(super) values: SecondaryMap<ValueKey, PassValue>,
    pub(super) nodes: SecondaryMap<NodeKey, PassNode>,
    /// Sums of the gradients that have come so far; in f32 where many of 16 bits add up.
    pub(super) grads: SecondaryMap<ValueKey, Tensor>,
    /// The sums of parameters that have several leaves, by how many those are.
    pub(super) shared: BTreeMap<ParameterId, (u32, Option<Tensor>)>,
    /// The user's own tensors: never given away as a gradient.
    pub(super) given: Vec<Tensor>,
    /// Values that aren't leaves whose gradients are asked for.
    pub(super) wanted: Vec<ValueKey>,
    pub(super) replay_nanos: u64,
    pub(super) quantize_nanos: u64,
    /// The node whose gradient is being computed.
    pub(super) visiting: Moment,
}

/// How [`grad_with`](Tape::grad_with) takes gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GradOptions {
    /// Keep the tape for further passes and recording, as [`backward_retain`](Tape::backward_retain) does.
    pub retain_graph: bool,
    /// Record the gradients, so that they have gradients of their own. Not supported yet: [`Error::SecondOrder`].
    pub create_graph: bool,
}

impl Tape {
    /// Gradients of a scalar loss by every leaf that has one. Consumes the tape: what it stores is freed as the loop
    /// passes, and later use is [`Error::TapeConsumed`].
    pub fn backward(&self, loss: &Var) -> Result<Gradients> {
        self.backward_from_scalar(loss, 1.0, false, None)
    }

    /// As [`backward`](Tape::backward), with every gradient `scale` times as large: backward starts at `scale` instead of 1,
    /// rounded to the loss's dtype. For losses whose gradients are too small for the dtype of what lies before; whoever takes
    /// the gradients divides by `scale`. It takes the memory of `backward`, to the byte and in the same order.
    pub fn backward_scaled(&self, loss: &Var, scale: f64) -> Result<Gradients> {
        self.backward_from_scalar(loss, scale, false, None)
    }

    /// As [`backward`](Tape::backward), but the tape stays: any number of passes and further recording may follow, and the
    /// same loss gives the same bits.
    pub fn backward_retain(&self, loss: &Var) -> Result<Gradients> {
        self.backward_from_scalar(loss, 1.0, true, None)
    }

    fn backward_from_scalar(
        &self,
        loss: &Var,
        scale: f64,
        retain: bool,
        wanted: Option<&[ValueKey]>,
    ) -> Result<Gradients> {
        if !Rc::ptr_eq(&loss.tape.0, &self.0) {
            return Err(Error::OtherTape { what: "backward", path: loss.path() });
        }
        self.try_graph("backward")?.check("backward", Some(loss.key))?;
        let tensor = loss.tensor()?;
        if tensor.len() != 1 {
            let reason =
                format!("backward starts at one number, this is {}; sum it, or use `backward_from`", Spec::of(&tensor));
            return Err(no_gradient(loss, reason));
        }
        let seed = Tensor::uninit(tensor.device(), tensor.shape(), tensor.dtype(), MemoryKind::Activation)?;
        tensor.device().run(kernel::Fill { value: scale, out: &seed })?;
        drop(tensor);
        self.backward_seeded(vec![(loss, seed)], Vec::new(), retain, wanted)
    }

    /// The gradients of a scalar loss by these values, leaves or not, in their order. Only what leads to them is computed.
    /// Consumes the tape, as [`backward`](Tape::backward) does.
    ///
    /// # Errors
    /// [`Error::NoGradient`] for a value that the loss doesn't depend on.
    pub fn grad(&self, loss: &Var, of: &[&Var]) -> Result<Vec<Tensor>> {
        self.grad_with(loss, of, GradOptions::default())
    }

    /// As [`grad`](Tape::grad), with options.
    ///
    /// # Errors
    /// [`Error::SecondOrder`] where the gradients shall have gradients: backward passes aren't recorded. The tape stays as it
    /// was. What may do instead: the first derivative written with ops, and differentiated; or differences of two `grad`s.
    pub fn grad_with(&self, loss: &Var, of: &[&Var], options: GradOptions) -> Result<Vec<Tensor>> {
        drop(self.try_graph("grad")?);
        for v in [&loss].into_iter().chain(of) {
            if !Rc::ptr_eq(&v.tape.0, &self.0) {
                return Err(Error::OtherTape { what: "grad", path: v.path() });
            }
        }
        if options.create_graph {
            let graph = self.try_graph("grad")?;
            let value = &graph.values[loss.key];
            return Err(Error::SecondOrder { path: value.path.to_string(), op: graph.nodes[value.node].op_name() });
        }
        let wanted: Vec<ValueKey> = of.iter().map(|v| v.key).collect();
        if let Some(v) = of.iter().find(|v| !v.requires_grad()) {
            return Err(no_gradient(v, v.why_no_gradient()));
        }
        let gradients = self.backward_from_scalar(loss, 1.0, options.retain_graph, Some(&wanted))?;
        let missing = |v: &Var| no_gradient(v, "the loss doesn't depend on it");
        of.iter().map(|v| gradients.of(v).cloned().ok_or_else(|| missing(v))).collect()
    }

    /// Gradients from given gradients of any values (the vector of a vector-Jacobian product). With `retain` the tape stays.
    pub fn backward_from(&self, seeds: &[(&Var, &Tensor)], retain: bool) -> Result<Gradients> {
        let device = self.device();
        let on_tape = |g: &Tensor| match device.computes() {
            true => Ok(g.clone()),
            false => Ok(g.entering("backward_from", &device)?.into_owned()),
        };
        let seeds: Vec<(&Var, Tensor)> = seeds.iter().map(|&(v, g)| Ok((v, on_tape(g)?))).collect::<Result<_>>()?;
        let given = seeds.iter().map(|(_, g)| g.clone()).collect();
        self.backward_seeded(seeds, given, retain, None)
    }

    fn backward_seeded(
        &self,
        seeds: Vec<(&Var, Tensor)>,
        given: Vec<Tensor>,
        retain: bool,
        wanted: Option<&[ValueKey]>,
    ) -> Result<Gradients> {
        // Another tape's key may name a value of this one.
        let ours = seeds.iter().all(|(v, _)| Rc::ptr_eq(&v.tape.0, &self.0));
        {
            let mut graph = self.try_graph("backward")?;
            graph.check("backward", seeds.first().map(|(v, _)| v.key).filter(|_| ours))?;
            graph.check_rules()?;
            let traced = graph.recording.is_some();
            drop(graph);
            if let (true, Some((v, _))) = (traced, seeds.first().filter(|_| ours)) {
                return Err(no_gradient(
                    v,
                    "a trace is of a forward pass; run backward after `Trace::record`, or `Trace::run`",
                ));
            }
        }
        for (v, g) in &seeds {
            if !Rc::ptr_eq(&v.tape.0, &self.0) {
                return Err(Error::OtherTape { what: "backward", path: v.path() });
            }
            if !v.requires_grad() {
                return Err(no_gradient(v, v.why_no_gradient()));
            }
            same_device("backward_from", g.device(), &self.device())?;
            if Spec::of(g) != Spec::of(&v.tensor()?) {
                return Err(no_gradient(
                    v,
                    format!("its gradient must be {}, got {}", Spec::of(&v.tensor()?), Spec::of(g)),
                ));
            }
        }
        let mut pass = Pass::plan(self, &seeds, given, retain, wanted);
        let result = pass.run(seeds);
        let (replay, quantize) = (pass.replay_nanos, pass.quantize_nanos);
        drop(pass);
        let mut graph = self.graph();
        graph.stats.replay_nanos += replay;
        graph.stats.quantize_nanos += quantize;
        result
    }
}

impl Var {
    /// Why a value that requires no gradient doesn't, and what to do instead.
    fn why_no_gradient(&self) -> String {
        let graph = self.tape.graph();
        let value = &graph.values[self.key];
        if !value.spec.dtype.is_float() {
            let dtype = value.spec.dtype;
            return format!("{dtype} values have no gradient; start from a float, before what made it an {dtype}");
        }
        // An op that has no gradient may lie between it and a leaf that requires one.
        let mut seen = std::collections::HashSet::new();
        let mut worklist = vec![value.node];
        while let Some(key) = worklist.pop() {
            let node = &graph.nodes[key];
            if node.inputs.iter().any(|&i| graph.values[i].requires_grad) {
                let (op, path) = (node.op_name(), &graph.values[node.outputs[0]].path);
                return format!(
                    "it depends on its leaves only through `{path}` ({op}), which has no gradient; take that value as a \
                     constant, or use an op that has one"
                );
            }
            worklist.extend(node.inputs.iter().map(|&i| graph.values[i].node).filter(|&n| seen.insert(n)));
        }
        "it depends on no leaf that requires a gradient; make one with `leaf` or `parameter`".into()
    }
}

fn no_gradient(v: &Var, reason: impl Into<String>) -> Error {
    let graph = v.tape.graph();
    let value = &graph.values[v.key];
    Error::NoGradient { path: value.path.to_string(), op: graph.nodes[value.node].op_name(), reason: reason.into() }
}

/// A pass that doesn't retain consumes the tape: everything goes, also where it failed half-way, or a rule panicked.
impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if !self.retain {
            let mut graph = self.tape.graph();
            graph.consumed = true;
            graph.values.values_mut().for_each(|v| v.stored = Stored::Freed);
        }
    }
}

impl<'a> Pass<'a> {
    /// Counts the readers of this pass and decides what must be replayed.
    fn plan(
        tape: &'a Tape,
        seeds: &[(&Var, Tensor)],
        given: Vec<Tensor>,
        retain: bool,
        wanted: Option<&[ValueKey]>,
    ) -> Pass<'a> {
        let mut graph = tape.graph();
        graph.marked_before = graph.next_sequence;
        let mut values: SecondaryMap<ValueKey, PassValue> =
            graph.values.keys().map(|k| (k, PassValue::default())).collect();
        let mut nodes: SecondaryMap<NodeKey, PassNode> = graph.nodes.keys().map(|k| (k, PassNode::default())).collect();
        let order = graph.in_recording_order();
        let mut shared: BTreeMap<ParameterId, (u32, Option<Tensor>)> = BTreeMap::new();
        for (v, _) in seeds {
            nodes[graph.values[v.key].node].reachable = true;
            values[v.key].uses += 1;
        }
        for &key in &order {
            let node = &graph.nodes[key];
            nodes[key].leads = match wanted {
                None => true,
                Some(wanted) => {
                    node.outputs.iter().any(|o| wanted.contains(o))
                        || node.inputs.iter().any(|&i| nodes[graph.values[i].node].leads)
                }
            };
        }
        for &key in order.iter().rev() {
            let node = &graph.nodes[key];
            nodes[key].reachable &= nodes[key].leads;
            if !nodes[key].reachable || !node.requires_grad {
                continue;
            }
            if let Some(id) = node.parameter {
                shared.entry(id).or_default().0 += 1;
            }
            for (&input, _) in node.inputs.iter().zip(&node.needs).filter(|(_, needs)| **needs) {
                let producer = graph.values[input].node;
                if nodes[producer].leads {
                    nodes[producer].reachable = true;
                    nodes[key].visited = true;
                    // Through a view, those of its outputs may be added to the input's, see `Pass::sum`.
                    let through = match &node.op {
                        Some(op) if is_part(op) => node.outputs.iter().map(|&o| values[o].uses).sum(),
                        _ => 1,
                    };
                    values[input].uses += through;
                }
            }
            if !nodes[key].visited {
                continue;
            }
            for value in node.saved() {
                let root = &mut values[graph.root(value)];
                root.readers += 1;
                root.segments.push(node.segment);
            }
        }
        for &key in &order {
            let node = &graph.nodes[key];
            let inputs_tainted = node.inputs.iter().any(|&i| values[graph.root(i)].tainted);
            for &output in node.outputs.iter().filter(|&&o| graph.root(o) == o) {
                let v = &graph.values[output];
                let disposition = match &v.stored {
                    Stored::Unsettled => graph.disposition(output),
                    Stored::Full(_) => Disposition::Full,
                    Stored::Quantized(_) => Disposition::Quantize,
                    Stored::Dropped | Stored::Freed => Disposition::Drop,
                };
                let value = &mut values[output];
                match disposition {
                    Disposition::Full => {}
                    Disposition::Quantize => value.tainted = true,
                    Disposition::Drop => {
                        // A held tensor is lent only where its replay would give the same bits.
                        value.replay = v.live.is_none() || inputs_tainted;
                        value.tainted = value.replay && inputs_tainted;
                    }
                }
            }
        }
        for &key in order.iter().rev() {
            let wanted = |o: &ValueKey| values[*o].readers > 0 && values[*o].replay;
            if graph.nodes[key].outputs.iter().any(wanted) {
                nodes[key].open = true;
                for &input in &graph.nodes[key].inputs {
                    values[graph.root(input)].readers += 1;
                }
            }
        }
        for (key, v) in graph.values.iter_mut() {
            let part = &values[key];
            if !retain && part.readers == 0 {
                v.stored = Stored::Freed;
            } else if part.readers > 0 && part.tainted && matches!(v.stored, Stored::Unsettled) {
                v.read_as = Some(if part.replay { Disposition::Drop } else { Disposition::Quantize });
            }
        }
        let (device, verify) = (graph.device.clone(), graph.options.verify == Verify::Bits);
        drop(graph);
        shared.retain(|_, (leaves, _)| *leaves > 1);
        let (grads, replay_nanos, quantize_nanos) = (SecondaryMap::new(), 0, 0);
        let wanted = wanted.map_or(Vec::new(), <[ValueKey]>::to_vec);
        let visiting = Moment::default();
        Pass {
            tape,
            device,
            retain,
            verify,
            values,
            nodes,
            grads,
            shared,
            given,
            wanted,
            replay_nanos,
            quantize_nanos,
            visiting,
        }
    }

    fn run(&mut self, seeds: Vec<(&Var, Tensor)>) -> Result<Gradients> {
        for (v, g) in seeds {
            self.add_grad(v.key, g)?;
        }
        let order = self.tape.graph().in_recording_order();
        let mut gradients = Gradients { tape: self.tape.0.id, ..Gradients::default() };
        for key in order.into_iter().rev() {
            if !self.nodes[key].reachable {
                continue;
            }
            let graph = self.tape.graph();
            let node = &graph.nodes[key];
            let (op, parameter, outputs) = (node.op.clone(), node.parameter, node.outputs.clone());
            drop(graph);
            let Some(op) = op else {
                self.finish_leaf(outputs[0], parameter, &mut gradients)?;
                continue;
            };
            for &output in &outputs {
                if self.wanted.contains(&output)
                    && let Some(grad) = self.take_grad(output)?
                {
                    gradients.by_value.insert(output, grad.clone());
                    self.grads.insert(output, grad);
                }
            }
            if self.nodes[key].visited {
                self.visit(key, &op)?;
            } else {
                outputs.iter().for_each(|&output| drop(self.grads.remove(output)));
            }
        }
        for (id, (_, sum)) in std::mem::take(&mut self.shared) {
            if let (Some(sum), Some(leaf)) = (sum, gradients.by_parameter.get(&id)) {
                let sum = if sum.dtype() == leaf.dtype() { sum } else { sum.cast(leaf.dtype(), MemoryKind::Gradient)? };
                gradients.by_parameter.insert(id, sum.sealed());
            }
        }
        Ok(gradients)
    }

    /// Runs one node's backward and hands its inputs their gradients.
    fn visit(&mut self, key: NodeKey, op: &Op) -> Result<()> {
        let graph = self.tape.graph();
        let node = &graph.nodes[key];
        let outputs = node.outputs.clone();
        let taken = outputs.iter().map(|_| false).collect();
        let (inputs, mut needs) = (node.inputs.clone(), node.needs.clone());
        for (needed, &input) in needs.iter_mut().zip(&inputs) {
            *needed &= self.nodes[graph.values[input].node].leads;
        }
        let leaves: SmallVec<[bool; 3]> = inputs.iter().map(|&i| graph.nodes[graph.values[i].node].is_leaf()).collect();
        let specs: SmallVec<[Spec; 3]> = inputs.iter().map(|&i| graph.values[i].spec.clone()).collect();
        let mut untaken: SmallVec<[(Slot, ValueKey); 4]> =
            node.saves.iter().map(|s| (s.slot, node.slot(s.slot))).collect();
        let (segment, name, profile) = (node.segment, node.op_name(), graph.options.profile);
        let path = graph.values[node.outputs[0]].path.clone();
        self.visiting = Moment { phase: Phase::Backward, node: node.sequence };
        drop(graph);
        self.device.meter().set_moment(self.visiting);
        let output_grads: SmallVec<[Option<Tensor>; 1]> =
            outputs.iter().map(|&output| self.take_grad(output)).collect::<Result<_>>()?;

        if output_grads.iter().any(Option::is_some) {
            let (before, replays_before) = (self.tape.0.clock.nanos(), self.replay_nanos + self.quantize_nanos);
            let device = self.device.clone();
            let mut saved = Saved { pass: self, node: key, segment, untaken: &mut untaken };
            let tape = saved.pass.tape;
            let mut cx = Backward {
                device: &device,
                clock: &tape.0.clock,
                pass: &mut saved,
                output_grads,
                input_grads: inputs.iter().map(|_| None).collect(),
                summed: SmallVec::from_elem(false, inputs.len()),
                needs: &needs,
                leaves: &leaves,
                inputs: &specs,
                taken,
                fault: RefCell::default(),
            };
            let broken = |reason: String| Error::BrokenRule { op: name, path: path.to_string(), reason };
            let result = op.rule().backward(&mut cx).map_err(|error| match error {
                Error::InvalidTensor { what, reason } => broken(format!("backward: {what}: {reason}")),
                other => other,
            });
            let (grads, summed) = (std::mem::take(&mut cx.input_grads), std::mem::take(&mut cx.summed));
            let fault = cx.fault.take();
            drop(cx);
            fault.map_or(Ok(()), |reason| Err(broken(reason)))?;
            result?;
            for (i, grad) in grads.into_iter().enumerate() {
                let wrong = match &grad {
                    Some(g) if needs[i] && (Spec::of(g) != specs[i] || *g.device() != device) => Some(format!(
                        "the gradient of input {i} is {g:?}, it must be {} on {}",
                        specs[i],
                        device.name()
                    )),
                    Some(_) if summed[i] => {
                        Some(format!("the gradient of input {i} was both set and added to its sum; do one of these"))
                    }
                    None if needs[i] && !summed[i] => Some(format!("no gradient was set for input {i}")),
                    _ => None,
                };
                if let Some(reason) = wrong {
                    return Err(broken(reason));
                }
                if let Some(grad) = grad.filter(|_| needs[i]) {
                    self.add_grad(inputs[i], grad)?;
                }
            }
            if profile {
                let kernel = self.tape.0.clock.nanos() - before;
                let replays = self.replay_nanos + self.quantize_nanos - replays_before;
                let mut graph = self.tape.graph();
                graph.stats.by_path.entry(path.to_string()).or_default().backward += kernel.saturating_sub(replays);
            }
        }
        // What backward didn't ask for.
        for (_, value) in untaken {
            self.end_read(value, segment);
        }
        Ok(())
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
                graph.values[root].stored = Stored::Freed;
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
            let node = &graph.nodes[self.node];
            let path = graph.values[node.outputs[0]].path.to_string();
            let reason = format!("backward asked for {slot:?}, which `saves` doesn't declare, or twice");
            return Err(Error::BrokenRule { op: node.op_name(), path, reason });
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
