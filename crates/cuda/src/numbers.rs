//! The numbers that kernels have for functions, by their names there.

#![allow(dead_code)] // each is one of a list

// Written by build.rs: a module for each of its `ENUMS`.
include!(concat!(env!("OUT_DIR"), "/numbers.rs"));

/// Whether a table of functions and the enum of their kernel have the same names in the same order. `LogSigmoid` is
/// `LOG_SIGMOID` there.
pub(crate) const fn agree(variants: &[&str], names: &[&str]) -> bool {
    let mut i = 0;
    while i < variants.len() && i < names.len() {
        if !same(variants[i].as_bytes(), names[i].as_bytes()) {
            return false;
        }
        i += 1;
    }
    variants.len() == names.len()
}

const fn same(mut variant: &[u8], mut name: &[u8]) -> bool {
    loop {
        match (variant, name) {
            ([], []) => return true,
            (_, [b'_', rest @ ..]) => name = rest,
            ([a, more @ ..], [b, rest @ ..]) if a.eq_ignore_ascii_case(b) => (variant, name) = (more, rest),
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::agree;

    #[test]
    fn names_and_order_count() {
        let variants = ["LogSigmoid", "Log1p", "Pow"];
        assert!(agree(&variants, &["LOG_SIGMOID", "LOG1P", "POW"]));
        for other in [
            &["LOG1P", "LOG_SIGMOID", "POW"][..],
            &["LOG_SIGMOID", "LOG1P"],
            &["LOG_SIGMOID", "LOG1P", "POW", "SIN"],
            &["LOG_SIGMOID", "LOG1P", "POWER"],
            &["LOG_SIGMOID", "LOG1P", "PO"],
        ] {
            assert!(!agree(&variants, other), "{other:?}");
        }
    }
}
