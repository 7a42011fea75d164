//! Fill and copy, from any dtype to any and between layouts, as on the CPU; and the conversions of 16-bit floats, for
//! every value, as crate `half` makes them.

use half::{bf16, f16};
use retape_core::kernel::RandomStream;
use retape_core::{DType, Device, Element, MemoryKind, Tensor};

const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

/// The same values, but for the bits of NaNs.
fn assert_same(ours: &Tensor, theirs: &Tensor, what: &str) {
    assert_eq!(ours.shape(), theirs.shape(), "{what}");
    if !ours.dtype().is_float() {
        return assert_eq!(ours.to_bytes().unwrap(), theirs.to_bytes().unwrap(), "{what}");
    }
    let (ours, theirs) = (ours.to_f64_vec().unwrap(), theirs.to_f64_vec().unwrap());
    for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{what}: {a} at {i}, not {b}");
    }
}

/// Values that conversions may stumble over.
fn hard_values(len: usize) -> Vec<f64> {
    let mut values = vec![0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 127.5, 255.0, 255.5, 256.0, -0.1, 65504.0, 65520.0, 65519.9];
    values.extend([
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1e-8,
        6e-8,
        5.960_464_477_539_063e-8,
        2.98e-8,
        1e-45,
        3.4e38,
    ]);
    values.extend([
        1e39,
        2147483647.0,
        2147483648.0,
        -2147483649.0,
        9.3e18,
        -9.3e18,
        f64::MAX,
        f64::MIN_POSITIVE,
        1e-310,
    ]);
    // Halfway between bf16s and between f16s, and next to that: one rounding is made, not two.
    for exact in [1.00390625, 1.01171875, 1.00048828125, 1.00146484375] {
        values.extend([exact, exact + 1e-12, exact - 1e-12]);
    }
    let stream = RandomStream { seed: 1, counter: 0 };
    let random = |i: u64| f64::from_bits(u64::from(stream.word(2 * i)) << 32 | u64::from(stream.word(2 * i + 1)));
    values.extend((0..len.saturating_sub(values.len()) as u64).map(random));
    values.truncate(len);
    values
}

/// A tensor of the dtype, made on the CPU, and its copy on our device.
fn both(device: &Device, shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    let values = hard_values(shape.iter().product());
    let theirs =
        Tensor::from_slice(&retape_cpu::device(), shape, &values).unwrap().cast(dtype, MemoryKind::Input).unwrap();
    let ours = Tensor::from_bytes(device, shape, dtype, &theirs.to_bytes().unwrap()).unwrap();
    (ours, theirs)
}

#[test]
fn fills() {
    let device = retape_cuda_emulator::device();
    for value in [0.0, -0.0, 1.0, -2.5, 300.0, -1e10, 1e-8, f64::NAN, f64::INFINITY] {
        for dtype in DTYPES {
            for shape in [&[3, 5][..], &[], &[0, 4], &[1000]] {
                let ours = Tensor::full(&device, shape, dtype, value).unwrap();
                let theirs = Tensor::full(&retape_cpu::device(), shape, dtype, value).unwrap();
                assert_same(&ours, &theirs, &format!("{value} as {dtype}"));
            }
        }
    }
}

#[test]
fn copies_between_all_dtypes_and_layouts() {
    let device = retape_cuda_emulator::device();
    type View = fn(&Tensor) -> Tensor;
    let views: [(&str, View); 6] = [
        ("whole", Tensor::clone),
        ("transposed", |x| x.transpose(0, 1).unwrap()),
        ("narrowed, at an odd offset", |x| x.narrow(1, 3, 13).unwrap()),
        ("with steps", |x| x.slice(1, 1, 11, 3).unwrap()),
        ("expanded", |x| x.narrow(0, 1, 1).unwrap().expand(&[4, 35]).unwrap()),
        ("empty", |x| x.narrow(0, 2, 0).unwrap()),
    ];
    for from in DTYPES {
        let (ours, theirs) = both(&device, &[9, 35], from);
        for (name, view) in views {
            for to in DTYPES {
                let cast = |x: &Tensor| view(x).cast(to, MemoryKind::Input).unwrap().copy(MemoryKind::Input).unwrap();
                assert_same(&cast(&ours), &cast(&theirs), &format!("{from} to {to}, {name}"));
            }
            let copied = view(&ours).contiguous(MemoryKind::Input).unwrap();
            assert_same(&copied, &view(&theirs).contiguous(MemoryKind::Input).unwrap(), &format!("{from}, {name}"));
        }
    }
}

fn cast<T: Element, U: Element>(device: &Device, values: &[T]) -> Vec<U> {
    let tensor = Tensor::from_slice(device, &[values.len()], values).unwrap();
    tensor.cast(U::DTYPE, MemoryKind::Input).unwrap().to_vec::<U>().unwrap()
}

#[test]
fn all_halves_widen_and_come_back() {
    let device = retape_cuda_emulator::device();
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let all: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
    for (&x, wide) in all.iter().zip(cast::<bf16, f32>(&device, &all)) {
        assert!(wide.to_bits() == x.to_f32().to_bits() || (wide.is_nan() && x.is_nan()), "{x:?} is {wide}");
    }
    let back = cast::<f32, bf16>(&device, &all.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    assert!(all.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())));
    let all: Vec<f16> = bits.iter().map(|&bits| f16::from_bits(bits)).collect();
    for (&x, wide) in all.iter().zip(cast::<f16, f32>(&device, &all)) {
        assert!(wide.to_bits() == x.to_f32().to_bits() || (wide.is_nan() && x.is_nan()), "{x:?} is {wide}");
    }
    let back = cast::<f32, f16>(&device, &all.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    assert!(all.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())));
}

/// Floats of every sign and exponent, around each place where rounding turns.
#[test]
fn floats_narrow_to_nearest_even() {
    let device = retape_cuda_emulator::device();
    let mut values = Vec::new();
    for top in 0..=u16::MAX {
        // The low bits around halves of a bf16's last place; a f16's lies at bit 13, and higher for denormals.
        for low in [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff] {
            values.push(f32::from_bits(u32::from(top) << 16 | low));
        }
    }
    for ((&x, b), h) in values.iter().zip(cast::<f32, bf16>(&device, &values)).zip(cast::<f32, f16>(&device, &values)) {
        let (expected_b, expected_h) = (bf16::from_f32(x), f16::from_f32(x));
        assert!(b.to_bits() == expected_b.to_bits() || (x.is_nan() && b.is_nan()), "{x:e}: {b}, not {expected_b}");
        assert!(h.to_bits() == expected_h.to_bits() || (x.is_nan() && h.is_nan()), "{x:e}: {h}, not {expected_h}");
    }
}
