//! The seeds of a run.

use retape_core::{DType, Tape, TapeOptions, Tensor};
use retape_nn::Random;
use std::collections::HashSet;

#[test]
fn seeds_are_a_function_of_run_and_step() {
    let mut seen = HashSet::new();
    for seed in [0, 1, 2, 1 << 53, (1 << 53) + 1, u64::MAX] {
        let mut random = Random::new(seed);
        for step in 0..200 {
            assert_eq!((random.seed(), random.step()), (seed, step));
            let given = random.next_seed();
            assert_eq!(Random::at(seed, step).next_seed(), given);
            assert!(seen.insert(given), "seed {seed}, step {step}: the seed of another step");
        }
    }
    // The last step is followed by the first one.
    let mut random = Random::at(3, u64::MAX);
    random.next_seed();
    assert_eq!(random, Random::new(3));
}

/// Philox is computed by hand here: a change of the numbers would change every run that resumes.
#[test]
fn the_mixing_stays_what_it_is() {
    let key = 7 ^ u64::from_be_bytes(*b"tapeseed");
    let words = retape_core::rng::philox4x32([0, 0, 5, 0], [key as u32, (key >> 32) as u32]);
    assert_eq!(Random::at(7, 5).next_seed(), words[0] as u64 + ((words[1] as u64) << 32));
}

#[test]
fn a_saved_one_goes_on_with_the_same_bits() {
    let device = retape_cpu::device();
    let x = Tensor::full(&device, &[1000], DType::F32, 1.0).unwrap();
    let mask = |random: &mut Random| {
        let tape = Tape::with(&device, TapeOptions { seed: Some(random.next_seed()), ..TapeOptions::default() });
        tape.leaf(&x).unwrap().dropout(0.5).unwrap().tensor().unwrap().to_bytes().unwrap()
    };
    let mut at_once = Random::new(u64::MAX);
    let all: Vec<_> = (0..6).map(|_| mask(&mut at_once)).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 6, "a step drops what another one dropped");
    let mut first = Random::new(u64::MAX);
    let mut in_two: Vec<_> = (0..3).map(|_| mask(&mut first)).collect();
    let saved = serde_json::to_string(&first).unwrap();
    assert_eq!(saved, r#"{"seed":18446744073709551615,"step":3}"#);
    let mut second: Random = serde_json::from_str(&saved).unwrap();
    in_two.extend((0..3).map(|_| mask(&mut second)));
    assert_eq!(in_two, all);
    assert!(serde_json::from_str::<Random>(r#"{"seed":1,"step":0,"more":1}"#).is_err());
}
