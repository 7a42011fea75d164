//! What the user of a policy or a mark should know.

use super::Lint;
use super::collect::Rules;
use crate::tape::graph::Graph;
use crate::tape::marking::{Candidate, MarkSource};
use crate::tape::value::{Exactness, Fate, Stored, ValueKey};
use crate::{Mark, Policy};
use std::collections::BTreeMap;

impl Rules<'_> {
    /// Presets, and rules of presets, that decided for nothing.
    fn lint(&self) -> Vec<Lint> {
        let mut lint = Vec::new();
        for preset in self.unmatched() {
            lint.push(Lint {
                code: "preset-matched-nothing",
                subject: preset.name.clone(),
                message: format!(
                    "it is for {}, and decided for no value of this model; {}",
                    preset.looks_for, preset.advice
                ),
            });
        }
        for (i, rule) in self.report().into_iter().enumerate().filter(|(_, r)| r.values == 0) {
            if !self.unmatched().any(|preset| preset.rules.contains(&i)) {
                lint.push(Lint {
                    code: "rule-matched-nothing",
                    subject: rule.rule,
                    message: "this preset's pattern decided for no value of this model".into(),
                });
            }
        }
        lint
    }

    /// Rules that cover what no mark can change.
    pub(super) fn lint_exact(&self, policy: &dyn Policy, kept_exactly: &[Candidate]) -> Vec<Lint> {
        let mut covered: BTreeMap<String, u64> = BTreeMap::new();
        for decision in kept_exactly.iter().filter_map(|value| policy.mark(&value.site())) {
            if decision.mark != Mark::Keep {
                *covered.entry(self.decided_by(MarkSource::Rule(decision.rule)).to_string()).or_default() += 1;
            }
        }
        let lint = covered.into_iter().map(|(subject, values)| {
            let message = format!("it also covers {values} integer or statistic value(s), which are kept exactly");
            Lint { code: "exact-value-covered", subject, message }
        });
        lint.collect()
    }
}

impl Graph {
    /// Integers and statistics, as policies see them.
    pub(super) fn kept_exactly(&self) -> Vec<Candidate> {
        let exact = self.roots_in_order().filter(|&key| self.roots[key].is_kept_exactly());
        let of_ops = exact.map(|key| (&self.values[key], &self.nodes[self.values[key].node]));
        of_ops.filter(|(_, node)| !node.is_leaf()).map(|(value, node)| Candidate::of(value, node)).collect()
    }

    /// What there is to know of marks, rules and presets, but for what they cover of exact values.
    pub(super) fn lint_marks(&self, rules: &Rules<'_>) -> Vec<Lint> {
        let mut lint = rules.lint();
        self.lint_savings(rules, &mut lint);
        self.lint_replays(&mut lint);
        self.lint_total(rules, &mut lint);
        self.lint_skipped(&mut lint);
        lint
    }

    /// Bytes that the tape stores of a root, or will where it hasn't settled yet.
    fn bytes_to_store(&self, key: ValueKey) -> u64 {
        let (spec, root) = (&self.values[key].spec, &self.roots[key]);
        if !root.is_unsettled() {
            return root.stored_bytes();
        }
        match self.fate(key) {
            Fate::Full => spec.bytes(),
            Fate::Packed(mark) => mark.bytes(spec).unwrap_or_else(|| spec.bytes()),
            Fate::Dropped => 0,
        }
    }

