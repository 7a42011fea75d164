//! Ops: what the engine knows of each. One file per op or family; registry.rs lists them.

mod backward;
mod exec;
mod registry;
mod rule;
mod sample;

pub mod attention;
pub mod binary;
pub mod causal_mask;
pub mod clamp;
pub mod conv;
pub mod copy;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod flip;
pub mod gather;
pub mod glu;
pub mod group_norm;
pub mod index;
pub mod join;
pub mod layer_norm;
pub mod loss;
pub mod matmul;
pub mod max_index;
pub mod pad;
pub mod pool;
pub mod reduce;
pub mod repeat;
pub mod rms_norm;
pub mod roll;
pub mod scan;
pub mod softmax;
pub mod ternary;
pub mod triangle;
pub mod unary;
pub mod view;
pub mod where_;

pub(crate) use backward::PassSource;
pub use backward::{Backward, GradientSum};
pub use exec::Exec;
pub(crate) use exec::KernelClock;
pub use registry::Op;
pub use rule::{Cost, OpRule, Output, Outputs, Save, Saves, Slot, Spec, saves};
pub(crate) use rule::{factors, one, one_float_dtype, rounds_to_zero, takes};
pub use sample::{Sample, SampleInput, SampleMemory, SampleValues};

// What the files of ops use, by `use super::*`.
use crate::kernel::{self, BinaryFn, ReduceFn};
use crate::layout::Shape;
use crate::{DType, MemoryKind, Result, Tensor};
use smallvec::{SmallVec, smallvec};
