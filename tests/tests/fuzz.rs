//! What the fuzzers of `fuzz/` run, on stable: the committed seeds, and some thousand pseudo-random inputs.
//! `RETAPE_CASES` sets how many.

use retape_tests::choices::Choices;
use retape_tests::fuzz;
use retape_tests::programs::Dice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Runs a target on its seeds, on their halves and with a byte changed, and on random bytes.
fn run(name: &str, target: fn(&[u8]), usual: u64, longest: usize) {
    let on = |what: &str, bytes: &[u8]| {
        let result = catch_unwind(AssertUnwindSafe(|| target(bytes)));
        assert!(result.is_ok(), "{name} fails on {what}: {bytes:?}");
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(name);
    let mut seeds: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    assert!(seeds.len() >= 16, "the seeds of {name} are in {folder:?}");
    let mut dice = Dice::new(name.len() as u64);
    for path in seeds {
        let mut bytes = std::fs::read(&path).unwrap();
        let what = path.display().to_string();
        on(&what, &bytes);
        on(&what, &bytes[..bytes.len() / 2]);
        let at = Choices::throw(&mut dice, bytes.len());
        bytes[at] = Choices::throw(&mut dice, 256) as u8;
        on(&what, &bytes);
    }
    let cases = std::env::var("RETAPE_CASES").ok().and_then(|n| n.parse::<u64>().ok());
    for _ in 0..cases.map_or(usual, |n| n * usual / 150) {
        let len = Choices::throw(&mut dice, longest);
        let bytes: Vec<u8> = (0..len).map(|_| Choices::throw(&mut dice, 256) as u8).collect();
        on("random bytes", &bytes);
    }
}

#[test]
fn layout() {
    run("layout", fuzz::layout, 5000, 80);
}

#[test]
fn ops() {
    run("ops", fuzz::ops, 500, 90);
}

#[test]
fn tape() {
    run("tape", fuzz::tape, 150, 250);
}

#[test]
fn rules() {
    run("rules", fuzz::rules, 3000, 100);
}
