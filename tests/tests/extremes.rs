//! Large, saturated and tiny numbers: what f32, bf16 and f16 give is what f64 gives of the same inputs, values and
//! gradients.

use retape_core::DType;
use retape_core::ops::{Op, Sample};
use retape_tests::conformance::{differences_from_f64, far_out_samples};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check(samples: impl Fn(DType) -> Vec<Sample>) {
    let device = retape_cpu::device();
    let of = |dtype| differences_from_f64(&device, &device, &[dtype], &samples(dtype));
    let differences: Vec<String> = DTYPES.into_iter().flat_map(of).collect();
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn every_sample_agrees_with_f64() {
    check(|_| Op::all_samples());
}

#[test]
fn every_op_agrees_with_f64_far_out() {
    check(far_out_samples);
}
