//! Numbers at the ends of their dtypes: casts, int8 groups, elementwise functions and losses.

use retape_core::{BackwardOptions, DType, Device, Result, Tape, Tensor, Var};
use retape_tests::{casts, far, floats, int8};
use std::sync::OnceLock;

fn cpu() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| retape_cpu::device_with_threads(1).unwrap()).clone()
}

fn none(faults: Vec<String>) {
    let some: Vec<&str> = faults.iter().take(40).map(String::as_str).collect();
    assert!(some.is_empty(), "{} faults:\n{}", faults.len(), some.join("\n"));
}

#[test]
fn casts_round_once() {
    casts::every_pair_rounds_once(&cpu());
    casts::a_fill_rounds_once(&cpu());
}

#[test]
fn int8_groups_of_every_magnitude() {
    int8::every_group_comes_back(&cpu());
}

#[test]
fn unary_functions() {
    none(far::unary_functions(&cpu()));
}

#[test]
fn functions_of_more() {
    none(far::functions_of_more(&cpu()));
}

#[test]
fn losses() {
    none(far::losses(&cpu()));
}

#[test]
fn a_bool_is_0_or_1() {
    let error = Tensor::from_bytes(&cpu(), &[3], DType::Bool, &[0, 1, 2]).unwrap_err().to_string();
    assert!(error.contains("position 2 is 2") && error.contains("u8"), "{error}");
    let x = Tensor::from_bytes(&cpu(), &[3], DType::Bool, &[0, 1, 1]).unwrap();
    assert_eq!(x.to_vec::<bool>().unwrap(), [false, true, true]);
}

/// The gradients of the float inputs of `f`, for a gradient of ones.
fn gradients(inputs: &[Tensor], f: impl Fn(&[Var]) -> Result<Var>) -> Vec<Vec<f64>> {
    let tape = Tape::new(&cpu());
    let leaf = |x: &Tensor| if x.dtype().is_float() { tape.leaf(x) } else { tape.constant(x) };
    let x: Vec<Var> = inputs.iter().map(|x| leaf(x).unwrap()).collect();
    let y = f(&x).unwrap();
    let ones = Tensor::full(&cpu(), &y.shape(), y.dtype(), 1.0).unwrap();
    let gradients = tape.backward_from(&[(&y, &ones)], BackwardOptions::default()).unwrap();
    let of = |x: &Var| gradients.of(x).map_or(Vec::new(), |g| g.to_f64_vec().unwrap());
    x.iter().map(of).collect()
}

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// What isn't outside its bounds passes its gradient, where the bounds are tensors; at a bound that is a number it is
/// 0.
#[test]
fn nan_passes_the_gradient_of_a_clamp() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let x = [-2.0, -1.0, 0.0, 1.0, 2.0, -inf, inf, nan];
    for dtype in FLOATS {
        let tensor = |values: &[f64]| floats(&cpu(), &[values.len()], values, dtype);
        let [x, low, high] = [&x[..], &[-1.0; 8], &[1.0; 8]].map(tensor);
        let both = gradients(&[x.clone(), low.clone(), high.clone()], |v| {
            v[0].clone().clamp_between(Some(v[1].clone()), Some(v[2].clone()))
        });
        assert_eq!(both[0], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], "{dtype}");
        assert_eq!(both[1], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], "{dtype}");
        assert_eq!(both[2], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0], "{dtype}");
        let below = gradients(&[x.clone(), low], |v| v[0].clone().clamp_between(Some(v[1].clone()), None));
        assert_eq!(below[0], [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], "{dtype}");
        let above = gradients(&[x.clone(), high], |v| v[0].clone().clamp_between(None, Some(v[1].clone())));
        assert_eq!(above[0], [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0], "{dtype}");
        let numbers = gradients(&[x], |v| v[0].clone().clamp(-1.0, 1.0));
        assert_eq!(numbers[0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], "{dtype}");
    }
}

#[test]
fn nan_stays_in_the_gradient_of_elu() {
    for dtype in FLOATS {
        let x = floats(&cpu(), &[4], &[f64::NAN, f64::NEG_INFINITY, f64::INFINITY, 2.0], dtype);
        let g = gradients(&[x], |v| v[0].clone().elu(0.8)).remove(0);
        assert!(g[0].is_nan() && g[1..] == [0.0, 1.0, 1.0], "{dtype}: {g:?}");
    }
}

/// `take_along_dim` counts from the end, like `index`; the others refuse that.
#[test]
fn negative_indices() {
    let x = floats(&cpu(), &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], DType::F32);
    let at = |values: &[i64], shape: &[usize]| Tensor::from_slice(&cpu(), shape, values).unwrap();
    let tape = Tape::new(&cpu());
    let v = tape.constant(&x).unwrap();
    let index = |values: &[i64], shape: &[usize]| tape.constant(&at(values, shape)).unwrap();
    let numbers = |y: Result<Var>| y.unwrap().tensor().unwrap().to_f64_vec().unwrap();
    let last = index(&[-1, -3], &[2, 1]);
    assert_eq!(numbers(v.clone().take_along_dim(&last, Some(1))), [2.0, 3.0]);
    assert_eq!(numbers(v.clone().take_along_dim(&last, None)), [5.0, 3.0]);
    let g = gradients(&[x.clone(), at(&[-1, -3], &[2, 1])], |v| v[0].clone().take_along_dim(&v[1], Some(1))).remove(0);
    assert_eq!(g, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
    let wide = index(&[-1], &[1]);
    for (refused, allowed) in [
        (v.clone().take_along_dim(index(&[-4], &[1, 1]), Some(1)), "-3..3"),
        (v.clone().gather(1, &last), "0..3"),
        (v.clone().index_select(0, &wide), "0..2"),
        (v.clone().scatter_add(1, &last, &v), "0..3"),
        (v.clone().index_add(0, &wide, v.clone().narrow(0, 0, 1).unwrap(), 1.0), "0..2"),
        (v.embedding(&wide), "0..2"),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(allowed) && error.contains('-'), "{error}");
    }
}

/// Scalars of every dtype beside a float, on either side.
#[test]
fn where_takes_scalars_of_any_dtype() {
    let tape = Tape::new(&cpu());
    let cond = tape.constant(&Tensor::from_slice(&cpu(), &[3], &[true, false, true]).unwrap()).unwrap();
    for dtype in FLOATS {
        let x = tape.constant(&floats(&cpu(), &[3], &[5.0, 6.0, 7.0], dtype)).unwrap();
        for scalar in DType::ALL {
            let one = tape.constant(&Tensor::full(&cpu(), &[], scalar, 1.0).unwrap()).unwrap();
            for (y, expected) in
                [(x.clone().where_(&cond, &one), [5.0, 1.0, 7.0]), (one.where_(&cond, &x), [1.0, 6.0, 1.0])]
            {
                let y = y.unwrap_or_else(|e| panic!("{dtype} and a {scalar}: {e}"));
                assert_eq!((y.dtype(), y.tensor().unwrap().to_f64_vec().unwrap()), (dtype, expected.to_vec()));
            }
        }
    }
}
