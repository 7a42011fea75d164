//! Training on CUDA: the golden run of PyTorch, mixed precision, every preset, a budget, and the same bits from run to run.

use retape_core::{DType, Device, Gradients, Policy, Tape, TapeOptions, meta};
use retape_cuda_emulator::device;
use retape_nn::{AdamW, AttentionForm, GptConfig, LossScaler, Parameter};
use retape_policy::{Context, PRESETS};
use retape_tests::gpt_curve::{Golden, compare_curve};
use std::rc::Rc;

const FORMS: [AttentionForm; 2] = [AttentionForm::Flash, AttentionForm::Explicit];

/// The golden curve in f32, within the CPU's own tolerance.
#[test]
fn f32_follows_the_golden_curve() {
    let golden = Golden::open(&retape_cpu::device());
    for form in FORMS {
        compare_curve(&device(), &golden, DType::F32, form, "init", "f32.all", "loss");
    }
}
