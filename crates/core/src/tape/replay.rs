//! Reading a saved value in a pass: stored, lent by the user, dequantized, or replayed.

use super::audit::Fingerprint;
use super::graph::{Disposition, Graph, NodeKey, Quantized, Stored, ValueKey};
use super::pass::Pass;
use super::record::is_view_of;
use super::{dequantize, quantize};
use crate::ops::Spec;
use crate::{Contents, Error, Int8Spec, Mark, MemoryKind, Moment, Phase, Result, Tensor};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// How a root is read by a pass.
enum Source {
    Ready(Tensor),
    /// Dequantize the store.
    Dequantize(Quantized),
    /// The user holds an Int8 value: quantize and dequantize it, as if no handle existed.
    RoundTrip(Tensor, Int8Spec),
}

impl Pass<'_> {
    /// A link of a replay chain that is let go when the chain has passed: it belongs to another segment, and is neither
    /// a boundary nor read in the segment being visited.
    fn is_transient(&self, graph: &Graph, root: ValueKey, target: ValueKey, visited: Option<u32>) -> bool {
        let (v, p) = (&graph.values[root], &self.values[root]);
        p.replay
            && root != target
            && v.segment.is_some()
            && v.segment != visited
            && !v.boundary
            && !p.segments.contains(&visited)
    }

    fn is_there(&self, root: ValueKey) -> bool {
        self.values[root].held.is_some() || !self.values[root].replay
    }

    /// The tensor of a value: stored, lent by the user, dequantized, or replayed.
    pub(super) fn read(&mut self, value: ValueKey, segment: Option<u32>) -> Result<Tensor> {
        let root = self.tape.graph().root(value);
        if !self.is_there(root) {
            let start = Instant::now();
            let quantize_before = self.quantize_nanos;
            let result = self.replay(root, segment);
            let quantize = self.quantize_nanos - quantize_before;
            self.replay_nanos += (start.elapsed().as_nanos() as u64).saturating_sub(quantize);
            result?;
        }
        self.view(value)
    }

    /// The tensor of a value whose root is there, through its views.
    fn view(&mut self, value: ValueKey) -> Result<Tensor> {
        let root = self.tape.graph().root(value);
        let mut tensor = self.base(root)?;
        let mut graph = self.tape.graph();
        let mut views: SmallVec<[ValueKey; 4]> = SmallVec::new();
        let mut at = value;
        while at != root {
            views.push(at);
            at = graph.nodes[graph.values[at].node].inputs[0];
        }
        for view in views.into_iter().rev() {
            let v = &graph.values[view];
            let op = graph.nodes[v.node].op.clone().expect("a view is made by an op");
            let (path, output, spec) = (v.path.clone(), v.output, v.spec.clone());
            drop(graph);
            // Outside of the borrow: it may be a user's.
            let again = op.rule().view(&tensor).transpose()?.unwrap_or_default();
            match again.get(output) {
                Some(again) if is_view_of(again, &tensor, &spec) => tensor = again.clone(),
                _ => {
                    let reason =
                        format!("`view` gives {again:?} when it is asked once more, without {spec} at {output}");
                    return Err(Error::BrokenRule { op: op.rule().name(), path: path.to_string(), reason });
                }
            }
            graph = self.tape.graph();
        }
        Ok(tensor)
    }

    /// The tensor of a root that is there.
    fn base(&mut self, root: ValueKey) -> Result<Tensor> {
        if let Some(held) = &self.values[root].held {
            return Ok(held.clone());
        }
        let graph = self.tape.graph();
        let v = &graph.values[root];
        let source = match (&v.stored, &v.live) {
            (Stored::Full(tensor), _) => Source::Ready(tensor.clone()),
            (Stored::Quantized(quantized), _) => Source::Dequantize(quantized.clone()),
            (_, Some(live)) => match (graph.disposition(root), v.mark) {
                (Disposition::Quantize, Some(Mark::Int8(spec))) if matches!(v.stored, Stored::Unsettled) => {
                    Source::RoundTrip(live.clone(), spec)
                }
                _ => Source::Ready(live.clone()),
            },
            _ => {
                let (op, path) = (graph.nodes[v.node].op_name(), v.path.to_string());
                return Err(Error::Internal { op, path, reason: "backward reads it, but it is gone".into() });
            }
        };
        let (op, path, id) = (graph.nodes[v.node].op_name(), v.path.clone(), v.id);
        let stream = graph.rounding_stream(root);
        drop(graph);
        let start = Instant::now();
        let exec = self.tape.exec(&self.device, MemoryKind::Recomputed);
        let tensor = match source {
            Source::Ready(tensor) => return Ok(tensor),
            Source::Dequantize(quantized) => {
                self.tape.graph().stats.quantize_traffic += quantized.traffic();
                dequantize(&exec, &quantized)?
            }
            Source::RoundTrip(live, spec) => {
                let stored = match quantize(&self.tape.exec(&self.device, MemoryKind::Quantized), &live, spec, stream) {
                    Err(Error::NonFinite { .. }) if self.tape.graph().keep_full(root) => return Ok(live),
                    other => other.map_err(|error| error.of_value(&path, op))?,
                };
                drop(live);
                self.tape.graph().stats.quantize_traffic += 2 * stored.traffic();
                dequantize(&exec, &stored)?
            }
        };
        self.quantize_nanos += start.elapsed().as_nanos() as u64;
        tensor.storage().note_contents(Contents::Value(id));
        self.values[root].held = Some(tensor.clone());
        Ok(tensor)
    }

    /// Replays what is missing of a root's chain, found by a worklist and run in recording order.
    fn replay(&mut self, target: ValueKey, visited: Option<u32>) -> Result<()> {
        let graph = self.tape.graph();
        let mut chain: HashSet<NodeKey> = HashSet::new();
        // How often each root is an input of the chain: a transient link goes with its last use.
        let mut uses: HashMap<ValueKey, u32> = HashMap::new();
        let mut worklist = vec![target];
        while let Some(value) = worklist.pop() {
            let key = graph.values[value].node;
            if !chain.insert(key) {
                continue;
            }
            for &input in &graph.nodes[key].inputs {
                let root = graph.root(input);
                *uses.entry(root).or_default() += 1;
                if !self.is_there(root) {
                    worklist.push(root);
                }
            }
        }
        let mut chain: Vec<NodeKey> = chain.into_iter().collect();
        chain.sort_unstable_by_key(|&n| graph.nodes[n].sequence);
        drop(graph);
        for key in chain {
            self.replay_node(key, target, visited, &mut uses)?;
        }
        Ok(())
    }

    fn replay_node(
        &mut self,
        key: NodeKey,
        target: ValueKey,
        visited: Option<u32>,
        uses: &mut HashMap<ValueKey, u32>,
    ) -> Result<()> {
        let graph = self.tape.graph();
        let node = &graph.nodes[key];
        let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
        let moment = Moment { phase: Phase::Replay, node: node.sequence };
        let (op, name, path) = (node.op.clone(), node.op_name(), graph.values[outputs[0]].path.clone());
        let specs: SmallVec<[Spec; 3]> = outputs.iter().map(|&o| graph.values[o].spec.clone()).collect();
        let ids: SmallVec<[u64; 3]> = outputs.iter().map(|&o| graph.values[o].id).collect();
        let profile = graph.options.profile;
        drop(graph);
        let Some(op) = op else {
            return Err(Error::Internal {
                op: name,
                path: path.to_string(),
                reason: "a leaf can't be replayed".into(),
            });
        };

        let tensors: SmallVec<[Tensor; 3]> = inputs.iter().map(|&i| self.view(i)).collect::<Result<_>>()?;
        let exec = self.tape.exec(&self.device, MemoryKind::Recomputed);
        let before = self.tape.0.clock.nanos();
        self.device.meter().set_moment(moment);
        let produced: SmallVec<[Tensor; 1]> = specs.iter().map(|s| exec.empty_like(s)).collect::<Result<_>>()?;
        op.rule().forward(&exec, &tensors, &produced)?;
        produced.iter().zip(ids).for_each(|(tensor, id)| tensor.storage().note_contents(Contents::Value(id)));
        self.device.meter().set_moment(self.visiting);
        drop(tensors);
        self.nodes[key].replays += 1;

        let mut borrowed = self.tape.graph();
        let graph = &mut *borrowed;
        let node = &mut graph.nodes[key];
        node.replays += 1;
        graph.stats.replays += 1;
        graph.stats.replayed_flops = graph.stats.replayed_flops.saturating_add(node.flops);
        graph.stats.replayed_traffic = graph.stats.replayed_traffic.saturating_add(node.traffic);
        graph.stats.most_replays_of_a_node = graph.stats.most_replays_of_a_node.max(self.nodes[key].replays);
        *graph.stats.replayed_paths.entry(path.to_string()).or_default() += 1;
        if profile {
            let nanos = self.tape.0.clock.nanos() - before;
            graph.stats.by_path.entry(path.to_string()).or_default().replay += nanos;
        }
        drop(borrowed);

        // Fill all outputs that this pass still reads; never replace one that is there.
        let mut all_transient = true;
        for (&output, tensor) in outputs.iter().zip(produced) {
            let value = &self.values[output];
            if !(value.replay && value.readers > 0 && value.held.is_none()) {
                continue;
            }
            if self.verify {
                self.audit(output, &tensor)?;
            }
            self.values[output].held = Some(tensor);
            all_transient &= self.is_transient(&self.tape.graph(), output, target, visited);
        }
        let tape = self.tape;
        let mut graph = tape.graph();
        let close = !all_transient && std::mem::replace(&mut self.nodes[key].open, false);
        for &input in &inputs {
            let root = graph.root(input);
            let left = uses.get_mut(&root).expect("every input of the chain was counted");
            *left -= 1;
            let last_use = *left == 0;
            if close {
                self.unread(&mut graph, root);
            }
            if last_use && self.is_transient(&graph, root, target, visited) && self.nodes[graph.values[root].node].open
            {
                self.values[root].held = None;
            }
        }
        Ok(())
    }

    /// Compares a replay with what was dropped; behind an int8 value, with the first replay.
    fn audit(&self, output: ValueKey, tensor: &Tensor) -> Result<()> {
        if !self.device.computes() {
            return Ok(());
        }
        let fingerprint = {
            let mut graph = self.tape.graph();
            if self.values[output].tainted && !graph.audited_behind_int8.contains(&output) {
                graph.audited_behind_int8.insert(output);
                graph.values[output].audit = None;
            }
            graph.values[output].audit.take()
        };
        let (difference, fingerprint) = match fingerprint {
            Some(fingerprint) => (fingerprint.first_difference(tensor)?, fingerprint),
            None => (None, Fingerprint::of(tensor)?),
        };
        let mut graph = self.tape.graph();
        graph.values[output].audit = Some(fingerprint);
        match difference {
            None => Ok(()),
            Some(index) => {
                let v = &graph.values[output];
                let (path, op) = (v.path.to_string(), graph.nodes[v.node].op_name());
                Err(Error::ReplayDiffers { path, op, index })
            }
        }
    }
}
