//! What the fuzzers in `fuzz/` run on the bytes that they make: a test for each, also run with few bytes on every
//! build.

use crate::choices::{Bytes, Choices};
use crate::sessions::{Marks, Session, session_of};
use crate::variations::places_don_t_show;
use crate::{layouts, patterns};
use retape_core::ops::{Op, Sample};
use retape_core::{Device, meta};
use std::collections::HashMap;

/// Shape, stride and broadcast arithmetic against the model.
pub fn layout(bytes: &[u8]) {
    let mut choices = Bytes::new(bytes);
    match choices.throw(4) {
        0 | 1 => layouts::views(&mut choices),
        2 => layouts::broadcasts(&mut choices),
        _ => layouts::windows(&mut choices),
    }
}

thread_local! {
    static SAMPLES: Vec<Sample> = Op::all_samples();
}

/// One op on operands that lie anywhere: see [`places_don_t_show`].
pub fn ops(bytes: &[u8]) {
    let device = retape_cpu::device_with_threads(1).expect("the CPU is there");
    SAMPLES.with(|samples| places_don_t_show(&device, samples, &mut Bytes::new(bytes)));
}

/// A session on a tape, with its passes, under no marks, lossless ones and all: see [`check_session`].
pub fn tape(bytes: &[u8]) {
    let device = retape_cpu::device_with_threads(1).expect("the CPU is there");
    check_session(&device, |device, marks| session_of(device, bytes, 60, marks).unwrap_or_else(|e| panic!("{e}")));
}

/// Runs a session under no marks, lossless ones and all, on the CPU and dry: the same memory events in both, nothing
/// left, each loss one gradient however often it is asked for, and that of no marks where marks lose nothing. Returns
/// how many passes there were.
pub fn check_session(device: &Device, session: impl Fn(&Device, Marks) -> Session) -> usize {
    let (mut passes, mut plain) = (0, None);
    for marks in [Marks::None, Marks::Lossless, Marks::All] {
        let (real, dry) = (session(device, marks), session(&meta(), marks));
        assert_eq!((real.peak, real.fingerprint, real.left), (dry.peak, dry.fingerprint, 0), "{marks:?}");
        let mut first = HashMap::new();
        for (loss, gradients) in &real.passes {
            assert_eq!(first.entry(*loss).or_insert(gradients), &gradients, "{marks:?}, loss {loss}");
        }
        passes += real.passes.len();
        let plain = plain.get_or_insert_with(|| real.passes.clone());
        assert!(marks == Marks::All || *plain == real.passes, "{marks:?}: other gradients than without marks");
    }
    passes
}

/// Rules, patterns, policies and files of rules.
pub fn rules(bytes: &[u8]) {
    let mut choices = Bytes::new(bytes);
    match choices.throw(3) {
        0 => patterns::texts(&String::from_utf8_lossy(&bytes[bytes.len().min(1)..])),
        1 => patterns::globs(&mut choices),
        _ => patterns::rule_texts(&mut choices),
    }
}
