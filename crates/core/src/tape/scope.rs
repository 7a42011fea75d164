//! Scopes: where a value is on the tape, and marks for all values of a region.

use super::graph::{Graph, MarkSource, Stored, ValueKey};
use super::trace::Event;
use super::{Tape, Var};
use crate::{BlockScope, Mark, Role, Roles, ScopeSite};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::rc::Rc;

pub(crate) type BlockScopes = SmallVec<[BlockScope; 2]>;

/// The scopes of role block that a tape has opened.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
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
    fn extend(&self, of_parent: &mut BlockScopes, path: &str, known: usize) {
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
#[derive(Debug)]
pub(crate) struct ScopeFrame {
    /// Tells it from a later scope at the same depth.
    id: u64,
    /// Names of the scopes from the outermost to this one, joined by dots; empty at the top.
    pub path: String,
    /// The path that a layer's scope was opened with.
    layer: Option<String>,
    pub role: Option<Role>,
    /// Roles of this scope and those around it.
    pub roles: Roles,
    /// The blocks that its path goes through.
    pub blocks: BlockScopes,
    pub mark: Option<Mark>,
    /// The innermost segment scope, this one included.
    pub segment: Option<u32>,
    pub is_segment: bool,
    /// How often a name was given, so that the second `add` is `add_1`.
    names: HashMap<String, u32>,
    /// Values that belong here and may outlive it.
    pub values: Vec<ValueKey>,
}

impl ScopeFrame {
    pub fn top() -> ScopeFrame {
        ScopeFrame {
            id: 0,
            path: String::new(),
            layer: None,
            role: None,
            roles: Roles::NONE,
            blocks: BlockScopes::new(),
            mark: None,
            segment: None,
            is_segment: false,
            names: HashMap::new(),
            values: Vec::new(),
        }
    }

    /// Notes a value that may outlive this scope; the top scope, which never closes, needs none.
    pub fn note(&mut self, value: ValueKey) {
        if self.id != 0 {
            self.values.push(value);
        }
    }

    pub fn path_of(&self, name: &str) -> String {
        match (self.path.as_str(), name) {
            ("", _) => name.to_string(),
            (_, "") => self.path.clone(),
            (path, _) => format!("{path}.{name}"),
        }
    }

    pub fn unique_name(&mut self, name: &str) -> String {
        if let Some(count) = self.names.get_mut(name) {
            *count += 1;
            return format!("{name}_{}", *count - 1);
        }
        self.names.insert(name.to_string(), 1);
        name.to_string()
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

/// An open scope of a tape; it closes when dropped.
#[derive(Debug)]
#[must_use = "a scope closes when dropped; bind it to a variable"]
pub struct ScopeGuard {
    tape: Tape,
    depth: usize,
    id: u64,
}

impl ScopeGuard {
    fn open(tape: &Tape, scope: Scope) -> ScopeGuard {
        let Some(mut graph) = tape.graph_or_park("scope") else {
            // A scope that is no more open than one that has closed with the one around it.
            return ScopeGuard { tape: tape.clone(), depth: usize::MAX, id: 0 };
        };
        let name = graph.name_of(&scope);
        let parent = graph.scopes.last().expect("the top scope never closes");
        let path = parent.path_of(name);
        let (segment, known) = (parent.segment, parent.path.len());
        let (roles, mut blocks) = (parent.roles.and(scope.role), parent.blocks.clone());
        if scope.role == Some(Role::Block) {
            graph.blocks.open(&path);
        }
        graph.blocks.extend(&mut blocks, &path, known);
        graph.roles_opened = graph.roles_opened.and(scope.role);
        let site = ScopeSite { path: &path, role: scope.role, blocks: &blocks };
        let is_segment = scope.segment || graph.options.policy.as_ref().is_some_and(|p| p.is_segment(&site));
        graph.next_scope += 1;
        let id = graph.next_scope;
        let layer = scope.of_layer.then(|| scope.name.clone());
        let (role, mark) = (scope.role, scope.mark);
        let mut frame = ScopeFrame { id, path, layer, role, roles, blocks, mark, segment, ..ScopeFrame::top() };
        if is_segment {
            frame.segment = Some(graph.next_segment);
            frame.is_segment = true;
            graph.next_segment += 1;
        }
        graph.scopes.push(frame);
        graph.tell(|_| Event::Open(scope));
        let depth = graph.scopes.len() - 1;
        drop(graph);
        ScopeGuard { tape: tape.clone(), depth, id }
    }
}

impl Graph {
    /// What a scope adds to the path of the innermost open one; for a layer, what the layer around it doesn't have.
    fn name_of<'a>(&self, scope: &'a Scope) -> &'a str {
        let inside = |layer: &str| {
            let rest = scope.name.strip_prefix(layer)?;
            if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
        };
        let around = self.scopes.iter().rev().filter(|_| scope.of_layer).filter_map(|frame| frame.layer.as_deref());
        around.filter_map(inside).next().unwrap_or(&scope.name)
    }
}

impl Drop for ScopeGuard {
    fn drop(&mut self) {
        // What the latest op was given settles later: a mark on what a closure in the scope returns is in time. A
        // policy that holds and drops a guard leaves the scope open, until the one around it closes.
        let Some(mut graph) = self.tape.or_park("scope", self.tape.borrow("scope")) else { return };
        // It may have closed with a scope around it; another may be open at its depth.
        if graph.scopes.get(self.depth).is_none_or(|s| s.id != self.id) {
            return;
        }
        // Scopes that were leaked or moved and are still open inside close with this one.
        while graph.scopes.len() > self.depth {
            close(&mut graph);
        }
    }
}

fn close(graph: &mut Graph) {
    graph.tell(|_| Event::Close);
    let frame = graph.scopes.pop().expect("the loop above checks");
    let level = graph.scopes.len() - 1;
    let outer_segment = graph.scopes[level].segment;
    let path: Rc<str> = frame.path.as_str().into();
    for key in frame.values {
        if !graph.values.contains_key(key) || !graph.is_held(key) {
            continue;
        }
        let value = &graph.values[key];
        let is_root = value.root == key;
        let unsettled = matches!(value.stored, Stored::Unsettled);
        let (roles, output_of) = (graph.scopes[level].roles, value.output_of.and(frame.role));
        let value = &mut graph.values[key];
        (value.roles, value.output_of) = (roles, output_of);
        value.blocks.clone_from(&frame.blocks);
        let value = &graph.values[key];
        if is_root && !value.exact && unsettled && value.source != MarkSource::Value && !graph.mark_is_fixed(key) {
            graph.count_rule(graph.values[key].source, -1);
            graph.assign_mark(key, level, &frame.path);
            graph.require_recipe(key);
        }
        graph.move_forward_time(key, &path);
        let value = &mut graph.values[key];
        value.path = path.clone();
        if unsettled {
            value.boundary |= frame.is_segment;
            value.segment = outer_segment;
        }
        graph.scopes[level].note(key);
    }
}
