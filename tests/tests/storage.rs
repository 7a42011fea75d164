//! Every way of storing a saved value: what it takes, how far it is off, and what the tape promises of it. A new format
//! is tested by its line in [`Mark::FORMATS`].

use half::bf16;
use retape_core::ops::Spec;
use retape_core::{
    BackwardOptions, DType, Device, Error, Gradients, Mark, MemoryKind, NonFinite, Policy, Result, Tape, TapeOptions,
    Tensor, Var, Verify, meta, scope,
};
use retape_policy::{Rule, RuleSet};
use retape_tests::conformance::FLOATS;
use retape_tests::int8::{rows, spacing};
use retape_tests::wrapped::{self, Watch};
use retape_tests::{floats, numbers, random};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BF16_MAX: f64 = 255.0 * (1u128 << 120) as f64;

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

/// Every format with its usual arguments, and some with others.
fn formats() -> Vec<Mark> {
    let others = ["int8:group=5", "int8:group=3:rounding=stochastic"];
    Mark::FORMATS.into_iter().chain(others.map(|text| text.parse().unwrap())).collect()
}

fn lossy() -> impl Iterator<Item = Mark> {
    formats().into_iter().filter(Mark::is_lossy)
}

fn seeded() -> TapeOptions {
    TapeOptions { seed: Some(3), ..TapeOptions::default() }
}

fn rule(pattern: &str, mark: Mark) -> TapeOptions {
    let policy: Rc<dyn Policy> = Rc::new(RuleSet::new([Rule::new(pattern, mark).unwrap()]));
    TapeOptions { policy: Some(policy), ..seeded() }
}

fn leaf(tape: &Tape, shape: &[usize], seed: u64) -> Var {
    tape.leaf(&random(&tape.device(), shape, seed, DType::F32)).unwrap()
}

fn bytes(gradients: &Gradients, of: &Var) -> Vec<u8> {
    gradients.of(of).unwrap().to_bytes().unwrap()
}

/// What a pass reads of a value that holds these numbers: the gradient of what it is multiplied by.
fn read_back(x: &Tensor, mark: Mark) -> Result<Tensor> {
    let tape = Tape::with(x.device(), seeded());
    let h = tape.leaf(x)?.scale(1.0)?;
    h.set_mark(mark)?;
    let ones = Tensor::full(x.device(), x.shape(), x.dtype(), 1.0)?;
    let w = tape.leaf(&ones)?;
    let y = h.mul(&w)?;
    let gradients = tape.backward_from(&[(&y, &ones)], BackwardOptions::default())?;
    Ok(gradients.of(&w).unwrap().clone())
}

/// The largest error of rows of `width`, in units of what the format allows the element; arithmetic may add a
/// ten-thousandth of that, and the result is rounded to its dtype.
fn worst(bounds: impl Fn(&[f64]) -> Vec<f64>, width: usize, x: &[f64], y: &[f64], dtype: DType) -> f64 {
    let bounds = x.chunks(width.max(1)).flat_map(bounds);
    let errors = x.iter().zip(y).zip(bounds).map(|((x, y), bound)| {
        assert!(x.is_finite() && y.is_finite() && bound >= 0.0, "{x:e} is {y:e} within {bound:e}");
        (x - y).abs() / (bound * (1.0 + 1e-4) + 0.5 * spacing(*y, dtype))
    });
    errors.fold(0.0, f64::max)
}

/// Rows from the least number to the largest that the format holds, with zeros and mixed magnitudes among them.
fn rows_for(mark: Mark, dtype: DType, width: usize) -> Vec<f64> {
    let is_bf16 = mark == Mark::Bf16 && dtype.size() > 2;
    let mut x = rows(if is_bf16 { DType::F32 } else { dtype }, width, 200);
    x[..width].fill(0.0);
    x[width] = -0.0;
    if is_bf16 {
        x.iter_mut().for_each(|x| *x = x.clamp(-BF16_MAX, BF16_MAX));
    }
    x
}

