//! Scopes: where a value is on the tape, and marks for all values of a region.

use super::graph::Graph;
use super::marking::{Candidate, MarkSource, Marking};
use super::value::ValueKey;
use super::{Tape, Var};
use crate::trace::Event;
use crate::{BlockScope, Error, Mark, Policy, Role, Roles, ScopeSite};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::rc::Rc;

/// Where a value or a scope is, as policies see it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    /// Roles of the open scopes around it: of a value when it was recorded, or when it last outlived one.
    pub roles: Roles,
    /// Roles of the scopes that a value outlived.
    pub output_of: Roles,
    /// The blocks that its path goes through.
    pub blocks: SmallVec<[BlockScope; 2]>,
}

/// The scopes of role block that a tape has opened.
#[derive(Debug, Default)]
struct Blocks {
    /// Which block of its parent the block of each path is.
    indices: HashMap<String, usize>,
    /// How many there are by the parent's path.
    counts: HashMap<String, usize>,
}

impl Blocks {
    /// Numbers the block of this path, unless it has its number.
    fn open(&mut self, path: &str) {
        if path.is_empty() || self.indices.contains_key(path) {
            return;
        }
        let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
        let count = self.counts.entry(parent.to_string()).or_default();
        self.indices.insert(path.to_string(), *count);
        *count += 1;
    }

    /// Adds the blocks that this path goes through to those that its first `known` bytes go through.
    fn extend(&self, of_parent: &mut SmallVec<[BlockScope; 2]>, path: &str, known: usize) {
        if self.indices.is_empty() {
            return;
        }
        let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
        // The parent itself may have become a block: reopened, with a role.
        for end in ends.filter(|&end| end >= known) {
            if let Some(&index) = self.indices.get(&path[..end])
                && of_parent.last().is_none_or(|block| block.end < end)
            {
                of_parent.push(BlockScope { end, index });
            }
        }
    }
}

/// An open scope.
#[derive(Debug, Default)]
pub(super) struct ScopeFrame {
    /// Tells it from a later scope at the same depth.
    id: u64,
    /// Names of the scopes from the outermost to this one, joined by dots; empty at the top.
    pub path: String,
    /// The path that a layer's scope was opened with.
    layer: Option<String>,
    pub role: Option<Role>,
    pub place: Place,
    mark: Option<Mark>,
    /// The innermost segment scope, this one included.
    pub segment: Option<u32>,
    is_segment: bool,
    /// How often a name was given, so that the second `add` is `add_1`.
    names: HashMap<String, u32>,
    /// Values that belong here and may outlive it.
    values: Vec<ValueKey>,
}

impl ScopeFrame {
    pub fn path_of(&self, name: &str) -> String {
        match (self.path.as_str(), name) {
            ("", _) => name.to_string(),
            (_, "") => self.path.clone(),
            (path, _) => format!("{path}.{name}"),
        }
    }

    /// The path of a new value of this name.
    fn unique_path_of(&mut self, name: &str) -> String {
        if let Some(count) = self.names.get_mut(name) {
            *count += 1;
            let name = format!("{name}_{}", *count - 1);
            return self.path_of(&name);
        }
        self.names.insert(name.to_string(), 1);
        self.path_of(name)
    }
}

/// The scopes that are open on a tape.
#[derive(Debug)]
pub(crate) struct Scopes {
    /// The outermost first: the top, which never closes.
    pub(super) frames: Vec<ScopeFrame>,
    blocks: Blocks,
    /// Of all scopes that were opened.
    roles_opened: Roles,
    next_segment: u32,
    next_id: u64,
}

impl Default for Scopes {
    fn default() -> Scopes {
        let frames = vec![ScopeFrame::default()];
        Scopes { frames, blocks: Blocks::default(), roles_opened: Roles::NONE, next_segment: 0, next_id: 0 }
    }
}

impl Scopes {
    pub fn level(&self) -> usize {
        self.frames.len() - 1
    }

