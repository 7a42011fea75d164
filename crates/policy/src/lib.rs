//! Which saved values of a whole model are kept, recomputed or stored in fewer bytes: rules that users write,
//! presets, and files of rules.
//!
//! Every strategy is a [`RuleSet`], an ordered list of [`Rule`]s of which the first match decides; so they compose:
//!
//! ```
//! use retape_core::Mark;
//! use retape_policy::{ModelShape, Rule, RuleSet, parse};
//!
//! let shape = ModelShape { blocks: 12 };
//! let mine = RuleSet::new([Rule::new("blocks.0.**", Mark::Keep)?]);
//! let policy = mine.then(parse("length_adaptive:threshold=1024", &shape)?);
//! # Ok::<(), retape_policy::Error>(())
//! ```

mod bytes;
mod error;
mod file;
mod names;
mod planner;
pub mod presets;
mod rule;
mod set;

pub use bytes::parse_bytes;
pub use error::{Error, Result};
pub use planner::{
    CostModel, LossyFormat, LossyUse, Plan, PlanCache, PlannedMark, Planner, PlannerOptions, Profile, Sensitivity,
    budget,
};
pub use presets::{ModelShape, PRESETS};
pub use rule::{Rule, parse_mark};
pub use set::RuleSet;

/// The policy that `spec` names: a preset with its arguments, `length_adaptive:threshold=1024`, or the path of a file
/// of rules, which ends in `.toml` (see [`RuleSet::from_toml`]).
pub fn parse(spec: &str, shape: &ModelShape) -> Result<RuleSet> {
    if !spec.ends_with(".toml") {
        return presets::preset(spec, shape);
    }
    let in_file = |error| Error::File { file: spec.to_owned(), error: Box::new(error) };
    let text = std::fs::read_to_string(spec).map_err(|e| in_file(Error::Unreadable(e.to_string())))?;
    RuleSet::from_toml(&text, shape).map_err(in_file)
}
