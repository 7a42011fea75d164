//! Recording: an op runs, and its node enters the graph.

use super::graph::{NewNode, NewValue};
use super::marking::{Candidate, Marking};
use super::scope::Place;
use super::value::ValueKey;
use super::{Tape, Var};
use crate::ops::{Cost, Exec, Op, OpRule, Outputs, Saves, Slot, Spec};
use crate::trace::Event;
use crate::{Device, Error, MemoryKind, Moment, Phase, Result, Tensor};
use smallvec::SmallVec;
use std::rc::Rc;

/// A call of an op, from its operands to its node.
struct Call<'a> {
    tape: &'a Tape,
    op: &'a Rc<Op>,
    rule: &'a dyn OpRule,
    /// For messages: the value may get a number on top.
    path: String,
    device: Device,
    inputs: &'a [Var],
    specs: SmallVec<[Spec; 3]>,
    needs: SmallVec<[bool; 3]>,
    sequence: u64,
    /// In `no_grad`.
    paused: bool,
}

/// What an op's rule says before it runs.
struct Promise {
    outputs: Outputs,
    requires_grad: bool,
    saves: Saves,
}

/// What running an op made.
struct Ran {
    outputs: SmallVec<[Tensor; 1]>,
    is_view: bool,
    cost: Cost,
    nanos: u64,
}

impl Tape {
    /// Runs an op and records it. The first input's tape decides. The inputs' handles go when the tape is next used,
    /// see [`Var`]; where the op fails, they go at once.
    pub(crate) fn record(&self, op: Rc<Op>, inputs: SmallVec<[Var; 3]>) -> Result<SmallVec<[Var; 1]>> {
        let _busy = self.occupy(op.rule().name())?;
        let (call, tensors) = Call::begin(self, &op, &inputs)?;
        let promise = call.promise()?;
        call.refuse_lossy_inputs(&promise.saves)?;
        let ran = call.run(&promise.outputs, tensors)?;
        let keys = match call.paused {
            // Every output is a constant: it has no history that could keep its inputs.
            true => call.insert_constants(&promise, ran),
            false => call.insert(promise, ran),
        };
        let mut graph = self.graph();
        graph.end_operands(inputs, keys[0].0);
        drop(graph);
        let visible = keys.into_iter().filter(|(_, visible)| *visible);
        Ok(visible.map(|(key, _)| Var { tape: self.clone(), key }).collect())
    }
}

impl<'a> Call<'a> {
    /// Looks at the operands. What the op before was given settles later: after a view, that op may still get its mark.
    fn begin(tape: &'a Tape, op: &'a Rc<Op>, inputs: &'a [Var]) -> Result<(Call<'a>, SmallVec<[Tensor; 3]>)> {
        let (rule, name) = (op.rule(), op.rule().name());
        tape.check(name, None)?;
        if let Some(other) = inputs.iter().find(|v| !v.is_of(tape)) {
            return Err(Error::OtherTape { what: name, path: other.path() });
        }
        let mut graph = tape.graph();
        graph.note_let_go();
        let tensors: SmallVec<[Tensor; 3]> = inputs.iter().map(|v| graph.live(v.key).clone()).collect();
        let call = Call {
            tape,
            op,
            rule,
            path: tape.0.scopes.borrow().path_of(name),
            device: graph.device.clone(),
            inputs,
            specs: tensors.iter().map(Spec::of).collect(),
            needs: inputs.iter().map(|v| graph.values[v.key].requires_grad).collect(),
            sequence: graph.next_sequence,
            paused: tape.0.paused.get() > 0,
        };
        Ok((call, tensors))
    }

    fn invalid(&self, reason: String) -> Error {
        let inputs = self.specs.iter().map(Spec::to_string).collect::<Vec<_>>().join(", ");
        Error::InvalidInput { op: self.rule.name(), path: self.path.clone(), inputs, reason }
    }

    fn broken(&self, reason: String) -> Error {
        Error::BrokenRule { op: self.rule.name(), path: self.path.clone(), reason }
    }

    /// An error of a kernel or a view, with the op's names.
    fn located(&self, error: Error) -> Error {
        match error {
            Error::InvalidValue { reason, .. } | Error::InvalidTensor { reason, .. } => self.invalid(reason),
            other => other,
        }
    }

