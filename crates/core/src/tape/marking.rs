//! Who decides a value's mark: the user on the value, else the innermost marked scope, else the policy.
//!
//! A policy is a user's code. It is asked outside any borrow of the graph, with the value as a [`Candidate`] of its
//! own.

use super::graph::Node;
use super::scope::{Place, Scopes};
use super::value::Value;
use crate::Mark;
use crate::mark::{Decision, Policy, Site};
use crate::ops::Spec;
use std::rc::Rc;

/// Who set a value's mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkSource {
    Default,
    Value,
    Scope,
    Rule(usize),
}

/// A value's mark.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Marking {
    pub mark: Option<Mark>,
    pub source: MarkSource,
    /// While its scope is open: a mark that it would get outside needs the recipe.
    pub may_drop_outside: bool,
}

impl Marking {
    pub const NONE: Marking = Marking { mark: None, source: MarkSource::Default, may_drop_outside: false };

    /// A mark that the user sets on the value.
    pub fn by_value(mark: Mark) -> Marking {
        Marking { mark: Some(mark), source: MarkSource::Value, may_drop_outside: false }
    }
}

/// A value that may be marked, apart from the graph.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub id: u64,
    pub path: Rc<str>,
    pub op: &'static str,
    pub place: Place,
    pub output: usize,
    pub spec: Spec,
    pub flops: u64,
    pub traffic: u64,
}

impl Candidate {
    pub fn of(value: &Value, node: &Node) -> Candidate {
        Candidate {
            id: value.id,
            path: value.path.clone(),
            op: node.op_name(),
            place: value.place.clone(),
            output: value.output,
            spec: value.spec.clone(),
            flops: node.flops,
            traffic: node.traffic,
        }
    }

    /// What a policy sees of it.
    pub fn site(&self) -> Site<'_> {
        Site {
            id: self.id,
            path: &self.path,
            op: self.op,
            roles: self.place.roles,
            output_of: self.place.output_of,
            blocks: &self.place.blocks,
            output: self.output,
            shape: &self.spec.shape,
            dtype: self.spec.dtype,
            bytes: self.spec.bytes(),
            flops: self.flops,
            traffic: self.traffic,
        }
    }
}

impl Scopes {
    /// What scope `level`, those around it and the policy say of a value.
    pub fn marking(&self, policy: Option<&dyn Policy>, level: usize, candidate: &Candidate) -> Marking {
        let site = candidate.site();
        let (mark, source) = self.decide(policy, level, &site);
        Marking { mark, source, may_drop_outside: self.may_drop_outside(policy, level, &site) }
    }

    fn decide(&self, policy: Option<&dyn Policy>, level: usize, site: &Site<'_>) -> (Option<Mark>, MarkSource) {
        if let Some(mark) = self.mark_at(level) {
            return (Some(mark), MarkSource::Scope);
        }
        match policy.and_then(|policy| policy.mark(site)) {
            Some(Decision { mark, rule }) => (Some(mark), MarkSource::Rule(rule)),
            None => (None, MarkSource::Default),
        }
    }

    /// Whether a value of scope `level` may come to be dropped by belonging to a scope further out: until its scopes
    /// close, it may outlive any of them.
    fn may_drop_outside(&self, policy: Option<&dyn Policy>, level: usize, site: &Site<'_>) -> bool {
        let mut output_of = site.output_of;
        (0..level).rev().any(|outer| {
            let (left, around) = (&self.frames[outer + 1], &self.frames[outer]);
            output_of = output_of.and(left.role);
            let site =
                Site { path: &left.path, roles: around.place.roles, output_of, blocks: &left.place.blocks, ..*site };
            matches!(self.decide(policy, outer, &site).0, None | Some(Mark::Recompute))
        })
    }
}
