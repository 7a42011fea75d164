//! The tape: records ops as they run, stores what backward will read as the marks say, and runs backward.

mod audit;
mod commit;
mod gradients;
pub(crate) mod graph;
pub(crate) mod marking;
mod operators;
mod options;
mod pass;
mod plan;
mod record;
mod replay;
mod scope;
mod settle;
pub(crate) mod stats;
pub mod storage;
mod sums;
pub(crate) mod value;
mod var;
mod visit;

use crate::device::unique;
use crate::ops::{Exec, KernelClock, Spec};
use crate::trace::Event;
use crate::{Device, Error, MemoryKind, Result, Tensor};
pub use commit::StateId;
pub use gradients::Gradients;
use graph::Graph;
pub use options::{BackwardOptions, NonFinite, TapeOptions, Verify};
use scope::Scopes;
pub use scope::{Scope, ScopeGuard, scope};
pub use stats::{PathTime, Stats};
use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::rc::Rc;
use value::ValueKey;
pub use var::Var;

/// Names one parameter across tapes, so that however often a tape is asked for it, there is one leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(u64);

impl ParameterId {
    /// An id that no other parameter of this process has or will have, also after this one is dropped.
    pub fn unique() -> ParameterId {
        ParameterId(unique())
    }
}

struct Shared {
    /// Unique for the process: another tape numbers its values alike.
    id: u64,
    device: Device,
    seed: Option<u64>,
    /// Borrowed for moments only, in which nothing of a user's runs.
    graph: RefCell<Graph>,
    /// Apart from the graph: policies are asked about open scopes.
    scopes: RefCell<Scopes>,
    /// A call is at work that may ask a policy or a rule: others that change the tape are `Error::Reentrant`.
    busy: Cell<bool>,
    /// How many streams random ops have taken.
    random_counter: Cell<u64>,
    /// How many `no_grad` are open.
    paused: Cell<u32>,
    /// What `commit` will apply.
    changes: RefCell<Vec<commit::Change>>,
    clock: KernelClock,
}

/// Records ops; see the crate's docs. A cheap handle: clones are the same tape. Not `Send`: a thread has its own tape.
///
/// Kernels, policies and rules run outside any borrow of the tape, and no state is shared between tapes. A policy or a
/// rule may ask its own tape for facts (sizes, paths, tensors, counts), and clone and drop handles. What changes the
/// tape (recording, scopes, marks, passes, `commit`) and the ledger are [`Error::Reentrant`] there; of
/// [`scope`](Tape::scope), which returns no error, the tape's next call returns it.
#[derive(Clone)]
pub struct Tape(Rc<Shared>);

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let graph = self.graph();
        write!(f, "Tape({} nodes on {})", graph.nodes.len(), graph.device.name())
    }
}

/// A call at work.
pub(crate) struct Busy<'a>(&'a Cell<bool>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Tape {
    /// A tape without a policy: everything that backward reads is kept. It has no seed, so it refuses random ops.
    pub fn new(device: &Device) -> Tape {
        Tape::with(device, TapeOptions::default())
    }

    /// A tape with options.
    pub fn with(device: &Device, mut options: TapeOptions) -> Tape {
        if !device.computes() {
            options.seed = options.seed.or(Some(0));
        }
        Tape(Rc::new(Shared {
            id: unique(),
            device: device.clone(),
            seed: options.seed,
            clock: KernelClock::new(options.profile),
            graph: RefCell::new(Graph::new(device, options)),
            scopes: RefCell::default(),
            busy: Cell::new(false),
            random_counter: Cell::new(0),
            paused: Cell::new(0),
            changes: RefCell::default(),
        }))
    }

