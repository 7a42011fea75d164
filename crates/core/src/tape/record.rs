//! Recording: an op runs, and its node enters the graph.

use super::graph::{Disposition, MarkSource, NewNode, NewValue};
use super::trace::Event;
use super::{Tape, Var};
use crate::ops::{Exec, Op, Outputs, Saves, Slot, Spec};
use crate::{Error, Mark, MemoryKind, Moment, Phase, Result, Tensor};
use smallvec::SmallVec;
use std::rc::Rc;

impl Tape {
    /// Runs an op and records it. The first input's tape decides. The inputs' handles go when the tape is next used,
    /// see [`Var`]; where the op fails, they go at once.
    pub(super) fn record(&self, op: Rc<Op>, inputs: SmallVec<[Var; 3]>) -> Result<SmallVec<[Var; 1]>> {
        let rule = op.rule();
        let name = rule.name();
        // What the op before was given settles below: after a view, that op may still get its mark.
        let mut graph = self.borrow(name)?;
        graph.check(name, None)?;
        for v in &inputs {
            if !Rc::ptr_eq(&v.tape.0, &self.0) {
                return Err(Error::OtherTape { what: name, path: v.path() });
            }
        }
        graph.note_let_go();
        let device = graph.device.clone();
        let mut tensors: SmallVec<[Tensor; 3]> = SmallVec::new();
        for v in &inputs {
            tensors.push(graph.values[v.key].live.clone().expect("a value with a handle has its tensor"));
        }
        let specs: SmallVec<[Spec; 3]> = tensors.iter().map(Spec::of).collect();
        let path = graph.scopes.last().expect("the top scope never closes").path_of(name);
        let profile = graph.options.profile;
        let needs: SmallVec<[bool; 3]> = inputs.iter().map(|v| graph.values[v.key].requires_grad).collect();
        let invalid = |reason: String| Error::InvalidInput {
            op: name,
            path: path.clone(),
            inputs: specs.iter().map(Spec::to_string).collect::<Vec<_>>().join(", "),
            reason,
        };
        let located = |error| match error {
            Error::InvalidValue { reason, .. } | Error::InvalidTensor { reason, .. } => invalid(reason),
            other => other,
        };
        let sequence = graph.next_sequence;
        let of_latest = graph.made_by_latest(inputs[0].key);
        // Rules run outside the borrow: they may be a user's.
        drop(graph);
        let broken = |reason: String| Error::BrokenRule { op: name, path: path.clone(), reason };
        let promised = rule.infer(&specs).map_err(invalid)?;
        if promised.iter().all(|o| o.statistic) {
            return Err(broken("`infer` promises no output but statistics; an op has at least one".into()));
        }
        let paused = self.0.paused.get() > 0;
        let requires_grad = !paused && needs.contains(&true) && promised.iter().any(|o| o.spec.dtype.is_float());
        let saves = if requires_grad { rule.saves(&needs) } else { Saves::new() };
        let counts = (inputs.len(), promised.len());
        check_saves(&saves, counts).map_err(broken)?;
        if saves.iter().any(|s| s.exact) {
            let graph = self.graph();
            for save in saves.iter().filter(|s| s.exact) {
                if let Slot::In(i) = save.slot {
                    let root = &graph.values[graph.root(inputs[i].key)];
                    let by_user = matches!(root.mark, Some(Mark::Int8(_))) && root.source == MarkSource::Value;
                    let by_pass = root.read_as == Some(Disposition::Quantize);
                    if by_user || by_pass {
                        let earlier = if by_pass { ", and a pass has read it as int8" } else { "" };
                        return Err(Error::MarkNotAllowed {
                            mark: "int8",
                            path: root.path.to_string(),
                            op: graph.nodes[root.node].op_name(),
                            reason: format!("{name} at `{path}` reads it exactly{earlier}; mark it keep or recompute"),
                        });
                    }
                }
            }
        }
        let views = rule.view(&tensors[0]);
        let same_value = of_latest && !paused && views.is_some();
        if !same_value {
            self.settle_operands();
            self.graph().check(name, None)?;
        }
        device.meter().set_moment(Moment { phase: Phase::Forward, node: sequence });

        let before = self.0.clock.nanos();
        let (outputs, is_view) = match views {
            Some(views) => {
                let views = views.map_err(located)?;
                let right = views.len() == promised.len()
                    && views.iter().zip(&promised).all(|(view, o)| is_view_of(view, &tensors[0], &o.spec));
                if !right {
                    let promised: Vec<String> = promised.iter().map(|o| o.spec.to_string()).collect();
                    let reason = format!(
                        "`view` gives {views:?}, which must be views of input 0, as `infer` promised: {}",
                        promised.join(", ")
                    );
                    return Err(broken(reason));
                }
                (views, true)
            }
            None => {
                let exec = self.exec(&device, MemoryKind::Activation);
                let outputs = allocate(&exec, &promised).map_err(located)?;
                rule.forward(&exec, &tensors, &outputs).map_err(located)?;
                (outputs, false)
            }
        };
        drop(tensors);
        let cost = rule.cost(&specs, &promised);
        if !same_value {
            self.settle_operands(); // the rule may have recorded ops
        }

        let mut graph = self.graph();
        graph.check(name, None)?; // the rule may have ended the tape
        graph.stats.forward_flops = graph.stats.forward_flops.saturating_add(cost.flops);
        let visible: SmallVec<[bool; 1]> = promised.iter().map(|o| !o.statistic).collect();
        let outputs: SmallVec<[NewValue; 3]> = outputs
            .into_iter()
            .zip(&promised)
            .map(|(tensor, o)| NewValue { tensor, exact: o.statistic, visible: !o.statistic })
            .collect();
        graph.tell(|g| Event::Op(op.clone(), g.operands(&inputs)));
        if paused {
            // Every output is a constant: it has no history that could keep its inputs.
            let keys = graph.insert_constants(name, outputs);
            graph.end_operands(inputs, keys[0]);
            drop(graph);
            return Ok(keys.into_iter().map(|key| Var { tape: self.clone(), key }).collect());
        }
        let (keys, pending) = graph.insert(NewNode {
            op: Some(op.clone()),
            inputs: inputs.iter().map(|v| v.key).collect(),
            outputs,
            saves,
            is_view,
            flops: cost.flops,
            traffic: cost.traffic,
            requires_grad,
            parameter: None,
            name,
        });
        if profile {
            graph.add_forward_time(keys[0], self.0.clock.nanos() - before);
        }
        graph.end_operands(inputs, keys[0]);
        drop(graph);
        for p in pending {
            self.quantize(p);
        }
        Ok(keys
            .into_iter()
            .zip(visible)
            .filter(|(_, visible)| *visible)
            .map(|(key, _)| Var { tape: self.clone(), key })
            .collect())
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
