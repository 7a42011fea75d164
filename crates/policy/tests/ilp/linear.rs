//! Linear expressions.

use std::collections::BTreeMap;

/// A constant and a sum of variables, each with its factor.
#[derive(Debug, Clone, Default)]
pub struct Linear {
    pub constant: f64,
    pub terms: BTreeMap<usize, f64>,
}

impl Linear {
    pub fn of(variable: usize) -> Linear {
        Linear { constant: 0.0, terms: [(variable, 1.0)].into() }
    }

    pub fn constant(constant: f64) -> Linear {
        Linear { constant, terms: BTreeMap::new() }
    }

    pub fn add(&mut self, factor: f64, other: &Linear) {
        self.constant += factor * other.constant;
        for (&variable, &f) in &other.terms {
            *self.terms.entry(variable).or_default() += factor * f;
        }
    }

    pub fn plus(mut self, factor: f64, other: &Linear) -> Linear {
        self.add(factor, other);
        self
    }

    pub fn at(&self, values: &[f64]) -> f64 {
        self.constant + self.terms.iter().map(|(&v, f)| f * values[v]).sum::<f64>()
    }

    /// Its largest value where all variables are in 0 ..= 1.
    pub fn most(&self) -> f64 {
        self.constant + self.terms.values().map(|f| f.max(0.0)).sum::<f64>()
    }
}
