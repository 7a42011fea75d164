//! What a command can fail with, and the exit status that says so.

use std::fmt;

/// `Result` of a command.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A failure: one line for the user, and the exit status.
#[derive(Debug)]
pub struct Failure {
    /// 2 for wrong usage or input, 1 for anything else.
    pub status: u8,
    /// What was wrong and what would be right.
    pub message: String,
}

impl Failure {
    /// Wrong usage or input.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { status: 2, message: message.into() }
    }

    /// The program contradicts itself.
    pub fn internal(message: impl fmt::Display) -> Failure {
        Failure::other(format!("internal error: {message}; please report it"))
    }

    /// Anything else.
    pub fn other(message: impl Into<String>) -> Failure {
        Failure { status: 1, message: message.into() }
    }
}

/// On one line, whatever a library put into its message.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.message.split_whitespace().collect();
        f.write_str(&words.join(" "))
    }
}

impl From<retape::core::Error> for Failure {
    fn from(error: retape::core::Error) -> Failure {
        use retape::core::Error as E;
        match error {
            E::RuleMatchedNothing { rule } => Failure::usage(format!(
                "rule `{rule}` matched no value of this model; correct its pattern (`retape inspect --all` lists the \
                 paths; a value marked `exact` takes no mark) or remove it"
            )),
            E::OutOfMemory { .. } => {
                Failure::usage(format!("{error}; raise --memory-limit, or choose a policy or a model that needs less"))
            }
            E::Unsupported { .. } | E::InvalidTensor { .. } | E::MarkNotAllowed { .. } => {
                Failure::usage(error.to_string())
            }
            error => Failure::other(error.to_string()),
        }
    }
}

impl From<retape::nn::Error> for Failure {
    fn from(error: retape::nn::Error) -> Failure {
        use retape::nn::Error as E;
        match error {
            E::Core(error) => error.into(),
            E::NonFiniteNorm { .. } | E::File { action: "write", .. } => Failure::other(error.to_string()),
            error => Failure::usage(error.to_string()),
        }
    }
}

impl From<retape::policy::Error> for Failure {
    fn from(error: retape::policy::Error) -> Failure {
        match error {
            retape::policy::Error::Engine(error) => error.into(),
            error => Failure::usage(error.to_string()),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::other(format!("writing JSON: {error}"))
    }
}
