//! Backward: one loop over the nodes in reverse, replaying what was dropped when it is first asked for.
//!
//! A pass settles nothing. What the user still holds is read as its mark says, so gradients never depend on handles.
//! Readers are counted for the pass over the nodes reachable from the seeds; a replayed or unpacked value is freed
//! after its last reader, and so is, in a consuming pass, what the tape stores.

use super::value::{NodeKey, ValueKey};
use super::{BackwardOptions, Gradients, ParameterId, Tape, Var};
use crate::device::same_device;
use crate::ops::{Op, Spec};
use crate::{Device, Error, MemoryKind, Moment, Result, Tensor, kernel};
use slotmap::SecondaryMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashSet};

/// A value's part in a pass; of a root, but for `uses`.
#[derive(Debug, Default)]
pub(super) struct PassValue {
    /// Reads by nodes yet to be visited, and by recipes that may yet be replayed in this pass.
    pub readers: u32,
    /// A lossy value lies in its replay chain.
    pub tainted: bool,
    /// Not there: to be replayed.
    pub replay: bool,
    /// Replayed or unpacked, until its last reader.
    pub held: Option<Tensor>,
    /// Segments of the nodes that will read it.
    pub segments: SmallVec<[Option<u32>; 2]>,
    /// Of a value, root or not: how many gradients add up to its own, those that the pass starts from included.
    pub uses: u32,
}

#[derive(Debug, Default)]
pub(super) struct PassNode {
    pub reachable: bool,
    /// A wanted value is an output of it or comes before it.
    pub leads: bool,
    /// Its gradient is computed: one of its inputs leads on.
    pub visited: bool,
    /// Its inputs have a reader for its replay.
    pub open: bool,
    pub replays: u64,
}

pub(super) struct Pass<'a> {
    pub tape: &'a Tape,
    pub device: Device,
    pub retain: bool,
    pub verify: bool,
    pub values: SecondaryMap<ValueKey, PassValue>,
    pub nodes: SecondaryMap<NodeKey, PassNode>,
    /// Sums of the gradients that have come so far; in f32 where many of 16 bits add up.
    pub grads: SecondaryMap<ValueKey, Tensor>,
    /// The sums of parameters that have several leaves, by how many those are.
    pub shared: BTreeMap<ParameterId, (u32, Option<Tensor>)>,
    /// The user's own tensors: never given away as a gradient.
    pub given: Vec<Tensor>,
    /// Values that aren't leaves whose gradients are asked for.
    pub wanted: Vec<ValueKey>,
    pub replay_nanos: u64,
    pub quantize_nanos: u64,
    /// The node whose gradient is being computed.
    pub visiting: Moment,
}

/// What a pass starts from, and what for.
pub(super) struct Start<'a> {
    /// Values with their gradients.
    pub seeds: Vec<(&'a Var, Tensor)>,
    /// The user's own tensors among these.
    pub given: Vec<Tensor>,
    pub retain: bool,
    /// The values whose gradients are asked for; none for all leaves.
    pub wanted: Option<Vec<ValueKey>>,
}

impl Tape {
    /// Gradients of a scalar loss by every leaf that has one. Consumes the tape: what it stores is freed as the loop
    /// passes, and later use is [`Error::TapeConsumed`].
    pub fn backward(&self, loss: &Var) -> Result<Gradients> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// As [`backward`](Tape::backward), with options: the tape stays, or the gradients are scaled.
    pub fn backward_with(&self, loss: &Var, options: BackwardOptions) -> Result<Gradients> {
        self.start_at_scalar(loss, options, None)
    }

    /// The gradients of a scalar loss by these values, leaves or not, in their order. Only what leads to them is
    /// computed. Consumes the tape, as [`backward`](Tape::backward) does.
    ///
    /// # Errors
    /// [`Error::NoGradient`] for a value that the loss doesn't depend on.
    pub fn grad(&self, loss: &Var, of: &[&Var]) -> Result<Vec<Tensor>> {
        self.grad_with(loss, of, BackwardOptions::default())
    }

    /// As [`grad`](Tape::grad), with options.
    pub fn grad_with(&self, loss: &Var, of: &[&Var], options: BackwardOptions) -> Result<Vec<Tensor>> {
        drop(self.settled());
        if let Some(other) = [&loss].into_iter().chain(of).find(|v| !v.is_of(self)) {
            return Err(Error::OtherTape { what: "grad", path: other.path() });
        }
        if !options.create_graph
            && let Some(v) = of.iter().find(|v| !v.requires_grad())
        {
            return Err(no_gradient(v, v.why_no_gradient()));
        }
        let gradients = self.start_at_scalar(loss, options, Some(of.iter().map(|v| v.key).collect()))?;
        let missing = |v: &Var| no_gradient(v, "the loss doesn't depend on it");
        of.iter().map(|v| gradients.of(v).cloned().ok_or_else(|| missing(v))).collect()
    }

    /// Gradients from given gradients of any values (the vector of a vector-Jacobian product).
    pub fn backward_from(&self, seeds: &[(&Var, &Tensor)], options: BackwardOptions) -> Result<Gradients> {
        if let (true, Some((v, _))) = (options.create_graph, seeds.first()) {
            return Err(v.second_order());
        }
        if options.scale != 1.0 {
            let reason = format!("gradients that are given aren't scaled, and the options ask for {}", options.scale);
            return Err(Error::tensor("backward_from", reason));
        }
        let device = self.device();
        let on_tape = |g: &Tensor| match device.computes() {
            true => Ok(g.clone()),
            false => Ok(g.entering("backward_from", &device)?.into_owned()),
        };
        let seeds: Vec<(&Var, Tensor)> = seeds.iter().map(|&(v, g)| Ok((v, on_tape(g)?))).collect::<Result<_>>()?;
        let given = seeds.iter().map(|(_, g)| g.clone()).collect();
        self.backward_seeded(Start { seeds, given, retain: options.retain_graph, wanted: None })
    }