    /// Marks that save nothing, or cost memory: by rule where a rule set them, by value where the user did.
    fn lint_savings(&self, rules: &Rules<'_>, lint: &mut Vec<Lint>) {
        let mut saved: BTreeMap<(String, &'static str, bool), (i64, u64)> = BTreeMap::new();
        for key in self.roots_in_order() {
            let (v, root) = (&self.values[key], &self.roots[key]);
            let mark = root.marking.mark.filter(|mark| *mark != Mark::Keep && !root.is_kept_exactly());
            let Some(mark) = mark else { continue };
            let without_mark = if root.was_ever_read() { v.spec.bytes() as i64 } else { 0 };
            let with_mark = match mark.bytes(&v.spec) {
                _ if mark == Mark::Recompute => 0,
                Some(bytes) if root.is_unsettled() => bytes as i64,
                _ => root.stored_bytes() as i64,
            };
            let subject = match root.marking.source {
                MarkSource::Value | MarkSource::Scope => v.path.to_string(),
                source => rules.decided_by(source).to_string(),
            };
            let as_it_is = mark != Mark::Recompute && !mark.packs(&v.spec);
            let total = saved.entry((subject, mark.name(), as_it_is)).or_default();
            // As it is, it is as good as kept.
            total.0 += if as_it_is { 0 } else { without_mark - with_mark };
            total.1 += 1;
        }
        for ((subject, mark, as_it_is), (bytes, values)) in saved {
            let (code, message) = match bytes {
                1.. => continue,
                0 if as_it_is => (
                    "mark-saves-nothing",
                    format!(
                        "mark {mark} on {values} value(s) saves 0 bytes: their elements take no more bytes as they \
                         are; leave it out, or take a smaller format"
                    ),
                ),
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
    }

    /// Dropped values whose replay holds more than they take.
    fn lint_replays(&self, lint: &mut Vec<Lint>) {
        for key in self.roots_in_order().filter(|&k| matches!(self.roots[k].stored(), Some(Stored::Dropped))) {
            let v = &self.values[key];
            for &input in &self.nodes[v.node].inputs {
                let input = self.root(input);
                let (source, root) = (&self.values[input], &self.roots[input]);
                if !root.is_read() && root.stored_bytes() > v.spec.bytes() && !self.nodes[source.node].is_leaf() {
                    lint.push(Lint {
                        code: "mark-costs-memory",
                        subject: v.path.to_string(),
                        message: format!(
                            "dropping its {} bytes holds `{}` ({} bytes), which nothing else needs",
                            v.spec.bytes(),
                            source.path,
                            root.stored_bytes()
                        ),
                    });
                }
            }
        }
    }

    /// A policy that marks values and saves nothing in all.
    fn lint_total(&self, rules: &Rules<'_>, lint: &mut Vec<Lint>) {
        let (mut marks, mut with, mut without) = (0, 0, 0);
        for key in self.roots_in_order().filter(|&key| !self.nodes[self.values[key].node].is_leaf()) {
            let (bytes, root) = (self.values[key].spec.bytes(), &self.roots[key]);
            let by_rule = matches!(root.marking.source, MarkSource::Rule(_)) && root.marking.mark != Some(Mark::Keep);
            // A mark on what nobody reads is another lint.
            marks += u64::from(by_rule && !root.is_kept_exactly() && root.was_ever_read());
            without += if root.is_read() { bytes } else { 0 };
            with += if root.is_needed() { self.bytes_to_store(key) } else { root.stored_bytes() };
        }
        if marks == 0 || with < without {
            return;
        }
        let presets: Vec<&str> = rules.presets.iter().map(|preset| preset.name.as_str()).collect();
        lint.push(Lint {
            code: "policy-saves-nothing",
            subject: if presets.is_empty() { "policy".into() } else { presets.join(", ") },
            message: format!(
                "with all marks the tape stores {with} bytes, and {without} without any; set another policy: what this \
                 one marks isn't saved, or its replay holds as much"
            ),
        });
    }

    /// Lossy marks that an exact reader refuses.
    fn lint_skipped(&self, lint: &mut Vec<Lint>) {
        for key in self.roots_in_order() {
            let (v, root) = (&self.values[key], &self.roots[key]);
            let mark = root.marking.mark.filter(|mark| mark.is_lossy() && mark.packs(&v.spec));
            if let (Some(mark), Exactness::ReadExactly) = (mark, root.exactness) {
                lint.push(Lint {
                    code: mark.format().map_or("mark-skipped", |format| format.skip_lint()),
                    subject: v.path.to_string(),
                    message: "an op reads it exactly, so it is kept in full".into(),
                });
            }
        }
    }

    /// Marks that a held handle defeats, and views that hold much more than they show.
    pub(super) fn lint_holders(&self) -> Vec<Lint> {
        let mut lint = Vec::new();
        for key in self.roots_in_order() {
            let (v, root) = (&self.values[key], &self.roots[key]);
            let is_leaf = self.nodes[v.node].is_leaf();
            let shrinks = root.marking.mark.is_some_and(|mark| mark == Mark::Recompute || mark.packs(&v.spec));
            if !is_leaf && root.is_held() && shrinks && root.is_read() {
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
            for value in self.nodes[node].saved() {
                let (view, base) = (&self.values[value], &self.values[self.root(value)]);
                let root = &self.roots[self.root(value)];
                let alone = root.reads() == 1 && !self.nodes[base.node].is_leaf();
                if alone && value != self.root(value) && 2 * view.spec.bytes() < root.stored_bytes() {
                    lint.push(Lint {
                        code: "view-holds-more",
                        subject: view.path.to_string(),
                        message: format!(
                            "it shows {} bytes and holds all {} of `{}`; copy it with `contiguous` first",
                            view.spec.bytes(),
                            root.stored_bytes(),
                            base.path
                        ),
                    });
                }
            }
        }
        lint
    }
}
