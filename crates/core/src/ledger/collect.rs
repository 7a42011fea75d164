//! The ledger of a tape, as it is right now.

use super::{DecidedBy, EntryMark, Ledger, LedgerEntry, RuleUse};
use crate::tape::Tape;
use crate::tape::graph::Graph;
use crate::tape::marking::MarkSource;
use crate::tape::value::{Fate, NodeKey, Root, Stored, Value, ValueKey};
use crate::{Error, MemoryKind, NodeName, Origin, Policy, PresetInfo, Result, RuleInfo, TapeNames};
use slotmap::SecondaryMap;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

type Sources = SmallVec<[ValueKey; 2]>;

/// What replaying a node once from what is stored takes.
#[derive(Debug, Default)]
struct ReplayCost {
    flops: u64,
    /// Nodes in that replay.
    nodes: u64,
    /// Some of these, so that a later walk that meets them needn't walk on.
    contains: SmallVec<[NodeKey; 4]>,
    /// Nodes looked at to find this out.
    walked: u64,
}

impl ReplayCost {
    /// More would cost what they spare.
    const MOST_CONTAINED: usize = 8;
}

impl Tape {
    /// Every saved tensor of this tape right now: its bytes, mark, who decided, who reads it, what a replay costs.
    /// On the meta device too: that is a dry run.
    ///
    /// # Errors
    /// [`Error::RuleMatchedNothing`] for a user's rule that decided for no value so far, and
    /// [`Error::PresetMatchedNothing`] for a preset of which no rule did, where no scope has a role.
    /// [`Error::Reentrant`] in a policy or a rule.
    pub fn ledger(&self) -> Result<Ledger> {
        let _busy = self.enter("ledger", None)?;
        let policy = self.graph().options.policy.clone();
        let uses = self.graph().rule_uses.clone();
        let rules = Rules::of(policy.as_deref(), uses);
        self.check_rules(&rules)?;
        let graph = self.graph();
        let values = graph.ledger_entries(&rules);
        let mut ledger = Ledger { values, rules: rules.report(), lint: graph.lint_marks(&rules) };
        let kept_exactly = graph.kept_exactly();
        drop(graph);
        if let Some(policy) = &policy {
            ledger.lint.extend(rules.lint_exact(&**policy, &kept_exactly));
        }
        ledger.lint.extend(self.graph().lint_holders());
        if let Some(policy) = policy {
            ledger.lint.extend(policy.lint(&ledger));
        }
        Ok(ledger)
    }

    /// Fails for a user's rule that decided for no value, and for a preset of which no rule did where no scope has a
    /// role.
    pub(crate) fn check_policy(&self) -> Result<()> {
        let policy = self.graph().options.policy.clone();
        let uses = self.graph().rule_uses.clone();
        self.check_rules(&Rules::of(policy.as_deref(), uses))
    }

    fn check_rules(&self, rules: &Rules<'_>) -> Result<()> {
        let unused = rules.infos.iter().zip(&rules.uses).find(|(r, n)| r.origin == Origin::User && **n == 0);
        if let Some((rule, _)) = unused {
            return Err(Error::RuleMatchedNothing { rule: rule.name.clone() });
        }
        let Some(preset) = rules.unmatched().next().filter(|_| self.roles_opened().is_empty()) else { return Ok(()) };
        let largest = self.graph().largest_saved();
        // A tape that saves nothing has nothing to mark.
        let Some((path, _)) = largest.first() else { return Ok(()) };
        let described: Vec<String> = largest.iter().map(|(path, op)| format!("`{path}` ({op})")).collect();
        Err(Error::PresetMatchedNothing {
            preset: preset.name.clone(),
            looks_for: preset.looks_for.clone(),
            example: format!("{}=recompute", kind_of(path)),
            largest: described.join(", "),
        })
    }

    /// The paths of the nodes and values that are on this tape now, for a [`Timeline`](crate::Timeline).
    pub fn names(&self) -> TapeNames {
        let graph = self.graph();
        let mut names = TapeNames::default();
        for node in graph.nodes.values() {
            let name = |value: ValueKey| NodeName { path: graph.values[value].path.to_string(), op: node.op_name() };
            names.nodes.insert(node.sequence, name(node.outputs[0]));
            for &output in &node.outputs {
                let (value, root) = (&graph.values[output], graph.roots.get(output));
                names.values.insert(value.id, name(output));
                let format = root.and_then(|root| root.marking.mark.as_ref()?.format());
                names.formats.extend(format.map(|format| (value.id, format.about())));
            }
        }
        names
    }
}

