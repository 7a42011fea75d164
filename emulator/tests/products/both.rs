//! Tensors that lie alike on the two devices.

use retape_core::{DType, Device, Kernel, MemoryKind, Tensor, kernel};

/// The CUDA device under test and the CPU.
pub struct Both {
    pub cuda: Device,
    pub cpu: Device,
}

/// How a tensor lies in its storage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lie {
    Plain,
    /// The last two dimensions stored the other way round.
    Transposed,
    /// Inside a larger tensor full of NaN, this much longer in the last dimension and 1 in the others.
    Inside(usize),
    /// Both.
    TransposedInside(usize),
    /// Every second element of the last dimension, NaN between them.
    Strided,
    /// One matrix for the whole of the first dimension.
    Expanded,
}

pub fn both() -> Both {
    Both { cuda: retape_cuda_emulator::device(), cpu: retape_cpu::device() }
}

/// Repeatable numbers in [-1, 1).
pub fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

impl Both {
    /// These values on CUDA and on the CPU.
    pub fn tensors(&self, lie: Lie, shape: &[usize], dtype: DType, values: &[f64]) -> [Tensor; 2] {
        let (rank, cpu) = (shape.len(), &self.cpu);
        let turned = |t: &Tensor| t.transpose(rank - 2, rank - 1).unwrap();
        let whole = Tensor::from_slice(cpu, shape, values).unwrap().cast(dtype, MemoryKind::Input).unwrap();
        let inside = |of: &Tensor, more: usize| {
            let sizes = of.shape().iter().enumerate().map(|(d, n)| n + if d + 1 == rank { more } else { 1 });
            let stored = Tensor::full(cpu, &sizes.collect::<Vec<_>>(), dtype, f64::NAN).unwrap();
            cpu.run(kernel::Copy { x: of, out: &narrowed(&stored, of.shape()) }).unwrap();
            stored
        };
        match lie {
            Lie::Plain => self.stored(&whole, Tensor::clone),
            Lie::Transposed => self.stored(&turned(&whole).contiguous(MemoryKind::Input).unwrap(), turned),
            Lie::Inside(more) => self.stored(&inside(&whole, more), |t| narrowed(t, shape)),
            Lie::TransposedInside(more) => {
                let of = turned(&whole);
                self.stored(&inside(&of, more), |t| turned(&narrowed(t, of.shape())))
            }
            Lie::Strided => {
                let mut sizes = shape.to_vec();
                sizes[rank - 1] *= 2;
                let stored = Tensor::full(cpu, &sizes, dtype, f64::NAN).unwrap();
                let every_second = |t: &Tensor| t.slice(rank - 1, 0, shape[rank - 1], 2).unwrap();
                cpu.run(kernel::Copy { x: &whole, out: &every_second(&stored) }).unwrap();
                self.stored(&stored, every_second)
            }
            Lie::Expanded => {
                let first = whole.narrow(0, 0, shape[0].min(1)).unwrap().contiguous(MemoryKind::Input).unwrap();
                self.stored(&first, |t| t.expand(shape).unwrap())
            }
        }
    }

    /// The view of the same bytes on both.
    fn stored(&self, stored: &Tensor, view: impl Fn(&Tensor) -> Tensor) -> [Tensor; 2] {
        let bytes = stored.to_bytes().unwrap();
        [&self.cuda, &self.cpu].map(|d| view(&Tensor::from_bytes(d, stored.shape(), stored.dtype(), &bytes).unwrap()))
    }

    /// New tensors full of NaN (77 where the dtype has none).
    pub fn outs(&self, shape: &[usize], dtype: DType) -> [Tensor; 2] {
        let value = if dtype.is_float() { f64::NAN } else { 77.0 };
        [&self.cuda, &self.cpu].map(|device| Tensor::full(device, shape, dtype, value).unwrap())
    }

    pub fn run<'a>(&self, cuda: impl Into<Kernel<'a>>, cpu: impl Into<Kernel<'a>>) {
        self.cuda.run(cuda).unwrap();
        self.cpu.run(cpu).unwrap();
    }
}

fn narrowed(t: &Tensor, shape: &[usize]) -> Tensor {
    shape.iter().enumerate().fold(t.clone(), |t, (d, &n)| t.narrow(d, t.shape()[d] - n, n).unwrap())
}

/// The largest relative error of rounding to this dtype.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.0,
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}

pub fn same_bytes(what: &str, [cuda, cpu]: &[Tensor; 2]) {
    let (ours, theirs) = (cuda.to_bytes().unwrap(), cpu.to_bytes().unwrap());
    let at = ours.iter().zip(&theirs).position(|(a, b)| a != b).map(|byte| byte / cuda.dtype().size());
    let value = |t: &Tensor| at.map(|at| t.to_f64_vec().unwrap()[at]);
    assert!(at.is_none(), "{what}: element {at:?} is {:?}, on the CPU {:?}", value(cuda), value(cpu));
}