/// Each element comes back within the format's bound, and in most rows one is nearly as far off as that.
#[test]
fn errors_are_within_their_bounds() {
    for mark in formats() {
        let bounds = |row: &[f64]| mark.format().unwrap().error_bounds(row);
        for dtype in FLOATS {
            let packs = mark.bytes(&Spec::new(&[64][..], dtype)).is_some();
            for width in [1, 5, 64, 70] {
                let context = format!("{} on {dtype}, rows of {width}", mark.text());
                let x = floats(&cpu(), &[200, width], &rows_for(mark, dtype, width), dtype);
                let y = read_back(&x, mark).unwrap();
                if !packs {
                    assert_eq!(y.to_bytes().unwrap(), x.to_bytes().unwrap(), "{context}");
                    continue;
                }
                let (x, y) = (x.to_f64_vec().unwrap(), y.to_f64_vec().unwrap());
                let rows = x.chunks(width).zip(y.chunks(width)).map(|(x, y)| worst(bounds, width, x, y, dtype));
                let mut of_rows: Vec<f64> = rows.filter(|&worst| worst > 0.0).collect();
                of_rows.sort_by(f64::total_cmp);
                let most = of_rows.last().copied().unwrap_or(0.0);
                assert!(most <= 1.0, "{context}: {most} of the bound");
                // Short rows may be exact, as a group of one number is.
                let usual = of_rows.get(of_rows.len() / 2).copied().unwrap_or(0.0);
                let is_short = width < 64 || dtype.size() == 2;
                assert!(is_short || usual > 0.7, "{context}: a row's worst is {usual} of the bound, which is too wide");
            }
        }
    }
}

/// The numbers of bf16 from 0 up, at the index of their bits, and what would be the next one.
fn bf16_numbers() -> Vec<f64> {
    let finite = (0..0x7f80).map(|bits: u32| f64::from(f32::from_bits(bits << 16)));
    finite.chain([2f64.powi(128)]).collect()
}

/// The nearer neighbour; of two that are equally near, the one with an even last bit.
fn nearest(numbers: &[f64], x: f64) -> f64 {
    let above = numbers.partition_point(|&n| n <= x.abs());
    let (low, high) = (numbers[above - 1], numbers[above]);
    let middle = 0.5 * (low + high);
    let up = x.abs() > middle || x.abs() == middle && above % 2 == 0;
    (if up { high } else { low }).copysign(x)
}

/// Of each sign: every number of bf16, the middle to the next, and the numbers on both sides of the middle.
fn around_ties(numbers: &[f64], step: impl Fn(f64, bool) -> f64) -> Vec<f64> {
    let pairs = numbers.windows(2).flat_map(|pair| {
        let middle = 0.5 * (pair[0] + pair[1]);
        let overflows = pair[1] > BF16_MAX;
        let beyond = (!overflows).then_some([middle, step(middle, true)]);
        [pair[0], step(middle, false)].into_iter().chain(beyond.into_iter().flatten())
    });
    pairs.flat_map(|x| [x, -x]).collect()
}

/// Every tie of bf16 and what is next to it, in f32 and in f64, where a first rounding to f32 would make ties.
#[test]
fn bf16_is_rounded_once_to_nearest_even() {
    let numbers = bf16_numbers();
    let in_f64 = around_ties(&numbers, |x, up| if up { x.next_up() } else { x.next_down() });
    let in_f32 =
        around_ties(&numbers, |x, up| f64::from(if up { (x as f32).next_up() } else { (x as f32).next_down() }));
    for (dtype, x) in [(DType::F64, &in_f64), (DType::F32, &in_f32)] {
        let y = read_back(&floats(&cpu(), &[x.len()], x, dtype), Mark::Bf16).unwrap().to_f64_vec().unwrap();
        for (&x, y) in x.iter().zip(y) {
            assert_eq!(y.to_bits(), nearest(&numbers, x).to_bits(), "{dtype}: {x:e} is {y:e}");
            let by_half = f64::from(bf16::from_f32(x as f32));
            assert!(dtype == DType::F64 || by_half.to_bits() == y.to_bits(), "{x:e} is {y:e}, not {by_half:e}");
        }
    }
}

