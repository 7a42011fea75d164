//! A forward pass that was recorded once and can be run again, with backward, under other marks.
//!
//! While a model runs on the meta device, all calls of its tape are noted: ops, handles that go, scopes, marks. Running
//! the trace tells another tape the same. So peak and replays come from the engine's own code, and the model's
//! doesn't run.

mod run;

use crate::device::unique;
use crate::layout::Layout;
use crate::ops::Op;
use crate::tape::graph::Graph;
use crate::tape::marking::MarkSource;
use crate::tape::stats::overhead_percent;
use crate::tape::value::{Exactness, ValueKey};
use crate::tensor::Template;
use crate::{
    DType, Device, Error, Mark, Moment, ParameterId, Policy, Result, Scope, Storage, Tape, TapeOptions, Tensor, Var,
};
use run::{Kept, Run};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Weak;

/// A call of a tape. Values go by their numbers, which a tape gives in the same order again.
#[derive(Debug)]
pub(crate) enum Event {
    Open(Scope),
    Close,
    Leaf {
        id: u64,
        source: LeafSource,
        requires_grad: bool,
        parameter: Option<ParameterId>,
    },
    /// A handle on a parameter's leaf once more.
    Reopen(u64),
    /// An op and its operands.
    Op(Rc<Op>, SmallVec<[Operand; 3]>),
    /// The last handles of these went, all before any was packed.
    Release(SmallVec<[u64; 3]>),
    /// The user has a value's tensor, and holds it until [`LetGo`](Event::LetGo).
    Take(u64),
    /// The user holds a tensor no more, by the value that it was taken from or put on the tape as.
    LetGo(u64),
    /// The user makes the tensor of one of [`Trace::templates`].
    Make(usize),
    Mark(u64, Mark),
    Pause,
    Resume,
}

/// A value that an op was given.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    id: u64,
    /// The user has no handle on it any more.
    ends: bool,
}

/// Where a leaf's tensor comes from.
#[derive(Debug)]
pub(crate) enum LeafSource {
    /// The user holds it all along.
    Held(Tensor),
    /// It is made in forward, or not held by anybody when forward has ended: one of [`Trace::templates`].
    Like(usize),
    /// It shares the storage of what the user took from a value, or put on the tape, and lies so in it.
    Of(u64, Layout),
}

/// What is noted of a forward pass while it runs.
#[derive(Debug)]
pub(crate) struct Recording {
    events: Vec<Event>,
    /// When each event was noted.
    times: Vec<u64>,
    /// When forward began.
    start: u64,
    /// The tensors that the user got from values or put on the tape, and still holds, each storage once.
    taken: Vec<Taken>,
    /// The values whose tensors lie in a storage, by its number.
    values: HashMap<u64, Vec<ValueKey>>,
    /// How often the events hold a storage, by its number.
    held: HashMap<u64, usize>,
}

/// A tensor that the user holds, apart from handles.
#[derive(Debug)]
struct Taken {
    id: u64,
    number: u64,
    storage: Weak<Storage>,
}

impl Recording {
    fn new() -> Recording {
        Recording {
            events: Vec::new(),
            times: Vec::new(),
            start: unique(),
            taken: Vec::new(),
            values: HashMap::new(),
            held: HashMap::new(),
        }
    }

    pub fn note_value(&mut self, storage: u64, value: ValueKey) {
        self.values.entry(storage).or_default().push(value);
    }

    fn take(&mut self, id: u64, tensor: &Tensor) {
        self.taken.push(Taken { id, number: tensor.storage().number(), storage: tensor.weak_storage() });
    }
}

impl Graph {
    /// What is noted of an op's operands, before their handles go.
    pub fn operands(&self, inputs: &[Var]) -> SmallVec<[Operand; 3]> {
        let operand = |v: &Var| {
            let given = inputs.iter().filter(|given| given.key() == v.key()).count();
            Operand { id: self.values[v.key()].id, ends: self.is_given(v.key(), given as u32) }
        };
        inputs.iter().map(operand).collect()
    }

