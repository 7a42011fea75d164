//! retape: tape-based reverse-mode autodiff whose saved tensors are first-class.
//!
//! Every value that backward will read carries a [`Mark`]: keep it, recompute it, or store it in fewer bytes, as int8
//! or bf16. Marks are set on a value, by a scope, or by a [`policy`] for a whole model; the [ledger](Tape::ledger) says
//! what each costs.
//!
//! ```
//! use retape::prelude::*;
//!
//! let device = retape::cpu();
//! let tape = Tape::new(&device);
//! let x = tape.constant(&Tensor::from_slice(&device, &[2, 3], &[1f32, -2.0, 3.0, 0.5, 0.0, -1.0])?)?;
//! let w = tape.leaf(&Tensor::from_slice(&device, &[3, 4], &[0.1f32; 12])?)?;
//!
//! let h = x.linear(&w, None)?;
//! let h = h.gelu_tanh()?.recompute()?; // dropped after its last use, replayed when backward asks
//! let loss = h.square()?.sum()?;
//!
//! println!("{}", tape.ledger()?); // every saved tensor: bytes, mark, who reads it, what a replay costs
//! let gradients = tape.backward(&loss)?; // the same bits as without the mark
//! assert_eq!(gradients.of(&w).map(|g| g.shape().to_vec()), Some(vec![3, 4]));
//! assert_eq!(tape.stats().replays, 1);
//! # Ok::<(), retape::Error>(())
//! ```
//!
//! The parts, each a crate of its own: tensors, the tape, marks and the ledger (re-exported here), [`nn`] with layers
//! and models, [`policy`] with rules and presets, and the devices [`cpu`] and [`meta`], with the feature `cuda` also
//! `cuda`. A step on `meta` computes shapes and bytes only and shows what the same step will take on a real device.
//! [`enum@Error`] takes in the errors of all parts; an op of your own returns the engine's, [`core::Error`].

mod error;

pub use error::{Error, Result};
pub use retape_core as core;
pub use retape_core::*;
pub use retape_cpu::{device as cpu, device_with_threads as cpu_with_threads};
#[cfg(feature = "cuda")]
pub use retape_cuda::{Options as CudaOptions, device as cuda, device_with as cuda_with};
pub use retape_nn as nn;
pub use retape_policy as policy;

/// What most programs need, under one `use`.
pub mod prelude {
    pub use retape_core::kernel::{CrossEntropySpec, LossReduction, PoolDivisor};
    pub use retape_core::ops::attention::AttentionOptions;
    pub use retape_core::ops::conv::{Conv, Padding};
    pub use retape_core::ops::pool::Pool;
    pub use retape_core::{
        DType, Device, Gradients, Int8Spec, Ledger, Mark, Policy, Role, Scope, Tape, TapeOptions, Tensor, Trace, Var,
        Verify, scope,
    };
    pub use retape_nn::{
        AdamW, AdamWConfig, AttentionForm, Builder, Embedding, Gpt, GptConfig, Init, LayerNorm, Linear, Parameter,
        Parameters, Random, State, clip_grad_norm,
    };
    pub use retape_policy::{ModelShape, Rule, RuleSet};
}
