//! Floats in files that people read: JSON has no infinities, which are written as text here and read back as they were.
//!
//! For a field: `#[serde(with = "retape_core::serde_float")]`; elsewhere [`Float`].

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A float that is text in a file where it isn't finite: `"inf"`, `"-inf"`, `"NaN"`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Float(pub f64);

/// Writes a float.
pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Float(*value).serialize(serializer)
}

/// Reads a float.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Float::deserialize(deserializer)?.0)
}

impl Serialize for Float {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Float, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Float;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, \"inf\", \"-inf\" or \"NaN\"")
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Float, E> {
                Ok(Float(value))
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Float, E> {
                Ok(Float(value as f64))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Float, E> {
                Ok(Float(value as f64))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Float, E> {
                let number = text.parse().ok().filter(|x: &f64| !x.is_finite());
                number.map(Float).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Number)
    }
}
