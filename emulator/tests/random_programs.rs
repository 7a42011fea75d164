//! Random programs under random marks, held handles, late marks and segments on CUDA: equal bits, the dry run's bytes
//! event by event, nothing left.

use retape_cuda_emulator::device;
use retape_tests::accumulation::{USES, many_uses_are_rounded_once, parts_add_up};
use retape_tests::programs::{lossy_marks_are_steady, marks_never_show};

#[test]
fn marks_handles_and_late_marks_never_show_in_the_gradients() {
    marks_never_show(&device(), 40);
}

#[test]
fn lossy_gradients_don_t_depend_on_handles_or_passes() {
    lossy_marks_are_steady(&device(), 40);
}

#[test]
fn gradients_of_many_uses_add_up() {
    many_uses_are_rounded_once(&device(), &[&USES]);
    parts_add_up(&device());
}
