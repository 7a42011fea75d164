//! What a pass looks at before it begins: which nodes it visits, who reads what, and what must be replayed.

use super::graph::{Graph, Node};
use super::pass::{Pass, PassNode, PassValue, Start};
use super::sums::is_part;
use super::value::{Fate, NodeKey, State, Stored, ValueKey};
use super::{ParameterId, Tape, Verify};
use crate::{Moment, Tensor};
use slotmap::SecondaryMap;
use std::collections::BTreeMap;

/// A pass in the making.
struct Plan<'g> {
    graph: &'g Graph,
    order: Vec<NodeKey>,
    values: SecondaryMap<ValueKey, PassValue>,
    nodes: SecondaryMap<NodeKey, PassNode>,
    shared: BTreeMap<ParameterId, (u32, Option<Tensor>)>,
}

impl<'a> Pass<'a> {
    /// Counts the readers of this pass and decides what must be replayed.
    pub fn plan(tape: &'a Tape, start: &Start<'_>) -> Pass<'a> {
        let mut graph = tape.graph();
        graph.marked_before = graph.next_sequence;
        let mut plan = Plan {
            order: graph.in_recording_order(),
            values: graph.values.keys().map(|k| (k, PassValue::default())).collect(),
            nodes: graph.nodes.keys().map(|k| (k, PassNode::default())).collect(),
            shared: BTreeMap::new(),
            graph: &graph,
        };
        plan.reach(start);
        plan.decide_replays();
        plan.open_recipes();
        let Plan { values, nodes, mut shared, .. } = plan;
        graph.begin_pass(&values, start.retain);
        shared.retain(|_, (leaves, _)| *leaves > 1);
        Pass {
            tape,
            device: graph.device.clone(),
            retain: start.retain,
            verify: graph.options.verify == Verify::Bits,
            values,
            nodes,
            grads: SecondaryMap::new(),
            shared,
            given: start.given.clone(),
            wanted: start.wanted.clone().unwrap_or_default(),
            replay_nanos: 0,
            quantize_nanos: 0,
            visiting: Moment::default(),
        }
    }
}

impl Plan<'_> {
    /// Finds the nodes to visit, from the seeds back to what is wanted, and counts what they read.
    fn reach(&mut self, start: &Start<'_>) {
        for (v, _) in &start.seeds {
            self.nodes[self.graph.values[v.key].node].reachable = true;
            self.values[v.key].uses += 1;
        }
        for &key in &self.order {
            let node = &self.graph.nodes[key];
            self.nodes[key].leads = start.wanted.as_ref().is_none_or(|wanted| {
                node.outputs.iter().any(|o| wanted.contains(o))
                    || node.inputs.iter().any(|&i| self.nodes[self.graph.values[i].node].leads)
            });
        }
        for key in self.order.clone().into_iter().rev() {
            self.visit(key, &self.graph.nodes[key]);
        }
    }

    fn visit(&mut self, key: NodeKey, node: &Node) {
        self.nodes[key].reachable &= self.nodes[key].leads;
        if !self.nodes[key].reachable || !node.requires_grad {
            return;
        }
        if let Some(id) = node.parameter {
            self.shared.entry(id).or_default().0 += 1;
        }
        for (&input, _) in node.inputs.iter().zip(&node.needs).filter(|(_, needs)| **needs) {
            let producer = self.graph.values[input].node;
            if self.nodes[producer].leads {
                self.nodes[producer].reachable = true;
                self.nodes[key].visited = true;
                // Through a view, those of its outputs may be added to the input's, see `Pass::sum`.
                let through = match &node.op {
                    Some(op) if is_part(op) => node.outputs.iter().map(|&o| self.values[o].uses).sum(),
                    _ => 1,
                };
                self.values[input].uses += through;
            }
        }
        if self.nodes[key].visited {
            for value in node.saved() {
                let root = &mut self.values[self.graph.root(value)];
                root.readers += 1;
                root.segments.push(node.segment);
            }
        }
    }

    fn decide_replays(&mut self) {
        for &key in &self.order {
            let node = &self.graph.nodes[key];
            let inputs_tainted = node.inputs.iter().any(|&i| self.values[self.graph.root(i)].tainted);
            for (&output, root) in node.outputs.iter().filter_map(|o| Some((o, self.graph.roots.get(*o)?))) {
                let value = &mut self.values[output];
                match (&root.state, self.graph.fate(output)) {
                    (State::Stored(Stored::Full(_)), _) | (State::Live(_), Fate::Full) => {}
                    (State::Stored(Stored::Packed(packed)), _) => value.tainted = packed.mark().is_lossy(),
                    (State::Live(_), Fate::Packed(mark)) => value.tainted = mark.is_lossy(),
                    (State::Stored(Stored::Dropped) | State::Freed(_) | State::Live(_), _) => {
                        // A held tensor is lent only where its replay would give the same bits.
                        value.replay = root.live().is_none() || inputs_tainted;
                        value.tainted = value.replay && inputs_tainted;
                    }
                }
            }
        }
    }

    /// Gives the inputs of each node that may be replayed a reader.
    fn open_recipes(&mut self) {
        for &key in self.order.iter().rev() {
            let node = &self.graph.nodes[key];
            let wanted = |o: &ValueKey| self.values[*o].readers > 0 && self.values[*o].replay;
            if node.outputs.iter().any(wanted) {
                self.nodes[key].open = true;
                node.inputs.iter().for_each(|&input| self.values[self.graph.root(input)].readers += 1);
            }
        }
    }
}

impl Graph {
    /// Frees what a consuming pass doesn't read, and fixes how this one reads what other reads would change.
    fn begin_pass(&mut self, values: &SecondaryMap<ValueKey, PassValue>, retain: bool) {
        for (key, root) in self.roots.iter_mut() {
            let part = &values[key];
            if !retain && part.readers == 0 {
                root.free();
            } else if part.readers > 0 && part.tainted && root.is_unsettled() {
                root.read_as = Some(if part.replay { Fate::Dropped } else { root.fate(&self.values[key].spec) });
            }
        }
    }
}