/// The checks above see what they are for: half a bound, bits that are cut off, ties that go away from zero.
#[test]
fn wrong_bounds_and_wrong_roundings_are_seen() {
    for mark in lossy() {
        let x = floats(&cpu(), &[200, 64], &rows_for(mark, DType::F32, 64), DType::F32);
        let y = read_back(&x, mark).unwrap().to_f64_vec().unwrap();
        let x = x.to_f64_vec().unwrap();
        let bounds = |row: &[f64]| mark.format().unwrap().error_bounds(row);
        let halved = |row: &[f64]| bounds(row).iter().map(|b| b / 2.0).collect();
        assert!(worst(halved, 64, &x, &y, DType::F32) > 1.0, "{}", mark.text());
        if mark == Mark::Bf16 {
            let cut: Vec<f64> = x.iter().map(|&x| f32::from_bits((x as f32).to_bits() & 0xffff_0000).into()).collect();
            assert!(worst(bounds, 64, &x, &cut, DType::F32) > 1.0);
        }
    }
    let numbers = bf16_numbers();
    let away = |x: f64| f64::from(f32::from_bits(((x as f32).to_bits() + 0x8000) & 0xffff_0000));
    let ties = around_ties(&numbers, |x, up| if up { x.next_up() } else { x.next_down() });
    assert!(ties.iter().any(|&x| away(x) != nearest(&numbers, x)), "ties go away from zero");
    assert!(ties.iter().any(|&x| f64::from(bf16::from_f32(x as f32)) != nearest(&numbers, x)), "f64 is rounded twice");
}

/// A forward whose only saved value has this mark; and what the tape, the ledger and the meter say that it takes.
fn takes(device: &Device, shape: &[usize], dtype: DType, mark: Mark) -> ([u64; 4], u64, u64) {
    let x = random(device, shape, 1, dtype);
    device.meter().reset_peak();
    let tape = Tape::with(device, seeded());
    let h = tape.leaf(&x).unwrap().scale(2.0).unwrap();
    h.set_mark(mark).unwrap();
    let y = h.square().unwrap();
    let entry = tape.ledger().unwrap().get("scale").unwrap().stored_bytes;
    let metered = [MemoryKind::Quantized, MemoryKind::Saved].map(|kind| device.meter().live_of(kind));
    let taken = [tape.saved_bytes(), entry, metered[0], metered[1]];
    let traffic = tape.stats().quantize_traffic;
    let seed = random(device, shape, 2, dtype);
    drop(tape.backward_from(&[(&y, &seed)], BackwardOptions::default()).unwrap());
    assert_eq!(tape.stats().quantize_traffic, 2 * traffic, "packed once, unpacked once");
    (taken, traffic, device.meter().fingerprint())
}

#[test]
fn bytes_are_those_predicted() {
    let shapes: [&[usize]; 10] =
        [&[], &[0], &[3, 0], &[0, 4], &[1], &[64], &[65], &[7, 63], &[2, 5, 70], &[2, 1, 3, 1, 2]];
    for (mark, dtype) in formats().into_iter().flat_map(|mark| FLOATS.map(|dtype| (mark, dtype))) {
        for shape in shapes {
            let context = format!("{} on {dtype} {shape:?}", mark.text());
            let spec = Spec::new(shape, dtype);
            let packed = mark.bytes(&spec);
            let stored = packed.unwrap_or(spec.bytes());
            let (taken, traffic, fingerprint) = takes(&cpu(), shape, dtype, mark);
            let metered = if packed.is_some() { [stored, 0] } else { [0, stored] };
            assert_eq!(taken, [stored, stored, metered[0], metered[1]], "{context}");
            assert_eq!(traffic, packed.map_or(0, |bytes| bytes + spec.bytes()), "{context}");
            assert_eq!(takes(&meta(), shape, dtype, mark), (taken, traffic, fingerprint), "{context}: dry");
            if packed.is_none() {
                assert!(!mark.is_lossy() || dtype.size() == 2, "{context}");
            } else if spec.len() >= 64 {
                assert!(mark.text().contains(':') || stored < spec.bytes(), "{context}: saves nothing");
            }
        }
    }
    let of = |mark: Mark, dtype| mark.bytes(&Spec::new(&[7, 70][..], dtype));
    assert_eq!(of(Mark::Bf16, DType::F64), Some(7 * 70 * 2));
    assert_eq!(of(Mark::Bf16, DType::F16), None);
    assert_eq!(of("int8:group=5".parse().unwrap(), DType::F32), Some(7 * 70 + 7 * 14 * 4));
    assert_eq!(of(Mark::Keep, DType::F32), None);
    assert_eq!(of(Mark::Recompute, DType::F32), None);
}

