//! A value of the tape, and what the tape stores of it.
//!
//! A value has two independent facts: how many handles the user holds, and what the tape stores of it. The second is a
//! fact of its *root*, the value that owns the storage: a view has none. A root also counts its *reads*, declared by
//! `saves`, and its *recipes*, one per node that may yet be replayed from it.

use super::audit::Fingerprint;
use super::marking::Marking;
use super::scope::Place;
use super::storage::Packed;
use crate::ops::Spec;
use crate::{Mark, Tensor};
use slotmap::new_key_type;
use std::rc::Rc;

new_key_type! {
    pub(crate) struct NodeKey;
    pub(crate) struct ValueKey;
}

#[derive(Debug)]
pub(crate) struct Value {
    /// Unique on the tape, and the same whatever the marks.
    pub id: u64,
    pub node: NodeKey,
    pub output: usize,
    /// The value whose storage this views; itself if it is no view.
    pub root: ValueKey,
    pub spec: Spec,
    pub path: Rc<str>,
    /// Where it is, as policies see it.
    pub place: Place,
    pub requires_grad: bool,
    /// Handles on this very value.
    pub(super) handles: u32,
    /// Of a view: its tensor, as long as a handle holds it.
    pub(super) view: Option<Tensor>,
}

/// What is known of a value that owns its storage.
#[derive(Debug)]
pub(crate) struct Root {
    /// Handles on it and on its views.
    pub(super) handles: u32,
    pub(super) state: State,
    pub marking: Marking,
    pub exactness: Exactness,
    /// Reads declared by living nodes that backward has not visited.
    pub(super) reads: u32,
    /// A read was ever declared. Not the current count, so that the outcome doesn't depend on when a handle goes.
    pub(super) ever_read: bool,
    pub(super) recipes: u32,
    /// It needs its node's inputs to stay replayable.
    pub(super) holds_recipe: bool,
    pub(super) segment: Option<u32>,
    /// It outlived a segment scope.
    pub(super) boundary: bool,
    /// How a pass has read it, where other reads would give other bits: it keeps to this whatever is recorded later.
    pub(super) read_as: Option<Fate>,
    pub(super) audit: Option<Fingerprint>,
    /// Relative L2 error of what is stored, if the tape measures it.
    pub(super) packing_error: Option<f64>,
}

/// What there is of a root.
#[derive(Debug)]
pub(crate) enum State {
    /// A handle is held, and nothing is decided.
    Live(Tensor),
    /// The last handle has gone; backward reads it, or replays others from it.
    Stored(Stored),
    /// Nobody needs it. It has its tensor as long as a handle holds it.
    Freed(Option<Tensor>),
}

/// What the tape stores of a root that has settled.
#[derive(Debug)]
pub(crate) enum Stored {
    Full(Tensor),
    Packed(Box<Packed>),
    /// To be replayed.
    Dropped,
}

/// How exact a value must stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exactness {
    /// Any mark may.
    Free,
    /// An op reads it exactly (tiled attention its q and k): it is stored in full, or recomputed.
    ReadExactly,
    /// A leaf, an integer or a statistic: kept in full whatever the mark.
    KeptExactly,
}

/// What becomes of a value by its mark, whatever handles are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Full,
    /// Stored as this mark says.
    Packed(Mark),
    Dropped,
}

impl Root {
    /// The tensor itself, where a handle holds it.
    pub fn live(&self) -> Option<&Tensor> {
        match &self.state {
            State::Live(tensor) | State::Freed(Some(tensor)) => Some(tensor),
            State::Stored(_) | State::Freed(None) => None,
        }
    }

    /// The tensor, where the user or the tape has it.
    pub fn full(&self) -> Option<&Tensor> {
        match &self.state {
            State::Stored(Stored::Full(tensor)) => Some(tensor),
            _ => self.live(),
        }
    }

    pub fn stored(&self) -> Option<&Stored> {
        match &self.state {
            State::Stored(stored) => Some(stored),
            State::Live(_) | State::Freed(_) => None,
        }
    }

    /// Whether its last handle is yet to go, so that nothing is decided.
    pub fn is_unsettled(&self) -> bool {
        matches!(self.state, State::Live(_))
    }

    pub fn is_freed(&self) -> bool {
        matches!(self.state, State::Freed(_))
    }

    /// Bytes that the tape stores of it.
    pub fn stored_bytes(&self) -> u64 {
        match &self.state {
            State::Stored(Stored::Full(tensor)) => tensor.storage_bytes() as u64,
            State::Stored(Stored::Packed(packed)) => packed.bytes(),
            _ => 0,
        }
    }

    /// The tape needs it no more: what is stored goes. A tensor that handles hold stays theirs.
    pub fn free(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Freed(None)) {
            State::Live(tensor) | State::Freed(Some(tensor)) => State::Freed(Some(tensor)),
            State::Stored(_) | State::Freed(None) => State::Freed(None),
        };
    }

    pub fn is_held(&self) -> bool {
        self.handles > 0
    }

    pub fn is_read(&self) -> bool {
        self.reads > 0
    }

    pub fn was_ever_read(&self) -> bool {
        self.ever_read
    }

    pub fn reads(&self) -> u32 {
        self.reads
    }

    /// Whether backward reads it, or may replay a node from it.
    pub fn is_needed(&self) -> bool {
        self.reads + self.recipes > 0
    }

    pub fn is_kept_exactly(&self) -> bool {
        self.exactness == Exactness::KeptExactly
    }

    pub fn packing_error(&self) -> Option<f64> {
        self.packing_error
    }

    /// What the mark asks for. Never a function of handles.
    pub fn fate(&self, spec: &Spec) -> Fate {
        if let Some(fixed) = self.read_as {
            return fixed;
        }
        match self.marking.mark {
            _ if self.is_kept_exactly() => Fate::Full,
            Some(Mark::Recompute) => Fate::Dropped,
            Some(mark) if mark.packs(spec) && !(mark.is_lossy() && self.exactness == Exactness::ReadExactly) => {
                Fate::Packed(mark)
            }
            Some(_) => Fate::Full,
            None if self.ever_read => Fate::Full,
            None => Fate::Dropped,
        }
    }

    /// Whether its node may yet be replayed for it, so that the node's inputs must stay.
    pub(super) fn wants_recipe(&self) -> bool {
        let droppable = matches!(self.marking.mark, None | Some(Mark::Recompute));
        !self.is_kept_exactly() && (self.marking.may_drop_outside || droppable)
    }
}
