//! The one error type of this crate. Every message says what was wrong, where, and what would be right.

use retape_core::DType;
use std::path::PathBuf;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All that can go wrong in layers, optimizers, data and checkpoints.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine refused.
    #[error(transparent)]
    Core(#[from] retape_core::Error),
    /// A model's configuration contradicts itself.
    #[error("model configuration: {field} = {value}: {reason}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// No model has this name.
    #[error("there is no model `{name}`; the models are {known}")]
    UnknownModel {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A layer or model was given a tensor that it can't take.
    #[error("{layer}: {reason}")]
    Input {
        /// The layer or model.
        layer: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// An optimizer's setting is out of its range, or parameters are grouped wrongly.
    #[error("AdamW: {reason}")]
    Optimizer {
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The gradients hold an infinity or a NaN, or their norm is beyond f64.
    #[error(
        "the gradient norm is {norm}: a gradient holds an infinity or NaN (first in `{parameter}`), or all are too \
         large for f64 together; nothing was updated"
    )]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
        /// The first parameter whose gradient makes it so.
        parameter: String,
    },
    /// A file can't be read, written or renamed.
    #[error("can't {action} {}: {source}", path.display())]
    File {
        /// What was tried: `read`, `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A text file isn't UTF-8.
    #[error("{} is not UTF-8 text: byte {offset} starts no character; give a text file", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Index of the first wrong byte.
        offset: usize,
    },
    /// A text is shorter than one window.
    #[error("{name} has {bytes} bytes; a sequence of {seq} needs at least {}", seq + 1)]
    TextTooShort {
        /// The file or text.
        name: String,
        /// Its length.
        bytes: usize,
        /// The sequence length asked for.
        seq: usize,
    },
    /// A token is no byte.
    #[error("token {token} at position {position} is no byte (0 to 255)")]
    NotAByte {
        /// The token.
        token: i64,
        /// Where.
        position: usize,
    },
    /// A file isn't in the safetensors format.
    #[error("{} is not a safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// Two different parameters or tensors of one model or file have one name.
    #[error(
        "there are two `{name}`, {first} and {second}; a name is for one parameter, and a file has \
         one tensor of it: rename one"
    )]
    DuplicateName {
        /// The name.
        name: String,
        /// Dtype and shape of the first.
        first: String,
        /// Dtype and shape of the second.
        second: String,
    },
    /// A checkpoint lacks a tensor.
    #[error("{} has no tensor `{name}`{}", path.display(), others(*more))]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The first that is missing.
        name: String,
        /// How many more are.
        more: usize,
    },
    /// A checkpoint has a tensor that nobody asked for.
    #[error("{} has a tensor `{name}` that this model has not{}", path.display(), others(*more))]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// The first unexpected one.
        name: String,
        /// How many more there are.
        more: usize,
    },
    /// A tensor of a checkpoint has another shape.
    #[error("`{name}` in {} is {found:?}, this model needs {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape asked for.
        expected: Vec<usize>,
    },
    /// A tensor of a checkpoint has another dtype.
    #[error(
        "`{name}` in {} is {found}, this model needs {expected}{}",
        path.display(),
        if *castable { "; allow the cast to convert it" } else { "" }
    )]
    WrongDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its dtype in the file.
        found: String,
        /// The dtype asked for.
        expected: DType,
        /// True where allowing casts would help.
        castable: bool,
    },
    /// A checkpoint has two names of one parameter, and their numbers differ.
    #[error(
        "{} has other numbers for `{name}` than for `{other}`, and in this model they are one parameter; build it \
         untied, or remove one of the two",
        path.display()
    )]
    TiedTensorsDiffer {
        /// The file.
        path: PathBuf,
        /// The further name.
        name: String,
        /// The parameter's own name.
        other: String,
    },
    /// A pattern can't be read, or matches no parameter.
    #[error("{reason}")]
    Pattern {
        /// Its start, where it is long.
        pattern: String,
        /// The pattern, what is wrong with it, and near names.
        reason: String,
    },
    /// A parameter or a state was to be replaced by a tensor of another shape, dtype or device.
    #[error("`{name}` is {expected}, it can't become {found}")]
    WrongReplacement {
        /// The parameter.
        name: String,
        /// Dtype, shape and device now.
        expected: String,
        /// Those of the replacement.
        found: String,
    },
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more)") }
}