/// How a leaf lies, and through which view a value is read, doesn't show in what is stored.
#[test]
fn views_and_strides_do_not_show() {
    let device = cpu();
    for mark in formats() {
        let x = random(&device, &[6, 70], 1, DType::F32);
        let expected = read_back(&x, mark).unwrap();
        let wide = random(&device, &[70, 6], 1, DType::F32).transpose(0, 1).unwrap();
        let copied = wide.contiguous(MemoryKind::Input).unwrap();
        let of_strided = read_back(&wide, mark).unwrap().to_f64_vec().unwrap();
        assert_eq!(of_strided, read_back(&copied, mark).unwrap().to_f64_vec().unwrap(), "{}", mark.text());

        type View = (fn(Var) -> Result<Var>, fn(&Tensor) -> Result<Tensor>);
        let views: [View; 3] = [
            (|h| h.transpose(0, 1), |t| t.transpose(0, 1)),
            (|h| h.narrow(1, 3, 50), |t| t.narrow(1, 3, 50)),
            (
                |h| h.reshape(&[2, 3, 70])?.select(1, 2),
                |t| t.contiguous(MemoryKind::Input)?.narrow(0, 2, 4)?.slice(0, 0, 2, 3),
            ),
        ];
        for (number, (view, of_tensor)) in views.into_iter().enumerate() {
            let tape = Tape::with(&device, seeded());
            let v = view(tape.leaf(&x).unwrap().scale(1.0).unwrap()).unwrap();
            v.set_mark(mark).unwrap();
            let ones = Tensor::full(&device, &v.shape(), DType::F32, 1.0).unwrap();
            let w = tape.leaf(&ones).unwrap();
            let y = v.mul(&w).unwrap();
            assert_eq!(
                tape.saved_bytes(),
                mark.bytes(&Spec::of(&x)).unwrap_or(6 * 70 * 4),
                "the whole value is stored"
            );
            let gradients = tape.backward_from(&[(&y, &ones)], BackwardOptions::default()).unwrap();
            let read = gradients.of(&w).unwrap().to_f64_vec().unwrap();
            let expected = of_tensor(&expected).unwrap().to_f64_vec().unwrap();
            assert_eq!(read, expected, "{}, view {number}", mark.text());
        }
    }
}

/// A step whose value holds this number, and what it leaves: the gradient, fallbacks, and bytes stored.
fn step_with(bad: f64, dtype: DType, mark: Mark, held: bool, non_finite: NonFinite) -> Result<(Vec<u8>, u64, u64)> {
    let device = cpu();
    let tape = Tape::with(&device, TapeOptions { non_finite, ..seeded() });
    let x = floats(&device, &[2, 3], &[1.0, -2.0, bad, 0.5, 0.0, 4.0], dtype);
    let h = tape.leaf(&x)?.scale(1.0)?;
    h.set_mark(mark)?;
    let ones = Tensor::full(&device, &[2, 3], dtype, 1.0)?;
    let w = tape.leaf(&ones)?;
    let y = h.clone().mul(&w)?;
    let h = held.then_some(h);
    let gradients = tape.backward_from(&[(&y, &ones)], BackwardOptions::RETAIN)?;
    drop(h);
    let again = tape.backward_from(&[(&y, &ones)], BackwardOptions::RETAIN)?;
    assert_eq!(bytes(&again, &w), bytes(&gradients, &w), "{} with {bad:e}, held {held}", mark.text());
    Ok((bytes(&gradients, &w), tape.stats().full_precision_fallbacks, tape.saved_bytes()))
}

