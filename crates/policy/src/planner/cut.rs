//! The cheapest choice for a price per byte, as a minimum cut.
//!
//! A value is absent, stored or replayed. What backward reads is not absent, and a replayed value needs each input of
//! its op stored or replayed. With truth values "available" (stored or replayed), "replayed", and for each op "runs
//! again", all constraints are implications between two of them, and the price is a sum over single ones: a minimum
//! closure, which is a minimum cut (Picard 1976, "Maximal closure of a graph and applications to combinatorial
//! problems"). How a stored value is stored concerns no other value, so the cheapest of the ways stands for all.

use super::graph::{Choice, Graph};
use petgraph::algo::dinics;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use retape_core::Moment;

/// Prices, in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    /// Of a byte that is live at the moment that counts.
    pub byte: f64,
    /// Of the error that lossy formats add to the gradients.
    pub error: f64,
}

/// A solution for classes: what it takes at the moment that counts, and its cost.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Solution {
    pub choices: Vec<Choice>,
    pub bytes: f64,
    pub seconds: f64,
}

/// The cut of one graph, with the bytes that count at one moment.
#[derive(Debug)]
pub(super) struct Cut<'a> {
    graph: &'a Graph,
    /// By class: bytes of stores and of replays.
    classes: Vec<Weights>,
    /// Seconds per byte of packing and unpacking.
    quantize: f64,
}

