//! Large, saturated and tiny numbers: what f32, bf16 and f16 give is what f64 gives of the same inputs, values and gradients.

use retape_core::DType;
use retape_core::ops::{Op, Sample};
use retape_tests::conformance::differences_from_f64;
use retape_tests::variations::filled;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check(samples: &[Sample]) {
    let device = retape_cpu::device();
    let differences = differences_from_f64(&device, &device, &DTYPES, samples);
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn every_sample_agrees_with_f64() {
    check(&Op::all_samples());
}

/// Every float input of every sample filled with such numbers.
#[test]
fn every_op_agrees_with_f64_far_out() {
    let lists: [&[f64]; 10] = [
        &[1e19, -2e19, 3e19, 5e18, 7e18],
        &[1e-25, -2e-25, 3e-25, 5e-26],
        &[1e8],
        &[-1e9],
        &[1e9, 1e9 - 64.0, 1e9 + 128.0],
        &[1e4, -1e4, 9e3],
        &[-1e4],
        &[f32::MIN as f64],
        &[f64::NEG_INFINITY],
        &[6e4, -6e4, 5.9e4],
    ];
    let samples: Vec<Sample> =
        Op::all_samples().iter().flat_map(|s| lists.iter().map(|values| filled(s, values))).collect();
    check(&samples);
}
