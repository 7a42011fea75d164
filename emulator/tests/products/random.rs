//! Random numbers and dropout: the CPU's bits.

use crate::both::{Lie, both, numbers, same_bytes};
use retape_core::DType;
use retape_core::kernel::{self, RandomStream};

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];
const STREAM: RandomStream = RandomStream { seed: 0x1234_5678_9abc_def0, counter: (7 << 33) + 5 };

#[test]
fn uniform() {
    let both = both();
    for dtype in FLOATS {
        for shape in [&[][..], &[1], &[8], &[3, 7], &[0, 4], &[5003]] {
            let outs = both.outs(shape, dtype);
            both.run(
                kernel::Uniform { stream: STREAM, out: &outs[0] },
                kernel::Uniform { stream: STREAM, out: &outs[1] },
            );
            same_bytes(&format!("{dtype} {shape:?}"), &outs);
        }
        // Not 16-byte aligned.
        let [cuda, cpu] = both.outs(&[21], dtype).map(|t| t.narrow(0, 1, 20).unwrap());
        both.run(kernel::Uniform { stream: STREAM, out: &cuda }, kernel::Uniform { stream: STREAM, out: &cpu });
        same_bytes(&format!("{dtype} inside"), &[cuda, cpu]);
    }
}

/// Logarithm, root and cosine are the devices' own.
#[test]
fn normal() {
    let both = both();
    let std = 0.02;
    for dtype in FLOATS {
        for shape in [&[][..], &[1], &[3, 7], &[0, 4], &[5003]] {
            let [out, cpu] = both.outs(shape, dtype);
            both.run(
                kernel::Normal { stream: STREAM, std, out: &out },
                kernel::Normal { stream: STREAM, std, out: &cpu },
            );
            let tolerance = std * crate::both::epsilon(dtype).max(8.0 * f64::EPSILON);
            for (i, (a, b)) in out.to_f64_vec().unwrap().into_iter().zip(cpu.to_f64_vec().unwrap()).enumerate() {
                assert!(
                    (a - b).abs() <= 4.0 * tolerance * (1.0 + b.abs() / std),
                    "{dtype} {shape:?}: {i} is {a}, should be {b}"
                );
            }
        }
    }
}

#[test]
fn dropout() {
    let both = both();
    for dtype in FLOATS {
        for (shape, lie) in [
            (&[][..], Lie::Plain),
            (&[3, 7], Lie::Plain),
            (&[6, 50], Lie::Transposed),
            (&[6, 50], Lie::Inside(3)),
            (&[0, 4], Lie::Plain),
            (&[5003], Lie::Plain),
        ] {
            for p in [0.0, 0.3, 1.0] {
                let [x, x_cpu] = both.tensors(lie, shape, dtype, &numbers(shape.iter().product(), 1));
                let outs = both.outs(shape, dtype);
                both.run(
                    kernel::Dropout { x: &x, p, stream: STREAM, out: &outs[0] },
                    kernel::Dropout { x: &x_cpu, p, stream: STREAM, out: &outs[1] },
                );
                same_bytes(&format!("{dtype} {shape:?} {lie:?}"), &outs);
                if lie == Lie::Plain {
                    both.cuda.run(kernel::Dropout { x: &x, p, stream: STREAM, out: &x }).unwrap();
                    same_bytes(&format!("{dtype} {shape:?} in place"), &[x, outs[1].clone()]);
                }
            }
        }
    }
}