/// What the rules of a tape's policy are, asked once and outside any borrow of the graph, and how often each decided.
pub(super) struct Rules<'a> {
    infos: &'a [RuleInfo],
    pub(super) presets: &'a [PresetInfo],
    uses: Vec<u64>,
}

impl<'a> Rules<'a> {
    fn of(policy: Option<&'a dyn Policy>, uses: Vec<u64>) -> Rules<'a> {
        let infos = policy.map_or(&[][..], |policy| policy.rules());
        let presets = policy.map_or(&[][..], |policy| policy.presets());
        Rules { infos, presets, uses }
    }

    /// The presets of which no rule decided for any value.
    pub(super) fn unmatched(&self) -> impl Iterator<Item = &PresetInfo> {
        let is_unmatched =
            |preset: &&PresetInfo| self.uses.get(preset.rules.clone()).is_some_and(|uses| uses.iter().all(|&n| n == 0));
        self.presets.iter().filter(is_unmatched)
    }

    pub(super) fn report(&self) -> Vec<RuleUse> {
        let uses = self.infos.iter().zip(&self.uses);
        uses.map(|(r, &values)| RuleUse { rule: r.name.clone(), origin: r.origin, values }).collect()
    }

    /// Who decided.
    pub(super) fn decided_by(&self, source: MarkSource) -> DecidedBy {
        match source {
            MarkSource::Value => DecidedBy::Value,
            MarkSource::Scope => DecidedBy::Scope,
            MarkSource::Default => DecidedBy::Default,
            MarkSource::Rule(rule) => {
                let name = self.infos.get(rule).map(|r| r.name.clone());
                DecidedBy::Rule(name.unwrap_or_else(|| format!("rule {rule}")))
            }
        }
    }
}

impl Graph {
    /// Paths and ops of the largest values that backward reads and a mark could change, the first of each kind.
    fn largest_saved(&self) -> Vec<(Rc<str>, &'static str)> {
        let free = |root: &Root| root.is_read() && !root.is_kept_exactly();
        let mut saved: Vec<&Value> =
            self.roots_in_order().filter(|&key| free(&self.roots[key])).map(|key| &self.values[key]).collect();
        saved.sort_by_key(|v| Reverse(v.spec.bytes()));
        let mut kinds = HashSet::new();
        let first = saved.into_iter().filter(|v| kinds.insert(kind_of(&v.path)));
        first.take(5).map(|v| (v.path.clone(), self.nodes[v.node].op_name())).collect()
    }

    /// Values that own their storage, in recording order.
    pub(super) fn roots_in_order(&self) -> impl Iterator<Item = ValueKey> {
        let nodes = self.in_recording_order().into_iter();
        nodes.flat_map(|n| self.nodes[n].outputs.clone()).filter(|&v| self.root(v) == v)
    }

    fn is_dropped(&self, key: ValueKey) -> bool {
        let root = &self.roots[key];
        if root.is_unsettled() {
            self.fate(key) == Fate::Dropped
        } else {
            matches!(root.stored(), Some(Stored::Dropped))
        }
    }

    /// What replaying each node once from what is stored takes, where an output of it is dropped.
    fn replay_costs(&self) -> SecondaryMap<NodeKey, ReplayCost> {
        let mut costs = SecondaryMap::new();
        for key in self.in_recording_order() {
            if self.nodes[key].outputs.iter().any(|&o| self.root(o) == o && self.is_dropped(o)) {
                costs.insert(key, self.replay_cost(key, &costs));
            }
        }
        costs
    }

