//! What users of other engines expect around backward: `no_grad`, `detach`, gradients of chosen values, operators,
//! printing.

use retape_core::{DType, Device, Error, MemoryKind, Tape, Tensor, Var};
use retape_tests::{floats, random};

fn cpu() -> Device {
    retape_cpu::device_with_threads(1).unwrap()
}

#[test]
fn no_grad_records_nothing() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[8, 8], 1, DType::F32)).unwrap();
    let base = device.meter().live();
    let mut state = tape.no_grad(|| x.clone().gelu().unwrap());
    assert!(!state.requires_grad() && x.requires_grad());
    for _ in 0..100 {
        // A loop whose state feeds itself: nothing of the past is held.
        state = tape.no_grad(|| state.tanh().unwrap().transpose(0, 1).unwrap().layer_norm(None, None, 1e-5).unwrap());
        assert_eq!((device.meter().live() - base, tape.node_count()), (256, 2));
    }
    assert_eq!(tape.saved_bytes(), 0);
    // Recording goes on afterwards, also after a panic or an error inside.
    assert!(tape.no_grad(|| x.clone().reshape(&[3])).is_err());
    let loss = x.clone().mul(&state).unwrap().sum().unwrap();
    assert_eq!(
        tape.backward(&loss).unwrap().of(&x).unwrap().to_bytes().unwrap(),
        state.tensor().unwrap().to_bytes().unwrap()
    );
}

#[test]
fn detach_cuts_the_gradient_and_shares_the_tensor() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, &[3], &[1.0, 2.0, 3.0], DType::F64)).unwrap();
    let y = x.clone().square().unwrap();
    let cut = y.clone().detach().unwrap();
    assert!(cut.tensor().unwrap().shares_storage(&y.tensor().unwrap()));
    let loss = y.mul(&cut).unwrap().sum().unwrap();
    // d/dx of x^2 c with c = x^2 held fixed.
    assert_eq!(tape.backward(&loss).unwrap().of(&x).unwrap().to_vec::<f64>().unwrap(), [2.0, 16.0, 54.0]);
}

#[test]
fn gradients_of_chosen_values() {
    let device = cpu();
    let build = || {
        let tape = Tape::new(&device);
        let a = tape.leaf(&floats(&device, &[2], &[1.0, 2.0], DType::F64)).unwrap();
        let b = tape.leaf(&floats(&device, &[2], &[3.0, 5.0], DType::F64)).unwrap();
        let h = a.clone().mul(&b).unwrap();
        let loss = h.clone().square().unwrap().sum().unwrap();
        (tape, a, b, h, loss)
    };
    let (tape, a, _b, h, loss) = build();
    let g = tape.grad(&loss, &[&h, &a]).unwrap();
    assert_eq!(g[0].to_vec::<f64>().unwrap(), [6.0, 20.0]);
    assert_eq!(g[1].to_vec::<f64>().unwrap(), [18.0, 100.0]);
    assert_eq!(device.meter().live_of(MemoryKind::Recomputed), 0);
    // It consumes the tape.
    assert!(matches!(tape.grad(&loss, &[&a]), Err(Error::TapeConsumed { .. })));
    // A marked value's gradient is the same, though its tensor is dropped.
    let (tape, _a, _b, h, loss) = build();
    h.set_mark(retape_core::Mark::Recompute).unwrap();
    assert_eq!(tape.grad(&loss, &[&h]).unwrap()[0].to_vec::<f64>().unwrap(), [6.0, 20.0]);
    let (tape, a, ..) = build();
    let other = a.sum().unwrap();
    let unrelated = tape.leaf(&floats(&device, &[1], &[1.0], DType::F64)).unwrap();
    let error = tape.grad(&other, &[&unrelated]).unwrap_err();
    assert!(error.to_string().contains("doesn't depend on it"), "{error}");
}

#[test]
fn operators_are_the_ops() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&floats(&device, &[2], &[1.0, 2.0], DType::F64)).unwrap();
    let y = tape.leaf(&floats(&device, &[2], &[4.0, 8.0], DType::F64)).unwrap();
    let vec = |v: retape_core::Result<Var>| v.unwrap().tensor().unwrap().to_vec::<f64>().unwrap();
    assert_eq!(vec(&x + &y), [5.0, 10.0]);
    assert_eq!(vec(&x - &y), [-3.0, -6.0]);
    assert_eq!(vec(&x * &y), [4.0, 16.0]);
    assert_eq!(vec(&x / &y), [0.25, 0.25]);
    assert_eq!(vec(-&x), [-1.0, -2.0]);
    assert_eq!((vec(&x + 1.0), vec(&x - 1.0)), (vec![2.0, 3.0], vec![0.0, 1.0]));
    assert_eq!((vec(&x * 2.0), vec(&x / 2.0)), (vec![2.0, 4.0], vec![0.5, 1.0]));
}

