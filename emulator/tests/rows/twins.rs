//! Tensors that exist twice, and kernels run on both.

use half::{bf16, f16};
use retape_core::{DType, Device, Element, Error, Kernel, MemoryKind, Tensor};
use retape_tests::writable;
use std::sync::OnceLock;

pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// The CUDA device that all tests share.
pub fn cuda() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(retape_cuda_emulator::device).clone()
}

fn cpu() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(retape_cpu::device).clone()
}

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// In row-major order.
    Plain,
    /// With its last two dimensions exchanged.
    Turned,
    /// Its last dimension inside a longer one, with NaN around.
    Inside,
    /// Its first dimension repeated.
    Repeated,
}

pub const LIES: [Lie; 4] = [Lie::Plain, Lie::Turned, Lie::Inside, Lie::Repeated];

/// The same numbers on the CUDA device, in a dtype, and on the CPU, in f64.
#[derive(Debug, Clone)]
pub struct Twin {
    pub ours: Tensor,
    pub theirs: Tensor,
}

/// Numbers in [-1, 1), a pure function of the seed.
pub fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// The bytes of these values in a dtype, and the values that they are there.
fn rounded(values: &[f64], dtype: DType) -> (Vec<u8>, Vec<f64>) {
    let all = || values.iter();
    match dtype {
        DType::F64 => (f64::to_bytes(values), values.to_vec()),
        DType::F32 => {
            let x: Vec<f32> = all().map(|&v| v as f32).collect();
            (f32::to_bytes(&x), x.iter().map(|&v| v.into()).collect())
        }
        DType::BF16 => {
            let x: Vec<bf16> = all().map(|&v| bf16::from_f64(v)).collect();
            (bf16::to_bytes(&x), x.iter().map(|&v| v.into()).collect())
        }
        _ => {
            let x: Vec<f16> = all().map(|&v| f16::from_f64(v)).collect();
            (f16::to_bytes(&x), x.iter().map(|&v| v.into()).collect())
        }
    }
}

impl Twin {
    /// A float tensor of these values in row-major order.
    pub fn of(shape: &[usize], values: &[f64], dtype: DType) -> Twin {
        let (bytes, exact) = rounded(values, dtype);
        Twin {
            ours: Tensor::from_bytes(&cuda(), shape, dtype, &bytes).unwrap(),
            theirs: Tensor::from_slice(&cpu(), shape, &exact).unwrap(),
        }
    }

    /// One that lies as said (as far as its shape allows).
    pub fn lying(lie: Lie, shape: &[usize], values: &[f64], dtype: DType) -> Twin {
        let rank = shape.len();
        match lie {
            Lie::Turned if rank >= 2 => {
                let mut turned = shape.to_vec();
                turned.swap(rank - 2, rank - 1);
                let plain = Tensor::from_slice(&cpu(), shape, values).unwrap().transpose(rank - 2, rank - 1).unwrap();
                let values: Vec<f64> = plain.copy(MemoryKind::Input).unwrap().to_vec().unwrap();
                Twin::of(&turned, &values, dtype).map(|t| t.transpose(rank - 2, rank - 1).unwrap())
            }
            Lie::Inside if rank >= 1 => {
                let last = shape[rank - 1];
                let mut wide = Vec::new();
                for row in values.chunks(last.max(1)) {
                    wide.extend([f64::NAN; 3]);
                    wide.extend_from_slice(row);
                    wide.extend([f64::NAN; 2]);
                }
                let mut around = shape.to_vec();
                around[rank - 1] += 5;
                wide.resize(around.iter().product(), f64::NAN);
                Twin::of(&around, &wide, dtype).map(|t| t.narrow(rank - 1, 3, last).unwrap())
            }
            Lie::Repeated if rank >= 1 && shape[0] > 0 => {
                let mut one = shape.to_vec();
                one[0] = 1;
                let len = one.iter().product();
                Twin::of(&one, &values[..len], dtype).map(|t| t.expand(shape).unwrap())
            }
            _ => Twin::of(shape, values, dtype),
        }
    }

    pub fn random(lie: Lie, shape: &[usize], seed: u64, dtype: DType) -> Twin {
        Twin::lying(lie, shape, &numbers(seed, shape.iter().product()), dtype)
    }

    /// Integers; i64 on the CPU.
    pub fn integers(shape: &[usize], values: &[i64], dtype: DType) -> Twin {
        let narrow: Vec<i32> = values.iter().map(|&v| v as i32).collect();
        Twin {
            ours: match dtype {
                DType::I32 => Tensor::from_slice(&cuda(), shape, &narrow).unwrap(),
                _ => Tensor::from_slice(&cuda(), shape, values).unwrap(),
            },
            theirs: Tensor::from_slice(&cpu(), shape, values).unwrap(),
        }
    }

