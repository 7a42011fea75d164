//! The tape: records ops as they run, stores what backward will read as the marks say, and runs backward.

mod audit;
mod commit;
mod graph;
mod operators;
mod pass;
mod record;
mod replay;
mod report;
mod scope;
mod settle;
mod sums;
mod trace;
mod var;

use crate::device::unique;
use crate::kernel::{self, RandomStream};
use crate::layout::Shape;
use crate::ops::{Exec, KernelClock, Spec};
use crate::{DType, Device, Error, Int8Spec, MemoryKind, Policy, Result, Rounding, Tensor};
pub use commit::StateId;
use graph::{Graph, PendingQuantize, Quantized, ValueKey};
pub use pass::GradOptions;
pub use scope::{Scope, ScopeGuard, scope};
use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Instant;
use trace::Event;
pub use trace::{DryRun, Trace, TraceNode, TraceValue};
pub use var::{Gradients, Var};

/// Names one parameter across tapes, so that however often a tape is asked for it, there is one leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(u64);

impl ParameterId {
    /// An id that no other parameter of this process has or will have, also after this one is dropped.
    pub fn unique() -> ParameterId {
        ParameterId(unique())
    }
}

/// Whether replays are checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verify {
    /// No.
    #[default]
    Off,
    /// Fingerprint each dropped value in forward and compare its replay: [`Error::ReplayDiffers`] names the op, the path
    /// and the first differing element. Behind an int8 value a replay differs by design; there, the replays of later
    /// passes are compared with the first one's. Costs host memory and time.
    Bits,
}

/// What an int8 store does with a group that holds an infinity or a NaN.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// [`Error::NonFinite`], which names the value.
    #[default]
    Error,
    /// Keep the value in full precision and count it in [`Stats::full_precision_fallbacks`]. Such a value is outside the
    /// promise that a dry run predicts the peak.
    KeepFull,
}

/// How a tape is set up.
#[derive(Debug, Clone, Default)]
pub struct TapeOptions {
    /// Decides marks where neither the value nor a scope does.
    pub policy: Option<Rc<dyn Policy>>,
    /// Seed of every random op. Each training step needs another one, or dropout repeats its mask. Without a seed, random
    /// ops are [`Error::Unseeded`]; the meta device draws no numbers and needs none.
    pub seed: Option<u64>,
    /// Whether replays are checked.
    pub verify: Verify,
    /// What an int8 store does with non-finite values.
    pub non_finite: NonFinite,
    /// Measure the error of each int8 store for the ledger (costs a dequantization and host time).
    pub measure_quantization: bool,
    /// Record time per path, see [`Stats::by_path`].
    pub profile: bool,
}

/// Time spent on one path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathTime {
    /// Nanoseconds in forward kernels.
    pub forward: u64,
    /// Nanoseconds in backward kernels, replays apart.
    pub backward: u64,
    /// Nanoseconds in replayed kernels.
    pub replay: u64,
}

/// Counters and clocks of a tape since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Kernels replayed by backward (one per node and replay).
    pub replays: u64,
    /// The most replays of one node in one pass.
    pub most_replays_of_a_node: u64,
    /// FLOPs of all replays.
    pub replayed_flops: u64,
    /// Bytes that replays read and write.
    pub replayed_traffic: u64,
    /// Bytes that quantizing and dequantizing read and write.
    pub quantize_traffic: u64,
    /// FLOPs of forward.
    pub forward_flops: u64,
    /// Values stored as int8.
    pub quantized: u64,
    /// Values that int8 could not hold and that stayed full ([`NonFinite::KeepFull`]).
    pub full_precision_fallbacks: u64,
    /// Nanoseconds in kernels, of all purposes.
    pub kernel_nanos: u64,
    /// Nanoseconds of replays, their bookkeeping included.
    pub replay_nanos: u64,
    /// Nanoseconds of quantizing and dequantizing.
    pub quantize_nanos: u64,
    /// Paths that were replayed, with counts.
    pub replayed_paths: BTreeMap<String, u64>,
    /// Time per path, if the tape profiles.
    pub by_path: BTreeMap<String, PathTime>,
}

