//! Reading a saved value in a pass: stored, lent by the user, unpacked, or replayed.

use super::audit::Fingerprint;
use super::graph::Graph;
use super::pass::Pass;
use super::record::is_view_of;
use super::storage::Packed;
use super::value::{Fate, NodeKey, State, Stored, ValueKey};
use crate::ops::{Op, Spec};
use crate::{Contents, Error, Mark, MemoryKind, Moment, Phase, Result, Tensor};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Instant;

/// How a root is read by a pass.
enum Source {
    Ready(Tensor),
    Unpack(Box<Packed>),
    /// The user holds a value that will be packed: pack and unpack it, as if no handle existed.
    RoundTrip(Tensor, Mark),
}

/// A node to be replayed.
struct Replay {
    key: NodeKey,
    op: Rc<Op>,
    path: Rc<str>,
    moment: Moment,
    inputs: SmallVec<[ValueKey; 3]>,
    outputs: SmallVec<[ValueKey; 3]>,
    specs: SmallVec<[Spec; 3]>,
    ids: SmallVec<[u64; 3]>,
}

/// A chain of nodes being replayed.
struct Chain {
    /// The root that it is for.
    target: ValueKey,
    /// The segment of the node being visited.
    visited: Option<u32>,
    /// How often each root is an input of the chain: a transient link goes with its last use.
    uses: HashMap<ValueKey, u32>,
}

impl Pass<'_> {
    /// A link of a replay chain that is let go when the chain has passed: it belongs to another segment, and is neither
    /// a boundary nor read in the segment being visited.
    fn is_transient(&self, graph: &Graph, root: ValueKey, chain: &Chain) -> bool {
        let (r, p) = (&graph.roots[root], &self.values[root]);
        p.replay
            && root != chain.target
            && r.segment.is_some()
            && r.segment != chain.visited
            && !r.boundary
            && !p.segments.contains(&chain.visited)
    }

    fn is_there(&self, root: ValueKey) -> bool {
        self.values[root].held.is_some() || !self.values[root].replay
    }

    /// The tensor of a value: stored, lent by the user, unpacked, or replayed.
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
        let source = graph.source(root)?;
        let ((path, op), id) = (graph.name_of(root), graph.values[root].id);
        let stream = graph.rounding_stream(root);
        drop(graph);
        let start = Instant::now();
        let (tape, device) = (self.tape, self.device.clone());
        let traffic = |bytes: u64| tape.graph().stats.quantize_traffic += bytes;
        let tensor = match source {
            Source::Ready(tensor) => return Ok(tensor),
            Source::Unpack(packed) => {
                traffic(packed.traffic());
                packed.unpack(&tape.exec(&device, MemoryKind::Recomputed))?
            }
            Source::RoundTrip(live, mark) => {
                let packed = match Packed::new(mark, &tape.exec(&device, MemoryKind::Quantized), &live, stream) {
                    Err(Error::NonFinite { .. }) if tape.graph().keep_full(root) => return Ok(live),
                    other => other.map_err(|error| error.of_value(&path, op))?,
                };
                drop(live);
                traffic(2 * packed.traffic());
                packed.unpack(&tape.exec(&device, MemoryKind::Recomputed))?
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
        let mut nodes: HashSet<NodeKey> = HashSet::new();
        let mut chain = Chain { target, visited, uses: HashMap::new() };
        let mut worklist = vec![target];
        while let Some(value) = worklist.pop() {
            let key = graph.values[value].node;
            if !nodes.insert(key) {
                continue;
            }
            for &input in &graph.nodes[key].inputs {
                let root = graph.root(input);
                *chain.uses.entry(root).or_default() += 1;
                if !self.is_there(root) {
                    worklist.push(root);
                }
            }
        }
        let mut nodes: Vec<NodeKey> = nodes.into_iter().collect();
        nodes.sort_unstable_by_key(|&n| graph.nodes[n].sequence);
        drop(graph);
        nodes.into_iter().try_for_each(|key| self.replay_node(key, &mut chain))
    }

    fn replay_node(&mut self, key: NodeKey, chain: &mut Chain) -> Result<()> {
        let replay = self.tape.graph().replay_of(key)?;
        let tensors: SmallVec<[Tensor; 3]> = replay.inputs.iter().map(|&i| self.view(i)).collect::<Result<_>>()?;
        let exec = self.tape.exec(&self.device, MemoryKind::Recomputed);
        let before = self.tape.0.clock.nanos();
        self.device.meter().set_moment(replay.moment);
        let produced: SmallVec<[Tensor; 1]> = replay.specs.iter().map(|s| exec.empty_like(s)).collect::<Result<_>>()?;
        replay.op.rule().forward(&exec, &tensors, &produced)?;
        let noted = produced.iter().zip(&replay.ids);
        noted.for_each(|(tensor, &id)| tensor.storage().note_contents(Contents::Value(id)));
        self.device.meter().set_moment(self.visiting);
        drop(tensors);
        self.nodes[key].replays += 1;
        let nanos = self.tape.0.clock.nanos() - before;
        self.tape.graph().count_replay(&replay, self.nodes[key].replays, nanos);
        let all_transient = self.fill(&replay, produced, chain)?;
        self.pass_on(&replay, all_transient, chain);
        Ok(())
    }

    /// Fills all outputs that this pass still reads; never replaces one that is there. Whether all of these are let go
    /// with the chain.
    fn fill(&mut self, replay: &Replay, produced: SmallVec<[Tensor; 1]>, chain: &Chain) -> Result<bool> {
        let mut all_transient = true;
        for (&output, tensor) in replay.outputs.iter().zip(produced) {
            let value = &self.values[output];
            if !(value.replay && value.readers > 0 && value.held.is_none()) {
                continue;
            }
            if self.verify {
                self.audit(output, &tensor)?;
            }
            self.values[output].held = Some(tensor);
            all_transient &= self.is_transient(&self.tape.graph(), output, chain);
        }
        Ok(all_transient)
    }

    /// Lets go of the inputs that a replay was the last to use.
    fn pass_on(&mut self, replay: &Replay, all_transient: bool, chain: &mut Chain) {
        let mut graph = self.tape.graph();
        let close = !all_transient && std::mem::replace(&mut self.nodes[replay.key].open, false);
        for &input in &replay.inputs {
            let root = graph.root(input);
            let left = chain.uses.get_mut(&root).expect("every input of the chain was counted");
            *left -= 1;
            let last_use = *left == 0;
            if close {
                self.unread(&mut graph, root);
            }
            if last_use && self.is_transient(&graph, root, chain) && self.nodes[graph.values[root].node].open {
                self.values[root].held = None;
            }
        }
    }

    /// Compares a replay with what was dropped; behind a lossy value, with the first replay.
    fn audit(&self, output: ValueKey, tensor: &Tensor) -> Result<()> {
        if !self.device.computes() {
            return Ok(());
        }
        let mut graph = self.tape.graph();
        if self.values[output].tainted && graph.audited_behind_lossy.insert(output) {
            graph.roots[output].audit = None;
        }
        let fingerprint = graph.roots[output].audit.take();
        drop(graph);
        let (difference, fingerprint) = match fingerprint {
            Some(fingerprint) => (fingerprint.first_difference(tensor)?, fingerprint),
            None => (None, Fingerprint::of(tensor)?),
        };
        let mut graph = self.tape.graph();
        graph.roots[output].audit = Some(fingerprint);
        let Some(index) = difference else { return Ok(()) };
        let (path, op) = graph.name_of(output);
        Err(Error::ReplayDiffers { path, op, index })
    }
}

