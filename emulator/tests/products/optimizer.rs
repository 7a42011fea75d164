//! AdamW against the CPU's.

use crate::both::{Lie, both, epsilon, numbers};
use retape_core::kernel::{self, AdamWConfig};
use retape_core::{BackwardOptions, DType, Device, MemoryKind, Tape, Tensor};
use retape_nn::{AdamW, Parameter};

#[test]
fn adamw() {
    use DType::*;
    let both = both();
    let config = AdamWConfig { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
    for dtypes in [[F32; 4], [F64; 4], [BF16; 4], [F16; 4], [F32, BF16, F32, F32], [BF16, BF16, F32, F32]] {
        for (shape, lie) in [
            (&[][..], Lie::Plain),
            (&[131], Lie::Plain),
            (&[2, 3000], Lie::Plain),
            (&[0], Lie::Plain),
            (&[9, 14], Lie::Transposed),
        ] {
            let n = shape.iter().product();
            let values = [1, 2, 3, 4].map(|seed| numbers(n, seed));
            let mut tensors = vec![];
            for (i, values) in values.iter().enumerate() {
                let values: Vec<f64> = values.iter().map(|x| if i == 3 { x.abs() } else { *x }).collect();
                // The gradient may lie otherwise than what is written.
                tensors.push(both.tensors(if i == 1 { lie } else { Lie::Plain }, shape, dtypes[i], &values));
            }
            for step in 1..4 {
                let kernel = |side: usize| {
                    let [p, g, m, v] = [0, 1, 2, 3].map(|i: usize| &tensors[i][side]);
                    kernel::AdamW { p, g, m, v, step, config, grad_scale: 0.5 }
                };
                both.run(kernel(0), kernel(1));
            }
            for (name, i) in [("p", 0), ("m", 2), ("v", 3)] {
                let [ours, theirs] = [&tensors[i][0], &tensors[i][1]].map(|t| t.to_f64_vec().unwrap());
                for (j, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                    let tolerance = 8.0 * epsilon(dtypes[i]) * (b.abs() + 0.1);
                    assert!(
                        (a - b).abs() <= tolerance,
                        "{dtypes:?} {shape:?} {lie:?}: {name}[{j}] is {a}, should be {b}"
                    );
                }
            }
        }
    }
}

/// A parameter of 16 bits is the rounding of an f32 master on both devices, so that small steps add up.
#[test]
fn small_steps_add_up_in_sixteen_bits() {
    let both = both();
    let config = AdamWConfig { lr: 6e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.01 };
    for dtype in [DType::BF16, DType::F16] {
        let run = |device: &Device| {
            // From 1.0 as in a run, with a gradient of each size.
            let w = Parameter::new("w", Tensor::full(device, &[37], dtype, 1.0).unwrap()).unwrap();
            let sizes: Vec<f64> = (0..37).map(|i| 2f64.powi(i % 11 - 8)).collect();
            let g = Tensor::from_slice(device, &[37], &sizes).unwrap().cast(dtype, MemoryKind::Input).unwrap();
            let mut optimizer = AdamW::decay_all(vec![w.clone()], config).unwrap();
            for _ in 0..100 {
                let tape = Tape::new(device);
                let y = w.var(&tape).unwrap().scale(1.0).unwrap();
                optimizer.step(&tape.backward_from(&[(&y, &g)], BackwardOptions::default()).unwrap(), 1.0).unwrap();
            }
            assert_eq!(device.meter().live_of(MemoryKind::Optimizer), 37 * 12);
            let state = optimizer.state().unwrap();
            let master = state.iter().find(|s| s.name == "w.master").unwrap().tensor.clone();
            let rounded = master.cast(dtype, MemoryKind::Input).unwrap();
            assert_eq!(rounded.to_bytes().unwrap(), w.tensor().to_bytes().unwrap());
            master.to_f64_vec().unwrap()
        };
        let [cuda, cpu] = [&both.cuda, &both.cpu].map(run);
        for (a, b) in cuda.iter().zip(&cpu) {
            // A constant gradient moves a parameter by lr a step.
            assert!((a - b).abs() < 1e-5 && (a - 0.396).abs() < 5e-3, "{dtype}: {a} and {b}");
        }
    }
}

/// Operands that don't belong together are refused, on the host, before anything is launched.
#[test]
fn adamw_checks_its_operands() {
    let both = both();
    let config = AdamWConfig { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1 };
    let t = |shape: &[usize], dtype| Tensor::full(&both.cuda, shape, dtype, 1.0).unwrap();
    let p = t(&[4], DType::F32);
    for wrong in [t(&[8], DType::F32), t(&[4], DType::F64), t(&[4], DType::I64)] {
        for place in 0..3 {
            let mut others = [&p; 3];
            others[place] = &wrong;
            let [g, m, v] = others;
            let kernel = kernel::AdamW { p: &p, g, m, v, step: 1, config, grad_scale: 1.0 };
            let error = both.cuda.run(kernel).unwrap_err().to_string();
            assert!(error.contains("adamw"), "{error}");
        }
    }
}
