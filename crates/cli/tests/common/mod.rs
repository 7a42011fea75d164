//! Runs the program.

#![allow(dead_code)] // each test binary uses a part

use serde_json::Value;
use std::process::{Command, Output};

/// A model that takes milliseconds.
pub const SMALL: &[&str] =
    &["--layers", "2", "--dim", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--threads", "1"];

/// The program with arguments, not yet started.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_retape"));
    command.args(args);
    command
}

/// Runs it.
pub fn run(args: &[&str]) -> Output {
    command(args).output().expect("the program starts")
}

/// Runs it with the small model.
pub fn run_small(args: &[&str]) -> Output {
    run(&[args, SMALL].concat())
}

/// What it wrote to stdout; it must have succeeded.
pub fn stdout(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "status {:?}: {stderr}", output.status);
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Its stdout's lines, each JSON.
pub fn json_lines(output: &Output) -> Vec<Value> {
    stdout(output).lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// It must have refused with status 2, one line on stderr that has these words, and nothing on stdout.
pub fn assert_refused(output: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("error: ") && !stderr.contains("panicked"), "{stderr}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    for word in words {
        assert!(stderr.contains(word), "`{word}` isn't in: {stderr}");
    }
}

/// All of these fields are there.
pub fn assert_fields(object: &Value, fields: &[&str]) {
    for field in fields {
        assert!(object.get(field).is_some(), "no `{field}` in {object}");
    }
}