/// What a format can't hold is an error that names it, or stays in full; what is large and finite may be held.
#[test]
fn numbers_beyond_a_format() {
    let numbers = [
        (DType::F32, f64::INFINITY),
        (DType::F32, f64::NEG_INFINITY),
        (DType::F32, f64::NAN),
        (DType::F64, f64::NAN),
        (DType::F64, f64::INFINITY),
        (DType::F32, f64::from(f32::MAX)),
        (DType::F64, 1e39),
        (DType::F64, f64::MIN),
        (DType::F32, BF16_MAX),
        (DType::BF16, f64::INFINITY),
        (DType::F16, f64::NAN),
    ];
    for (mark, (dtype, bad)) in formats().into_iter().flat_map(|mark| numbers.map(|number| (mark, number))) {
        let packed = mark.bytes(&Spec::new(&[2, 3][..], dtype));
        let held_by_format = bad.is_finite() && (mark != Mark::Bf16 || bad.abs() <= BF16_MAX);
        let full = 6 * dtype.size() as u64;
        for held in [false, true] {
            let context = format!("{} on {dtype} with {bad:e}, held {held}", mark.text());
            let strict = step_with(bad, dtype, mark, held, NonFinite::Error);
            let lenient = step_with(bad, dtype, mark, held, NonFinite::KeepFull).unwrap();
            let kept = step_with(bad, dtype, Mark::Keep, held, NonFinite::Error).unwrap();
            match packed {
                Some(packed) if held_by_format => {
                    assert_eq!(strict.as_ref(), Ok(&lenient), "{context}");
                    assert_eq!((lenient.1, lenient.2), (0, packed), "{context}");
                }
                Some(_) => {
                    let error = strict.unwrap_err();
                    let (format, text) = (mark.name(), error.to_string());
                    let expected = Error::NonFinite { format, path: "scale".into(), op: "scale" };
                    assert_eq!(error, expected, "{context}");
                    assert!(text.contains(format) && text.contains("fallback to full precision"), "{text}");
                    assert_eq!(lenient, (kept.0, 1, full), "{context}");
                }
                None => {
                    assert_eq!(strict.as_ref(), Ok(&kept), "{context}");
                    assert_eq!(lenient, (kept.0, 0, full), "{context}");
                }
            }
        }
    }
}

/// A value whose elements take no more bytes than the format's is stored as it is: no bit changes, and the ledger says
/// that the mark saves nothing.
#[test]
fn what_is_small_already_is_stored_as_it_is() {
    let device = cpu();
    let mut cases = 0;
    for (mark, dtype) in lossy().flat_map(|mark| FLOATS.map(|dtype| (mark, dtype))) {
        let run = |mark| {
            let tape = Tape::with(&device, seeded());
            let x = tape.leaf(&random(&device, &[8, 64], 1, dtype)).unwrap();
            let h = x.clone().scale(3.0).unwrap();
            h.set_mark(mark).unwrap();
            let y = h.gelu().unwrap().square().unwrap();
            let lint = tape.ledger().unwrap().lint;
            let says =
                lint.into_iter().find(|lint| lint.code == "mark-saves-nothing" && lint.message.contains(mark.name()));
            let gradients = tape.backward_from(&[(&y, &random(&device, &[8, 64], 2, dtype))], BackwardOptions::RETAIN);
            (bytes(&gradients.unwrap(), &x), tape.saved_bytes(), tape.stats().quantized, says)
        };
        let ((marked, saved, packed, says), kept) = (run(mark), run(Mark::Keep));
        let context = format!("{} on {dtype}: {says:?}", mark.text());
        if mark.bytes(&Spec::new(&[8, 64][..], dtype)).is_some() {
            assert!(marked != kept.0 && packed == 1, "{context}");
            assert!(mark.text().contains(':') || saved < kept.1 && says.is_none(), "{context}");
        } else {
            assert!(marked == kept.0 && saved == kept.1 && packed == 0, "{context}");
            assert!(says.is_some_and(|lint| lint.message.contains("as they are")), "{context}");
            cases += 1;
        }
    }
    assert!(cases >= 2, "bf16 on both 16-bit dtypes");
}

