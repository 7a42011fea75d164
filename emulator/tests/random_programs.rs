//! Random programs under random marks, held handles, late marks and segments on CUDA: equal bits, the dry run's bytes event by
//! event, nothing left.

use retape_cuda_emulator::device;
use retape_tests::programs::{int8_is_steady, marks_never_show};

#[test]
fn marks_handles_and_late_marks_never_show_in_the_gradients() {
    marks_never_show(&device(), 40);
}

#[test]
fn int8_gradients_don_t_depend_on_handles_or_passes() {
    int8_is_steady(&device(), 40);
}
