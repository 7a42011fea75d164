//! Scopes: where a value is on the tape, and marks for all values of a region.

use super::Tape;
use super::graph::{Graph, MarkSource, Stored, ValueKey};
use super::trace::Event;
use crate::{Error, Mark, Result};
use std::collections::HashMap;
use std::rc::Rc;

/// An open scope.
#[derive(Debug)]
pub(crate) struct ScopeFrame {
    /// Tells it from a later scope at the same depth.
    id: u64,
    /// Names of the scopes from the outermost to this one, joined by dots; empty at the top.
    pub path: String,
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
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
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

/// An open scope of a tape; it closes when dropped. A scope covers the values made inside that don't outlive it: one
/// whose handle is still held when the scope closes (its output) belongs to the scope around it, by path (it bears the
/// closed scope's path) and by mark.
///
/// Declare it before the values it shall cover: locals are dropped in reverse order.
#[derive(Debug)]
#[must_use = "a scope closes when dropped; bind it to a variable"]
pub struct Scope {
    tape: Tape,
    depth: usize,
    id: u64,
    path: String,
}

impl Scope {
    pub(super) fn open(tape: &Tape, name: &str) -> Scope {
        let Some(mut graph) = tape.graph_or_park("scope") else {
            // A scope that is no more open than one that has closed with the one around it.
            return Scope { tape: tape.clone(), depth: usize::MAX, id: 0, path: name.to_owned() };
        };
        let parent = graph.scopes.last().expect("the top scope never closes");
        let path = parent.path_of(name);
        let segment = parent.segment;
        let is_segment = graph.options.policy.as_ref().is_some_and(|p| p.is_segment(&path));
        graph.next_scope += 1;
        let id = graph.next_scope;
        let mut frame = ScopeFrame { id, path: path.clone(), segment, ..ScopeFrame::top() };
        if is_segment {
            frame.make_segment(&mut graph.next_segment);
        }
        graph.scopes.push(frame);
        graph.tell(|_| Event::Open(name.to_string()));
        let depth = graph.scopes.len() - 1;
        drop(graph);
        Scope { tape: tape.clone(), depth, id, path }
    }

    /// Changes the open scope; where it has closed with one around it, that is an error, parked.
    fn change(&self, what: &'static str, event: Event, change: impl FnOnce(&mut ScopeFrame, &mut u32)) {
        let Some(mut graph) = self.tape.graph_or_park("scope") else { return };
        let graph = &mut *graph;
        match graph.scopes.get_mut(self.depth).filter(|s| s.id == self.id) {
            Some(frame) => {
                change(frame, &mut graph.next_segment);
                graph.tell(|_| event);
            }
            None => {
                let reason = "the scope has closed, with the one around it; scopes close in reverse order".into();
                let path = self.path.clone();
                graph.park(Error::MarkTooLate { mark: what, path, op: "scope", reason });
            }
        }
    }

    /// Marks every value of this scope that has no mark of its own. It overrules the policy and outer scopes.
    pub fn mark(self, mark: Mark) -> Scope {
        self.change(mark.name(), Event::ScopeMark(self.depth, mark), |frame, _| frame.mark = Some(mark));
        self
    }

    /// Makes this scope a segment: while backward visits another scope, a chain of replays through this one holds only
    /// its boundaries (the values that outlive it), not its inside.
    pub fn segment(self) -> Scope {
        self.change("segment", Event::Segment(self.depth), ScopeFrame::make_segment);
        self
    }
}

impl ScopeFrame {
    fn make_segment(&mut self, next: &mut u32) {
        self.segment = Some(*next);
        self.is_segment = true;
        *next += 1;
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // A policy that holds and drops one leaves it open, until the scope around it closes.
        let Some(mut graph) = self.tape.graph_or_park("scope") else { return };
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
        let Some(value) = graph.values.get(key) else { continue };
        let is_root = value.root == key;
        let survives = if is_root { value.root_handles > 0 } else { value.handles > 0 };
        if !survives {
            continue;
        }
        let unsettled = matches!(value.stored, Stored::Unsettled);
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

/// Runs `f` in a scope of its own whose values are recomputed: what other engines call a checkpoint. It holds what `f`
/// takes from outside and its result, and replays the inside once when backward gets there.
pub fn checkpoint<T>(tape: &Tape, name: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let _scope = tape.scope(name).mark(Mark::Recompute);
    f()
}
