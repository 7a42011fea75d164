//! What was measured on a device, as a file.

use super::{CostModel, Sensitivity};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What ops cost on a device and what lossy marks add to the gradients there: measured once, saved, and loaded for
/// the next plan.
///
/// ```
/// # use retape_policy::Profile;
/// let profile = Profile::from_toml(&Profile::default().to_toml())?;
/// assert_eq!(profile, Profile::default());
/// # Ok::<(), retape_policy::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profile {
    /// What it was measured of, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What ops cost.
    pub costs: CostModel,
    /// What lossy marks add, by the mark as rules write it (`int8:group=32`).
    pub sensitivity: BTreeMap<String, Sensitivity>,
}

impl Profile {
    /// As a file that [`from_toml`](Profile::from_toml) reads.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("numbers and text are TOML")
    }

    /// Reads such a file.
    ///
    /// # Errors
    /// [`Error::InvalidToml`], and [`Error::InvalidProfile`] for figures that nothing can have.
    pub fn from_toml(text: &str) -> Result<Profile> {
        let profile: Profile = toml::from_str(text).map_err(|e| crate::file::invalid(text, &e))?;
        profile.costs.check().map_err(Error::InvalidProfile)?;
        let all = profile.sensitivity.values().flat_map(Sensitivity::iter);
        let wrong = all.into_iter().find(|(_, error)| error.is_nan() || *error < 0.0);
        if let Some((kind, error)) = wrong {
            return Err(Error::InvalidProfile(format!("the error of `{kind}` is {error}; it must be 0 or more")));
        }
        Ok(profile)
    }
}