#[test]
fn tensors_print() {
    let device = cpu();
    let t = Tensor::from_slice(&device, &[2, 2], &[1f32, 2.5, -3.0, 0.0]).unwrap();
    assert_eq!(t.to_string(), "[[1, 2.5],\n [-3, 0]] f32[2, 2]");
    assert_eq!(format!("{:.2}", t.narrow(0, 1, 1).unwrap()), "[[-3.00, 0.00]] f32[1, 2]");
    let long = Tensor::from_slice(&device, &[9], &[0i64, 1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(long.to_string(), "[0, 1, 2, ..., 6, 7, 8] i64[9]");
    let scalar = Tensor::full(&device, &[], DType::F64, 4.0).unwrap();
    assert_eq!((scalar.to_string(), format!("{scalar:?}")), ("4 f64[]".into(), "Tensor(f64[] on cpu)".into()));
    assert_eq!(Tensor::full(&device, &[0, 3], DType::F32, 0.0).unwrap().to_string(), "[] f32[0, 3]");
    assert_eq!(Tensor::full(&retape_core::meta(), &[2], DType::F32, 0.0).unwrap().to_string(), "(no numbers) f32[2]");
}

/// Gradients of bf16 and f16 values add up, through casts and repeats.
#[test]
fn half_precision_gradients_add_up() {
    let device = cpu();
    for dtype in [DType::BF16, DType::F16] {
        let tape = Tape::new(&device);
        let half = random(&device, &[1, 4], 1, DType::F32).cast(dtype, MemoryKind::Input).unwrap();
        let x = tape.leaf(&half).unwrap();
        let (a, b) =
            (x.clone().cast(DType::F32).unwrap(), x.clone().expand(&[3, 4]).unwrap().cast(DType::F32).unwrap());
        let loss = a.square().unwrap().sum().unwrap().add(b.sum().unwrap()).unwrap();
        let gradient = tape.backward(&loss).unwrap().of(&x).unwrap().to_f64_vec().unwrap();
        for (g, x) in gradient.iter().zip(half.to_f64_vec().unwrap()) {
            approx::assert_relative_eq!(*g, 2.0 * x + 3.0, max_relative = 1e-2);
        }
    }
}

/// A pass for the gradient of an inner value ends there: the op that made it is neither visited nor replayed for.
#[test]
fn the_gradient_of_an_inner_value_doesn_t_visit_its_own_op() {
    let device = cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&random(&device, &[8, 8], 1, DType::F64)).unwrap();
    let h = x.exp().unwrap().recompute().unwrap();
    let y = h.clone().gelu().unwrap().recompute().unwrap();
    let loss = y.clone().square().unwrap().sum().unwrap();
    drop(h);
    let gradient = tape.grad(&loss, &[&y]).unwrap().remove(0);
    assert_eq!(
        gradient.to_f64_vec().unwrap(),
        y.tensor().unwrap().to_f64_vec().unwrap().iter().map(|y| 2.0 * y).collect::<Vec<_>>()
    );
    assert_eq!(tape.stats().replays, 0, "y is held; exp would be replayed only for gelu's gradient");
}

/// What several leaves hold alone is listed once, and all of it.
#[test]
fn the_ledger_lists_what_detached_values_hold() {
    let device = cpu();
    let x = random(&device, &[64, 64], 1, DType::F32);
    let stored = |parts: fn(&Var) -> Vec<Var>| {
        let tape = Tape::new(&device);
        let x = tape.leaf(&x).unwrap();
        let base = device.meter().live();
        let h = x.clone().scale(2.0).unwrap();
        let detached = parts(&h);
        drop(h);
        let mut products = Vec::new();
        for part in detached {
            products.push(x.clone().narrow(0, 0, part.shape()[0]).unwrap().mul(&part).unwrap().sum().unwrap());
        }
        let loss = products.iter().skip(1).fold(products[0].clone(), |sum, p| sum.add(p).unwrap());
        drop(products);
        let totals = tape.ledger().unwrap().totals();
        let live = device.meter().live() - base - 4; // the loss
        assert_eq!(totals.stored_bytes, live);
        drop(loss);
        totals.stored_bytes
    };
    assert_eq!(stored(|h| vec![h.clone().detach().unwrap()]), 16_384);
    assert_eq!(stored(|h| vec![h.clone().detach().unwrap(), h.clone().detach().unwrap()]), 16_384);
    assert_eq!(stored(|h| vec![h.clone().detach().unwrap(), h.clone().scale(3.0).unwrap().detach().unwrap()]), 32_768);
    // A part holds the whole.
    assert_eq!(stored(|h| vec![h.tape().constant(&h.tensor().unwrap().narrow(0, 0, 8).unwrap()).unwrap()]), 16_384);
}
