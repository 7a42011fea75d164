//! A run of a trace's forward pass: another tape is given the calls that were noted.

use super::{Event, LeafSource, Operand, Trace};
use crate::tape::value::ValueKey;
use crate::{Result, ScopeGuard, Tape, Tensor, Var};
use smallvec::SmallVec;
use std::collections::HashMap;

/// What the user has while forward runs, and still has when it has ended.
#[derive(Default)]
pub(super) struct Kept {
    scopes: Vec<ScopeGuard>,
    handles: Vec<Option<Var>>,
    tensors: HashMap<u64, Tensor>,
}

/// A run of a trace's forward pass.
pub(super) struct Run<'a> {
    trace: &'a Trace,
    tape: &'a Tape,
    leaves: HashMap<u64, ValueKey>,
    /// Tensors made for leaves, and how many leaves each is yet to have.
    made: HashMap<usize, (Tensor, usize)>,
    kept: Kept,
}

impl<'a> Run<'a> {
    pub(super) fn new(trace: &'a Trace, tape: &'a Tape) -> Run<'a> {
        Run { trace, tape, leaves: HashMap::new(), made: HashMap::new(), kept: Kept::default() }
    }

    /// The loss, and what the user holds besides.
    pub(super) fn end(self) -> Result<(Var, Kept)> {
        Ok((self.held(self.trace.loss)?.clone(), self.kept))
    }

    pub(super) fn tell(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Open(scope) => self.kept.scopes.push(self.tape.scope(scope)),
            Event::Close => drop(self.kept.scopes.pop()),
            Event::Leaf { id, source, requires_grad, parameter } => {
                let tensor = self.tensor_of(source)?;
                let leaf = self.tape.add_leaf(&tensor, *requires_grad, *parameter)?;
                self.leaves.insert(*id, leaf.key());
                if !matches!(source, LeafSource::Of(..)) {
                    self.kept.tensors.insert(*id, tensor);
                }
                self.hold(leaf);
            }
            Event::Reopen(id) => self.reopen(*id)?,
            Event::Op(op, operands) => {
                let operands = self.operands(operands)?;
                let outputs = self.tape.record(op.clone(), operands)?;
                outputs.into_iter().for_each(|output| self.hold(output));
            }
            Event::Take(id) => {
                let tensor = self.held(*id)?.tensor()?;
                self.kept.tensors.insert(*id, tensor);
            }
            Event::LetGo(id) => drop(self.kept.tensors.remove(id)),
            Event::Make(index) => {
                let (template, leaves) = &self.trace.templates[*index];
                self.made.insert(*index, (template.make(&self.trace.device)?, *leaves));
            }
            Event::Release(ids) => {
                let handles = &mut self.kept.handles;
                let gone = ids.iter().filter_map(|&id| handles.get_mut(id as usize).and_then(Option::take));
                self.tape.let_go_all(gone);
            }
            Event::Mark(id, mark) => self.held(*id)?.set_mark(*mark)?,
            Event::Pause => self.tape.pause(1),
            Event::Resume => self.tape.pause(-1),
        }
        Ok(())
    }

    fn hold(&mut self, var: Var) {
        let id = self.tape.graph().values[var.key()].id as usize;
        let handles = &mut self.kept.handles;
        if handles.len() <= id {
            handles.resize_with(id + 1, || None);
        }
        handles[id] = Some(var);
    }

    fn held(&self, id: u64) -> Result<&Var> {
        self.kept.handles.get(id as usize).and_then(Option::as_ref).ok_or_else(|| Trace::diverged(id))
    }

    fn tensor_of(&mut self, source: &LeafSource) -> Result<Tensor> {
        match source {
            LeafSource::Held(tensor) => Ok(tensor.clone()),
            LeafSource::Of(id, layout) => {
                Ok(self.kept.tensors.get(id).ok_or_else(|| Trace::diverged(*id))?.with_layout(layout.clone()))
            }
            LeafSource::Like(index) => {
                let (tensor, left) = self.made.remove(index).ok_or_else(|| Trace::diverged(*index as u64))?;
                if left > 1 {
                    self.made.insert(*index, (tensor.clone(), left - 1));
                }
                Ok(tensor)
            }
        }
    }

    fn reopen(&mut self, id: u64) -> Result<()> {
        let key = *self.leaves.get(&id).ok_or_else(|| Trace::diverged(id))?;
        let graph = self.tape.graph();
        let own = graph.roots.get(key).and_then(|root| root.full().cloned());
        let tensor = self.kept.tensors.get(&id).cloned().or(own).ok_or_else(|| Trace::diverged(id))?;
        drop(graph);
        let leaf = self.tape.reopened(key, &tensor).ok_or_else(|| Trace::diverged(id))?;
        self.hold(leaf);
        Ok(())
    }

    fn operands(&mut self, operands: &[Operand]) -> Result<SmallVec<[Var; 3]>> {
        let mut vars: SmallVec<[Var; 3]> = SmallVec::new();
        for (i, operand) in operands.iter().enumerate() {
            let again = operands[i + 1..].iter().any(|later| later.id == operand.id);
            let own = self.kept.handles.get_mut(operand.id as usize).filter(|_| operand.ends && !again);
            // Without a clone, which would be a use of the tape: the recorded call was none.
            let var = match own.and_then(Option::take) {
                Some(var) => var,
                None => self.held(operand.id)?.clone(),
            };
            vars.push(var);
        }
        Ok(vars)
    }
}
