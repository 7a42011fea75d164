//! The ledger and the lint of a tape.

use super::Tape;
use super::graph::{Disposition, Graph, MarkSource, NodeKey, Stored, Value, ValueKey};
use crate::{
    Error, Int8Spec, Ledger, LedgerEntry, Lint, Mark, MemoryKind, NodeName, Origin, PresetInfo, Result, RuleUse,
    TapeNames,
};
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
    pub fn ledger(&self) -> Result<Ledger> {
        let mut graph = self.try_graph("ledger")?;
        graph.check("ledger", None)?;
        graph.check_rules()?;
        let mut ledger = Ledger { values: graph.ledger_entries(), rules: graph.rule_report(), lint: Vec::new() };
        ledger.lint = graph.lint(&ledger);
        if let Some(policy) = &graph.options.policy {
            ledger.lint.extend(policy.lint(&ledger));
        }
        Ok(ledger)
    }

    /// The paths of the nodes and values that are on this tape now, for a [`Timeline`](crate::Timeline).
    pub fn names(&self) -> TapeNames {
        let graph = self.graph();
        let mut names = TapeNames::default();
        for node in graph.nodes.values() {
            let name = |value: ValueKey| NodeName { path: graph.values[value].path.to_string(), op: node.op_name() };
            names.nodes.insert(node.sequence, name(node.outputs[0]));
            names.values.extend(node.outputs.iter().map(|&output| (graph.values[output].id, name(output))));
        }
        names
    }
}

impl Graph {
    pub(super) fn in_recording_order(&self) -> Vec<NodeKey> {
        let mut order: Vec<NodeKey> = self.nodes.keys().collect();
        order.sort_unstable_by_key(|&n| self.nodes[n].sequence);
        order
    }

