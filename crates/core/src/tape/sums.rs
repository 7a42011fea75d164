//! Sums of gradients: those of all uses of a value add up in a fixed order, many of 16 bits in f32, and are rounded
//! once.

use super::pass::Pass;
use super::value::ValueKey;
use super::{Gradients, ParameterId};
use crate::kernel::{self, BinaryFn};
use crate::ops::{Exec, GradientSum, Op, Spec};
use crate::{Contents, DType, MemoryKind, Result, Tensor};
use smallvec::SmallVec;
use std::rc::Rc;

/// How many views of views are looked through: a longer chain goes on from there when it is visited.
const MOST_VIEWS: usize = 64;

impl Pass<'_> {
    pub(super) fn add_grad(&mut self, value: ValueKey, grad: Tensor) -> Result<()> {
        let SumSpec { dtype, kind, id, is_leaf, .. } = self.sum_spec(value);
        let grad = match self.grads.remove(value) {
            None => grad,
            Some(sum) => add_in(&self.tape.exec(&self.device, kind), dtype, sum, grad)?,
        };
        if is_leaf && kind == MemoryKind::Gradient && self.may_give(&grad) {
            grad.storage().set_kind(MemoryKind::Gradient);
        }
        grad.storage().note_contents(Contents::Gradient(id));
        self.grads.insert(value, grad);
        Ok(())
    }

    /// The gradient of a value, to be added to in place. That of a view to which nothing has been added is a part of
    /// the gradient of what it views: a loop may take a small part of a new view each time.
    pub(super) fn sum(&mut self, value: ValueKey) -> Result<GradientSum> {
        let mut views: SmallVec<[(Rc<Op>, usize); 2]> = SmallVec::new();
        let mut base = value;
        let graph = self.tape.graph();
        while views.len() < MOST_VIEWS && !self.grads.contains_key(base) && !self.wanted.contains(&base) {
            let v = &graph.values[base];
            let node = &graph.nodes[v.node];
            let Some(op) = node.op.as_ref().filter(|op| is_part(op) && self.nodes[v.node].visited) else { break };
            views.push((op.clone(), v.output));
            base = node.inputs[0];
        }
        let all = graph.values[value].spec.len() == graph.values[base].spec.len();
        drop(graph);
        if all && !self.grads.contains_key(base) && views.iter().any(|(op, _)| matches!(**op, Op::Permute(_))) {
            // The first to add, and to all of it: in its own order.
            return self.own_sum(value);
        }
        let GradientSum { tensor: whole, mut is_new } = self.own_sum(base)?;
        let view =
            |whole: Tensor, (op, output): &(Rc<Op>, usize)| Some(op.rule().view(&whole)?.ok()?.swap_remove(*output));
        let part = views.iter().rev().try_fold(whole.clone(), view);
        let covers = part.as_ref().is_some_and(Tensor::covers_storage);
        if is_new && !covers {
            self.tape.exec(&self.device, MemoryKind::Activation).run(kernel::Fill { value: 0.0, out: &whole })?;
            is_new = false;
        }
        match part {
            Some(tensor) => Ok(GradientSum { tensor, is_new }),
            // A reshape that the strides of this sum don't allow.
            None => self.own_sum(value),
        }
    }

    /// The same in memory of its own: what has been added so far, or new memory.
    fn own_sum(&mut self, value: ValueKey) -> Result<GradientSum> {
        let SumSpec { spec, dtype, kind, id, .. } = self.sum_spec(value);
        let so_far = self.grads.remove(value);
        let is_new = so_far.is_none();
        let tensor = match so_far {
            Some(sum) if sum.is_sole_owner() && sum.dtype() == dtype => sum,
            shared => {
                let exec = self.tape.exec(&self.device, kind);
                let own = exec.empty(&spec.shape, dtype)?;
                own.storage().note_contents(Contents::Gradient(id));
                if let Some(shared) = shared {
                    exec.run(kernel::Copy { x: &shared, out: &own })?;
                }
                own
            }
        };
        // The op writes it while the pass holds it, too.
        tensor.storage().set_open(true);
        self.grads.insert(value, tensor.clone());
        Ok(GradientSum { tensor, is_new })
    }

    /// Takes the gradient of a value to which nothing will be added any more: where it was summed in f32, it is rounded
    /// here, once.
    pub(super) fn take_grad(&mut self, value: ValueKey) -> Result<Option<Tensor>> {
        let Some(sum) = self.grads.remove(value) else { return Ok(None) };
        sum.storage().set_open(false);
        let SumSpec { spec, id, is_leaf, .. } = self.sum_spec(value);
        if sum.dtype() == spec.dtype {
            return Ok(Some(sum));
        }
        let exec = self.tape.exec(&self.device, if is_leaf { MemoryKind::Gradient } else { MemoryKind::Activation });
        let grad = exec.empty_like(&spec)?;
        grad.storage().note_contents(Contents::Gradient(id));
        exec.run(kernel::Copy { x: &sum, out: &grad })?;
        Ok(Some(grad))
    }

    /// How the gradients of a value are summed. Two of 16 bits are rounded once where they meet; more need f32 between.
    fn sum_spec(&self, value: ValueKey) -> SumSpec {
        let graph = self.tape.graph();
        let v = &graph.values[value];
        let is_leaf = graph.nodes[v.node].is_leaf();
        let dtype = if self.values[value].uses > 2 { v.spec.dtype.computed_in() } else { v.spec.dtype };
        let handed_out = is_leaf && dtype == v.spec.dtype;
        let kind = if handed_out { MemoryKind::Gradient } else { MemoryKind::Activation };
        SumSpec { spec: v.spec.clone(), dtype, kind, id: v.id, is_leaf }
    }

    /// Whether a leaf's gradient may be handed out as it is: not a part of a larger tensor, not the user's own.
    fn may_give(&self, grad: &Tensor) -> bool {
        grad.covers_storage() && !self.given.iter().any(|given| given.shares_storage(grad))
    }

    /// Hands out the gradient of a leaf.
    pub(super) fn finish_leaf(
        &mut self,
        leaf: ValueKey,
        parameter: Option<ParameterId>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        // A parameter updated between two recordings on one tape has two leaves, whose sums add up before they are
        // rounded.
        if let Some(id) = parameter
            && let Some((_, sum)) = self.shared.get_mut(&id)
            && let Some(more) = self.grads.get(leaf)
        {
            let exec = self.tape.exec(&self.device, MemoryKind::Gradient);
            *sum = Some(match sum.take() {
                None => more.clone(),
                Some(sum) => add_in(&exec, more.dtype().computed_in(), sum, more.clone())?,
            });
        }
        let Some(mut grad) = self.take_grad(leaf)? else { return Ok(()) };
        if !self.may_give(&grad) {
            grad = grad.copy(MemoryKind::Gradient)?;
        }
        grad.storage().set_kind(MemoryKind::Gradient);
        if let Some(id) = parameter {
            gradients.by_parameter.insert(id, grad.clone());
        }
        gradients.by_value.insert(leaf, grad);
        Ok(())
    }
}

/// Whether an op's outputs are views with distinct elements, whose gradients are those of the elements viewed.
pub(super) fn is_part(op: &Op) -> bool {
    matches!(op, Op::Reshape(_) | Op::Permute(_) | Op::Narrow(_) | Op::Split(_))
}

/// How the gradients of a value are summed.
struct SumSpec {
    spec: Spec,
    /// In which dtype.
    dtype: DType,
    /// What the sum is counted as.
    kind: MemoryKind,
    id: u64,
    is_leaf: bool,
}

/// sum + more in this dtype, which is theirs or f32.
fn add_in(exec: &Exec<'_>, dtype: DType, sum: Tensor, more: Tensor) -> Result<Tensor> {
    if sum.dtype() == dtype && more.dtype() == dtype {
        return exec.accumulate(sum, more);
    }
    let out = if sum.dtype() == dtype { exec.replace(&sum)? } else { exec.empty(sum.shape(), dtype)? };
    exec.run(kernel::Binary { f: BinaryFn::Add, a: &sum, b: &more, out: &out })?;
    Ok(out)
}