    pub(super) fn top(&self) -> &ScopeFrame {
        &self.frames[self.level()]
    }

    pub fn path_of(&self, name: &str) -> String {
        self.top().path_of(name)
    }

    pub(super) fn unique_path_of(&mut self, name: &str) -> String {
        let level = self.level();
        self.frames[level].unique_path_of(name)
    }

    /// Notes a value that may outlive the innermost scope; the top scope, which never closes, needs none.
    pub(super) fn note(&mut self, value: ValueKey) {
        let level = self.level();
        if level > 0 {
            self.frames[level].values.push(value);
        }
    }

    /// The mark of the innermost marked scope, from scope `level` outwards.
    pub fn mark_at(&self, level: usize) -> Option<Mark> {
        self.frames[..=level].iter().rev().find_map(|frame| frame.mark)
    }

    /// The frame of a new scope inside the innermost one; without its number and whether it is a segment.
    fn frame(&mut self, scope: &Scope) -> ScopeFrame {
        let parent = self.top();
        let path = parent.path_of(self.name_of(scope));
        let (segment, known) = (parent.segment, parent.path.len());
        let mut place = Place { roles: parent.place.roles.and(scope.role), ..parent.place.clone() };
        if scope.role == Some(Role::Block) {
            self.blocks.open(&path);
        }
        self.blocks.extend(&mut place.blocks, &path, known);
        self.roles_opened = self.roles_opened.and(scope.role);
        let layer = scope.of_layer.then(|| scope.name.clone());
        ScopeFrame { path, layer, role: scope.role, place, mark: scope.mark, segment, ..ScopeFrame::default() }
    }

    /// What a scope adds to the path of the innermost open one; for a layer, what the layer around it doesn't have.
    fn name_of<'a>(&self, scope: &'a Scope) -> &'a str {
        let inside = |layer: &str| {
            let rest = scope.name.strip_prefix(layer)?;
            if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
        };
        let around = self.frames.iter().rev().filter(|_| scope.of_layer).filter_map(|frame| frame.layer.as_deref());
        around.filter_map(inside).next().unwrap_or(&scope.name)
    }

    /// Opens a scope, and returns its number.
    fn open(&mut self, mut frame: ScopeFrame, is_segment: bool) -> u64 {
        self.next_id += 1;
        frame.id = self.next_id;
        if is_segment {
            frame.segment = Some(self.next_segment);
            frame.is_segment = true;
            self.next_segment += 1;
        }
        self.frames.push(frame);
        self.next_id
    }
}

/// What a scope is: its name, and perhaps a role, a mark for its values, and whether it is a segment. [`scope`] makes
/// one.
///
/// A scope covers the values made inside that don't outlive it: one whose handle is still held when the scope closes
/// (its output) belongs to the scope around it, by path (it bears the closed scope's path) and by mark.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a scope is described, not opened; give it to `Tape::scope` or to `within`"]
pub struct Scope {
    name: String,
    of_layer: bool,
    role: Option<Role>,
    mark: Option<Mark>,
    segment: bool,
}

/// A scope of this name, which may hold dots (`blocks.3`).
///
/// ```
/// use retape_core::{DType, Error, Mark, Role, Tape, Tensor, meta, scope};
///
/// let device = meta();
/// let tape = Tape::new(&device);
/// let x = tape.leaf(&Tensor::full(&device, &[4, 8], DType::F32, 0.0)?)?;
/// let y = x.within(scope("mlp").role(Role::FeedForward).mark(Mark::Recompute), |x| x.gelu()?.square())?;
/// assert_eq!(y.path(), "mlp");
/// # Ok::<(), Error>(())
/// ```
pub fn scope(name: impl Into<String>) -> Scope {
    Scope { name: name.into(), of_layer: false, role: None, mark: None, segment: false }
}

impl Scope {
    /// The scope of the layer whose parameters lie under `path`. What is inside has this path too: of the path, a layer
    /// adds what the innermost open layer that it is part of doesn't have. Scopes of other kinds between the two add
    /// theirs.
    pub fn of_layer(path: impl Into<String>) -> Scope {
        Scope { of_layer: true, ..scope(path) }
    }