    fn start_at_scalar(
        &self,
        loss: &Var,
        options: BackwardOptions,
        wanted: Option<Vec<ValueKey>>,
    ) -> Result<Gradients> {
        if !loss.is_of(self) {
            return Err(Error::OtherTape { what: "backward", path: loss.path() });
        }
        drop(self.enter("backward", Some(loss.key))?);
        if options.create_graph {
            return Err(loss.second_order());
        }
        let tensor = loss.tensor()?;
        if tensor.len() != 1 {
            let reason =
                format!("backward starts at one number, this is {}; sum it, or use `backward_from`", Spec::of(&tensor));
            return Err(no_gradient(loss, reason));
        }
        let seed = Tensor::uninit(tensor.device(), tensor.shape(), tensor.dtype(), MemoryKind::Activation)?;
        tensor.device().run(kernel::Fill { value: options.scale, out: &seed })?;
        drop(tensor);
        let (seeds, given) = (vec![(loss, seed)], Vec::new());
        self.backward_seeded(Start { seeds, given, retain: options.retain_graph, wanted })
    }

    fn backward_seeded(&self, start: Start<'_>) -> Result<Gradients> {
        // Another tape's key may name a value of this one.
        let ours = |v: &Var| v.is_of(self);
        let first = start.seeds.first().map(|(v, _)| *v).filter(|v| ours(v));
        let _busy = self.enter("backward", first.map(|v| v.key))?;
        self.check_policy()?;
        let is_traced = self.graph().recording.is_some();
        if let (true, Some(v)) = (is_traced, first) {
            let reason = "a trace is of a forward pass; run backward after `Trace::record`, or `Trace::run`";
            return Err(no_gradient(v, reason));
        }
        for (v, g) in &start.seeds {
            if !ours(v) {
                return Err(Error::OtherTape { what: "backward", path: v.path() });
            }
            v.check_seed(g)?;
        }
        let mut pass = Pass::plan(self, &start);
        let result = pass.run(start.seeds);
        let (replay, quantize) = (pass.replay_nanos, pass.quantize_nanos);
        drop(pass);
        let mut graph = self.graph();
        graph.stats.replay_nanos += replay;
        graph.stats.quantize_nanos += quantize;
        result
    }
}

impl Var {
    /// Fails unless a pass may start at this value with this gradient.
    fn check_seed(&self, gradient: &Tensor) -> Result<()> {
        if !self.requires_grad() {
            return Err(no_gradient(self, self.why_no_gradient()));
        }
        same_device("backward_from", gradient.device(), &self.tape.device())?;
        let spec = Spec::of(&self.tensor()?);
        if Spec::of(gradient) != spec {
            return Err(no_gradient(self, format!("its gradient must be {spec}, got {}", Spec::of(gradient))));
        }
        Ok(())
    }

    fn second_order(&self) -> Error {
        let (path, op) = self.tape.graph().name_of(self.key);
        Error::SecondOrder { path, op }
    }

    /// Why a value that requires no gradient doesn't, and what to do instead.
    fn why_no_gradient(&self) -> String {
        let graph = self.tape.graph();
        let value = &graph.values[self.key];
        if !value.spec.dtype.is_float() {
            let dtype = value.spec.dtype;
            return format!("{dtype} values have no gradient; start from a float, before what made it an {dtype}");
        }
        // An op that has no gradient may lie between it and a leaf that requires one.
        let mut seen = HashSet::new();
        let mut worklist = vec![value.node];
        while let Some(key) = worklist.pop() {
            let node = &graph.nodes[key];
            if node.inputs.iter().any(|&i| graph.values[i].requires_grad) {
                let (op, path) = (node.op_name(), &graph.values[node.outputs[0]].path);
                return format!(
                    "it depends on its leaves only through `{path}` ({op}), which has no gradient; take that value as \
                     a constant, or use an op that has one"
                );
            }
            worklist.extend(node.inputs.iter().map(|&i| graph.values[i].node).filter(|&n| seen.insert(n)));
        }
        "it depends on no leaf that requires a gradient; make one with `leaf` or `parameter`".into()
    }
}

fn no_gradient(v: &Var, reason: impl Into<String>) -> Error {
    let (path, op) = v.tape.graph().name_of(v.key);
    Error::NoGradient { path, op, reason: reason.into() }
}

/// A pass that doesn't retain consumes the tape: everything goes, also where it failed half-way, or a rule panicked.
impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if !self.retain {
            let mut graph = self.tape.graph();
            graph.consumed = true;
            graph.roots.values_mut().for_each(|root| root.free());
        }
    }
}

impl Pass<'_> {
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
            match op {
                None => self.finish_leaf(outputs[0], parameter, &mut gradients)?,
                Some(op) => self.step(key, &op, &outputs, &mut gradients)?,
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

    /// Hands out the gradients of outputs that are wanted, and passes on to the inputs.
    fn step(&mut self, key: NodeKey, op: &Op, outputs: &[ValueKey], gradients: &mut Gradients) -> Result<()> {
        for &output in outputs {
            if self.wanted.contains(&output)
                && let Some(grad) = self.take_grad(output)?
            {
                gradients.by_value.insert(output, grad.clone());
                self.grads.insert(output, grad);
            }
        }
        if self.nodes[key].visited {
            return self.visit(key, op);
        }
        outputs.iter().for_each(|&output| drop(self.grads.remove(output)));
        Ok(())
    }
}
