//! Whole-system tests of retape; see `tests/`.