    /// What its values are to the model; presets go by it.
    pub fn role(self, role: Role) -> Scope {
        Scope { role: Some(role), ..self }
    }

    /// Marks every value of the scope that has no mark of its own. It overrules the policy and outer scopes.
    pub fn mark(self, mark: Mark) -> Scope {
        Scope { mark: Some(mark), ..self }
    }

    /// Makes it a segment: while backward visits another scope, a chain of replays through this one holds only its
    /// boundaries (the values that outlive it), not its inside.
    pub fn segment(self) -> Scope {
        Scope { segment: true, ..self }
    }
}

impl From<&str> for Scope {
    fn from(name: &str) -> Scope {
        scope(name)
    }
}

impl From<String> for Scope {
    fn from(name: String) -> Scope {
        scope(name)
    }
}

impl From<&String> for Scope {
    fn from(name: &String) -> Scope {
        scope(name)
    }
}

impl From<&Scope> for Scope {
    fn from(scope: &Scope) -> Scope {
        scope.clone()
    }
}

impl Tape {
    /// Opens a scope; it closes when the guard is dropped. Declare the guard before the values that the scope shall
    /// cover: locals are dropped in reverse order. [`within`](Tape::within) needs no such care.
    pub fn scope(&self, scope: impl Into<Scope>) -> ScopeGuard {
        ScopeGuard::open(self, scope.into())
    }

    /// Runs `f` in a scope. With `.mark(Mark::Recompute)` it is what other engines call a checkpoint: it holds what `f`
    /// takes from outside and its result, and replays the inside once when backward gets there.
    pub fn within<T>(&self, scope: impl Into<Scope>, f: impl FnOnce() -> T) -> T {
        let _scope = self.scope(scope);
        f()
    }
}

impl Var {
    /// Runs `f` on this value in a scope; see [`Tape::within`].
    pub fn within<T>(self, scope: impl Into<Scope>, f: impl FnOnce(Var) -> T) -> T {
        let tape = self.tape.clone();
        let _scope = tape.scope(scope);
        f(self)
    }
}

/// An open scope of a tape; it closes when dropped. In a policy or a rule of the same tape it stays open until the
/// scope around it closes.
#[derive(Debug)]
#[must_use = "a scope closes when dropped; bind it to a variable"]
pub struct ScopeGuard {
    tape: Tape,
    depth: usize,
    id: u64,
}

impl ScopeGuard {
    fn open(tape: &Tape, scope: Scope) -> ScopeGuard {
        let policy = tape.settled().options.policy.clone();
        let Ok(_busy) = tape.occupy("scope") else {
            tape.graph().park(Error::Reentrant { what: "scope" });
            // A scope that is no more open than one that has closed with the one around it.
            return ScopeGuard { tape: tape.clone(), depth: usize::MAX, id: 0 };
        };
        let frame = tape.0.scopes.borrow_mut().frame(&scope);
        let site = ScopeSite { path: &frame.path, role: scope.role, blocks: &frame.place.blocks };
        let is_segment = scope.segment || policy.is_some_and(|policy| policy.is_segment(&site));
        let mut scopes = tape.0.scopes.borrow_mut();
        let id = scopes.open(frame, is_segment);
        let depth = scopes.level();
        tape.graph().tell(|_| Event::Open(scope));
        ScopeGuard { tape: tape.clone(), depth, id }
    }
}

impl Drop for ScopeGuard {
    fn drop(&mut self) {
        // It may have closed with a scope around it; another may be open at its depth.
        let is_open = |tape: &Tape| tape.0.scopes.borrow().frames.get(self.depth).is_some_and(|f| f.id == self.id);
        if !is_open(&self.tape) {
            return;
        }
        // In a policy or a rule it stays open, until the one around it closes.
        let Ok(_busy) = self.tape.occupy("scope") else {
            return self.tape.graph().park(Error::Reentrant { what: "scope" });
        };
        // Scopes that were leaked or moved and are still open inside close with this one. What the latest op was given
        // settles later: a mark on what a closure in the scope returns is in time.
        while self.tape.0.scopes.borrow().frames.len() > self.depth {
            self.tape.close_scope();
        }
    }
}

