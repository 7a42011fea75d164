//! Programs of C++ that run kernels on the emulator without Rust: compiled by tests, with or without sanitizers.

use std::path::{Path, PathBuf};
use std::process::Command;

/// How a program is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "each test uses some")]
pub enum Mode {
    Plain,
    /// Address and undefined-behaviour sanitizers.
    Address,
    Thread,
}

pub struct Program(PathBuf);

#[derive(Debug)]
pub struct Run {
    pub success: bool,
    pub output: String,
}

impl Program {
    /// Compiles `tests/programs/{name}.cpp`.
    pub fn compile(name: &str, mode: Mode) -> Program {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let unique = format!("{name}-{mode:?}-{:?}", std::thread::current().id());
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(unique);
        let compiler = retape_cuda_emulator::compiler().unwrap_or_else(|reason| panic!("{reason}"));
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-O1", "-g1", "-fno-strict-aliasing", "-Wno-attributes", "-Wno-unknown-pragmas"]);
        command.args(match mode {
            Mode::Plain => &[][..],
            Mode::Address => &["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
            Mode::Thread => &["-fsanitize=thread"],
        });
        command.arg("-I").arg(root.join("src")).arg("-I").arg(root.join("../kernels"));
        command.arg(root.join(format!("tests/programs/{name}.cpp")));
        for object in ["scheduler", "fiber", "registry", "shared_memory", "faults", "memory"] {
            command.arg(retape_cuda_emulator::objects().join(format!("{object}.o")));
        }
        let output = command.arg("-ldl").arg("-o").arg(&program).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Program(program)
    }

    /// Runs it with this order of threads.
    pub fn run(&self, arguments: &[&str], order: &str) -> Run {
        let mut command = Command::new(&self.0);
        command.args(arguments).env("RETAPE_EMULATOR_ORDER", order).env("ASAN_OPTIONS", "detect_leaks=0");
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Run { success: output.status.success(), output: text }
    }
}