/// A user's lossy mark on what an op reads exactly is an error, before the op or after it. A rule's is skipped,
/// with a lint.
#[test]
fn what_is_read_exactly_stays_exact() {
    let device = cpu();
    for (mark, dtype) in formats().into_iter().flat_map(|mark| FLOATS.map(|dtype| (mark, dtype))) {
        let context = format!("{} on {dtype}", mark.text());
        let packs = mark.bytes(&Spec::new(&[1, 4, 1, 8][..], dtype)).is_some();
        let run = |options: TapeOptions, before: bool, after: bool| -> Result<_> {
            let tape = Tape::with(&device, options);
            let x = tape.leaf(&random(&device, &[1, 4, 1, 8], 1, dtype))?;
            let (q, k, v) = (x.clone().scale(1.5)?, x.clone().scale(2.0)?, x.clone().shift(1.0)?);
            if before {
                q.set_mark(mark)?;
            }
            let y = q.clone().attention(&k, &v, 1.0, true, 0.0)?;
            if after {
                k.set_mark(mark)?;
            }
            drop((q, k, v));
            let seed = random(&device, &[1, 4, 1, 8], 2, dtype);
            let lint = tape.ledger()?.lint;
            let gradients = tape.backward_from(&[(&y, &seed)], BackwardOptions::RETAIN)?;
            Ok((bytes(&gradients, &x), tape.saved_bytes(), lint))
        };
        let plain = run(seeded(), false, false).unwrap();
        for (before, after) in [(true, false), (false, true)] {
            match run(seeded(), before, after) {
                Err(Error::MarkNotAllowed { mark: name, path, reason, .. }) if packs => {
                    let value = if before { "scale" } else { "scale_1" };
                    assert_eq!((name, path.as_str()), (mark.name(), value), "{context}: {reason}");
                    assert!(reason.contains("keep") && reason.contains("recompute"), "{context}: {reason}");
                }
                other => assert_eq!((other.unwrap().0, packs), (plain.0.clone(), false), "{context}"),
            }
        }
        let ruled = run(rule("scale*", mark), false, false).unwrap();
        assert_eq!((ruled.0, ruled.1), (plain.0, plain.1), "{context}");
        let code = mark.format().unwrap().skip_lint();
        let skipped: Vec<_> = ruled.2.iter().filter(|lint| lint.code == code).map(|lint| &*lint.subject).collect();
        assert_eq!(skipped, if packs { vec!["scale", "scale_1"] } else { vec![] }, "{context}");
    }
}

/// Leaves, integers and statistics are kept whatever the rule; a mark of the user's on one is an error.
#[test]
fn what_is_kept_exactly_stays_exact() {
    let device = cpu();
    for mark in Mark::all() {
        let tape = Tape::with(&device, rule("**", mark));
        let x = leaf(&tape, &[4, 64], 1);
        let refused = |v: &Var| matches!(v.set_mark(mark), Err(Error::MarkNotAllowed { .. }));
        let ids = x.clone().abs().unwrap().scale(3.0).unwrap().cast(DType::I64).unwrap();
        assert_eq!((refused(&x), refused(&ids)), (mark != Mark::Keep, mark != Mark::Keep), "{mark}");
        let row = ids.clone().select(1, 0).unwrap();
        drop(ids);
        let y = x.layer_norm(None, None, 1e-5).unwrap().embedding(&row).unwrap().square().unwrap();
        drop(row);
        let ledger = tape.ledger().unwrap();
        let exact = ledger.values.iter().filter(|v| v.mark.name() == "exact");
        let exact: Vec<_> = exact.filter(|v| v.op != "leaf").map(|v| (v.op, v.stored_bytes == v.bytes)).collect();
        assert!(exact.contains(&("cast", true)) && exact.iter().all(|(_, full)| *full), "{mark}: {exact:?}");
        assert!(exact.iter().any(|(op, _)| *op == "layer_norm"), "{mark}: {exact:?}");
        tape.backward(&y.sum().unwrap()).unwrap();
    }
}

