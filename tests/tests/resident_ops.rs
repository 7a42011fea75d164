//! The memory that each op takes from the system at 64 MiB, and the pool's own, against what the meter counts. Each
//! case runs in a process of its own: this binary starts itself again.

#![cfg(target_os = "linux")]

use retape_core::ops::Sample;
use retape_core::{DType, Device, MemoryKind, Tensor, kernel};
use retape_tests::conformance::label;
use retape_tests::grown;
use std::process::Command;

const SIZE: u64 = 64 << 20;
/// Ways in which an op's samples are grown.
const WAYS: usize = 4;
/// Names the case that this process runs.
const CASE: &str = "RETAPE_RESIDENT_CASE";

/// What stands in the status of this process, in bytes.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// From here on the system's high-water mark is of what follows.
fn reset_high_water() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// Prints what `body` took from the system above `before`, and what may be taken.
fn report(device: &Device, before: u64, body: impl FnOnce()) {
    device.meter().reset_peak();
    reset_high_water();
    body();
    let held = status("VmHWM:").saturating_sub(before);
    println!("measured {} {held} {}", device.meter().peak(), device.scratch_bytes());
}

/// One sample, forward and backward.
fn op(sample: &Sample, small: &Sample) {
    let device = retape_cpu::device_with_threads(2).unwrap();
    // Thread stacks and code pages: there before.
    grown::run(&device, small, &grown::tensors(&device, small)).unwrap();
    let before = status("VmRSS:");
    let inputs = grown::tensors(&device, sample);
    report(&device, before, || grown::run(&device, sample, &inputs).unwrap());
}

fn touched(device: &Device, bytes: usize) -> Tensor {
    let tensor = Tensor::uninit(device, &[bytes], DType::U8, MemoryKind::Input).unwrap();
    device.run(kernel::Fill { value: 1.0, out: &tensor }).unwrap();
    tensor
}

type Pattern = fn(&Device);

/// What may drive a pool beyond its bound. The first takes part in the measured peak by construction: one tensor at a
/// time.
const POOLS: [(&str, Pattern); 5] = [
    ("many sizes, one at a time", |device| (1..40).for_each(|i| drop(touched(device, i * (4 << 20))))),
    ("many sizes after a refused request", |device| {
        assert!(Tensor::uninit(device, &[1 << 46], DType::U8, MemoryKind::Input).is_err());
        (1..40).for_each(|i| drop(touched(device, i * (4 << 20))));
    }),
    ("many sizes after a limit refused one", |device| {
        device.meter().set_limit(Some(1 << 30));
        assert!(Tensor::uninit(device, &[1 << 34], DType::U8, MemoryKind::Input).is_err());
        (1..40).for_each(|i| drop(touched(device, i * (4 << 20))));
    }),
    ("small buffers, then large ones", |device| {
        let small: Vec<Tensor> = (0..4000).map(|_| touched(device, 60_000)).collect();
        drop(small);
        let large: Vec<Tensor> = (0..60).map(|_| touched(device, 4_000_000)).collect();
        drop(large);
        let middle: Vec<Tensor> = (0..1600).map(|_| touched(device, 150_000)).collect();
        drop(middle);
        drop(touched(device, 240_000_000));
    }),
    ("a little more each time", |device| {
        for i in 0..300 {
            drop((touched(device, (1 << 20) + i * 40_000), touched(device, (1 << 20) + i * 70_000)));
        }
    }),
];

#[test]
#[ignore = "run by the others, in a process of its own"]
fn one_case() {
    let Ok(case) = std::env::var(CASE) else { return };
    if let Some((_, body)) = POOLS.iter().find(|(name, _)| *name == case) {
        let device = retape_cpu::device_with_threads(2).unwrap();
        drop(touched(&device, 1 << 16));
        let before = status("VmRSS:");
        return report(&device, before, || body(&device));
    }
    let at: usize = case.parse().unwrap();
    let (large, small) = (grown::all(SIZE, WAYS), grown::all(1 << 14, WAYS));
    let name = |s: &Sample| (s.op.rule().name(), s.name);
    let twin = small.iter().find(|s| name(s) == name(&large[at])).unwrap_or(&small[0]);
    op(&large[at], twin);
}

/// Runs a case and gives peak, resident and scratch bytes.
fn measure(case: &str) -> Result<[u64; 3], String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["one_case", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|l| l.split_once("measured ")).map(|(_, numbers)| numbers);
    let numbers: Option<Vec<u64>> = line.and_then(|l| l.split_whitespace().map(|n| n.parse().ok()).collect());
    let numbers: Option<[u64; 3]> = numbers.and_then(|n| n.try_into().ok());
    numbers.filter(|_| output.status.success()).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What may be resident, scratch included: at most 10% + 16 MiB above the peak.
fn allowed(peak: u64) -> u64 {
    peak + peak / 10 + (16 << 20)
}

#[test]
fn a_pool_holds_little_more_than_the_peak() {
    for (name, _) in POOLS {
        let measured = measure(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(measured[1] <= allowed(measured[0]), "{name}: peak, resident, scratch {measured:?}");
    }
}

/// Those that once took memory beside the meter, and those most likely to.
const FEW: [&str; 10] = [
    "sum",
    "gather",
    "scatter_add",
    "cross_entropy",
    "embedding",
    "layer_norm",
    "prod",
    "index",
    "nll_loss",
    "cumprod",
];

/// All ops with `RETAPE_RESIDENT=all`, and then the table of docs/results/resident.md; else some.
#[test]
fn what_an_op_takes_is_metered() {
    let all = std::env::var("RETAPE_RESIDENT").is_ok_and(|v| v == "all");
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let mut wrong = Vec::new();
    for (at, sample) in grown::all(SIZE, WAYS).iter().enumerate() {
        if !all && !FEW.contains(&sample.op.rule().name()) {
            continue;
        }
        let shapes: Vec<String> = sample.inputs.iter().map(|i| format!("{:?}", i.shape)).collect();
        let shapes = shapes.join(" ");
        match measure(&at.to_string()) {
            Ok(measured) => {
                let [peak, held, scratch] = measured.map(mib);
                println!("| `{}` | {shapes} | {peak:.1} | {held:.1} | {scratch:.1} |", sample.op.rule().name());
                if measured[1] > allowed(measured[0]) {
                    wrong.push(format!("{} {shapes}: peak, resident, scratch {measured:?}", label(sample)));
                }
            }
            Err(e) => wrong.push(format!("{} {shapes}: {e}", label(sample))),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_op_can_be_grown() {
    let large = grown::all(SIZE, WAYS);
    for sample in retape_core::ops::Op::all_samples() {
        let name = sample.op.rule().name();
        assert!(large.iter().any(|l| l.op.rule().name() == name), "{name} has no large sample");
    }
}
