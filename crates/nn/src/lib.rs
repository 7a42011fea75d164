//! Layers, GPT models, losses, AdamW, data and checkpoints on disk, on top of [`retape_core`].
//!
//! Two contracts hold everywhere. *Paths*: a layer opens the scopes named in its documentation, and policies find
//! values by them. *Handles*: what the tape stores of a value is decided when the last handle on it goes, so a layer
//! takes its input by value where nobody else needs it and lets go of every value as soon as it has been used.
//!
//! *Mixed precision*: layers compute in the dtype of their input. With [`GptConfig::dtype`] bf16 or f16 parameters,
//! gradients and optimizer state stay f32; a layer casts each parameter on the tape where it uses it, weights marked
//! `Recompute`, so that none are held in 16 bits between forward and backward: the step's peak holds those of one
//! layer. Embeddings are looked up and added in f32 and the sum is cast; the loss is f32. f16 trains with a [`LossScaler`].

mod adamw;
mod attention;
mod block;
pub mod checkpoint;
mod clip;
mod config;
pub mod data;
mod embedding;
mod error;
mod gpt;
mod initializer;
mod layer_norm;
mod linear;
mod loss_scaler;
mod mlp;
mod parameter;
mod random;
mod state;

pub use adamw::{AdamW, AdamWConfig, ParameterGroup};
pub use attention::CausalSelfAttention;
pub use block::Block;
pub use clip::{Clip, clip_grad_norm};
pub use config::{AttentionForm, GptConfig};
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use gpt::Gpt;
pub use initializer::Initializer;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use loss_scaler::LossScaler;
pub use mlp::Mlp;
pub use parameter::Parameter;
pub use random::Random;
pub use state::State;
