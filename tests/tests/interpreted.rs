//! Every op's small samples once on the CPU, forward and backward: small enough for Miri, which `scripts/soak.sh` runs this
//! with. Miri interprets the kernels, their threads included, and reports what is undefined: reads of memory that was
//! never written, pointers out of bounds or of the wrong provenance, data races.

use retape_core::DType;
use retape_core::ops::Op;
use retape_tests::conformance::label;
use retape_tests::{SampleMarks, run_sample};

/// Samples with more elements take Miri minutes.
const LARGEST: usize = 64;

#[test]
fn every_small_sample_runs() {
    let device = retape_cpu::device();
    let (mut ran, mut before) = (0, device.meter().live());
    for sample in Op::all_samples() {
        let elements: usize = sample.inputs.iter().map(|i| i.shape.iter().product::<usize>()).sum();
        if elements > LARGEST {
            continue;
        }
        for dtype in [DType::F32, DType::BF16] {
            let run = run_sample(&device, &sample, dtype, SampleMarks::default(), 1);
            run.unwrap_or_else(|e| panic!("{dtype} {}: {e}", label(&sample)));
            let live = device.meter().live();
            assert_eq!(std::mem::replace(&mut before, live), live, "{dtype} {}", label(&sample));
            ran += 1;
        }
    }
    assert!(ran > 400, "only {ran} runs");
}