    fn promise(&self) -> Result<Promise> {
        let outputs = self.rule.infer(&self.specs).map_err(|reason| self.invalid(reason))?;
        if outputs.iter().all(|o| o.statistic) {
            return Err(self.broken("`infer` promises no output but statistics; an op has at least one".into()));
        }
        let differentiable = self.needs.contains(&true) && outputs.iter().any(|o| o.spec.dtype.is_float());
        let requires_grad = !self.paused && differentiable;
        let saves = if requires_grad { self.rule.saves(&self.needs) } else { Saves::new() };
        check_saves(&saves, (self.inputs.len(), outputs.len())).map_err(|reason| self.broken(reason))?;
        Ok(Promise { outputs, requires_grad, saves })
    }

    /// Fails where the op reads an input exactly that the user has marked lossy, or that a pass has read so.
    fn refuse_lossy_inputs(&self, saves: &Saves) -> Result<()> {
        for save in saves.iter().filter(|save| save.exact) {
            let Slot::In(i) = save.slot else { continue };
            let graph = self.tape.graph();
            let Some((root, mark, by_pass)) = graph.not_exact(self.inputs[i].key) else { continue };
            let earlier = if by_pass { format!(", and a pass has read it as {}", mark.name()) } else { String::new() };
            let (path, op) = graph.name_of(root);
            let reader = (self.rule.name(), &self.path);
            let reason = format!("{} at `{}` reads it exactly{earlier}; mark it keep or recompute", reader.0, reader.1);
            return Err(Error::MarkNotAllowed { mark: mark.name(), path, op, reason });
        }
        Ok(())
    }

    /// Runs the op, or views its input.
    fn run(&self, promised: &Outputs, tensors: SmallVec<[Tensor; 3]>) -> Result<Ran> {
        let views = self.rule.view(&tensors[0]);
        let of_latest = !self.paused && self.tape.graph().made_by_latest(self.inputs[0].key);
        if !(of_latest && views.is_some()) {
            self.tape.settle_operands();
            self.tape.check(self.rule.name(), None)?;
        }
        self.device.meter().set_moment(Moment { phase: Phase::Forward, node: self.sequence });
        let before = self.tape.0.clock.nanos();
        let (outputs, is_view) = match views {
            Some(views) => (self.checked(views.map_err(|e| self.located(e))?, &tensors[0], promised)?, true),
            None => {
                let exec = self.tape.exec(&self.device, MemoryKind::Activation);
                let outputs = allocate(&exec, promised).map_err(|e| self.located(e))?;
                self.rule.forward(&exec, &tensors, &outputs).map_err(|e| self.located(e))?;
                (outputs, false)
            }
        };
        drop(tensors);
        let cost = self.rule.cost(&self.specs, promised);
        Ok(Ran { outputs, is_view, cost, nanos: self.tape.0.clock.nanos() - before })
    }

    /// The views, where they are what `infer` promised.
    fn checked(
        &self,
        views: SmallVec<[Tensor; 1]>,
        input: &Tensor,
        promised: &Outputs,
    ) -> Result<SmallVec<[Tensor; 1]>> {
        let all = views.iter().zip(promised).all(|(view, o)| is_view_of(view, input, &o.spec));
        if all && views.len() == promised.len() {
            return Ok(views);
        }
        let promised: Vec<String> = promised.iter().map(|o| o.spec.to_string()).collect();
        Err(self.broken(format!(
            "`view` gives {views:?}, which must be views of input 0, as `infer` promised: {}",
            promised.join(", ")
        )))
    }

    fn insert_constants(&self, promise: &Promise, ran: Ran) -> SmallVec<[(ValueKey, bool); 3]> {
        let mut graph = self.tape.graph();
        graph.stats.forward_flops = graph.stats.forward_flops.saturating_add(ran.cost.flops);
        graph.tell(|g| Event::Op(self.op.clone(), g.operands(self.inputs)));
        drop(graph);
        let visible = ran.outputs.into_iter().zip(&promise.outputs).filter(|(_, o)| !o.statistic);
        visible.map(|(tensor, _)| (self.tape.insert_leaf(self.rule.name(), tensor, false, None), true)).collect()
    }