    /// The graph in the middle of a call.
    pub(crate) fn graph(&self) -> RefMut<'_, Graph> {
        self.0.graph.borrow_mut()
    }

    /// The graph for a call of the user's: what the latest op was given by value settles first. Not where a policy or a
    /// rule asks: the call that asks it settles when it must.
    pub(crate) fn settled(&self) -> RefMut<'_, Graph> {
        if !self.0.busy.get() {
            self.settle_operands();
        }
        let mut graph = self.graph();
        graph.note_let_go();
        graph
    }

    /// The graph for a mark on a value or a fact of it: after either, the op that made it can still be marked
    /// `Recompute`.
    fn settled_for(&self, value: ValueKey) -> RefMut<'_, Graph> {
        let graph = self.graph();
        if graph.made_by_latest(value) {
            return graph;
        }
        drop(graph);
        self.settled()
    }

    /// Begins a call that changes the tape. It is at work until what this returns is dropped.
    pub(crate) fn occupy(&self, what: &'static str) -> Result<Busy<'_>> {
        match self.0.busy.replace(true) {
            true => Err(Error::Reentrant { what }),
            false => Ok(Busy(&self.0.busy)),
        }
    }

    /// Fails where the tape can't be used: with a parked error, and after a pass has consumed it.
    pub(crate) fn check(&self, what: &'static str, on: Option<ValueKey>) -> Result<()> {
        let mut graph = self.graph();
        if let Some(error) = graph.parked.take() {
            return Err(error);
        }
        if !graph.consumed {
            return Ok(());
        }
        let path = on.and_then(|v| Some(graph.values.get(v)?.path.to_string()));
        Err(Error::TapeConsumed { what, path: path.unwrap_or_else(|| self.0.scopes.borrow().path_of(what)) })
    }

    /// Begins a call that changes the tape, where it can be used.
    pub(crate) fn enter(&self, what: &'static str, on: Option<ValueKey>) -> Result<Busy<'_>> {
        drop(self.settled());
        let busy = self.occupy(what)?;
        self.check(what, on)?;
        Ok(busy)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.0.device.clone()
    }

    /// A leaf with a gradient. A tape of the meta device takes a tensor of any device here, by its shape alone: what
    /// stands for it has its bytes, is counted as it is, and lives as long. Other tapes take tensors of their device
    /// only.
    pub fn leaf(&self, tensor: &Tensor) -> Result<Var> {
        self.add_leaf(tensor, true, None)
    }

    /// A leaf without a gradient: tokens, targets, constants. Of other devices as in [`leaf`](Tape::leaf).
    pub fn constant(&self, tensor: &Tensor) -> Result<Var> {
        self.add_leaf(tensor, false, None)
    }

    /// The leaf of a parameter: one per id, however often it is asked for, so that the gradients of all its uses add
    /// up.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] where this id had another shape or dtype on this tape, [`Error::DeviceMismatch`]
    /// where the tensor is on another device and the tape's computes.
    pub fn parameter(&self, id: ParameterId, tensor: &Tensor, requires_grad: bool) -> Result<Var> {
        let busy = self.enter("parameter", None)?;
        let mut graph = self.graph();
        let tensor = tensor.entering("parameter", &graph.device)?;
        if let Some((key, spec)) = graph.parameters.get(&id).cloned() {
            let asked = Spec::of(&tensor);
            if asked != spec {
                return Err(Error::tensor(
                    "parameter",
                    format!("{id:?} is {spec} on this tape, and {asked} now; give each parameter an id of its own"),
                ));
            }
            if graph.reopen_leaf(key, &tensor, requires_grad) {
                drop(graph);
                return Ok(Var { tape: self.clone(), key });
            }
        }
        drop(graph);
        drop(busy);
        self.add_leaf(&tensor, requires_grad, Some(id))
    }

    pub(crate) fn add_leaf(&self, tensor: &Tensor, requires_grad: bool, parameter: Option<ParameterId>) -> Result<Var> {
        let _busy = self.enter("leaf", None)?;
        if requires_grad && !tensor.dtype().is_float() {
            return Err(Error::NoGradient {
                path: "leaf".into(),
                op: "leaf",
                reason: format!("{} values have no gradient; use `constant`, or cast to f32 first", tensor.dtype()),
            });
        }
        let tensor = tensor.entering("leaf", &self.0.device)?;
        let name = if parameter.is_some() { "parameter" } else { "leaf" };
        let key = self.insert_leaf(name, (*tensor).clone(), requires_grad, parameter);
        let mut graph = self.graph();
        graph.note_leaf(key, &tensor, requires_grad, parameter);
        if let Some(id) = parameter {
            graph.parameters.insert(id, (key, Spec::of(&tensor)));
        }
        Ok(Var { tape: self.clone(), key })
    }

    /// Another handle on a leaf that this tensor is of, where it is still there.
    pub(crate) fn reopened(&self, leaf: ValueKey, tensor: &Tensor) -> Option<Var> {
        let mut graph = self.graph();
        let requires_grad = graph.values.get(leaf)?.requires_grad;
        graph.reopen_leaf(leaf, tensor, requires_grad).then(|| Var { tape: self.clone(), key: leaf })
    }

    /// Adds a leaf to the innermost scope.
    fn insert_leaf(&self, name: &str, tensor: Tensor, requires_grad: bool, parameter: Option<ParameterId>) -> ValueKey {
        let mut scopes = self.0.scopes.borrow_mut();
        let at = (scopes.unique_path_of(name).into(), scopes.top().place.clone());
        let key = self.graph().insert_leaf(at, tensor, requires_grad, parameter);
        scopes.note(key);
        key
    }

    /// Runs `f` without recording: what ops inside make are constants, which hold nothing of what they were made from.
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Pause<'a>(&'a Tape);
        impl Drop for Pause<'_> {
            fn drop(&mut self) {
                self.0.pause(-1);
                self.0.settled().tell(|_| Event::Resume);
            }
        }
        self.pause(1);
        self.settled().tell(|_| Event::Pause);
        let _pause = Pause(self);
        f()
    }

    pub(crate) fn pause(&self, change: i32) {
        self.0.paused.update(|open| open.wrapping_add_signed(change));
    }

    /// How many streams random ops have taken, see [`apply_random`](Var::apply_random).
    pub fn random_counter(&self) -> u64 {
        self.0.random_counter.get()
    }

    /// Living nodes, leaves included.
    pub fn node_count(&self) -> usize {
        self.settled().nodes.len()
    }

    /// Bytes that the tape stores for backward right now (leaves, which the user owns, apart).
    pub fn saved_bytes(&self) -> u64 {
        self.settled().saved_bytes()
    }

    /// Counters and clocks.
    pub fn stats(&self) -> Stats {
        Stats { kernel_nanos: self.0.clock.nanos(), ..self.settled().stats.clone() }
    }

    pub(crate) fn exec<'a>(&'a self, device: &'a Device, kind: MemoryKind) -> Exec<'a> {
        Exec::new(device, kind, &self.0.clock)
    }
}
