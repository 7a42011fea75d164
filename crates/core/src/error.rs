//! The one error type of this crate. Every message says what was wrong, where, and what would be right.

use crate::DType;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// All that can go wrong in tensors, kernels and the tape.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An op was given inputs it can't take. `inputs` lists each input as `dtype[shape]`.
    #[error("{op} at `{path}` with inputs ({inputs}): {reason}")]
    InvalidInput {
        /// The op's name.
        op: &'static str,
        /// Where on the tape it would have been recorded.
        path: String,
        /// The inputs, as `f32[2, 3], i64[2]`.
        inputs: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A tensor can't be built or viewed as asked.
    #[error("{what}: {reason}")]
    InvalidTensor {
        /// What was asked for.
        what: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A tensor's elements were asked for as another type.
    #[error("tensor holds {actual}, but {asked} was asked for; cast it first")]
    WrongDType {
        /// The tensor's dtype.
        actual: DType,
        /// The dtype asked for.
        asked: DType,
    },
    /// Two tensors that must be on one device are not.
    #[error(
        "{what}: the tensors are on different devices ({left} and {right}); one op runs on one device, and one that is \
         opened twice is two"
    )]
    DeviceMismatch {
        /// The op or the call.
        what: &'static str,
        /// Name of the first device.
        left: String,
        /// Name of the second device.
        right: String,
    },
    /// Numbers were asked of the meta device, which has none.
    #[error(
        "{what}: its device is meta, which computes shapes and bytes and holds no numbers: this is a dry run. Branch \
         on shapes, pass the number in from outside the closure that is run dry, or measure on a device that computes"
    )]
    NoNumbers {
        /// The call, and what it was called on.
        what: String,
    },
    /// State was to be changed by a dry run.
    #[error(
        "{what}: this tape's device is meta, so this is a dry run, which leaves all state as it was; what was \
         collected goes with the tape. Commit the tape of a step on a device that computes"
    )]
    DryRun {
        /// The call.
        what: &'static str,
    },
    /// A device that can't be opened, or that failed: no driver, no such GPU, a failed launch.
    #[error("{device}: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// What was wrong, and what would help.
        reason: String,
    },
    /// The device has no kernel for this.
    #[error("{kernel} is not supported on {device}: {reason}")]
    Unsupported {
        /// The kernel or op.
        kernel: &'static str,
        /// The device's name.
        device: String,
        /// What is missing (dtype, shape, ...).
        reason: String,
    },
    /// A kernel met values it can't work on (an index out of range).
    #[error("{kernel}: {reason}")]
    InvalidValue {
        /// The kernel.
        kernel: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The meter's hard limit would be exceeded, or the device is full.
    #[error("out of memory: {requested} bytes requested with {in_use} in use, the limit is {limit}")]
    OutOfMemory {
        /// Bytes of the allocation that failed.
        requested: u64,
        /// Bytes live at that moment, of all kinds.
        in_use: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A mark came after the value had settled or a pass had begun, or its inputs are gone.
    #[error("mark {mark} on `{path}` ({op}) comes too late: {reason}")]
    MarkTooLate {
        /// The mark asked for.
        mark: &'static str,
        /// The value's path.
        path: String,
        /// The op that made the value.
        op: &'static str,
        /// Why, and what would be in time.
        reason: String,
    },
    /// A mark that this value can't take (a leaf, an integer, a statistic, an exact read).
    #[error("mark {mark} on `{path}` ({op}) can't be honoured: {reason}")]
    MarkNotAllowed {
        /// The mark asked for.
        mark: &'static str,
        /// The value's path.
        path: String,
        /// The op that made the value.
        op: &'static str,
        /// Why.
        reason: String,
    },
    /// A user's rule decided for no value.
    #[error(
        "rule `{rule}` decided for no value on this tape: it matches none, or stronger marks cover all that it \
         matches; correct the pattern or remove the rule"
    )]
    RuleMatchedNothing {
        /// The rule as the user wrote it.
        rule: String,
    },
    /// No rule of a preset decided for any value, on a tape of which no scope has a role.
    #[error(
        "policy `{preset}` decided for no value: it is for {looks_for}, and no scope on this tape has a role; give \
         scopes theirs, as `tape.scope(scope(\"h.0\").role(Role::Block))`, or mark values by rules of your own, as \
         `{example}`; the largest saved values are {largest}"
    )]
    PresetMatchedNothing {
        /// The preset's name.
        preset: String,
        /// The values that it is for.
        looks_for: String,
        /// A rule that marks the largest of the saved values.
        example: String,
        /// Paths and ops of the largest saved values, one of each kind.
        largest: String,
    },
    /// A lossy store met a number that its format can't hold: an infinity, a NaN, or one beyond its range.
    #[error(
        "{format} store of `{path}` ({op}): a value holds an infinity, a NaN or a number beyond the format, which \
         {format} can't represent; keep this value, or allow the fallback to full precision"
    )]
    NonFinite {
        /// The format, such as `int8`.
        format: &'static str,
        /// The value's path.
        path: String,
        /// The op that made the value.
        op: &'static str,
    },
    /// The tape was consumed by `backward`.
    #[error(
        "{what} at `{path}`: this tape was consumed by `backward`; start a new tape, or keep it by `backward_with` and \
         `BackwardOptions::RETAIN`"
    )]
    TapeConsumed {
        /// The op or the call.
        what: &'static str,
        /// The value that it was called on, or where the op would have been recorded.
        path: String,
    },
    /// The tape was used by code that it was running at that moment: by a policy or a rule, of this very tape.
    #[error(
        "{what}: the tape is in use by the policy or the rule that it has called; a policy decides by its site alone, \
         and a rule by the specs and tensors that it is given: use the tape outside of them"
    )]
    Reentrant {
        /// The call that can't be answered.
        what: &'static str,
    },
    /// A gradient of a gradient was asked for.
    #[error(
        "second derivative of `{path}` ({op}): gradients aren't recorded on the tape, so there is no gradient of a \
         gradient yet; write the first derivative with ops and differentiate that, or take differences of `grad`"
    )]
    SecondOrder {
        /// The loss's path.
        path: String,
        /// The op that made the loss.
        op: &'static str,
    },
    /// A `Var` of another tape was passed.
    #[error(
        "{what}: `{path}` belongs to another tape; an op takes values of one tape: record it on this one, or bring its \
         tensor over with `leaf` or `constant`"
    )]
    OtherTape {
        /// The op or call.
        what: &'static str,
        /// The foreign value's path.
        path: String,
    },
    /// Backward can't start from or reach this value.
    #[error("no gradient for `{path}` ({op}): {reason}")]
    NoGradient {
        /// The value's path.
        path: String,
        /// The op that made the value.
        op: &'static str,
        /// Why, and what to do instead.
        reason: String,
    },
    /// A random op was asked for on a tape that has no seed.
    #[error(
        "{what} at `{path}` draws random numbers, and this tape has no seed; give it one: `Tape::with(&device, \
         TapeOptions {{ seed: Some(seed), ..TapeOptions::default() }})`, another seed for each training step"
    )]
    Unseeded {
        /// The op, or the rounding of a packing.
        what: &'static str,
        /// Where on the tape.
        path: String,
    },
    /// `Verify::Bits` found a replay that differs from what was dropped.
    #[error("replay of `{path}` ({op}) differs from the value dropped in forward, first at flat index {index}")]
    ReplayDiffers {
        /// The value's path.
        path: String,
        /// The op that was replayed.
        op: &'static str,
        /// First differing element, counted in row-major order.
        index: usize,
    },
    /// An op's rule doesn't do what [`OpRule`](crate::ops::OpRule) says that it does.
    #[error("{op} at `{path}` breaks the contract of a rule: {reason}")]
    BrokenRule {
        /// The op.
        op: &'static str,
        /// The value's path, or where the op would have been recorded.
        path: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The engine contradicts itself; please report it.
    #[error("internal error in {op} at `{path}`: {reason}")]
    Internal {
        /// The op.
        op: &'static str,
        /// The value's path.
        path: String,
        /// What was violated.
        reason: String,
    },
}

impl Error {
    /// An error of a packing that knows no value, with the value's names.
    pub(crate) fn of_value(mut self, value: &str, its_op: &'static str) -> Self {
        if let Error::NonFinite { path, op, .. } | Error::MarkNotAllowed { path, op, .. } = &mut self {
            (*path, *op) = (value.into(), its_op);
        }
        if let Error::Unseeded { path, .. } = &mut self {
            *path = value.into();
        }
        self
    }

    pub(crate) fn tensor(what: &'static str, reason: impl Into<String>) -> Self {
        Error::InvalidTensor { what, reason: reason.into() }
    }
}
