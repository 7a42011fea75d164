//! The ledger and the lint of a tape.

use super::Tape;
use super::graph::{Disposition, Graph, MarkSource, NodeKey, Stored, ValueKey};
use crate::{Error, Kind, Ledger, LedgerEntry, Lint, Mark, Name, Names, Origin, Result, RuleUse};
use slotmap::SecondaryMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};

type Sources = SmallVec<[ValueKey; 2]>;

impl Tape {
    /// Every saved tensor of this tape right now: its bytes, mark, who decided, who reads it, what a replay costs.
    /// On the meta device too: that is a dry run.
    ///
    /// # Errors
    /// [`Error::RuleMatchedNothing`] for a user's rule that decided for no value so far.
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
    pub fn names(&self) -> Names {
        let graph = self.graph();
        let mut names = Names::default();
        for node in graph.nodes.values() {
            let name = |value: ValueKey| Name { path: graph.values[value].path.to_string(), op: node.op_name() };
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

    /// Fails for a user's rule that decided for no value.
    pub(super) fn check_rules(&self) -> Result<()> {
        let Some(policy) = &self.options.policy else { return Ok(()) };
        let unused = policy.rules().iter().zip(&self.rule_uses).find(|(r, n)| r.origin == Origin::User && **n == 0);
        match unused {
            Some((rule, _)) => Err(Error::RuleMatchedNothing { rule: rule.name.clone() }),
            None => Ok(()),
        }
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

    /// FLOPs and ops of replaying a root once from what is stored. `known` holds the costs of earlier roots: where a
    /// chain doesn't branch it isn't walked again for each of its links.
    fn replay_cost(&self, root: ValueKey, known: &SecondaryMap<ValueKey, (u64, u64)>) -> (u64, u64) {
        if !self.is_dropped(root) {
            return (0, 0);
        }
        let node = &self.nodes[self.values[root].node];
        let mut dropped: SmallVec<[ValueKey; 3]> =
            node.inputs.iter().map(|&i| self.root(i)).filter(|&r| self.is_dropped(r)).collect();
        dropped.dedup();
        if let [only] = dropped[..]
            && let Some((flops, depth)) = known.get(only)
        {
            return (flops + node.flops, depth + 1);
        }
        let (mut flops, mut seen, mut worklist) = (0u64, HashSet::new(), vec![root]);
        while let Some(value) = worklist.pop() {
            let node = self.values[value].node;
            if !seen.insert(node) {
                continue;
            }
            flops = flops.saturating_add(self.nodes[node].flops);
            worklist.extend(self.nodes[node].inputs.iter().map(|&i| self.root(i)).filter(|&r| self.is_dropped(r)));
        }
        (flops, seen.len() as u64)
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
        let (mut entries, mut costs, mut sources) = (Vec::new(), SecondaryMap::new(), SecondaryMap::new());
        for key in self.roots() {
            let v = &self.values[key];
            let node = &self.nodes[v.node];
            let (recompute_flops, depth) = self.replay_cost(key, &costs);
            costs.insert(key, (recompute_flops, depth));
            sources.insert(key, self.replay_sources(key, &sources));
            let owned_leaf = node.is_leaf() && self.is_held_by_tape_alone(key);
            let listed = if node.is_leaf() {
                owned_leaf
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

    /// A leaf whose tensor nobody outside the tape holds any more: its bytes are the tape's doing.
    fn is_held_by_tape_alone(&self, leaf: ValueKey) -> bool {
        match &self.values[leaf].stored {
            Stored::Full(tensor) => {
                tensor.is_sole_owner() && matches!(tensor.storage().kind(), Kind::Input | Kind::Activation)
            }
            _ => false,
        }
    }

    fn lint(&self, ledger: &Ledger) -> Vec<Lint> {
        let mut lint = Vec::new();
        for rule in ledger.rules.iter().filter(|r| r.values == 0) {
            lint.push(Lint {
                code: "rule-matched-nothing",
                subject: rule.rule.clone(),
                message: "this preset's pattern decided for no value of this model".into(),
            });
        }
        self.lint_savings(&mut lint);
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
                (Mark::Int8(spec), Stored::Unsettled) => {
                    let last = v.spec.shape.last().copied().unwrap_or(1).max(1);
                    let rows = v.spec.len() / last;
                    let scale = v.spec.dtype.computed_in().size();
                    (v.spec.len() + scale * rows * last.div_ceil(spec.group.max(1))) as i64
                }
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
                        "mark {mark} on {values} value(s) saves 0 bytes: backward reads none of them, or they are views"
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
