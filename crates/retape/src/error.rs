//! One error for programs that use several of the crates.

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in any of the crates. Their errors convert into it, so that one `?` does for all. The engine's own is
/// always [`Error::Core`], also where a layer or a policy passed it on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Of the tape, its ops and tensors.
    #[error(transparent)]
    Core(retape_core::Error),
    /// Of layers, optimizers, data and checkpoints.
    #[error(transparent)]
    Nn(retape_nn::Error),
    /// Of rules, presets and plans.
    #[error(transparent)]
    Policy(retape_policy::Error),
}

impl From<retape_core::Error> for Error {
    fn from(error: retape_core::Error) -> Error {
        Error::Core(error)
    }
}

impl From<retape_nn::Error> for Error {
    fn from(error: retape_nn::Error) -> Error {
        match error {
            retape_nn::Error::Core(error) => Error::Core(error),
            other => Error::Nn(other),
        }
    }
}

impl From<retape_policy::Error> for Error {
    fn from(error: retape_policy::Error) -> Error {
        match error {
            retape_policy::Error::Engine(error) => Error::Core(error),
            other => Error::Policy(other),
        }
    }
}
