//! What the tests share: tensors from f64 values in every kind of view, poisoned outputs, comparisons.
#![allow(dead_code)]

use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Device, Kernel, MemoryKind, Tensor};

pub const FLOATS: [DType; 2] = [DType::F32, DType::F64];
pub const STREAM: RandomStream = RandomStream { seed: 42, counter: 3 };

pub fn device(threads: usize) -> Device {
    retape_cpu::device_with_threads(threads).unwrap()
}

pub fn run<'a>(device: &Device, kernel: impl Into<Kernel<'a>>) {
    device.run(kernel).unwrap();
}

/// The workspace of a scatter-add.
pub fn order_of(source: &Tensor, indices: &[&Tensor], out: &Tensor) -> Tensor {
    let len = retape_core::kernel::meeting(source, indices, out);
    Tensor::uninit(source.device(), &[len], DType::I64, MemoryKind::Workspace).unwrap()
}

/// Repeatable numbers in about [-2, 2].
pub fn values(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) as f64 / (1u64 << 31) as f64 - 0.5) * 4.0
    };
    // Numbers that f32 holds exactly, so that both dtypes see the same.
    (0..n).map(|_| next() as f32 as f64).collect()
}

/// A tensor that kernels may write.
pub fn tensor(device: &Device, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let (x, out) =
        (Tensor::from_slice(device, shape, values), Tensor::uninit(device, shape, dtype, MemoryKind::Input).unwrap());
    run(device, kernel::Copy { x: &x.unwrap(), out: &out });
    out
}

/// The same values as a contiguous tensor, as a view with its dimensions stored in reverse, and as the inside of a
/// larger tensor full of NaN.
pub fn views(device: &Device, dtype: DType, shape: &[usize], values: &[f64]) -> Vec<Tensor> {
    let plain = tensor(device, dtype, shape, values);
    let order: Vec<usize> = (0..shape.len()).rev().collect();
    let turned = plain.permute(&order).unwrap().copy(MemoryKind::Input).unwrap().permute(&order).unwrap();
    let padded: Vec<usize> = shape.iter().map(|n| n + 2).collect();
    let nan = Tensor::full(device, &padded, dtype, f64::NAN).unwrap();
    let inside = shape.iter().enumerate().fold(nan, |t, (d, &n)| t.narrow(d, 1, n).unwrap());
    run(device, kernel::Copy { x: &plain, out: &inside });
    vec![plain, turned, inside]
}

/// An output full of NaN.
pub fn poisoned(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::full(device, shape, dtype, f64::NAN).unwrap()
}

pub fn close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let got = got.to_f64_vec().unwrap();
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * (1.0 + w.abs());
        assert!(same, "{what}: element {i} is {g}, should be {w}");
    }
}

pub fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-12 } else { 2e-6 }
}

/// Runs the same on 1, 2 and 3 threads and several times: all must give the same bytes.
pub fn same_bits(what: &str, compute: impl Fn(&Device) -> Vec<Tensor>) {
    let mut first: Option<Vec<Vec<u8>>> = None;
    for threads in [1, 2, 3] {
        let device = device(threads);
        for _ in 0..if threads == 2 { 20 } else { 2 } {
            let bytes: Vec<_> = compute(&device).iter().map(|t| t.to_bytes().unwrap()).collect();
            assert!(first.get_or_insert_with(|| bytes.clone()) == &bytes, "{what}: other bits with {threads} threads");
        }
    }
}
