//! Random numbers, and marks by number.

use retape_core::{Decision, Mark, Origin, Policy, RuleInfo, Site};

/// A sequence of random numbers for each seed (an xorshift generator).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// 0 .. sides - 1.
    pub fn throw(&mut self, sides: usize) -> usize {
        for shift in [13, 7, 17] {
            self.0 ^= if shift == 7 { self.0 >> shift } else { self.0 << shift };
        }
        (self.0 >> 33) as usize % sides
    }
}

/// Marks by the number of the value.
#[derive(Debug)]
pub struct Marks {
    marks: Vec<Option<Mark>>,
    rules: [RuleInfo; 1],
}

impl Marks {
    pub fn new(marks: &[(u64, Mark)]) -> Marks {
        let mut of = vec![None; marks.iter().map(|m| m.0 as usize + 1).max().unwrap_or(0)];
        marks.iter().for_each(|&(id, mark)| of[id as usize] = Some(mark));
        Marks { marks: of, rules: [RuleInfo { name: "test".into(), origin: Origin::Preset }] }
    }
}

impl Policy for Marks {
    fn mark(&self, site: &Site<'_>) -> Option<Decision> {
        Some(Decision { mark: self.marks.get(site.id as usize).copied().flatten()?, rule: 0 })
    }
    fn rules(&self) -> &[RuleInfo] {
        &self.rules
    }
}
