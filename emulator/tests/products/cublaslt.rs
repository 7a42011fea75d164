//! The products of matmul.rs through cuBLASLt's functions: in a process of its own, with fake_cublaslt.cpp in the
//! library's place, which sees to it that the arguments are in order. On a GPU it is the other way round: there the
//! process of its own is one without the library.

use std::path::Path;
use std::process::Command;

#[test]
fn products_by_cublaslt() {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let passes = |tests: &mut Command| {
        let output = tests.arg("matmul::").output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    };
    let mut tests = Command::new(std::env::current_exe().unwrap());
    if retape_cuda_emulator::tests_gpu() {
        return passes(tests.env("RETAPE_CUBLASLT", "none"));
    }
    let driver = retape_cuda_emulator::library().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let (library, log) = (folder.path().join("libcublasLt.so"), folder.path().join("log"));
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()));
    compiler.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden", "-I"]);
    compiler
        .arg(root.join("src"))
        .arg(root.join("tests/products/fake_cublaslt.cpp"))
        .arg("-o")
        .arg(&library)
        .arg("-ldl");
    assert!(compiler.status().unwrap().success(), "g++ failed; see above");

    tests.env("RETAPE_CUBLASLT", &library).env("RETAPE_CUDA_DRIVER", driver);
    passes(tests.env("FAKE_CUBLASLT_LOG", &log));

    let log = std::fs::read_to_string(&log).unwrap();
    let counts: Vec<usize> = log.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [products, heuristics, alive] = counts[..] else { panic!("{log}") };
    assert!(products > 300, "most go through it: {log}");
    assert!(heuristics < products, "an algorithm is looked for once for each shape: {log}");
    assert_eq!(alive, 0, "all that was made was destroyed: {log}");
}
