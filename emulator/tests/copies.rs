//! Fill and copy, from any dtype to any, and between any layouts, as on the CPU.

use retape_core::{DType, Tensor};

#[test]
fn fills() {
    let device = retape_cuda_emulator::device();
    for value in [0.0, -0.0, 1.0, -2.5, 300.0, f64::INFINITY] {
        for dtype in DTYPES {
            let ours = Tensor::full(&device, &[3, 5], dtype, value).unwrap();
            let theirs = Tensor::full(&retape_cpu::device(), &[3, 5], dtype, value).unwrap();
            assert_eq!(ours.to_bytes().unwrap(), theirs.to_bytes().unwrap(), "{value} as {dtype}");
        }
    }
}

const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];
