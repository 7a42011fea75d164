//! AdamW against the CPU's.

use crate::both::{Lie, both, epsilon, numbers};
use retape_core::kernel::AdamWConfig;
use retape_core::{DType, Kernel};

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
                    Kernel::AdamW { p, g, m, v, step, config, grad_scale: 0.5 }
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
