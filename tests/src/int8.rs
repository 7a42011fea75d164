//! Int8 groups of every magnitude.

use crate::{floats, numbers};
use retape_core::kernel::{self, RandomStream};
use retape_core::{DType, Device, MemoryKind, Tensor};

/// Bits of the mantissa behind the leading 1, and the exponents of the least normal and of the largest number.
fn format(dtype: DType) -> (i32, i32, i32) {
    match dtype {
        DType::F64 => (52, -1022, 1023),
        DType::F32 => (23, -126, 127),
        DType::BF16 => (7, -126, 127),
        _ => (10, -14, 15),
    }
}

/// x 2^e, where 2^e itself may be out of range.
fn scaled(x: f64, e: i32) -> f64 {
    x * 2f64.powi(e / 2) * 2f64.powi(e - e / 2)
}

/// The distance of a dtype's neighbours at x.
pub fn spacing(x: f64, dtype: DType) -> f64 {
    let (mantissa, least, _) = format(dtype);
    let exponent = if x == 0.0 { least } else { (x.abs().log2().floor() as i32).max(least) };
    scaled(1.0, exponent - mantissa)
}

/// Rows of `width`: of one magnitude each, from the least number to the largest, some mixed, some at an end.
pub fn rows(dtype: DType, width: usize, count: usize) -> Vec<f64> {
    let (mantissa, least, most) = format(dtype);
    let largest = scaled(2.0 - scaled(1.0, -mantissa), most);
    let (low, span) = (least - mantissa, most - least + mantissa);
    let mut values = Vec::new();
    for row in 0..count {
        let random = numbers(row as u64, 2 * width, -1.0, 1.0);
        let exponent = |part: f64| low + (part.abs() * f64::from(span)) as i32;
        let of_row = exponent(numbers(777, count, 0.0, 1.0)[row]);
        values.extend((0..width).map(|i| match row % 8 {
            0 => scaled(random[i], exponent(random[width + i])),
            1 => largest * random[i].signum(),
            2 => scaled(1.0, low) * (random[i] * (1 << (row % 10)) as f64).round(),
            3 => largest * random[i],
            _ => scaled(2.0 * random[i], of_row),
        }));
    }
    values
}

/// A finite group comes back finite, and its largest magnitude exactly. Each element is off by at most half a step (a
/// whole one if rounded by chance) and the rounding of the result. A step is the largest magnitude / 127.
pub fn every_group_comes_back(device: &Device) {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for (width, group) in [(64, 64), (70, 33), (5, 1), (300, 300)] {
            let count = 200;
            let x = floats(device, &[count, width], &rows(dtype, width, count), dtype);
            let groups = width.div_ceil(group);
            for rounding in [None, Some(RandomStream { seed: 5, counter: 1 })] {
                let uninit = |shape: &[usize], dtype| Tensor::uninit(device, shape, dtype, MemoryKind::Input).unwrap();
                let (q, out) = (uninit(x.shape(), DType::U8), uninit(x.shape(), dtype));
                let scales = uninit(&[count, groups], dtype.computed_in());

                device.run(kernel::Quantize { x: &x, group, rounding, q: &q, scales: &scales }).unwrap();
                device.run(kernel::Dequantize { q: &q, scales: &scales, group, out: &out }).unwrap();
                let (x, out) = (x.to_f64_vec().unwrap(), out.to_f64_vec().unwrap());
                let steps = if rounding.is_some() { 1.0 } else { 0.5 };
                for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                    for (x, out) in x.chunks(group).zip(out.chunks(group)) {
                        let absmax = x.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                        for (&x, &y) in x.iter().zip(out) {
                            let what =
                                format!("{dtype}, groups of {group}, {rounding:?}: {x:e} of {absmax:e} is {y:e}");
                            assert!(y.is_finite() && (x.abs() < absmax || y == x), "{what}");
                            let allowed = (steps + 5e-5) * (absmax / 127.0) + 0.5 * spacing(y, dtype);
                            assert!((x - y).abs() <= allowed, "{what}, off by {:e} of {allowed:e}", (x - y).abs());
                        }
                    }
                }
            }
        }
    }
}
