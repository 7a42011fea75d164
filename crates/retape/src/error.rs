//! One error for programs that use several of the crates.

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in any of the crates. Their errors convert into it, so that one `?` does for all. The engine's own
/// is always [`Error::Core`], also where a layer or a policy passed it on.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One `?` does for all crates, and the engine's errors are the engine's, whoever passed them on.
    #[test]
    fn errors_convert() {
        let core = || retape_core::Error::TapeConsumed { what: "leaf", path: "leaf".into() };
        let through = |f: &dyn Fn() -> Result<()>| f().unwrap_err();
        let results = [
            through(&|| Err(core())?),
            through(&|| Err(retape_nn::Error::Core(core()))?),
            through(&|| Err(retape_policy::Error::Engine(core()))?),
        ];
        for error in results {
            assert!(matches!(error, Error::Core(retape_core::Error::TapeConsumed { .. })), "{error:?}");
        }
        let unknown = through(&|| retape_policy::parse_mark("fp4").map(|_| ()).map_err(Error::from));
        assert!(matches!(unknown, Error::Policy(_)) && unknown.to_string().contains("fp4"));
    }
}
