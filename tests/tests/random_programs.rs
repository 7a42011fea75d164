//! Random programs with random marks, held handles, late marks and segments: equal bits, equal bytes, nothing left.
//! `RETAPE_CASES` sets the number of programs (the soak runs thousands).

use retape_tests::fuzz::check_session;
use retape_tests::programs::{lossy_marks_are_steady, marks_never_show};
use retape_tests::sessions::session;
use retape_tests::traced::traces_are_exact;

fn cases() -> u64 {
    std::env::var("RETAPE_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(150)
}

#[test]
fn marks_handles_and_late_marks_never_show_in_the_gradients() {
    marks_never_show(&retape_cpu::device_with_threads(1).unwrap(), cases());
}

#[test]
fn lossy_gradients_don_t_depend_on_handles_or_passes() {
    lossy_marks_are_steady(&retape_cpu::device_with_threads(1).unwrap(), cases());
}

/// Passes between any other actions: the same loss gives the same bits each time, lossless marks the bits of none.
#[test]
fn a_session_gives_each_loss_one_gradient() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let mut passes = 0;
    for seed in 1..=cases() {
        passes += check_session(&device, |device, marks| {
            session(device, seed, 120, marks).unwrap_or_else(|e| panic!("seed {seed}, {marks:?}: {e}"))
        });
    }
    assert!(passes as u64 > 4 * cases(), "{passes} passes");
}

#[test]
fn a_trace_takes_the_memory_of_a_forward_that_leaves_things_behind() {
    traces_are_exact(&retape_cpu::device_with_threads(1).unwrap(), 2 * cases());
}
