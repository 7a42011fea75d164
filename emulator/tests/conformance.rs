//! The CUDA backend against the registry of ops, as every device is: each op that has CUDA kernels, in every float
//! dtype.

use retape_core::ops::{Op, Sample};
use retape_core::{DType, Mark};
use retape_cuda_emulator::device;
use retape_tests::SampleMarks;
use retape_tests::conformance::{
    FLOATS, Refused, differences_from_f64, far_out_samples, marks_don_t_show, outputs_are_rounded_once,
    strides_don_t_show,
};

/// Ops without CUDA kernels, as docs/cuda.md lists them. It is an error if another one is refused, and if one of these
/// isn't.
const REFUSED: &[&str] = &[];

fn check(refused: Refused) {
    let expected: Refused = REFUSED.iter().map(|&op| op.to_owned()).collect();
    assert_eq!(refused, expected);
}

#[test]
fn f64_agrees_with_the_cpu() {
    check(outputs_are_rounded_once(&device(), &retape_cpu::device(), &[DType::F64], false));
}

#[test]
fn f32_agrees_with_the_cpu_in_f64() {
    check(outputs_are_rounded_once(&device(), &retape_cpu::device(), &[DType::F32], false));
}

#[test]
fn sixteen_bits_are_rounded_once() {
    check(outputs_are_rounded_once(&device(), &retape_cpu::device(), &[DType::BF16, DType::F16], true));
}

fn agree_with_f64(dtypes: &[DType], samples: &[Sample]) {
    let differences = differences_from_f64(&device(), &retape_cpu::device(), dtypes, samples);
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn every_sample_agrees_with_f64() {
    agree_with_f64(&[DType::F32, DType::BF16, DType::F16], &Op::all_samples());
}

/// Large, saturated and tiny numbers.
#[test]
fn every_op_agrees_with_f64_far_out() {
    agree_with_f64(&[DType::F32], &far_out_samples(DType::F32));
}

/// Inputs and outputs marked alike, in turn: bits, bytes, nothing left, equal passes.
#[test]
fn marks_don_t_show_in_f32() {
    marks(DType::F32);
}

#[test]
fn marks_don_t_show_in_bf16() {
    marks(DType::BF16);
}

fn marks(dtype: DType) {
    let marks = Mark::all().filter(|&mark| mark != Mark::Keep);
    let pairs = marks.map(|mark| SampleMarks { inputs: Some(mark), outputs: Some(mark) });
    check(marks_don_t_show(&device(), &[dtype], &pairs.collect::<Vec<_>>()));
}

#[test]
fn strided_inputs_give_the_same_numbers() {
    // A strided operand may be read by another kernel, which adds in another order.
    strides_don_t_show(&device(), &FLOATS[..2], 1e-5);
}
