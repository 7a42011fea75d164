//! Faults planted in a kernel (tests/programs/planted.cuh): each is found by the modes that should find it, and the
//! kernel without faults passes in all of them.

mod programs;

use programs::{Mode, Program};

/// Each fault, the modes of which at least one order must find it, and what it then says.
const FAULTS: [(&str, &[Mode], &[&str]); 16] = {
    use Mode::{Address, Plain, Thread};
    [
        ("nothing", &[], &[]),
        ("a barrier is missing before shared memory is read", &[Plain, Address, Thread], &["WRONG", "data race"]),
        (
            "a barrier is missing before shared memory is written again",
            &[Plain, Address, Thread],
            &["WRONG", "data race"],
        ),
        ("a wait for copies is missing", &[Plain, Address, Thread], &["WRONG"]),
        ("a row too many is written", &[Plain, Address, Thread], &["was written", "heap-buffer-overflow"]),
        ("a row too many is read", &[Address], &["heap-buffer-overflow"]),
        ("a vector access is misaligned", &[Address], &["misaligned"]),
        (
            "half of the lanes shuffle by a full mask",
            &[Plain, Address, Thread],
            &["FAULT: multiply: deadlock in block"],
        ),
        ("a shuffle reads a lane that has ended", &[Plain, Address, Thread], &["reads a lane that takes no part"]),
        ("a mask leaves a lane out", &[Plain, Address, Thread], &["the mask leaves out a lane that calls"]),
        ("warps are at different barriers", &[Plain, Address, Thread], &["are at different barriers"]),
        ("a warp leaves out a barrier", &[Plain, Address, Thread], &["are at different barriers"]),
        ("shared memory overflows", &[Plain, Address, Thread], &["outside its 5120 bytes", "use-after-poison"]),
        ("shared memory is read that nobody wrote", &[Plain, Address, Thread], &["WRONG"]),
        ("blocks write to one place", &[Thread], &["data race"]),
        ("a stack overflows", &[Plain, Address], &["a thread's stack is full", "stack-overflow"]),
    ]
};

fn check(mode: Mode) {
    let program = Program::compile("planted", mode);
    for (number, (fault, modes, signs)) in FAULTS.iter().enumerate() {
        let runs = ["forward", "reverse", "7"].map(|order| (order, program.run(&[&number.to_string()], order)));
        if number == 0 {
            for (order, run) in &runs {
                assert!(run.success && run.output == "ok\n", "{mode:?}, {order}, no fault:\n{}", run.output);
            }
        } else if modes.contains(&mode) {
            let found = runs.iter().any(|(_, run)| !run.success && signs.iter().any(|sign| run.output.contains(sign)));
            assert!(found, "{mode:?} doesn't find that {fault}:\n{:#?}", runs);
        }
    }
}

#[test]
fn plain() {
    check(Mode::Plain);
}

#[test]
fn with_address_and_undefined_sanitizers() {
    check(Mode::Address);
}

#[test]
fn with_thread_sanitizer() {
    check(Mode::Thread);
}

/// Errors name the kernel, the line, the block and the thread.
#[test]
fn errors_say_where() {
    let program = Program::compile("planted", Mode::Plain);
    let run = program.run(&["9"], "forward");
    let line = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/planted.cuh")).unwrap();
    let line = 1 + line.lines().position(|line| line.contains("__shfl_xor_sync")).unwrap();
    let place = format!("planted.cuh:{line}, block (0,0,0), thread (3,0,0)");
    assert!(run.output.starts_with("FAULT: multiply: shuffle: ") && run.output.contains(&place), "{}", run.output);
}