/// The gradient's bytes of two retained passes over one value that is stored, and another that is replayed from it.
fn two_passes(options: TapeOptions, mark: impl Fn(Var) -> Result<Var>, held: [bool; 2]) -> Vec<u8> {
    let device = cpu();
    let tape = Tape::with(&device, TapeOptions { verify: Verify::Bits, ..options });
    let x = leaf(&tape, &[4, 64], 1);
    let h = mark(x.clone()).unwrap();
    let t = h.clone().tanh().unwrap().recompute().unwrap();
    let loss = t.clone().gelu().unwrap().mul(&h).unwrap().sum().unwrap();
    let mut handles = Some((h, t));
    let mut passes = Vec::new();
    for held in held {
        handles = handles.filter(|_| held);
        passes.push(bytes(&tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap(), &x));
    }
    assert_eq!(passes[0], passes[1], "two passes, other bits");
    passes.swap_remove(0)
}

/// Who gives the mark and what handles are held changes no bit; nor does an exact format. Replays are audited too.
#[test]
fn gradients_depend_on_the_mark_alone() {
    let plain = two_passes(seeded(), |x| x.scale(3.0), [false; 2]);
    for mark in formats() {
        let by_value = |x: Var| {
            let h = x.scale(3.0)?;
            h.set_mark(mark)?;
            Ok(h)
        };
        let stored = two_passes(seeded(), by_value, [false; 2]);
        assert_eq!(stored == plain, !mark.is_lossy(), "{}", mark.text());
        for held in [[true; 2], [true, false]] {
            assert_eq!(two_passes(seeded(), by_value, held), stored, "{}, held {held:?}", mark.text());
        }
        assert_eq!(two_passes(rule("scale", mark), |x| x.scale(3.0), [false; 2]), stored, "{}: by rule", mark.text());
        let in_scope = |x: Var| {
            let tape = x.tape().clone();
            // Kept until its scope has closed: what outlives it is marked outside.
            tape.within(scope("outer").mark(mark), || x.within("inner", |x| x.scale(3.0))?.reshape(&[4, 64]))
        };
        let again = two_passes(seeded(), in_scope, [false; 2]);
        assert!(again == plain || again == stored, "{}: a scope's output is marked outside", mark.text());
    }
}

/// A replay behind a lossy value is compared with the one before: a flipped bit is named.
#[test]
fn a_replay_behind_a_lossy_value_is_audited() {
    let watch = Arc::new(Watch::default());
    let device = wrapped::device(watch.clone());
    for mark in lossy() {
        let tape = Tape::with(&device, TapeOptions { verify: Verify::Bits, ..seeded() });
        let x = leaf(&tape, &[4, 64], 1);
        let h = x.clone().scale(3.0).unwrap();
        h.set_mark(mark).unwrap();
        let loss = h.tanh().unwrap().recompute().unwrap().sum().unwrap();
        let pass = || tape.backward_with(&loss, BackwardOptions::RETAIN).map(|gradients| bytes(&gradients, &x));
        assert_eq!(pass().unwrap(), pass().unwrap(), "{}", mark.text());
        watch.kernels.lock().unwrap().clear();
        watch.flip_unary.store(1, Ordering::Relaxed);
        let error = pass().unwrap_err();
        watch.flip_unary.store(0, Ordering::Relaxed);
        assert_eq!(error, Error::ReplayDiffers { path: "tanh".into(), op: "tanh", index: 5 }, "{}", mark.text());
    }
}