    pub fn push_event(&mut self, event: Event) {
        if let Some(recording) = &mut self.recording {
            recording.events.push(event);
            recording.times.push(unique());
        }
    }

    /// Notes which tensors the user has let go of since the last event: those that only the tape still holds, or
    /// nobody.
    pub fn note_let_go(&mut self) {
        let Some(recording) = &mut self.recording else { return };
        let mut taken = std::mem::take(&mut recording.taken);
        let mut gone = Vec::new();
        taken.retain(|t| {
            let is_held = self.is_held_outside(t);
            gone.extend((!is_held).then_some(t.id));
            is_held
        });
        self.recording.as_mut().into_iter().for_each(|recording| recording.taken = std::mem::take(&mut taken));
        gone.into_iter().for_each(|id| self.push_event(Event::LetGo(id)));
    }

    /// Whether the user still holds a tensor: not only the tape and the events do.
    fn is_held_outside(&self, taken: &Taken) -> bool {
        let Some(recording) = &self.recording else { return false };
        let values = recording.values.get(&taken.number).into_iter().flatten();
        let by_tape = values.filter(|&&v| self.has_tensor(v)).count();
        let by_events = recording.held.get(&taken.number).copied().unwrap_or(0);
        taken.storage.strong_count() > by_tape + by_events
    }

    /// Notes that the user gets a value's tensor. A parameter's is the user's own.
    pub fn note_taken(&mut self, value: ValueKey) {
        self.note_let_go();
        if self.recording.is_none() || self.nodes[self.values[value].node].parameter.is_some() {
            return;
        }
        let (id, tensor) = (self.values[value].id, self.live(value).clone());
        let Some(recording) = &mut self.recording else { return };
        if !recording.taken.iter().any(|t| t.number == tensor.storage().number()) {
            recording.take(id, &tensor);
            self.push_event(Event::Take(id));
        }
    }

    /// Notes a new leaf.
    pub fn note_leaf(&mut self, leaf: ValueKey, tensor: &Tensor, requires_grad: bool, parameter: Option<ParameterId>) {
        let id = self.values[leaf].id;
        let Some(recording) = &mut self.recording else { return };
        let number = tensor.storage().number();
        let source = match recording.taken.iter().find(|t| t.number == number) {
            Some(taken) => LeafSource::Of(taken.id, tensor.layout().clone()),
            None => {
                *recording.held.entry(number).or_default() += 1;
                // Parameters from before are the user's all along: a model has many of them to look at.
                if parameter.is_none() || tensor.storage().made() > recording.start {
                    recording.take(id, tensor);
                }
                LeafSource::Held(tensor.clone())
            }
        };
        self.push_event(Event::Leaf { id, source, requires_grad, parameter });
    }
}

/// A forward pass up to its loss, recorded on the meta device.
///
/// ```
/// use retape_core::{DType, Tensor, Trace, meta};
///
/// let device = meta();
/// let x = Tensor::full(&device, &[256, 256], DType::F32, 0.0)?;
/// let trace = Trace::record(&device, None, |tape| tape.leaf(&x)?.gelu()?.square()?.sum())?;
/// assert_eq!(trace.run(None)?.replays, []);
/// # Ok::<(), retape_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Trace {
    device: Device,
    policy: Option<Rc<dyn Policy>>,
    events: Vec<Event>,
    loss: u64,
    /// With how many leaves each is of.
    templates: Vec<(Template, usize)>,
    nodes: Vec<TraceNode>,
    values: Vec<TraceValue>,
}

