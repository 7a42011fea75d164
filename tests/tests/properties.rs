//! Properties over random inputs. Every choice is a byte, so that proptest reduces a failure by dropping bytes and by
//! making them smaller: towards short programs and contiguous tensors. `RETAPE_CASES` sets how many; with `RETAPE_SEED`
//! they are others.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use retape_core::ops::{Op, Sample};
use retape_tests::choices::Bytes;
use retape_tests::fuzz::check_session;
use retape_tests::sessions::{Marks, session, session_of};
use retape_tests::variations::places_don_t_show;
use retape_tests::{layouts, patterns};
use std::cell::Cell;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The usual number of cases, or `RETAPE_CASES` in the same proportion. The same on every run, unless `RETAPE_SEED` is
/// set.
fn cases(usual: u32) -> ProptestConfig {
    let cases = number("RETAPE_CASES").map_or(usual, |n| (n * usual as u64).div_ceil(150) as u32);
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(number("RETAPE_SEED").unwrap_or(1)),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    }
}

thread_local! {
    static STRANGE: Cell<u32> = const { Cell::new(0) };
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn layouts_are_what_the_model_says(bytes in vec(any::<u8>(), 0..80)) {
        layouts::views(&mut Bytes::new(&bytes));
    }

    #[test]
    fn shapes_broadcast_as_compared_by_hand(bytes in vec(any::<u8>(), 0..16)) {
        layouts::broadcasts(&mut Bytes::new(&bytes));
    }

    #[test]
    fn windows_lie_inside_their_storage(bytes in vec(any::<u8>(), 0..40)) {
        layouts::windows(&mut Bytes::new(&bytes));
    }

    #[test]
    fn patterns_match_as_tried_by_hand(bytes in vec(any::<u8>(), 0..80)) {
        patterns::globs(&mut Bytes::new(&bytes));
    }

    #[test]
    fn a_rule_s_text_is_the_rule(bytes in vec(any::<u8>(), 0..100)) {
        patterns::rule_texts(&mut Bytes::new(&bytes));
    }

    #[test]
    fn any_text_is_taken_or_an_error(
        text in "\\PC{0,40}",
        toml in "(preset|rule|path|mark|=|'|\\[|\\]|\n|int8|bf16|keep|a|[0-9]| ){0,30}",
    ) {
        patterns::texts(&text);
        patterns::texts(&toml);
    }
}

/// Random samples of the registry in random sizes, lying anywhere that views can express: transposed, cut out, in
/// steps, repeated; with NaN and indices out of range around them.
#[test]
fn places_in_memory_don_t_show_in_the_numbers() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let samples: Vec<Sample> = Op::all_samples();
    proptest!(cases(4000), |(bytes in vec(any::<u8>(), 2..90))| {
        let strange = places_don_t_show(&device, &samples, &mut Bytes::new(&bytes));
        STRANGE.set(STRANGE.get() + u32::from(strange));
    });
    assert!(STRANGE.get() > 1000, "only {} cases lay strangely", STRANGE.get());
}

/// Any session has the gradients of the same one without marks; proptest reduces one that hasn't.
#[test]
fn a_session_of_bytes_gives_each_loss_one_gradient() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    proptest!(cases(150), |(bytes in vec(any::<u8>(), 0..250))| {
        check_session(&device, |device, marks| session_of(device, &bytes, 80, marks).unwrap_or_else(|e| panic!("{e}")));
    });
}

/// A tape on another thread changes nothing, on a device of its own or on the same one (whose meter they share).
#[test]
fn another_tape_changes_nothing() {
    let device = retape_cpu::device();
    proptest!(cases(20), |(bytes in vec(any::<u8>(), 0..200), seed in any::<u64>())| {
        let run = |device: &_| session_of(device, &bytes, 80, Marks::None).unwrap();
        let alone = run(&device);
        let own = retape_cpu::device_with_threads(1).unwrap();
        let beside = std::thread::scope(|scope| {
            let other = scope.spawn(|| session(&own, seed, 60, Marks::All).map(drop));
            let beside = run(&device);
            other.join().unwrap().unwrap();
            beside
        });
        assert_eq!(alone, beside);
    });
}