/// The error of a store is measured within the format's bound, and costs the same memory dry.
#[test]
fn a_store_s_error_is_measured() {
    for mark in lossy() {
        let run = |device: &Device| {
            let x = random(device, &[16, 70], 1, DType::F32);
            device.meter().reset_peak();
            let tape = Tape::with(device, TapeOptions { measure_quantization: true, ..seeded() });
            let h = tape.leaf(&x).unwrap().scale(2.0).unwrap();
            h.set_mark(mark).unwrap();
            let loss = h.square().unwrap().sum().unwrap();
            let measured = tape.ledger().unwrap().get("scale").unwrap().quantization_error;
            drop(tape.backward(&loss).unwrap());
            (measured, device.meter().peak(), device.meter().fingerprint())
        };
        let (measured, peak, events) = run(&cpu());
        let x: Vec<f64> = numbers(1, 16 * 70, -1.0, 1.0);
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let bounds: Vec<f64> = x.chunks(70).flat_map(|row| mark.format().unwrap().error_bounds(row)).collect();
        let most = norm(&bounds) / norm(&x);
        assert!(measured.is_some_and(|e| e > most / 10.0 && e < most), "{}: {measured:?} of {most}", mark.text());
        assert_eq!(run(&meta()), (None, peak, events), "{}: dry", mark.text());
    }
}

/// A mark after a pass, or random numbers without a seed, is an error whatever the format.
#[test]
fn marks_that_come_too_late_or_need_a_seed() {
    let device = cpu();
    for mark in formats().into_iter().chain([Mark::Recompute]) {
        let tape = Tape::new(&device);
        let x = leaf(&tape, &[4, 8], 1);
        let draws = mark.format().is_some_and(|format| format.randomness().is_some());
        match x.clone().scale(2.0).unwrap().set_mark(mark) {
            Err(Error::Unseeded { what, path }) if draws => assert!(what.contains(mark.name()) && path == "scale"),
            other => assert_eq!((other, draws), (Ok(()), false), "{}", mark.text()),
        }
        let tape = Tape::with(&device, seeded());
        let h = leaf(&tape, &[4, 8], 1).scale(2.0).unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        h.set_mark(mark).unwrap();
        tape.backward_with(&loss, BackwardOptions::RETAIN).unwrap();
        let error = h.set_mark(mark).unwrap_err();
        assert!(matches!(&error, Error::MarkTooLate { mark: name, .. } if *name == mark.name()), "{error}");
    }
}

#[test]
fn texts_of_marks() {
    let more =
        ["int8:rounding=nearest", "int8:rounding=stochastic", "int8:group=1", "int8:rounding=stochastic:group=9"];
    let more = more.map(|text| text.parse::<Mark>().unwrap());
    for mark in Mark::all().chain(formats()).chain(more) {
        assert_eq!(mark.text().parse(), Ok(mark), "{}", mark.text());
        let rule: Rule = format!("a.*={}", mark.text()).parse().unwrap();
        assert_eq!((rule.mark(), rule.to_string()), (mark, format!("a.*={}", mark.text())));
    }
    let all = "the marks are keep, recompute, int8, bf16";
    let group = "write int8:group=N with a whole number N >= 1";
    for (text, expected) in [
        ("int4", format!("unknown mark `int4`; {all}")),
        ("", format!("unknown mark ``; {all}")),
        ("BF16", format!("unknown mark `BF16`; {all}")),
        ("bf16 ", format!("unknown mark `bf16 `; {all}")),
        ("int8:group=0", group.into()),
        ("int8:group=-3", group.into()),
        ("int8:group", group.into()),
        ("int8:rounding=up", "write int8:rounding=nearest or int8:rounding=stochastic".into()),
        ("int8:gruop=3", "int8 takes group=N and rounding=nearest or rounding=stochastic".into()),
        ("int8:", "int8 takes group=N and rounding=nearest or rounding=stochastic".into()),
        ("bf16:group=3", "`bf16` takes no arguments; leave out `group`".into()),
        ("keep:x", "`keep` takes no arguments; leave out `x`".into()),
        ("recompute:group=3", "`recompute` takes no arguments; leave out `group`".into()),
    ] {
        assert_eq!(text.parse::<Mark>(), Err(expected), "`{text}`");
    }
}