/// An op of a [`Trace`] that isn't a view, or a leaf. Values are indices into [`Trace::values`], those that own their
/// storage: a view stands for the value that it views.
#[derive(Debug, Clone)]
pub struct TraceNode {
    /// Its number in recording order, as in [`Moment::node`].
    pub sequence: u64,
    /// The op's name, `leaf` for a leaf.
    pub op: &'static str,
    /// What it is computed from.
    pub inputs: Vec<usize>,
    /// What it computes.
    pub outputs: Vec<usize>,
    /// What its gradient reads; nothing where backward doesn't come by.
    pub reads: Vec<usize>,
    /// FLOPs of running it.
    pub flops: u64,
    /// Bytes that running it reads and writes.
    pub traffic: u64,
}

/// A value of a [`Trace`] that owns its storage.
#[derive(Debug, Clone)]
pub struct TraceValue {
    /// Its number on the tape, as in [`Site::id`](crate::Site::id).
    pub id: u64,
    /// Scopes and name.
    pub path: String,
    /// The op that made it.
    pub op: &'static str,
    /// The index of its node in [`Trace::nodes`].
    pub node: usize,
    /// Which output of the op.
    pub output: usize,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// Its bytes in full precision.
    pub bytes: u64,
    /// A leaf, an integer or a statistic: kept whatever the mark.
    pub exact: bool,
    /// Lossy marks are not for it: an op reads it exactly.
    pub read_exactly: bool,
    /// The mark that the user gave it by value, by scope or by the policy that the trace was recorded with.
    pub given: Option<Mark>,
}

/// What a run of a [`Trace`] took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DryRun {
    /// Highest step bytes: of the step itself and of the inputs that it is given, whatever else lives on the device.
    pub peak_bytes: u64,
    /// When that was.
    pub peak_moment: Moment,
    /// [`MemoryMeter::fingerprint`](crate::MemoryMeter::fingerprint) at the end of backward, gradients still there.
    pub fingerprint: u64,
    /// Bytes that the tape stored at the end of forward.
    pub saved_bytes: u64,
    /// Indices of the nodes that were replayed, and how often, in recording order.
    pub replays: Vec<(usize, u64)>,
    /// FLOPs of forward.
    pub forward_flops: u64,
    /// FLOPs of the replays.
    pub replayed_flops: u64,
    /// Bytes that packing and unpacking read and wrote.
    pub quantize_traffic: u64,
}

impl DryRun {
    /// FLOPs of the replays over those of a step without any (backward counts as twice forward), in percent.
    pub fn overhead_percent(&self) -> f64 {
        overhead_percent(self.replayed_flops, self.forward_flops)
    }
}

impl Trace {
    /// Runs `forward` once on a tape of the meta device `device`, noting what it tells the tape, up to the loss that it
    /// returns. Where there is a `policy`, its marks count as given: a run's policy can't overrule them.
    ///
    /// `forward` may be over a model of any device: a tape of the meta device takes its tensors by their shapes. What
    /// it takes is counted as theirs, see [`Tape::leaf`]. No state is committed.
    ///
    /// What `forward` leaves behind counts too: a value whose handle it has put away, or whose tensor, is held through
    /// backward. Tensors that it makes and that become leaves count from there until they are let go of, which is seen
    /// at the tape's next call. Other tensors are no part of a trace.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] on a device that computes, whatever `forward` returns, and [`Error::NoGradient`]
    /// where the loss depends on no leaf with a gradient, or where `forward` runs backward.
    pub fn record<E: From<Error>>(
        device: &Device,
        policy: Option<Rc<dyn Policy>>,
        forward: impl FnOnce(&Tape) -> Result<Var, E>,
    ) -> Result<Trace, E> {
        if device.computes() {
            let (left, right) = (device.name(), "meta".into());
            return Err(Error::DeviceMismatch { what: "Trace::record", left, right }.into());
        }
        let tape = Tape::with(device, TapeOptions { policy: policy.clone(), ..TapeOptions::default() });
        tape.graph().recording = Some(Recording::new());
        let loss = forward(&tape)?;
        if !loss.is_of(&tape) {
            return Err(Error::OtherTape { what: "Trace::record", path: loss.path() }.into());
        }
        if !loss.requires_grad() {
            let (path, op) = tape.graph().name_of(loss.key());
            let reason = "it depends on no leaf that requires a gradient; make one with `leaf` or `parameter`".into();
            return Err(Error::NoGradient { path, op, reason }.into());
        }
        drop(tape.enter("Trace::record", None)?);
        let mut graph = tape.graph();
        let recording = graph.recording.take().unwrap_or_else(Recording::new);
        let mut trace = Trace {
            device: device.clone(),
            policy,
            events: Vec::new(),
            loss: graph.values[loss.key()].id,
            templates: Vec::new(),
            nodes: Vec::new(),
            values: Vec::new(),
        };
        trace.list(&graph, loss.key());
        drop(graph);
        drop(loss);
        drop(tape);
        trace.take_events(recording);
        Ok(trace)
    }