    /// What replaying a node takes, by those before it. The chain is walked back to where all of it goes through one
    /// node, whose cost is known: so residual connections don't make each of n links walk the whole chain.
    fn replay_cost(&self, key: NodeKey, known: &SecondaryMap<NodeKey, ReplayCost>) -> ReplayCost {
        let mut cost = ReplayCost::default();
        // What is left to walk, the latest last.
        let mut frontier = BTreeMap::from([(self.nodes[key].sequence, key)]);
        while let Some((_, node)) = frontier.pop_last() {
            if let Some(rest) = known.get(node)
                && frontier.values().all(|n| rest.contains.contains(n))
            {
                cost.flops = cost.flops.saturating_add(rest.flops);
                cost.nodes += rest.nodes;
                cost.contains.extend(frontier.into_values().take(ReplayCost::MOST_CONTAINED));
                cost.contains.push(node);
                break;
            }
            cost.walked += 1;
            cost.nodes += 1;
            cost.flops = cost.flops.saturating_add(self.nodes[node].flops);
            if node != key && cost.contains.len() < ReplayCost::MOST_CONTAINED {
                cost.contains.push(node);
            }
            let dropped = self.nodes[node].inputs.iter().map(|&i| self.root(i)).filter(|&r| self.is_dropped(r));
            frontier.extend(dropped.map(|r| self.values[r].node).map(|n| (self.nodes[n].sequence, n)));
        }
        cost
    }

    /// What a replay of a root begins with: stored values and inputs, the nearest first. Parameters apart. `known`
    /// holds those of earlier roots.
    fn replay_sources(&self, root: ValueKey, known: &SecondaryMap<ValueKey, Sources>) -> Sources {
        let mut sources = Sources::new();
        if !self.is_dropped(root) {
            return sources;
        }
        let inputs = || self.nodes[self.values[root].node].inputs.iter().map(|&i| self.root(i));
        let stored = inputs().filter(|&r| !self.is_dropped(r) && self.nodes[self.values[r].node].parameter.is_none());
        let dropped = inputs().filter_map(|r| known.get(r)).flatten().copied();
        for source in stored.chain(dropped) {
            if sources.len() < LedgerEntry::MOST_SOURCES && !sources.contains(&source) {
                sources.push(source);
            }
        }
        sources
    }

    /// Paths of the ops whose backward reads each root.
    fn readers(&self) -> HashMap<ValueKey, Vec<String>> {
        let mut readers: HashMap<ValueKey, Vec<String>> = HashMap::new();
        for node in self.in_recording_order() {
            let node = &self.nodes[node];
            for value in node.saved() {
                let path = self.values[node.outputs[0]].path.to_string();
                let of_root = readers.entry(self.root(value)).or_default();
                if of_root.last() != Some(&path) {
                    of_root.push(path);
                }
            }
        }
        readers
    }

    fn ledger_entries(&self, rules: &Rules<'_>) -> Vec<LedgerEntry> {
        let (mut readers, costs, by_tape_alone) =
            (self.readers(), self.replay_costs(), self.leaves_held_by_tape_alone());
        let (mut entries, mut sources) = (Vec::new(), SecondaryMap::new());
        for key in self.roots_in_order() {
            let (v, root) = (&self.values[key], &self.roots[key]);
            sources.insert(key, self.replay_sources(key, &sources));
            let listed = if self.nodes[v.node].is_leaf() {
                by_tape_alone.contains(&key)
            } else {
                root.is_read() || root.stored_bytes() > 0 || (root.marking.mark.is_some() && root.is_needed())
            };
            if listed {
                let cost = costs.get(v.node).filter(|_| self.is_dropped(key));
                let sources = sources[key].iter().map(|&source| self.values[source].path.to_string()).collect();
                let readers = readers.remove(&key).unwrap_or_default();
                entries.push(LedgerEntry { readers, replayed_from: sources, ..self.entry(key, rules, cost) });
            }
        }
        entries
    }

    /// A root's entry, without what it is read by and replayed from.
    fn entry(&self, key: ValueKey, rules: &Rules<'_>, cost: Option<&ReplayCost>) -> LedgerEntry {
        let (v, root) = (&self.values[key], &self.roots[key]);
        let exact = root.is_kept_exactly();
        let mark = root.marking.mark.map_or(EntryMark::Unmarked, EntryMark::Mark);
        LedgerEntry {
            id: v.id,
            path: v.path.to_string(),
            op: self.nodes[v.node].op_name(),
            roles: v.place.roles,
            shape: v.spec.shape.to_vec(),
            dtype: v.spec.dtype,
            bytes: v.spec.bytes(),
            stored_bytes: root.stored_bytes(),
            mark: if exact { EntryMark::Exact } else { mark },
            rule: if exact { DecidedBy::Exact } else { rules.decided_by(root.marking.source) },
            readers: Vec::new(),
            recompute_flops: cost.map_or(0, |cost| cost.flops),
            depth: cost.map_or(0, |cost| cost.nodes),
            replayed_from: Vec::new(),
            quantization_error: root.packing_error(),
            held_by_handle: root.is_held(),
        }
    }

