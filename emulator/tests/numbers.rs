//! Numbers at the ends of their dtypes: casts, int8 groups, elementwise functions and losses.

use retape_core::Device;
use retape_tests::{casts, far, int8};
use std::sync::OnceLock;

fn cuda() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(retape_cuda_emulator::device).clone()
}

fn none(faults: Vec<String>) {
    let some: Vec<&str> = faults.iter().take(40).map(String::as_str).collect();
    assert!(some.is_empty(), "{} faults:\n{}", faults.len(), some.join("\n"));
}

#[test]
fn casts_round_once() {
    casts::every_pair_rounds_once(&cuda());
    casts::a_fill_rounds_once(&cuda());
}

#[test]
fn int8_groups_of_every_magnitude() {
    int8::every_group_comes_back(&cuda());
}

#[test]
fn elementwise_functions() {
    none(far::unary_functions(&cuda()));
    none(far::functions_of_more(&cuda()));
    none(far::losses(&cuda()));
}