    pub fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Twin {
        Twin { ours: f(&self.ours), theirs: f(&self.theirs) }
    }

    pub fn shape(&self) -> &[usize] {
        self.ours.shape()
    }
}

/// One side of a comparison: a device, and the dtype of float outputs there.
#[derive(Debug)]
pub struct Side {
    pub device: Device,
    pub dtype: DType,
    inputs: Vec<Tensor>,
}

impl Side {
    /// Input number i.
    pub fn input(&self, i: usize) -> &Tensor {
        &self.inputs[i]
    }

    /// An output, full of NaN.
    pub fn out(&self, shape: &[usize]) -> Tensor {
        self.filled(shape, self.dtype)
    }

    /// An output of statistics.
    pub fn stat(&self, shape: &[usize]) -> Tensor {
        self.filled(shape, if self.dtype == DType::F64 { DType::F64 } else { DType::F32 })
    }

    pub fn filled(&self, shape: &[usize], dtype: DType) -> Tensor {
        Tensor::full(&self.device, shape, dtype, f64::NAN).unwrap()
    }

    /// A contiguous copy of an input, to be written over, also by its views.
    pub fn copy_of(&self, i: usize) -> Tensor {
        writable(&self.inputs[i])
    }

    pub fn run<'a>(&self, kernel: impl Into<Kernel<'a>>) {
        self.device.run(kernel).unwrap();
    }

    pub fn error<'a>(&self, kernel: impl Into<Kernel<'a>>) -> Error {
        self.device.run(kernel).unwrap_err()
    }
}

fn ours(dtype: DType, inputs: &[&Twin]) -> Side {
    Side { device: cuda(), dtype, inputs: inputs.iter().map(|t| t.ours.clone()).collect() }
}

fn theirs(inputs: &[&Twin]) -> Side {
    Side { device: cpu(), dtype: DType::F64, inputs: inputs.iter().map(|t| t.theirs.clone()).collect() }
}

/// Half the distance of 1 to the next number.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-53),
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-11),
    }
}

/// Runs on both devices and compares what comes out: within one rounding of the output's dtype, and `slack` times f32's
/// (f64's) own relative to the largest number, for inputs of about 1; NaN and infinity where the CPU has them; the same
/// bits the second time.
pub fn compare(label: &str, dtype: DType, slack: f64, inputs: &[&Twin], run: impl Fn(&Side) -> Vec<Tensor>) {
    let outputs = run(&ours(dtype, inputs));
    let again = run(&ours(dtype, inputs));
    let expected = run(&theirs(inputs));
    for (i, (ours, theirs)) in outputs.iter().zip(&expected).enumerate() {
        assert_eq!(
            ours.to_bytes().unwrap(),
            again[i].to_bytes().unwrap(),
            "{label} {dtype}: output {i} differs by run"
        );
        let (a, e) = (ours.to_f64_vec().unwrap(), theirs.to_f64_vec().unwrap());
        assert_eq!(a.len(), e.len(), "{label} {dtype}: output {i}");
        let largest = e.iter().filter(|x| x.is_finite()).fold(0.0, |m: f64, x| m.max(x.abs()));
        let own = if dtype == DType::F64 { unit(DType::F64) } else { unit(DType::F32) };
        for (k, (&a, &e)) in a.iter().zip(&e).enumerate() {
            let allowed = if ours.dtype().is_float() {
                // What is too small for a normal f16 is rounded more coarsely.
                1.01 * unit(ours.dtype()) * e.abs()
                    + slack * own * largest.max(0.1)
                    + if ours.dtype() == DType::F16 { 3e-8 } else { 0.0 }
            } else {
                0.0
            };
            let overflow = ours.dtype() == DType::F16 && e.abs() > 65_519.0 && a == e.signum() * f64::INFINITY;
            let same = a == e || a.is_nan() && e.is_nan() || (a - e).abs() <= allowed || overflow;
            assert!(same, "{label} {dtype}: output {i}, element {k} is {a:e}, should be {e:e} +- {allowed:e}");
        }
    }
}

/// The error on both devices is the same.
pub fn compare_errors(label: &str, inputs: &[&Twin], kernel: impl Fn(&Side) -> Error) {
    let (ours, theirs) = (kernel(&ours(DType::F32, inputs)), kernel(&theirs(inputs)));
    assert_eq!(ours.to_string(), theirs.to_string(), "{label}");
}