impl Tape {
    /// Roles of all scopes that were opened.
    pub(crate) fn roles_opened(&self) -> Roles {
        self.0.scopes.borrow().roles_opened
    }

    /// Closes the innermost scope. What outlives it belongs to the scope around it, and may get another mark there.
    fn close_scope(&self) {
        let Some(frame) = self.0.scopes.borrow_mut().frames.pop() else { return };
        let path: Rc<str> = frame.path.as_str().into();
        let mut graph = self.graph();
        graph.tell(|_| Event::Close);
        let policy = graph.options.policy.clone();
        let moved = {
            let scopes = self.0.scopes.borrow();
            graph.outlive(&frame, &path, &scopes)
        };
        drop(graph);
        let marked = self.marks_outside(policy.as_deref(), moved);
        let mut graph = self.graph();
        for (key, marking) in marked {
            marking.into_iter().for_each(|marking| graph.remark(key, marking));
            graph.values.get_mut(key).into_iter().for_each(|value| value.path = path.clone());
        }
    }

    /// The marks of values in the innermost scope, which they have come to belong to.
    fn marks_outside(&self, policy: Option<&dyn Policy>, moved: Vec<(ValueKey, Option<Candidate>)>) -> Vec<Remark> {
        let mut marked = Vec::new();
        for (key, candidate) in moved {
            let scopes = self.0.scopes.borrow();
            let marking = candidate.map(|candidate| scopes.marking(policy, scopes.level(), &candidate));
            drop(scopes);
            self.0.scopes.borrow_mut().note(key);
            marked.push((key, marking));
        }
        marked
    }
}

/// A value and what marks it from here on, where that may change.
type Remark = (ValueKey, Option<Marking>);

impl Graph {
    /// Moves the values that outlive a scope to the one around it, and lists them; with what policies see of those
    /// whose mark may still change.
    fn outlive(&mut self, frame: &ScopeFrame, path: &Rc<str>, scopes: &Scopes) -> Vec<(ValueKey, Option<Candidate>)> {
        let around = scopes.top();
        let mut moved = Vec::new();
        for &key in &frame.values {
            if !self.values.contains_key(key) || !self.is_held(key) {
                continue;
            }
            self.move_forward_time(key, path);
            let value = &mut self.values[key];
            value.place = Place {
                roles: around.place.roles,
                output_of: value.place.output_of.and(frame.role),
                blocks: frame.place.blocks.clone(),
            };
            let open = self.outlive_root(key, frame.is_segment, around.segment);
            let value = &self.values[key];
            let candidate = || Candidate { path: path.clone(), ..Candidate::of(value, &self.nodes[value.node]) };
            moved.push((key, open.then(candidate)));
        }
        moved
    }

    /// Whether a value that outlives its scope may get another mark.
    fn outlive_root(&mut self, key: ValueKey, of_segment: bool, segment: Option<u32>) -> bool {
        let fixed = self.mark_is_fixed(key);
        let Some(root) = self.roots.get_mut(key).filter(|root| root.is_unsettled()) else { return false };
        root.boundary |= of_segment;
        root.segment = segment;
        !root.is_kept_exactly() && root.marking.source != MarkSource::Value && !fixed
    }

    /// Gives a value another mark, as scopes and policy have it.
    fn remark(&mut self, key: ValueKey, marking: Marking) {
        let Some(root) = self.roots.get_mut(key).filter(|root| root.is_unsettled()) else { return };
        let before = std::mem::replace(&mut root.marking, marking);
        self.count_rule(before.source, -1);
        self.count_rule(marking.source, 1);
        self.require_recipe(key);
    }
}
