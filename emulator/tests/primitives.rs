//! The twins of prim.cuh's instructions, and what threads do together, against their definitions.

mod programs;

use programs::{Mode, Program};

fn check(mode: Mode) {
    let program = Program::compile("primitives", mode);
    for order in ["forward", "reverse", "1", "2", "3"] {
        let run = program.run(&[], order);
        assert!(run.success && run.output == "ok\n", "{mode:?}, {order}:\n{}", run.output);
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
