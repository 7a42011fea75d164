//! Random programs with random marks, held handles, late marks and segments: equal bits, equal bytes, nothing left.
//! `RETAPE_CASES` sets the number of programs (the soak runs thousands).

use retape_core::meta;
use retape_tests::fuzz::check_session;
use retape_tests::programs::{Config, Run, run};
use retape_tests::sessions::session;

fn cases() -> u64 {
    std::env::var("RETAPE_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(150)
}

/// Runs on the CPU and dry, and checks what always holds.
fn checked(device: &retape_core::Device, config: Config) -> Run {
    let real = run(device, config).unwrap_or_else(|e| panic!("{config:?}: {e}"));
    let dry = run(&meta(), config).unwrap_or_else(|e| panic!("dry {config:?}: {e}"));
    assert_eq!((dry.peak, dry.fingerprint), (real.peak, real.fingerprint), "{config:?}");
    assert_eq!(real.left, 0, "{config:?}");
    assert_eq!(real.left_without_backward, 0, "{config:?}");
    assert_eq!(real.nodes_without_backward, 4, "only the leaves stay: {config:?}");
    assert_eq!(real.saved, real.metered, "{config:?}");
    if !config.segments {
        assert!(real.stats.most_replays_of_a_node <= 1, "{config:?}: {:?}", real.stats.most_replays_of_a_node);
    }
    assert!(real.gradients.iter().all(|g| *g == real.gradients[0]), "passes differ: {config:?}");
    real
}

#[test]
fn marks_handles_and_late_marks_never_show_in_the_gradients() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let (mut replays, mut too_late) = (0, 0);
    for graph in 1..=cases() {
        let plain = checked(&device, Config { graph, passes: 1, ..Config::default() });
        for variant in 0..4 {
            let handles = variant % 2 * (graph + 1);
            let late = variant / 2 * (graph + 9);
            let config =
                Config { graph, marks: Some(graph * 4 + variant), handles, late, passes: 1, ..Config::default() };
            for config in [config, Config { passes: 3, ..config }, Config { segments: true, verify: true, ..config }] {
                let marked = checked(&device, config);
                assert_eq!(marked.gradients[0], plain.gradients[0], "{config:?}");
                replays += marked.stats.replays;
                too_late += marked.too_late;
            }
        }
    }
    assert!(replays > 20 * cases(), "the marks did something: {replays} replays");
    assert!(too_late > 0, "some late marks came too late");
}

#[test]
fn int8_gradients_don_t_depend_on_handles_or_passes() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let mut quantized = 0;
    for graph in 1..=cases() {
        for segments in [false, true] {
            let config = Config {
                graph,
                marks: Some(graph + 77),
                int8: true,
                segments,
                verify: true,
                passes: 2,
                ..Config::default()
            };
            let tidy = checked(&device, config);
            let sloppy = run(&device, Config { handles: graph + 5, ..config }).unwrap();
            if !segments {
                // A held handle changes which values outlive a scope, and so their path and mark.
                assert_eq!(tidy.gradients, sloppy.gradients, "{config:?}");
            }
            quantized += tidy.stats.quantized;
        }
    }
    assert!(quantized > 0);
}

/// Passes between any other actions: the same loss gives the same bits each time, marks without int8 the bits of none.
#[test]
fn a_session_gives_each_loss_one_gradient() {
    let device = retape_cpu::device_with_threads(1).unwrap();
    let mut passes = 0;
    for seed in 1..=cases() {
        passes += check_session(&device, |device, marks| {
            session(device, seed, 120, marks).unwrap_or_else(|e| panic!("seed {seed}, {marks:?}: {e}"))
        });
    }
    assert!(passes as u64 > 4 * cases(), "{passes} passes");
}
