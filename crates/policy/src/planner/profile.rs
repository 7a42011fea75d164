//! What was measured on a device, as a file.

use super::{CostModel, Sensitivity};
use crate::{Error, Result};
use retape_core::{Int8Spec, Mark};
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
#[serde(from = "File")]
pub struct Profile {
    /// What it was measured of, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What ops cost.
    pub costs: CostModel,
    /// What lossy marks add, by the mark as rules write it (`int8:group=32`).
    pub sensitivity: BTreeMap<String, Sensitivity>,
}

/// A file, also of the first form, which had errors of int8 alone.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    model: Option<String>,
    int8_group: Option<usize>,
    costs: CostModel,
    sensitivity: Errors,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Errors {
    ByMark(BTreeMap<String, Sensitivity>),
    OfInt8(Sensitivity),
}

impl Default for Errors {
    fn default() -> Errors {
        Errors::ByMark(BTreeMap::new())
    }
}

impl From<File> for Profile {
    fn from(file: File) -> Profile {
        let int8 = Int8Spec { group: file.int8_group.unwrap_or(Int8Spec::DEFAULT.group), ..Int8Spec::DEFAULT };
        // One mark may be written in several ways.
        let usual = |text: String| text.parse().map_or(text, Mark::text);
        let sensitivity = match file.sensitivity {
            Errors::OfInt8(errors) => BTreeMap::from([(Mark::Int8(int8).text(), errors)]),
            Errors::ByMark(errors) => errors.into_iter().map(|(mark, errors)| (usual(mark), errors)).collect(),
        };
        Profile { model: file.model, costs: file.costs, sensitivity }
    }
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
        let is_lossy = |text: &str| text.parse().is_ok_and(|mark: Mark| mark.is_lossy());
        if let Some(text) = profile.sensitivity.keys().find(|text| !is_lossy(text)) {
            return Err(Error::InvalidProfile(format!("`{text}` is no lossy mark, so it has no errors")));
        }
        let all = profile.sensitivity.values().flat_map(Sensitivity::iter);
        let wrong = all.into_iter().find(|(_, error)| error.is_nan() || *error < 0.0);
        if let Some((kind, error)) = wrong {
            return Err(Error::InvalidProfile(format!("the error of `{kind}` is {error}; it must be 0 or more")));
        }
        Ok(profile)
    }
}
