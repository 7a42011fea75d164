//! The direction of imports, and that every package says its licence.

use std::path::Path;

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