struct Shared {
    /// Unique for the process: another tape numbers its values alike.
    id: u64,
    device: Device,
    seed: Option<u64>,
    graph: RefCell<Graph>,
    /// Handles that came while the graph was borrowed.
    cloned: RefCell<Vec<ValueKey>>,
    /// Handles that went while the graph was borrowed.
    dropped: RefCell<Vec<ValueKey>>,
    /// A call that could not be answered while the graph was borrowed, nor return an error.
    reentered: Cell<Option<&'static str>>,
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
/// Kernels and rules run outside any borrow of the tape, and no state is shared between tapes. A *policy* runs inside: one
/// that uses its own tape gets [`Error::Reentrant`] from calls that return a `Result`; the others (sizes, paths, counts,
/// [`scope`](Tape::scope)) answer as for nothing, an empty shape or 0, and the error is what the next call of the tape
/// returns. Handles may be cloned and dropped there.
#[derive(Clone)]
pub struct Tape(Rc<Shared>);

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.graph.try_borrow() {
            Ok(g) => write!(f, "Tape({} nodes on {})", g.nodes.len(), g.device.name()),
            Err(_) => write!(f, "Tape(in use)"),
        }
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
            cloned: RefCell::default(),
            dropped: RefCell::default(),
            reentered: Cell::default(),
            random_counter: Cell::new(0),
            paused: Cell::new(0),
            changes: RefCell::default(),
        }))
    }

    /// The graph in the middle of a call, where nothing can have borrowed it.
    fn graph(&self) -> RefMut<'_, Graph> {
        self.borrow("tape").expect("the tape calls policies only inside calls that have its graph")
    }

    /// The graph, with what was done to handles meanwhile done first.
    fn borrow(&self, what: &'static str) -> Result<RefMut<'_, Graph>> {
        while let Ok(mut graph) = self.0.graph.try_borrow_mut() {
            self.0.cloned.borrow_mut().drain(..).for_each(|value| graph.retain_handle(value));
            if let Some(what) = self.0.reentered.take() {
                graph.park(Error::Reentrant { what });
            }
            let next = self.0.dropped.borrow_mut().pop();
            let Some(value) = next else { return Ok(graph) };
            drop(graph);
            self.let_go([value]);
        }
        Err(Error::Reentrant { what })
    }

    /// The graph for a call of the user: what the latest op was given by value settles first.
    fn try_graph(&self, what: &'static str) -> Result<RefMut<'_, Graph>> {
        self.settle_operands();
        let mut graph = self.borrow(what)?;
        graph.note_let_go();
        Ok(graph)
    }

    /// The graph for a mark on a value or a fact of it: after either, the op that made it can still be marked
    /// `Recompute`.
    fn graph_at(&self, value: ValueKey, what: &'static str) -> Result<RefMut<'_, Graph>> {
        let graph = self.borrow(what)?;
        if graph.made_by_latest(value) {
            return Ok(graph);
        }
        drop(graph);
        self.try_graph(what)
    }

    /// Lets go of the handles that the latest op was given by value.
    pub(crate) fn settle_operands(&self) {
        let Ok(mut graph) = self.0.graph.try_borrow_mut() else { return };
        let ended = std::mem::take(&mut graph.ended);
        drop(graph);
        if !ended.is_empty() {
            self.let_go(ended);
        }
    }

    /// The graph for a call that can't fail: where a policy makes it, it has no answer, and the next call fails.
    fn graph_or_park(&self, what: &'static str) -> Option<RefMut<'_, Graph>> {
        self.or_park(what, self.try_graph(what))
    }

    fn or_park<'a>(&self, what: &'static str, graph: Result<RefMut<'a, Graph>>) -> Option<RefMut<'a, Graph>> {
        if graph.is_err() {
            self.0.reentered.set(Some(what));
        }
        graph.ok()
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

    /// The leaf of a parameter: one per id, however often it is asked for, so that the gradients of all its uses add up.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] where this id had another shape or dtype on this tape, [`Error::DeviceMismatch`] where the
    /// tensor is on another device and the tape's computes.
    pub fn parameter(&self, id: ParameterId, tensor: &Tensor, requires_grad: bool) -> Result<Var> {
        let mut graph = self.try_graph("parameter")?;
        graph.check("parameter", None)?;
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
        self.add_leaf(&tensor, requires_grad, Some(id))
    }

    fn add_leaf(&self, tensor: &Tensor, requires_grad: bool, parameter: Option<ParameterId>) -> Result<Var> {
        let mut graph = self.try_graph("leaf")?;
        graph.check("leaf", None)?;
        if requires_grad && !tensor.dtype().is_float() {
            return Err(Error::NoGradient {
                path: "leaf".into(),
                op: "leaf",
                reason: format!("{} values have no gradient; use `constant`, or cast to f32 first", tensor.dtype()),
            });
        }
        let tensor = tensor.entering("leaf", &graph.device)?;
        let name = if parameter.is_some() { "parameter" } else { "leaf" };
        let keys = graph.insert_leaf(name, (*tensor).clone(), requires_grad, parameter);
        graph.note_leaf(keys[0], &tensor, requires_grad, parameter);
        if let Some(id) = parameter {
            graph.parameters.insert(id, (keys[0], Spec::of(&tensor)));
        }
        Ok(Var { tape: self.clone(), key: keys[0] })
    }

    /// Runs `f` without recording: what ops inside make are constants, which hold nothing of what they were made from.
    pub fn no_grad<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Pause<'a>(&'a Tape);
        impl Drop for Pause<'_> {
            fn drop(&mut self) {
                self.0.0.paused.update(|open| open - 1);
                self.0.tell(|_| Event::Resume);
            }
        }
        self.0.paused.update(|open| open + 1);
        self.tell(|_| Event::Pause);
        let _pause = Pause(self);
        f()
    }

    /// Notes an event, where the tape is being traced.
    fn tell(&self, event: impl FnOnce(&Graph) -> Event) {
        if let Ok(mut graph) = self.try_graph("trace") {
            graph.tell(event);
        }
    }

    /// How many streams random ops have taken, see [`apply_random`](Var::apply_random).
    pub fn random_counter(&self) -> u64 {
        self.0.random_counter.get()
    }

    /// Living nodes, leaves included.
    pub fn node_count(&self) -> usize {
        self.graph_or_park("node_count").map_or(0, |graph| graph.nodes.len())
    }

    /// Bytes that the tape stores for backward right now (leaves, which the user owns, apart).
    pub fn saved_bytes(&self) -> u64 {
        self.graph_or_park("saved_bytes").map_or(0, |graph| graph.saved_bytes())
    }

    /// Counters and clocks.
    pub fn stats(&self) -> Stats {
        let mut stats = self.graph_or_park("stats").map_or_else(Stats::default, |graph| graph.stats.clone());
        stats.kernel_nanos = self.0.clock.nanos();
        stats
    }

    fn exec<'a>(&'a self, device: &'a Device, kind: MemoryKind) -> Exec<'a> {
        Exec::new(device, kind, &self.0.clock)
    }

    /// Runs a settling's kernel outside the borrow.
    fn quantize(&self, pending: PendingQuantize) {
        let PendingQuantize { value, tensor, spec } = pending;
        let start = Instant::now();
        let (device, measure, stream) = {
            let graph = self.graph();
            (graph.device.clone(), graph.options.measure_quantization, graph.rounding_stream(value))
        };
        let result = quantize(&self.exec(&device, MemoryKind::Quantized), &tensor, spec, stream).map_err(|error| {
            let graph = self.graph();
            let v = &graph.values[value];
            error.of_value(&v.path, graph.nodes[v.node].op_name())
        });
        let error = match &result {
            Ok(quantized) if measure => self.quantization_error(&device, &tensor, quantized).ok(),
            _ => None,
        };
        let mut graph = self.graph();
        if let Ok(quantized) = &result {
            graph.stats.quantize_traffic += quantized.traffic();
        }
        graph.finish_quantize(value, result, error);
        graph.stats.quantize_nanos += start.elapsed().as_nanos() as u64;
        drop(graph);
    }

    /// Relative L2 distance of an int8 store from the original.
    fn quantization_error(&self, device: &Device, original: &Tensor, quantized: &Quantized) -> Result<f64> {
        // Both tensors on every device, so that a dry run takes the same memory.
        let stored = dequantize(&self.exec(device, MemoryKind::Workspace), quantized)?
            .cast(DType::F64, MemoryKind::Workspace)?;
        let original = original.cast(DType::F64, MemoryKind::Workspace)?;
        let (mut error, mut norm) = (0.0, 0.0);
        for (x, y) in original.to_vec::<f64>()?.into_iter().zip(stored.to_vec::<f64>()?) {
            error += (x - y) * (x - y);
            norm += x * x;
        }
        Ok(if norm == 0.0 { 0.0 } else { (error / norm).sqrt() })
    }

    /// A handle goes.
    fn release(&self, value: ValueKey) {
        match self.try_graph("drop") {
            Ok(graph) => {
                drop(graph);
                self.let_go([value]);
            }
            Err(_) => self.0.dropped.borrow_mut().push(value),
        }
    }

    /// Handles go, in order, all before any of their values is quantized.
    fn let_go(&self, values: impl IntoIterator<Item = ValueKey>) {
        let Ok(mut graph) = self.0.graph.try_borrow_mut() else { return };
        let pending = graph.release_handles(values);
        drop(graph);
        pending.into_iter().for_each(|pending| self.quantize(pending));
    }
}

const STOCHASTIC: &str = "int8 with stochastic rounding";

const EMPTY_GROUP: &str = "a group needs at least 1 element; 64 is usual";

/// Stores a tensor as int8; `stream` is for stochastic rounding. Fails where a group isn't finite, or has no elements, or
/// where the tape has no seed to round with; the caller names the value.
fn quantize(exec: &Exec<'_>, tensor: &Tensor, int8: Int8Spec, stream: Option<RandomStream>) -> Result<Quantized> {
    let group = int8.group;
    if group == 0 {
        let reason = EMPTY_GROUP.into();
        return Err(Error::MarkNotAllowed { mark: "int8", path: String::new(), op: "", reason });
    }
    let spec = Spec::of(tensor);
    let mut scales: Shape = spec.shape.clone();
    match scales.last_mut() {
        Some(last) => *last = last.div_ceil(group),
        None => scales.push(1),
    }
    let rounding = match int8.rounding {
        Rounding::Nearest => None,
        Rounding::Stochastic => Some(stream.ok_or_else(|| Error::Unseeded { what: STOCHASTIC, path: String::new() })?),
    };
    let q = exec.empty(&spec.shape, DType::U8)?;
    let scales = exec.empty(&scales, spec.dtype.computed_in())?;
    exec.run(kernel::Quantize { x: tensor, group, rounding, q: &q, scales: &scales })?;
    if scales.device().computes() && has_nan(&scales)? {
        return Err(Error::NonFinite { path: String::new(), op: "" });
    }
    Ok(Quantized { q, scales, group, spec })
}

/// True where one of these f32 or f64 numbers is NaN. Takes no memory of the device.
fn has_nan(x: &Tensor) -> Result<bool> {
    Ok(match x.dtype() {
        DType::F64 => x.to_vec::<f64>()?.iter().any(|x| x.is_nan()),
        _ => x.to_vec::<f32>()?.iter().any(|x| x.is_nan()),
    })
}

fn dequantize(exec: &Exec<'_>, quantized: &Quantized) -> Result<Tensor> {
    let out = exec.empty_like(&quantized.spec)?;
    let Quantized { q, scales, group, .. } = quantized;
    exec.run(kernel::Dequantize { q, scales, group: *group, out: &out })?;
    Ok(out)
}