    /// Lists the nodes and values that live when forward ends.
    fn list(&mut self, graph: &Graph, loss: ValueKey) {
        let mut reachable = slotmap::SecondaryMap::new();
        let order = graph.in_recording_order();
        reachable.insert(graph.values[loss].node, ());
        for &key in order.iter().rev().filter(|&&key| graph.nodes[key].requires_grad) {
            if reachable.contains_key(key) {
                let node = &graph.nodes[key];
                let inputs = node.inputs.iter().zip(&node.needs).filter(|(_, needs)| **needs);
                inputs.for_each(|(&input, _)| {
                    reachable.insert(graph.values[input].node, ());
                });
            }
        }
        let mut indices = HashMap::new();
        for key in order {
            let node = &graph.nodes[key];
            let roots = node.outputs.iter().filter(|&&o| graph.root(o) == o);
            let index = self.nodes.len();
            let mut outputs = Vec::new();
            for &root in roots {
                let (v, kept) = (&graph.values[root], &graph.roots[root]);
                indices.insert(root, self.values.len());
                outputs.push(self.values.len());
                self.values.push(TraceValue {
                    id: v.id,
                    path: v.path.to_string(),
                    op: node.op_name(),
                    node: index,
                    output: v.output,
                    shape: v.spec.shape.to_vec(),
                    dtype: v.spec.dtype,
                    bytes: v.spec.bytes(),
                    exact: kept.is_kept_exactly(),
                    read_exactly: kept.exactness == Exactness::ReadExactly,
                    given: kept.marking.mark.filter(|_| kept.marking.source != MarkSource::Default),
                });
            }
            let reads: Vec<usize> = match reachable.contains_key(key) {
                true => node.saved().iter().map(|&v| indices[&graph.root(v)]).collect(),
                false => Vec::new(),
            };
            if outputs.is_empty() && reads.is_empty() {
                continue; // a view
            }
            self.nodes.push(TraceNode {
                sequence: node.sequence,
                op: node.op_name(),
                inputs: node.inputs.iter().map(|&i| indices[&graph.root(i)]).collect(),
                outputs,
                reads,
                flops: node.flops,
                traffic: node.traffic,
            });
        }
    }

