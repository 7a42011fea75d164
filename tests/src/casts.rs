//! Conversions between all dtypes against exact integers: every number is (-1)^s m 2^e, and is rounded once.

use crate::numbers;
use retape_core::kernel::RandomStream;
use retape_core::{DType, Device, MemoryKind, Tensor};

/// What an element's bits say.
#[derive(Debug, Clone, Copy)]
enum Number {
    Nan,
    Infinite(bool),
    /// Sign, mantissa, exponent of 2.
    Finite(bool, u64, i32),
}

/// Bits of a float's mantissa (without the leading 1) and of its exponent.
fn format(dtype: DType) -> Option<(u32, u32)> {
    match dtype {
        DType::F64 => Some((52, 11)),
        DType::F32 => Some((23, 8)),
        DType::BF16 => Some((7, 8)),
        DType::F16 => Some((10, 5)),
        _ => None,
    }
}

/// The exponent of the least bit of subnormal numbers.
fn least(mantissa: u32, exponent: u32) -> i32 {
    2 - (1 << (exponent - 1)) - mantissa as i32
}

fn decode(dtype: DType, bits: u64) -> Number {
    let Some((mantissa, exponent)) = format(dtype) else {
        let value = match dtype {
            DType::I64 => bits as i64,
            DType::I32 => i64::from(bits as i32),
            _ => bits as i64,
        };
        return Number::Finite(value < 0, value.unsigned_abs(), 0);
    };
    let negative = bits >> (mantissa + exponent) != 0;
    let (fraction, biased) = (bits & ((1 << mantissa) - 1), bits >> mantissa & ((1 << exponent) - 1));
    match (biased, fraction) {
        (0, _) => Number::Finite(negative, fraction, least(mantissa, exponent)),
        (all, 0) if all == (1 << exponent) - 1 => Number::Infinite(negative),
        (all, _) if all == (1 << exponent) - 1 => Number::Nan,
        _ => Number::Finite(negative, fraction | 1 << mantissa, least(mantissa, exponent) + biased as i32 - 1),
    }
}

/// The bits of the nearest float, of two the even one; None for NaN.
fn nearest(number: Number, (mantissa, exponent): (u32, u32)) -> Option<u64> {
    let infinite = ((1u64 << exponent) - 1) << mantissa;
    let (negative, bits) = match number {
        Number::Nan => return None,
        Number::Infinite(negative) => (negative, infinite),
        Number::Finite(negative, 0, _) => (negative, 0),
        Number::Finite(negative, m, e) => {
            let least = least(mantissa, exponent);
            // The exponent of the last bit that stays.
            let last = (e + (64 - m.leading_zeros()) as i32 - (mantissa as i32 + 1)).max(least);
            let kept = match last - e {
                cut @ 1..=100 => {
                    let (whole, rest) = (u128::from(m) >> cut, u128::from(m) & ((1 << cut) - 1));
                    let half = 1u128 << (cut - 1);
                    (whole + u128::from(rest > half || rest == half && whole & 1 == 1)) as u64
                }
                ..=0 => m << (e - last),
                _ => 0,
            };
            // A subnormal number's bits are its mantissa; a carry goes into the exponent by itself.
            let bits = if kept >> mantissa == 0 { kept } else { (((last - least) as u64) << mantissa) + kept };
            (negative, bits.min(infinite))
        }
    };
    Some(bits | (negative as u64) << (mantissa + exponent))
}

