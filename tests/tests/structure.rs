//! The direction of imports, that every package says its licence, where `unsafe` blocks may be, and how long lines are.

use std::path::{Path, PathBuf};

/// Each crate, and the crates of this project that it may depend on (dev-dependencies apart).
const ALLOWED: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("cpu", &["retape-core"]),
    ("cuda-driver", &[]),
    ("cuda", &["retape-core", "retape-cuda-driver"]),
    ("policy", &["retape-core"]),
    ("nn", &["retape-core"]),
    ("retape", &["retape-core", "retape-cpu", "retape-cuda", "retape-nn", "retape-policy"]),
    ("cli", &["retape"]),
];

#[test]
fn imports_go_one_way() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut seen = Vec::new();
    for entry in std::fs::read_dir(&crates).unwrap() {
        let folder = entry.unwrap().file_name().into_string().unwrap();
        let manifest = std::fs::read_to_string(crates.join(&folder).join("Cargo.toml")).unwrap();
        let (_, allowed) = ALLOWED.iter().find(|(name, _)| *name == folder).expect("a crate without its place here");
        let mut section = "";
        for line in manifest.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if section == "[dependencies]" && name.starts_with("retape") {
                assert!(allowed.contains(&name), "crates/{folder} depends on {name}");
            }
        }
        assert!(manifest.contains("license.workspace = true"), "crates/{folder} has no licence");
        seen.push(folder);
    }
    assert_eq!(seen.len(), ALLOWED.len(), "{seen:?}");
}

/// Where `unsafe` blocks may be: the backends, the tests' wrapper of one, and the page on how to write one.
const UNSAFE: [&str; 6] =
    ["crates/cpu", "crates/cuda", "crates/cuda-driver", "emulator", "tests/src/wrapped.rs", "docs/adding-a-backend.md"];

#[test]
fn unsafe_blocks_are_in_backends_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let block = concat!("unsafe", " {");
    let mut found = [false; UNSAFE.len()];
    let mut left: Vec<PathBuf> =
        ["README.md", "benches", "crates", "docs", "emulator", "fuzz", "tests"].map(PathBuf::from).into();
    while let Some(path) = left.pop() {
        let full = root.join(&path);
        if full.is_dir() {
            let entries = std::fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name()));
            left.extend(entries.filter(|path| !path.ends_with("target")));
        } else if path.extension().is_some_and(|e| e == "rs" || e == "md")
            && std::fs::read_to_string(&full).unwrap().contains(block)
        {
            let place = UNSAFE.iter().position(|place| path.starts_with(place));
            found[place.unwrap_or_else(|| panic!("{} has an unsafe block", path.display()))] = true;
        }
    }
    assert!(found.iter().all(|&found| found), "{UNSAFE:?} have blocks: {found:?}");
}

/// Endings of sources.
const SOURCES: [&str; 9] = ["rs", "cu", "cuh", "cpp", "h", "sh", "py", "js", "css"];

/// Where lines may be longer: what tools write.
const GENERATED: [&str; 3] = ["docs/results", "target", ".cuda"];

/// Lines of sources are of at most 120 columns, comments included.
#[test]
fn no_line_is_longer_than_120_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (mut long, mut files) = (Vec::new(), 0);
    let mut left: Vec<PathBuf> =
        ["benches", "crates", "docs", "emulator", "fuzz", "kernels", "scripts", "tests"].map(PathBuf::from).into();
    while let Some(path) = left.pop() {
        let full = root.join(&path);
        if GENERATED.iter().any(|place| path.ends_with(place)) {
            continue;
        }
        if full.is_dir() {
            left.extend(std::fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| SOURCES.contains(&e)) {
            files += 1;
            let text = std::fs::read_to_string(&full).unwrap();
            let lines = text.lines().enumerate().filter(|(_, line)| line.chars().count() > 120);
            long.extend(lines.map(|(i, _)| format!("{}:{}", path.display(), i + 1)));
        }
    }
    assert!(files > 300, "only {files} files were found");
    assert!(long.is_empty(), "{} lines are longer than 120 columns:\n{}", long.len(), long.join("\n"));
}

/// The model that README opens with is an example that is compiled: the same lines.
#[test]
fn readme_opens_with_an_example_that_compiles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let (readme, example) = (read("README.md"), read("crates/retape/examples/own_model.rs"));
    let shown = readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let code = example.split_once("\n\n").unwrap().1;
    assert_eq!(shown, code);
}

/// No value needs a `drop` to let go of it: README, docs, examples and nn have none for handles.
#[test]
fn no_handle_is_dropped_by_hand() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files: Vec<PathBuf> = vec![root.join("README.md")];
    for (dir, ending) in [("docs", "md"), ("crates/retape/examples", "rs"), ("crates/nn/src", "rs")] {
        let entries = std::fs::read_dir(root.join(dir)).unwrap().map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.extension().is_some_and(|e| e == ending)));
    }
    assert!(files.len() > 20, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let line = text.lines().find(|line| line.contains("drop(") && !line.contains("fn drop("));
        assert_eq!(line, None, "{}", file.display());
    }
}
