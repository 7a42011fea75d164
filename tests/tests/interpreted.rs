//! Every op's small samples once on the CPU, forward and backward: small enough for Miri, which `scripts/soak.sh` runs
//! this with. Miri interprets the kernels, their threads included, and reports what is undefined: reads of memory that
//! was never written, pointers out of bounds or of the wrong provenance, data races.

use retape_core::DType;
use retape_core::ops::Op;
use retape_tests::conformance::label;
use retape_tests::{SampleMarks, run_sample};
use std::collections::BTreeMap;

/// The most elements of a sample's inputs, and samples of an op in each dtype. More take Miri hours.
const LARGEST: usize = 64;
const SAMPLES: usize = if cfg!(miri) { 1 } else { usize::MAX };

#[test]
fn every_small_sample_runs() {
    let device = retape_cpu::device_with_threads(2).unwrap();
    let live = device.meter().live();
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    for sample in Op::all_samples() {
        let elements: usize = sample.inputs.iter().map(|i| i.shape.iter().product::<usize>()).sum();
        let count = ran.entry(sample.op.rule().name()).or_default();
        if elements > LARGEST || *count == SAMPLES {
            continue;
        }
        *count += 1;
        if cfg!(miri) {
            eprintln!("{}", label(&sample)); // it takes minutes
        }
        for dtype in [DType::F32, DType::BF16] {
            let run = run_sample(&device, &sample, dtype, SampleMarks::default(), 1);
            run.unwrap_or_else(|e| panic!("{dtype} {}: {e}", label(&sample)));
            assert_eq!(device.meter().live(), live, "{dtype} {}", label(&sample));
        }
    }
    assert!(ran.len() > 90 && ran.values().all(|&count| count > 0), "{ran:?}");
}