    /// Fails for a user's rule that decided for no value, and for a preset of which no rule did where no scope has a
    /// role.
    pub(super) fn check_rules(&self) -> Result<()> {
        let Some(policy) = &self.options.policy else { return Ok(()) };
        let unused = policy.rules().iter().zip(&self.rule_uses).find(|(r, n)| r.origin == Origin::User && **n == 0);
        if let Some((rule, _)) = unused {
            return Err(Error::RuleMatchedNothing { rule: rule.name.clone() });
        }
        let unmatched = policy.presets().iter().find(|preset| self.is_unmatched(preset));
        let Some(preset) = unmatched.filter(|_| self.roles_opened.is_empty()) else { return Ok(()) };
        let largest = self.largest_saved();
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

    /// Whether no rule of a preset decided for any value.
    fn is_unmatched(&self, preset: &PresetInfo) -> bool {
        self.rule_uses.get(preset.rules.clone()).is_some_and(|uses| uses.iter().all(|&n| n == 0))
    }

    /// Paths and ops of the largest values that backward reads and a mark could change, the first of each kind.
    fn largest_saved(&self) -> Vec<(Rc<str>, &'static str)> {
        let mut saved: Vec<&Value> =
            self.roots().map(|key| &self.values[key]).filter(|v| v.reads > 0 && !v.exact).collect();
        saved.sort_by_key(|v| Reverse(v.spec.bytes()));
        let mut kinds = HashSet::new();
        let first = saved.into_iter().filter(|v| kinds.insert(kind_of(&v.path)));
        first.take(5).map(|v| (v.path.clone(), self.nodes[v.node].op_name())).collect()
    }

    fn rule_report(&self) -> Vec<RuleUse> {
        let Some(policy) = &self.options.policy else { return Vec::new() };
        let uses = policy.rules().iter().zip(&self.rule_uses);
        uses.map(|(r, &values)| RuleUse { rule: r.name.clone(), origin: r.origin, values }).collect()
    }

    fn rule_name(&self, source: MarkSource) -> String {
        match (source, &self.options.policy) {
            (MarkSource::Value, _) => "value".into(),
            (MarkSource::Scope, _) => "scope".into(),
            (MarkSource::Rule(rule), Some(policy)) => {
                policy.rules().get(rule).map_or_else(|| format!("rule {rule}"), |r| r.name.clone())
            }
            (MarkSource::Default | MarkSource::Rule(_), _) => "default".into(),
        }
    }

    /// Roots in recording order.
    fn roots(&self) -> impl Iterator<Item = ValueKey> {
        let nodes = self.in_recording_order().into_iter();
        nodes.flat_map(|n| self.nodes[n].outputs.clone()).filter(|&v| self.root(v) == v)
    }

    fn is_dropped(&self, root: ValueKey) -> bool {
        match self.values[root].stored {
            Stored::Unsettled => self.disposition(root) == Disposition::Drop,
            Stored::Dropped => true,
            _ => false,
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

    /// What replaying a node takes, by those before it. The chain is walked back to where all of it goes through one node,
    /// whose cost is known: so residual connections don't make each of n links walk the whole chain.
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

    /// What a replay of a root begins with: stored values and inputs, the nearest first. Parameters apart. `known` holds
    /// those of earlier roots.
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

    fn ledger_entries(&self) -> Vec<LedgerEntry> {
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
        let (costs, by_tape_alone) = (self.replay_costs(), self.leaves_held_by_tape_alone());
        let (mut entries, mut sources) = (Vec::new(), SecondaryMap::new());
        for key in self.roots() {
            let v = &self.values[key];
            let node = &self.nodes[v.node];
            let cost = costs.get(v.node).filter(|_| self.is_dropped(key));
            let (recompute_flops, depth) = cost.map_or((0, 0), |cost| (cost.flops, cost.nodes));
            sources.insert(key, self.replay_sources(key, &sources));
            let listed = if node.is_leaf() {
                by_tape_alone.contains(&key)
            } else {
                v.reads > 0 || v.stored_bytes() > 0 || (v.mark.is_some() && v.recipes > 0)
            };
            if !listed {
                continue;
            }
            entries.push(LedgerEntry {
                id: v.id,
                path: v.path.to_string(),
                op: node.op_name(),
                roles: v.roles,
                shape: v.spec.shape.to_vec(),
                dtype: v.spec.dtype,
                bytes: v.spec.bytes(),
                stored_bytes: v.stored_bytes(),
                mark: if v.exact { "exact" } else { v.mark.map_or("none", Mark::name) },
                rule: if v.exact { "exact".into() } else { self.rule_name(v.source) },
                readers: readers.remove(&key).unwrap_or_default(),
                recompute_flops,
                depth,
                replayed_from: sources[key].iter().map(|&source| self.values[source].path.to_string()).collect(),
                quantization_error: v.quantization_error,
                held_by_handle: v.root_handles > 0,
            });
        }
        entries
    }

    /// Leaves whose tensors nobody outside the tape holds any more: their bytes are the tape's doing. Of several in one
    /// storage the first.
    fn leaves_held_by_tape_alone(&self) -> HashSet<ValueKey> {
        // How often the tape holds each storage, and the leaf that is listed for it: none where a value that isn't a leaf is.
        let mut storages: HashMap<u64, (usize, Option<ValueKey>)> = HashMap::new();
        for key in self.roots() {
            let Stored::Full(tensor) = &self.values[key].stored else { continue };
            let of_storage = storages.entry(tensor.storage().number()).or_insert((0, Some(key)));
            of_storage.0 += 1;
            if !self.nodes[self.values[key].node].is_leaf() {
                of_storage.1 = None;
            }
        }
        let leaves = storages.into_values().filter_map(|(held, leaf)| Some((held, leaf?)));
        let by_tape_alone = leaves.filter(|&(held, leaf)| match &self.values[leaf].stored {
            Stored::Full(t) => {
                t.holders() == held && matches!(t.storage().kind(), MemoryKind::Input | MemoryKind::Activation)
            }
            _ => false,
        });
        by_tape_alone.map(|(_, leaf)| leaf).collect()
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        let mut lint = Vec::new();
        let presets = self.options.policy.as_ref().map_or(&[][..], |policy| policy.presets());
        let unmatched: Vec<&PresetInfo> = presets.iter().filter(|preset| self.is_unmatched(preset)).collect();
        for preset in &unmatched {
            lint.push(Lint {
                code: "preset-matched-nothing",
                subject: preset.name.clone(),
                message: format!(
                    "it is for {}, and decided for no value of this model; {}",
                    preset.looks_for, preset.advice
                ),
            });
        }
        for (i, rule) in ledger.rules.iter().enumerate().filter(|(_, r)| r.values == 0) {
            if unmatched.iter().any(|preset| preset.rules.contains(&i)) {
                continue;
            }
            lint.push(Lint {
                code: "rule-matched-nothing",
                subject: rule.rule.clone(),
                message: "this preset's pattern decided for no value of this model".into(),
            });
        }
        self.lint_savings(&mut lint);
        self.lint_total(&mut lint);
        self.lint_exact(&mut lint);
        self.lint_holders(&mut lint);
        lint
    }

    /// Marks that save nothing, or cost memory: by rule where a rule set them, by value where the user did.
    fn lint_savings(&self, lint: &mut Vec<Lint>) {
        let mut saved: BTreeMap<(String, &'static str), (i64, u64)> = BTreeMap::new();
        for key in self.roots() {
            let v = &self.values[key];
            let Some(mark) = v.mark.filter(|_| !v.exact) else { continue };
            let without_mark = if v.ever_read { v.spec.bytes() as i64 } else { 0 };
            let with_mark = match (mark, &v.stored) {
                (Mark::Keep, _) => continue,
                (Mark::Recompute, _) => 0,
                // Not settled yet: what it will take.
                (Mark::Int8(spec), Stored::Unsettled) => v.int8_bytes(spec) as i64,
                (Mark::Int8(_), _) => v.stored_bytes() as i64,
                #[allow(unreachable_patterns)] // marks are open to more
                _ => continue,
            };
            let subject = match v.source {
                MarkSource::Value | MarkSource::Scope => v.path.to_string(),
                source => self.rule_name(source),
            };
            let total = saved.entry((subject, mark.name())).or_default();
            total.0 += without_mark - with_mark;
            total.1 += 1;
        }
        for ((subject, mark), (bytes, values)) in saved {
            let (code, message) = match bytes {
                1.. => continue,
                0 => (
                    "mark-saves-nothing",
                    format!(
                        "mark {mark} on {values} value(s) saves 0 bytes: backward reads none of them; set it on values \
                         that the ledger lists as stored"
                    ),
                ),
                _ => (
                    "mark-costs-memory",
                    format!("mark {mark} on {values} value(s) costs {} bytes more than it saves", -bytes),
                ),
            };
            lint.push(Lint { code, subject, message });
        }
        for key in self.roots().filter(|&k| matches!(self.values[k].stored, Stored::Dropped)) {
            for &input in &self.nodes[self.values[key].node].inputs {
                let (v, input) = (&self.values[key], &self.values[self.root(input)]);
                if input.reads == 0 && input.stored_bytes() > v.spec.bytes() && !self.nodes[input.node].is_leaf() {
                    lint.push(Lint {
                        code: "mark-costs-memory",
                        subject: v.path.to_string(),
                        message: format!(
                            "dropping its {} bytes holds `{}` ({} bytes), which nothing else needs",
                            v.spec.bytes(),
                            input.path,
                            input.stored_bytes()
                        ),
                    });
                }
            }
        }
    }

    /// A policy that marks values and saves nothing in all.
    fn lint_total(&self, lint: &mut Vec<Lint>) {
        let Some(policy) = &self.options.policy else { return };
        let (mut marks, mut with, mut without) = (0, 0, 0);
        for key in self.roots().filter(|&key| !self.nodes[self.values[key].node].is_leaf()) {
            let v = &self.values[key];
            let by_rule = matches!(v.source, MarkSource::Rule(_)) && !matches!(v.mark, Some(Mark::Keep));
            // A mark on what nobody reads is another lint.
            marks += u64::from(by_rule && !v.exact && v.ever_read);
            without += if v.reads > 0 { v.spec.bytes() } else { 0 };
            with += match (&v.stored, v.mark) {
                // What it will take.
                (Stored::Unsettled, mark) if v.reads + v.recipes > 0 => match (self.disposition(key), mark) {
                    (Disposition::Full, _) => v.spec.bytes(),
                    (Disposition::Quantize, Some(Mark::Int8(spec))) => v.int8_bytes(spec),
                    _ => 0,
                },
                _ => v.stored_bytes(),
            };
        }
        if marks == 0 || with < without {
            return;
        }
        let presets: Vec<&str> = policy.presets().iter().map(|preset| preset.name.as_str()).collect();
        lint.push(Lint {
            code: "policy-saves-nothing",
            subject: if presets.is_empty() { "policy".into() } else { presets.join(", ") },
            message: format!(
                "with all marks the tape stores {with} bytes, and {without} without any; set another policy: what this \
                 one marks isn't saved, or its replay holds as much"
            ),
        });
    }

    /// Rules that cover what no mark can change, and int8 that an exact reader refuses.
    fn lint_exact(&self, lint: &mut Vec<Lint>) {
        let mut covered: BTreeMap<String, u64> = BTreeMap::new();
        for key in self.roots() {
            let v = &self.values[key];
            let node = &self.nodes[v.node];
            if matches!(v.mark, Some(Mark::Int8(_))) && v.read_exactly {
                lint.push(Lint {
                    code: "int8-skipped",
                    subject: v.path.to_string(),
                    message: "an op reads it exactly, so it is kept in full".into(),
                });
            }
            if !v.exact || node.is_leaf() {
                continue;
            }
            let site = self.site(key, &v.path);
            let decision = self.options.policy.as_ref().and_then(|p| p.mark(&site));
            if let Some(decision) = decision
                && decision.mark != Mark::Keep
            {
                *covered.entry(self.rule_name(MarkSource::Rule(decision.rule))).or_default() += 1;
            }
        }
        for (subject, values) in covered {
            let message = format!("it also covers {values} integer or statistic value(s), which are kept exactly");
            lint.push(Lint { code: "exact-value-covered", subject, message });
        }
    }

    /// Marks that a held handle defeats, and views that hold much more than they show.
    fn lint_holders(&self, lint: &mut Vec<Lint>) {
        for key in self.roots() {
            let v = &self.values[key];
            let is_leaf = self.nodes[v.node].is_leaf();
            let shrinks = matches!(v.mark, Some(Mark::Recompute | Mark::Int8(_)));
            if !is_leaf && v.root_handles > 0 && shrinks && v.reads > 0 {
                lint.push(Lint {
                    code: "held-by-handle",
                    subject: v.path.to_string(),
                    message: format!(
                        "a handle holds its {} bytes, so its mark saves nothing; drop it earlier",
                        v.spec.bytes()
                    ),
                });
            }
        }
        for node in self.in_recording_order() {
            let node = &self.nodes[node];
            for value in node.saved() {
                let (view, root) = (&self.values[value], &self.values[self.root(value)]);
                let alone = root.reads == 1 && !self.nodes[root.node].is_leaf();
                if alone && value != self.root(value) && 2 * view.spec.bytes() < root.stored_bytes() {
                    lint.push(Lint {
                        code: "view-holds-more",
                        subject: view.path.to_string(),
                        message: format!(
                            "it shows {} bytes and holds all {} of `{}`; copy it with `contiguous` first",
                            view.spec.bytes(),
                            root.stored_bytes(),
                            root.path
                        ),
                    });
                }
            }
        }
    }
}

impl Value {
    /// Bytes that it takes as int8.
    fn int8_bytes(&self, int8: Int8Spec) -> u64 {
        let last = self.spec.shape.last().copied().unwrap_or(1).max(1);
        let rows = self.spec.len() / last;
        let scale = self.spec.dtype.computed_in().size();
        (self.spec.len() + scale * rows * last.div_ceil(int8.group.max(1))) as u64
    }
}

/// What the paths of values of repeated layers have in common: a star for each segment that is a number.
fn kind_of(path: &str) -> String {
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
        let of_last = &costs[graph.values[graph.root(last.key)].node];
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
