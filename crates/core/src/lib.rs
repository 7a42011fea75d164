//! The core of retape: tensors, the `Backend` trait, the tape with its marks, backward, and the ledger.
//!
//! It knows no policy preset, no layer and no concrete backend but meta.

mod check;
mod device;
mod dtype;
mod error;
pub mod glob;
pub mod kernel;
pub mod layout;
mod ledger;
mod mark;
mod meta;
mod meter;
pub mod ops;
pub mod rng;
mod role;
pub mod serde_float;
mod stand_in;
pub mod tape;
mod tensor;
mod timeline;
mod trace;

pub use check::{GradientCheck, check_gradients};
pub use device::{Backend, Buffer, Device, Storage};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use kernel::{Kernel, Launch};
pub use ledger::{DecidedBy, EntryMark, Ledger, LedgerChange, LedgerEntry, LedgerTotals, Lint, RuleUse};
pub use mark::{BlockScope, Decision, Mark, Origin, Policy, PresetInfo, RuleInfo, ScopeSite, Site};
pub use meta::meta;
pub use meter::{Contents, MemoryEvent, MemoryKind, MemoryMeter, Moment, Phase};
pub use role::{Role, Roles};
pub use tape::storage::{Int8Spec, Rounding, StorageFormat};
pub use tape::{
    BackwardOptions, Gradients, NonFinite, ParameterId, Scope, ScopeGuard, StateId, Stats, Tape, TapeOptions, Var,
    Verify, scope,
};
pub use tensor::Tensor;
pub use timeline::{KindBytes, LiveAllocation, NodeName, TapeNames, Timeline, TimelinePoint};
pub use trace::{DryRun, Trace, TraceNode, TraceValue};