#[derive(Debug, Clone, Default)]
struct Weights {
    stored: f64,
    replayed: f64,
    /// By format, where all of the class may be stored so.
    packed: Vec<Option<PackedWeights>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct PackedWeights {
    bytes: f64,
    error: f64,
    seconds: f64,
}

impl Weights {
    /// The price of storing the class in the cheapest of the ways, and which that is; in full, where none is cheaper.
    fn cheapest(&self, prices: Prices) -> (f64, Choice) {
        let packed = self.packed.iter().enumerate().filter_map(|(format, weights)| {
            let w = (*weights)?;
            Some((prices.byte * w.bytes + w.seconds + prices.error * w.error, Choice::Packed(format)))
        });
        let full = (prices.byte * self.stored, Choice::Keep);
        packed.fold(full, |least, way| if way.0 < least.0 { way } else { least })
    }
}

impl<'a> Cut<'a> {
    /// Counts what is live at `moment`, or without one all that is stored when forward ends.
    pub fn new(graph: &'a Graph, moment: Option<Moment>, quantize: f64) -> Cut<'a> {
        let weights = graph.classes.iter().map(|class| {
            let none = vec![Some(PackedWeights::default()); graph.formats.len()];
            let mut sum = Weights { packed: none, ..Weights::default() };
            for item in class.items.iter().map(|&i| &graph.items[i]) {
                let (stored, replayed) = match moment {
                    Some(moment) => (item.stored_at(moment), item.replayed_at(moment)),
                    None => (true, false),
                };
                let replayed = if replayed { item.bytes as f64 } else { 0.0 };
                sum.stored += if stored { item.bytes as f64 } else { 0.0 };
                sum.replayed += replayed;
                for (weights, packed) in sum.packed.iter_mut().zip(&item.packed) {
                    *weights = weights.zip(*packed).map(|(sum, packed)| PackedWeights {
                        // A value that is being read is there in full, too.
                        bytes: sum.bytes + if stored { packed.bytes as f64 } else { 0.0 } + replayed,
                        error: sum.error.max(packed.error),
                        seconds: sum.seconds + quantize * 2.0 * (item.bytes + packed.bytes) as f64,
                    });
                }
            }
            sum
        });
        Cut { classes: weights.collect(), graph, quantize }
    }

    /// The solutions for all prices of a byte, least bytes last: the lower hull of what classes alone can reach.
    pub fn hull(&self, error_price: f64) -> Vec<Solution> {
        let solve = |byte: f64| self.solve(Prices { byte, error: error_price });
        let first = solve(0.0);
        let total: f64 = self.graph.nodes.iter().map(|n| n.seconds).sum::<f64>() + self.quantize;
        let least_bytes = self.classes.iter().map(|w| w.stored).filter(|b| *b > 0.0).fold(f64::INFINITY, f64::min);
        let last = solve(if least_bytes.is_finite() { 2.0 * total / least_bytes } else { 1.0 });
        let mut hull = vec![first.clone()];
        let mut pairs = vec![(first, last)];
        while let Some((more, less)) = pairs.pop() {
            if more.bytes <= less.bytes {
                continue;
            }
            let price = (less.seconds - more.seconds) / (more.bytes - less.bytes);
            let between = solve(price.max(0.0));
            let on_line = |s: &Solution| s.seconds + price * s.bytes;
            // Strictly below the line through both, or they are neighbours.
            if on_line(&between) < on_line(&more) * (1.0 - 1e-9)
                && between.bytes < more.bytes
                && between.bytes > less.bytes
            {
                pairs.push((between.clone(), less));
                pairs.push((more, between));
            } else {
                hull.push(less);
            }
        }
        hull
    }

    /// The choices of all items for these prices.
    pub fn solve(&self, prices: Prices) -> Solution {
        let graph = self.graph;
        // Stored in the cheapest of the ways.
        let store: Vec<(f64, Choice)> = self.classes.iter().map(|w| w.cheapest(prices)).collect();
        let replay: Vec<f64> = self.classes.iter().map(|w| prices.byte * w.replayed).collect();
        let scale = {
            let all = store.iter().map(|s| s.0).sum::<f64>()
                + replay.iter().sum::<f64>()
                + graph.nodes.iter().map(|n| n.seconds).sum::<f64>();
            if all > 0.0 { (1u64 << 40) as f64 / all } else { 1.0 }
        };
        const NEVER: u64 = 1 << 50;

        let mut network: DiGraph<(), u64> = DiGraph::new();
        let (source, sink) = (network.add_node(()), network.add_node(()));
        let available: Vec<NodeIndex> = graph.classes.iter().map(|_| network.add_node(())).collect();
        let replayed: Vec<NodeIndex> = graph.classes.iter().map(|_| network.add_node(())).collect();
        // What it costs that one is true: an edge to the sink; what it saves: one from the source.
        let mut weigh = |node: NodeIndex, seconds: f64| {
            let weight = (seconds.abs() * scale).round() as u64;
            match seconds {
                s if s > 0.0 => network.add_edge(node, sink, weight),
                _ => network.add_edge(source, node, weight),
            };
        };
        for (class, &(seconds, _)) in store.iter().enumerate() {
            weigh(available[class], seconds);
            weigh(replayed[class], replay[class] - seconds);
        }
        for (class, _) in graph.classes.iter().enumerate() {
            network.add_edge(replayed[class], available[class], NEVER);
            if graph.classes[class].read {
                network.add_edge(source, available[class], NEVER);
            }
        }
        for node in &graph.nodes {
            let runs = network.add_node(());
            network.add_edge(runs, sink, (node.seconds * scale).round() as u64);
            for &output in &node.outputs {
                network.add_edge(replayed[output], runs, NEVER);
            }
            for &input in &node.inputs {
                network.add_edge(runs, available[input], NEVER);
            }
        }
        let (_, flows) = dinics(&network, source, sink);

        // True is what the source still reaches.
        let mut reached = vec![false; network.node_count()];
        let mut worklist = vec![source];
        reached[source.index()] = true;
        while let Some(node) = worklist.pop() {
            let forward = network.edges(node).filter(|e| flows[e.id().index()] < *e.weight()).map(|e| e.target());
            let back = network.edges_directed(node, petgraph::Direction::Incoming);
            let back = back.filter(|e| flows[e.id().index()] > 0).map(|e| e.source());
            for next in forward.chain(back) {
                if !std::mem::replace(&mut reached[next.index()], true) {
                    worklist.push(next);
                }
            }
        }
        let of_class: Vec<Choice> = (0..graph.classes.len())
            .map(|class| match (reached[available[class].index()], reached[replayed[class].index()]) {
                (_, true) => Choice::Recompute,
                (true, false) => store[class].1,
                // Nobody needs it: kept, it isn't stored.
                (false, false) => Choice::Keep,
            })
            .collect();
        self.solution(&of_class)
    }

    fn solution(&self, of_class: &[Choice]) -> Solution {
        let needed = self.needed(of_class);
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for (class, weights) in self.classes.iter().enumerate().filter(|(class, _)| needed[*class]) {
            match of_class[class] {
                Choice::Keep => bytes += weights.stored,
                Choice::Recompute => bytes += weights.replayed,
                Choice::Packed(format) => {
                    let packed = weights.packed[format].unwrap_or_default();
                    bytes += packed.bytes;
                    seconds += packed.seconds;
                }
            }
        }
        let runs = |node: &&super::graph::NodeClass| {
            node.outputs.iter().any(|&o| needed[o] && of_class[o] == Choice::Recompute)
        };
        seconds += self.graph.nodes.iter().filter(runs).map(|n| n.seconds).sum::<f64>();
        let choices = self.graph.items.iter().map(|item| of_class[item.class]).collect();
        Solution { choices, bytes, seconds }
    }

    /// Classes that backward reads or a replay needs.
    fn needed(&self, of_class: &[Choice]) -> Vec<bool> {
        let mut needed: Vec<bool> = self.graph.classes.iter().map(|c| c.read).collect();
        let mut producers: Vec<Vec<usize>> = vec![Vec::new(); self.graph.classes.len()];
        for (index, node) in self.graph.nodes.iter().enumerate() {
            node.outputs.iter().for_each(|&o| producers[o].push(index));
        }
        let mut worklist: Vec<usize> = (0..needed.len()).filter(|&c| needed[c]).collect();
        while let Some(class) = worklist.pop() {
            if of_class[class] != Choice::Recompute {
                continue;
            }
            for &input in producers[class].iter().flat_map(|&n| &self.graph.nodes[n].inputs) {
                if !std::mem::replace(&mut needed[input], true) {
                    worklist.push(input);
                }
            }
        }
        needed
    }
}
