//! Layers, GPT models, losses, AdamW, data and checkpoints on disk, on top of [`retape_core`].
//!
//! Two contracts hold everywhere. *Paths*: a layer opens its own scope, of its role, at the path of its parameters.
//! What is inside is named in its documentation, and policies find values by these paths and roles. *Handles*: a layer
//! takes its input by value, and what the tape stores of a value is decided when the last op has used it. So a layer
//! written in the plainest way holds no value longer than it must; who needs the input again clones it.
//!
//! *Mixed precision*: layers compute in the dtype of their input. With [`GptConfig::dtype`] bf16 or f16 parameters,
//! gradients and optimizer state stay f32; a layer casts each parameter on the tape where it uses it, weights marked
//! `Recompute`, so that none are held in 16 bits between forward and backward: the step's peak holds those of one
//! layer. Embeddings are looked up and added in f32 and the sum is cast; the loss is f32. f16 trains with a
//! [`LossScaler`].

mod adamw;
mod attention;
mod block;
mod builder;
pub mod checkpoint;
mod clip;
mod config;
pub mod data;
mod embedding;
mod error;
mod gpt;
mod init;
mod layer_norm;
mod linear;
mod loss_scaler;
mod mlp;
mod parameter;
mod parameters;
mod random;
mod state;

pub use adamw::{AdamW, AdamWConfig, ParameterGroup};
pub use attention::CausalSelfAttention;
pub use block::Block;
pub use builder::Builder;
pub use clip::{Clip, clip_grad_norm};
pub use config::{AttentionForm, GptConfig};
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use gpt::Gpt;
pub use init::Init;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use loss_scaler::LossScaler;
pub use mlp::Mlp;
pub use parameter::Parameter;
pub use parameters::Parameters;
pub use random::Random;
pub use state::State;
