//! A user's own crate, outside this workspace and on a machine without CUDA, builds against the facade and runs: the
//! feature `cuda` is off by default, as the build script of `cust` would fail there.

use std::path::Path;
use std::process::Command;

const MANIFEST: &str = r#"
[package]
name = "outside"
version = "0.1.0"
edition = "2024"

[dependencies]
retape = { path = "RETAPE" }

[workspace]
"#;

const MAIN: &str = r#"
use retape::prelude::*;

fn main() -> Result<(), retape::Error> {
    let device = retape::cpu();
    let tape = Tape::new(&device);
    let x = tape.leaf(&Tensor::from_slice(&device, &[2], &[1f32, 2.0])?)?;
    let gradients = tape.backward(&(&x * &x)?.sum()?)?;
    println!("{:?}", gradients.of(&x).unwrap().to_f64_vec()?);
    Ok(())
}
"#;

#[test]
fn a_crate_outside_builds_without_cuda() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let outside = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(outside.path().join(name), text).unwrap();
    std::fs::create_dir(outside.path().join("src")).unwrap();
    write("Cargo.toml", &MANIFEST.replace("RETAPE", &here.display().to_string()));
    write("src/main.rs", MAIN);
    std::fs::copy(here.join("../../Cargo.lock"), outside.path().join("Cargo.lock")).unwrap();
    // What the workspace's own cargo put into the environment isn't there for a user.
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CUDA") || name.starts_with("CARGO")) {
        if name != "CARGO_HOME" {
            cargo.env_remove(name);
        }
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside");
    cargo.args(["run", "--quiet", "--offline", "--config", "profile.dev.debug=false", "--target-dir"]).arg(target);
    let output = cargo.current_dir(outside.path()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[2.0, 4.0]\n");
    let lock = std::fs::read_to_string(outside.path().join("Cargo.lock")).unwrap();
    assert!(!lock.contains("\"cust\""), "the facade without its feature depends on cust");
}
