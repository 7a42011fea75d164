//! State that layers change: what it becomes is collected on the tape, and applied by `commit`.
//!
//! So measuring a step, or running it dry, leaves all state as it was: neither ever commits.

use super::{Tape, Var, unique};
use crate::{Error, Result, Tensor};
use std::fmt;

/// Names a state across tapes: a running mean, a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(u64);

impl StateId {
    /// An id that no other state of this process has or will have, also after this one is dropped.
    pub fn unique() -> StateId {
        StateId(unique())
    }
}

/// A change that waits for `commit`.
pub(super) enum Change {
    /// A state becomes a tensor.
    State(StateId, Tensor, Box<dyn FnOnce(Tensor)>),
    /// Anything else.
    Other(Box<dyn FnOnce()>),
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::State(id, tensor, _) => write!(f, "{id:?} becomes {tensor:?}"),
            Change::Other(_) => write!(f, "a change"),
        }
    }
}

impl Tape {
    /// Collects what a state becomes: [`commit`](Tape::commit) calls `apply` with the value's tensor. Of several values
    /// for one state the last counts.
    ///
    /// The tensor holds no history and has no gradient. It lives, and is counted, until it is applied or the tape goes.
    /// A leaf, a view, or what another state becomes is copied here, so that the state gets a tensor of its own.
    /// `apply` can't fail: check what may be wrong before.
    ///
    /// # Errors
    /// [`Error::OtherTape`] for a value of another tape, [`Error::TapeConsumed`] after `backward`.
    pub fn set_later(&self, state: StateId, value: impl Into<Var>, apply: impl FnOnce(Tensor) + 'static) -> Result<()> {
        let value = value.into();
        drop(self.enter("set_later", None)?);
        if !value.is_of(self) {
            return Err(Error::OtherTape { what: "set_later", path: value.path() });
        }
        let tensor = value.tensor()?;
        let made_here = {
            let graph = self.graph();
            !graph.nodes[graph.values[graph.root(value.key)].node].is_leaf()
        };
        let taken = self.0.changes.borrow().iter().any(|change| match change {
            Change::State(id, other, _) => *id != state && other.shares_storage(&tensor),
            Change::Other(_) => false,
        });
        let tensor = match made_here && !taken && tensor.covers_storage() {
            true => tensor,
            // A recorded op, so that a trace's runs take its memory, too.
            false => {
                drop(tensor);
                self.no_grad(|| value.contiguous())?.tensor()?
            }
        };
        let change = Change::State(state, tensor, Box::new(apply));
        let mut changes = self.0.changes.borrow_mut();
        let earlier = changes.iter().position(|c| matches!(c, Change::State(id, ..) if *id == state));
        let earlier = earlier.map(|at| changes.remove(at));
        changes.push(change);
        drop(changes);
        drop(earlier); // what `apply` owns may be a user's
        Ok(())
    }

    /// What this tape has collected for a state: a layer that is called twice on one tape goes on from there.
    pub fn later(&self, state: StateId) -> Result<Option<Var>> {
        let changes = self.0.changes.borrow();
        let tensor = changes.iter().find_map(|change| match change {
            Change::State(id, tensor, _) if *id == state => Some(tensor.clone()),
            _ => None,
        });
        drop(changes);
        tensor.map(|tensor| self.constant(&tensor)).transpose()
    }

    /// Collects a change that is no tensor's, a position say: [`commit`](Tape::commit) runs `apply`. It can't fail:
    /// check what may be wrong before. A value of this tape in it would keep the tape alive; take its tensor.
    pub fn on_commit(&self, apply: impl FnOnce() + 'static) -> Result<()> {
        drop(self.enter("on_commit", None)?);
        self.0.changes.borrow_mut().push(Change::Other(Box::new(apply)));
        Ok(())
    }

    /// Applies what was collected, in that order, each change once. A tape that is dropped instead changes nothing.
    /// Call it after `backward`, which leaves the changes waiting: before, what it applies counts no longer as the
    /// step's, and the step's peak may be below the predicted one.
    ///
    /// # Errors
    /// Nothing is applied where this fails: [`Error::DryRun`] on the meta device, or an error that the tape kept for
    /// its next call.
    pub fn commit(&self) -> Result<()> {
        drop(self.settled());
        drop(self.occupy("commit")?);
        let mut graph = self.graph();
        if let Some(error) = graph.parked.take() {
            return Err(error);
        }
        if !graph.device.computes() {
            return Err(Error::DryRun { what: "commit" });
        }
        drop(graph);
        let changes = self.0.changes.take();
        for change in changes {
            match change {
                Change::State(_, tensor, apply) => apply(tensor),
                Change::Other(apply) => apply(),
            }
        }
        Ok(())
    }
}