    /// Takes over what was noted. Leaves' tensors that forward made, or that nobody else holds any more, aren't held
    /// by the trace: each run makes its own.
    fn take_events(&mut self, recording: Recording) {
        let Recording { mut events, times, start, held, .. } = recording;
        let let_go: HashSet<u64> =
            events.iter().filter_map(|e| if let Event::LetGo(id) = e { Some(*id) } else { None }).collect();
        let mut template_of: HashMap<u64, (usize, bool)> = HashMap::new();
        let (mut makes, mut last) = (Vec::new(), Vec::new());
        for event in &mut events {
            let Event::Leaf { id, source, .. } = event else { continue };
            let LeafSource::Held(tensor) = source else { continue };
            let (number, made) = (tensor.storage().number(), tensor.storage().made());
            let (template, unheld) = match template_of.get(&number) {
                Some(&known) => known,
                None => {
                    let unheld = tensor.holders() == held[&number];
                    if made < start && !unheld && !let_go.contains(id) {
                        continue;
                    }
                    let template = self.templates.len();
                    self.templates.push((tensor.template(), held[&number]));
                    makes.push((times.partition_point(|&noted| noted < made), made, template));
                    template_of.insert(number, (template, unheld));
                    (template, unheld)
                }
            };
            if unheld && !let_go.contains(id) {
                last.push(Event::LetGo(*id));
            }
            *source = LeafSource::Like(template);
        }
        makes.sort_unstable();
        let mut makes = makes.into_iter().peekable();
        for (at, event) in events.into_iter().enumerate() {
            while let Some((_, _, template)) = makes.next_if(|make| make.0 == at) {
                self.events.push(Event::Make(template));
            }
            self.events.push(event);
        }
        self.events.append(&mut last);
    }

    /// The meta device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The policy that it was recorded with, whose marks count as given.
    pub fn policy(&self) -> Option<&Rc<dyn Policy>> {
        self.policy.as_ref()
    }

    /// Its ops but views, in recording order.
    pub fn nodes(&self) -> &[TraceNode] {
        &self.nodes
    }

    /// Its values, in recording order.
    pub fn values(&self) -> &[TraceValue] {
        &self.values
    }

    /// Runs forward and backward again under another policy.
    ///
    /// # Errors
    /// Those of the tape: a hard limit of the device's meter that is too small, a user's rule that decides for nothing.
    pub fn run(&self, policy: Option<Rc<dyn Policy>>) -> Result<DryRun> {
        let meter = self.device.meter();
        meter.reset_peak();
        let others = meter.step_live() - self.input_bytes();
        let tape = Tape::with(&self.device, TapeOptions { policy, ..TapeOptions::default() });
        let (loss, kept) = self.forward(&tape)?;
        let saved_bytes = tape.saved_bytes();
        let gradients = tape.backward(&loss)?;
        let fingerprint = meter.fingerprint();
        drop((gradients, kept));
        let graph = tape.graph();
        let by_sequence: HashMap<u64, u64> =
            graph.nodes.values().filter(|n| n.replays() > 0).map(|n| (n.sequence, n.replays())).collect();
        let replays = self.nodes.iter().enumerate();
        let replays = replays.filter_map(|(i, n)| by_sequence.get(&n.sequence).map(|&count| (i, count))).collect();
        Ok(DryRun {
            peak_bytes: meter.step_peak() - others,
            peak_moment: meter.peak_moment(),
            fingerprint,
            saved_bytes,
            replays,
            forward_flops: graph.stats.forward_flops,
            replayed_flops: graph.stats.replayed_flops,
            quantize_traffic: graph.stats.quantize_traffic,
        })
    }

    /// Step bytes of the leaves' tensors that are held all along.
    fn input_bytes(&self) -> u64 {
        let held = self.events.iter().filter_map(|event| match event {
            Event::Leaf { source: LeafSource::Held(tensor), .. } if tensor.storage().kind().is_step() => Some(tensor),
            _ => None,
        });
        // Each storage once.
        let bytes: HashMap<_, _> = held.map(|t| (std::ptr::from_ref(t.storage()), t.storage_bytes() as u64)).collect();
        bytes.values().sum()
    }

    /// Tells a tape of the same device what was noted, and returns the loss and what the user holds besides.
    fn forward(&self, tape: &Tape) -> Result<(Var, Kept)> {
        let mut run = Run::new(self, tape);
        self.events.iter().try_for_each(|event| run.tell(event))?;
        run.end()
    }

    fn diverged(id: u64) -> Error {
        let reason = format!("a run of the trace has no handle on value {id}, as the recorded one had");
        Error::Internal { op: "trace", path: String::new(), reason }
    }
}