    /// Leaves whose tensors nobody outside the tape holds any more: their bytes are the tape's doing. Of several in one
    /// storage the first.
    fn leaves_held_by_tape_alone(&self) -> HashSet<ValueKey> {
        // How often the tape holds each storage, and the leaf that is listed for it: none where a value that isn't a
        // leaf is.
        let mut storages: HashMap<u64, (usize, Option<ValueKey>)> = HashMap::new();
        for key in self.roots_in_order() {
            let Some(Stored::Full(tensor)) = self.roots[key].stored() else { continue };
            let of_storage = storages.entry(tensor.storage().number()).or_insert((0, Some(key)));
            of_storage.0 += 1;
            if !self.nodes[self.values[key].node].is_leaf() {
                of_storage.1 = None;
            }
        }
        let leaves = storages.into_values().filter_map(|(held, leaf)| Some((held, leaf?)));
        let by_tape_alone = leaves.filter(|&(held, leaf)| match self.roots[leaf].stored() {
            Some(Stored::Full(t)) => {
                t.holders() == held && matches!(t.storage().kind(), MemoryKind::Input | MemoryKind::Activation)
            }
            _ => false,
        });
        by_tape_alone.map(|(_, leaf)| leaf).collect()
    }
}

/// What the paths of values of repeated layers have in common: a star for each segment that is a number.
pub(super) fn kind_of(path: &str) -> String {
    let star = |segment| if str::parse::<u64>(segment).is_ok() { "*" } else { segment };
    path.split('.').map(star).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use crate::scope;
    use crate::{DType, Mark, Result, Tape, Tensor, Var, meta};

    /// Nodes that the ledger walks over, and FLOPs and depth of the last link's replay, for a chain of `links` links.
    fn walked(links: usize, link: fn(&Var, &Var) -> Result<Var>) -> (u64, u64, u64) {
        let device = meta();
        let tape = Tape::new(&device);
        let x = tape.leaf(&Tensor::full(&device, &[4, 4], DType::F32, 0.0).unwrap()).unwrap();
        let _scope = tape.scope(scope("all").mark(Mark::Recompute));
        let shared = x.clone().exp().unwrap();
        let mut h = x.gelu().unwrap();
        for _ in 0..links {
            h = link(&h, &shared).unwrap();
        }
        let last = h.clone();
        let loss = h.square().unwrap().sum().unwrap();
        let graph = tape.graph();
        let costs = graph.replay_costs();
        let of_last = &costs[graph.values[graph.root(last.key())].node];
        let walked = costs.values().map(|cost| cost.walked).sum();
        let figures = (walked, of_last.flops, of_last.nodes);
        drop((costs, graph));
        drop((last, loss));
        figures
    }

    /// Whatever branches and joins between the links, each node is looked at a few times.
    #[test]
    fn replay_costs_of_branching_chains_take_linear_time() {
        type Link = fn(&Var, &Var) -> Result<Var>;
        let links: [(&str, u64, Link); 5] = [
            ("residual", 2, |h, _| h.clone().tanh()?.add(h)),
            ("squared", 1, |h, _| h.clone().mul(h)),
            ("two branches", 4, |h, _| h.clone().tanh()?.mul(&h.clone().exp()?.sigmoid()?)),
            ("with one value shared by all", 1, |h, shared| h.clone().mul(shared)),
            ("residual, with one value shared by all", 3, |h, shared| h.clone().tanh()?.mul(shared)?.add(h)),
        ];
        for (name, nodes, link) in links {
            let (few, flops, depth) = walked(50, link);
            let (many, more_flops, more_depth) = walked(200, link);
            assert!(many < 5 * few, "{name}: {few} nodes for 50 links, {many} for 200");
            // gelu, and the shared value where it takes part.
            let start = if name.contains("shared") { 2 } else { 1 };
            assert_eq!((depth, more_depth), (start + 50 * nodes, start + 200 * nodes), "{name}");
            let per_link = (more_flops - flops) / 150;
            assert_eq!(more_flops - flops, 150 * per_link, "{name}");
        }
    }
}