/// The bits that a cast must give; None for a NaN.
fn expected(from: DType, bits: u64, to: DType) -> Option<u64> {
    let number = decode(from, bits);
    if let Some(format) = format(to) {
        return nearest(number, format);
    }
    if to == DType::Bool {
        return Some(!matches!(number, Number::Finite(_, 0, _)) as u64);
    }
    let value: i128 = match number {
        Number::Nan => 0,
        Number::Infinite(negative) => {
            if negative {
                i128::MIN
            } else {
                i128::MAX
            }
        }
        Number::Finite(negative, m, e) => {
            let size = match e {
                64.. => {
                    if m == 0 {
                        0
                    } else {
                        i128::MAX
                    }
                }
                0.. => i128::from(m) << e.min(62),
                -63.. => i128::from(m >> -e),
                _ => 0,
            };
            if negative { -size } else { size }
        }
    };
    let (low, high): (i128, i128) = match to {
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        _ => (0, 255),
    };
    // Floats end at the range's ends; of integers the low bits stay.
    let value = if from.is_float() { value.clamp(low, high) } else { value };
    Some(value as u64 & (u64::MAX >> (64 - 8 * to.size())))
}

/// Bits of numbers of every size, and of such as lie at and beside the middle of two neighbours in each other format.
fn bits(from: DType, count: u64) -> Vec<u64> {
    let stream = RandomStream { seed: 9, counter: from as u64 };
    let word = |i: u64| u64::from(stream.word(2 * i)) << 32 | u64::from(stream.word(2 * i + 1));
    let mask = u64::MAX >> (64 - 8 * from.size());
    if from == DType::Bool {
        return vec![0, 1];
    }
    let mut all: Vec<u64> = vec![0, 1, mask, mask >> 1, (mask >> 1) + 1, 127, 128, 255];
    all.push(((1u64 << 60) + (1 << 36) + 1) & mask);
    for i in 0..count {
        let random = word(i);
        // Any bits; integers of any length.
        all.push(random & mask);
        all.push((random & mask) >> (random % (8 * from.size() as u64)));
        // Bits whose last ones are those of a middle, and one more or less.
        for kept in [8, 11, 24, 53] {
            let length = match format(from) {
                Some((mantissa, _)) => mantissa + 1,
                None => 1 + (random >> 40) as u32 % (8 * from.size() as u32 - 1),
            };
            let Some(cut) = length.checked_sub(kept).filter(|&cut| cut > 0) else { continue };
            let (above, middle) = (random & mask & !((1 << cut) - 1), 1u64 << (cut - 1));
            let above = if from.is_float() { above } else { above & ((1 << length) - 1) | 1 << (length - 1) };
            all.extend([middle, middle + 1, middle - 1].map(|low| (above | low) & mask));
            if !from.is_float() {
                all.push((above | middle | 1).wrapping_neg() & mask);
            }
        }
    }
    all
}

fn tensor(device: &Device, dtype: DType, bits: &[u64]) -> Tensor {
    let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()[..dtype.size()].to_vec()).collect();
    Tensor::from_bytes(device, &[bits.len()], dtype, &bytes).unwrap()
}

fn bits_of(tensor: &Tensor) -> Vec<u64> {
    let element = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
    tensor.to_bytes().unwrap().chunks(tensor.dtype().size()).map(element).collect()
}

fn check(from: DType, to: DType, bits: u64, got: u64) {
    let same = match expected(from, bits, to) {
        Some(expected) => got == expected,
        None => matches!(decode(to, got), Number::Nan),
    };
    assert!(same, "{from} {bits:#x} to {to}: {got:#x}, not {:#x?}", expected(from, bits, to));
}

/// Every pair of dtypes.
pub fn every_pair_rounds_once(device: &Device) {
    for from in DType::ALL {
        let bits = bits(from, 500);
        let x = tensor(device, from, &bits);
        for to in DType::ALL.into_iter().filter(|&to| to != from) {
            let y = x.cast(to, MemoryKind::Input).unwrap();
            bits.iter().zip(bits_of(&y)).for_each(|(&bits, got)| check(from, to, bits, got));
        }
    }
}

/// A fill is a cast of f64.
pub fn a_fill_rounds_once(device: &Device) {
    for bits in bits(DType::F64, 12).into_iter().chain(numbers(3, 20, -300.0, 300.0).into_iter().map(f64::to_bits)) {
        for to in DType::ALL {
            let y = Tensor::full(device, &[1], to, f64::from_bits(bits)).unwrap();
            check(DType::F64, to, bits, bits_of(&y)[0]);
        }
    }
}