    /// Adds the node, with the marks that scopes and policy have for its outputs; packs those that get no handle.
    fn insert(&self, promise: Promise, ran: Ran) -> SmallVec<[(ValueKey, bool); 3]> {
        let mut scopes = self.tape.0.scopes.borrow_mut();
        let path: Rc<str> = scopes.unique_path_of(self.rule.name()).into();
        let (place, segment) = (scopes.top().place.clone(), scopes.top().segment);
        drop(scopes);
        let at = (&path, &place);
        let outputs = self.marked(ran.outputs, &promise.outputs, (ran.is_view, ran.cost), at);
        let visible: SmallVec<[bool; 3]> = outputs.iter().map(|o| o.visible).collect();
        let mut graph = self.tape.graph();
        graph.stats.forward_flops = graph.stats.forward_flops.saturating_add(ran.cost.flops);
        graph.tell(|g| Event::Op(self.op.clone(), g.operands(self.inputs)));
        let (keys, pending) = graph.insert(NewNode {
            op: Some(self.op.clone()),
            inputs: self.inputs.iter().map(|v| v.key).collect(),
            outputs,
            saves: promise.saves,
            is_view: ran.is_view,
            cost: ran.cost,
            requires_grad: promise.requires_grad,
            parameter: None,
            path,
            place,
            segment,
        });
        if graph.options.profile {
            graph.add_forward_time(keys[0], ran.nanos);
        }
        drop(graph);
        self.tape.pack(pending);
        let keys: SmallVec<[(ValueKey, bool); 3]> = keys.into_iter().zip(visible).collect();
        let mut scopes = self.tape.0.scopes.borrow_mut();
        keys.iter().filter(|(_, visible)| *visible).for_each(|&(key, _)| scopes.note(key));
        keys
    }

    /// The outputs with the marks that scopes and policy have for them. The policy is asked outside any borrow of the
    /// graph.
    fn marked(
        &self,
        outputs: SmallVec<[Tensor; 1]>,
        promised: &Outputs,
        (is_view, cost): (bool, Cost),
        (path, place): (&Rc<str>, &Place),
    ) -> SmallVec<[NewValue; 3]> {
        let graph = self.tape.graph();
        let (policy, first) = (graph.options.policy.clone(), graph.next_value);
        drop(graph);
        let scopes = self.tape.0.scopes.borrow();
        let marking = |output: usize, spec: &Spec| {
            let candidate = Candidate {
                id: first + output as u64,
                path: if output == 0 { path.clone() } else { format!("{path}#{output}").into() },
                op: self.rule.name(),
                place: place.clone(),
                output,
                spec: spec.clone(),
                flops: cost.flops,
                traffic: cost.traffic,
            };
            scopes.marking(policy.as_deref(), scopes.level(), &candidate)
        };
        let outputs = outputs.into_iter().zip(promised).enumerate();
        let new = outputs.map(|(output, (tensor, o))| {
            let kept_exactly = o.statistic || !o.spec.dtype.is_float();
            let free = !is_view && !kept_exactly;
            let marking = if free { marking(output, &o.spec) } else { Marking::NONE };
            NewValue { tensor, kept_exactly, visible: !o.statistic, marking }
        });
        new.collect()
    }
}

/// Fails unless `saves` declares tensors that there are, each once.
fn check_saves(saves: &Saves, (inputs, outputs): (usize, usize)) -> Result<(), String> {
    for (i, save) in saves.iter().enumerate() {
        let is_there = match save.slot {
            Slot::In(i) => i < inputs,
            Slot::Out(i) => i < outputs,
        };
        let twice = saves[..i].iter().any(|s| s.slot == save.slot);
        if !is_there || twice {
            let wrong = if twice { "twice" } else { "which isn't there" };
            return Err(format!("`saves` declares {:?}, {wrong}; of {inputs} inputs and {outputs} outputs", save.slot));
        }
    }
    Ok(())
}

/// Whether a rule's view is what it must be: of its input, as promised.
pub(super) fn is_view_of(view: &Tensor, input: &Tensor, promised: &Spec) -> bool {
    view.shares_storage(input) && Spec::of(view) == *promised
}

fn allocate(exec: &Exec<'_>, promised: &Outputs) -> Result<SmallVec<[Tensor; 1]>> {
    promised.iter().map(|o| exec.empty_like(&o.spec)).collect()
}