impl Graph {
    /// How a pass reads a root that is neither replayed nor unpacked yet.
    fn source(&self, key: ValueKey) -> Result<Source> {
        let root = &self.roots[key];
        Ok(match (&root.state, self.fate(key)) {
            (State::Stored(Stored::Full(tensor)) | State::Freed(Some(tensor)), _) => Source::Ready(tensor.clone()),
            (State::Stored(Stored::Packed(packed)), _) => Source::Unpack(packed.clone()),
            (State::Live(tensor), Fate::Packed(mark)) => Source::RoundTrip(tensor.clone(), mark),
            (State::Live(tensor), _) => Source::Ready(tensor.clone()),
            (State::Stored(Stored::Dropped) | State::Freed(None), _) => {
                let (path, op) = self.name_of(key);
                return Err(Error::Internal { op, path, reason: "backward reads it, but it is gone".into() });
            }
        })
    }

    fn replay_of(&self, key: NodeKey) -> Result<Replay> {
        let node = &self.nodes[key];
        let Some(op) = node.op.clone() else {
            let (path, op) = self.name_of(node.outputs[0]);
            return Err(Error::Internal { op, path, reason: "a leaf can't be replayed".into() });
        };
        Ok(Replay {
            key,
            op,
            path: self.values[node.outputs[0]].path.clone(),
            moment: Moment { phase: Phase::Replay, node: node.sequence },
            specs: node.outputs.iter().map(|&o| self.values[o].spec.clone()).collect(),
            ids: node.outputs.iter().map(|&o| self.values[o].id).collect(),
            inputs: node.inputs.clone(),
            outputs: node.outputs.clone(),
        })
    }

    /// Counts a replay, the `nth` of its node in this pass.
    fn count_replay(&mut self, replay: &Replay, nth: u64, nanos: u64) {
        let (node, stats) = (&mut self.nodes[replay.key], &mut self.stats);
        node.replays += 1;
        stats.replays += 1;
        stats.replayed_flops = stats.replayed_flops.saturating_add(node.flops);
        stats.replayed_traffic = stats.replayed_traffic.saturating_add(node.traffic);
        stats.most_replays_of_a_node = stats.most_replays_of_a_node.max(nth);
        *stats.replayed_paths.entry(replay.path.to_string()).or_default() += 1;
        if self.options.profile {
            stats.by_path.entry(replay.path.to_string()).or_default().replay += nanos;
        }
    }
}
