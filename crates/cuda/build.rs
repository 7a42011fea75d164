//! Compiles kernels/*.cu and embeds their images, where there is an nvcc: the environment's `NVCC`, what
//! scripts/install-nvcc.sh has put into `.cuda`, or one on the path. Without one the crate builds all the same.
//!
//! Also reads the enums by which kernels number their functions, so that Rust knows the numbers by the same names.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// GPUs with code of their own, then the oldest that later ones may be compiled for at run time.
const TARGETS: [&str; 3] =
    ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"];

/// Enums of kernels/ that launches take numbers from, and the modules of these numbers in src/numbers.rs.
const ENUMS: [(&str, &str, &str); 9] = [
    ("elementwise.cu", "Unary", "unary"),
    ("elementwise.cu", "Binary", "binary"),
    ("elementwise.cu", "Ternary", "ternary"),
    ("elementwise.cu", "ClampInput", "clamp"),
    ("pointwise_loss.cu", "Loss", "loss"),
    ("reduce.cu", "Kind", "reduce"),
    ("scan.cu", "Fold", "scan"),
    ("window.cu", "Divisor", "divisor"),
    ("cross_entropy.cu", "Reduction", "reduction"),
];

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../..");
    let (kernels, out) = (root.join("kernels"), PathBuf::from(env::var("OUT_DIR").unwrap()));
    println!("cargo:rerun-if-changed={}", kernels.display());
    println!("cargo:rerun-if-changed={}", root.join(".cuda/nvcc").display());
    println!("cargo:rerun-if-env-changed=NVCC");
    let mut files: Vec<String> = fs::read_dir(&kernels)
        .expect("the folder of kernels")
        .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(".cu")?.to_owned()))
        .collect();
    files.sort();
    let embedded = match find_nvcc(&root) {
        Some(nvcc) => {
            compile(&nvcc, &kernels, &files, &out);
            let image = |file: &String| format!("({file:?}, include_bytes!({:?}) as &[u8])", image_path(&out, file));
            format!("Some(&[{}])", files.iter().map(image).collect::<Vec<_>>().join(", "))
        }
        None => "None".into(),
    };
    let text =
        format!("static FILES: &[&str] = &{files:?};\nstatic EMBEDDED: Option<&[(&str, &[u8])]> = {embedded};\n");
    fs::write(out.join("embedded.rs"), text).unwrap();
    let numbers: String = ENUMS.iter().map(|(file, name, module)| enum_module(&kernels, file, name, module)).collect();
    fs::write(out.join("numbers.rs"), numbers).unwrap();
}

/// A module with the enum's numbers as constants, and `NAMES`, the enum's list.
fn enum_module(kernels: &Path, file: &str, name: &str, module: &str) -> String {
    let source = fs::read_to_string(kernels.join(file)).expect("a source file");
    let body = source.split_once(&format!("enum {name} : int32_t {{")).and_then(|(_, rest)| rest.split_once('}'));
    let (body, _) = body.unwrap_or_else(|| panic!("kernels/{file} has no `enum {name} : int32_t {{ .. }}`"));
    let names: Vec<&str> = body.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let plain = |name: &&str| name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
    assert!(names.iter().all(plain), "enum {name} of kernels/{file} must be a plain list of names, got {names:?}");
    let constant = |(i, name): (usize, &&str)| format!("    pub const {name}: i32 = {i};\n");
    let constants: String = names.iter().enumerate().map(constant).collect();
    format!("pub mod {module} {{\n{constants}    pub const NAMES: &[&str] = &{names:?};\n}}\n")
}

fn image_path(out: &Path, file: &str) -> PathBuf {
    out.join(format!("{file}.fatbin"))
}

/// An nvcc that starts: the one that `NVCC` names, and no other where it is set; else one of the usual places.
fn find_nvcc(root: &Path) -> Option<PathBuf> {
    let candidates = match env::var_os("NVCC") {
        Some(named) => vec![named.into()],
        None => vec![root.join(".cuda/nvcc"), "nvcc".into()],
    };
    candidates.into_iter().find(|nvcc| Command::new(nvcc).arg("--version").output().is_ok_and(|o| o.status.success()))
}

/// Those that have changed, one at a time on each core.
fn compile(nvcc: &Path, kernels: &Path, files: &[String], out: &Path) {
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).expect("a source file");
    let sources = fs::read_dir(kernels).expect("the folder of kernels").map(|entry| entry.unwrap().path());
    let headers = sources.filter(|path| path.extension().is_some_and(|e| e == "cuh")).map(|path| changed(&path)).max();
    let stale = |file: &&String| {
        let image = fs::metadata(image_path(out, file)).and_then(|m| m.modified());
        let source = changed(&kernels.join(format!("{file}.cu"))).max(headers.expect("headers"));
        image.map_or(true, |image| image < source)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for some in files.iter().filter(stale).collect::<Vec<_>>().chunks(cores) {
        let start = |file: &String| {
            let mut command = Command::new(nvcc);
            command.args(["-std=c++17", "-O3", "-fatbin", "-o"]).arg(image_path(out, file));
            command.args(TARGETS.iter().map(|target| format!("-gencode={target}")));
            (file.clone(), command.arg(kernels.join(format!("{file}.cu"))).spawn().expect("nvcc starts"))
        };
        for (file, mut running) in some.iter().copied().map(start).collect::<Vec<_>>() {
            if !running.wait().expect("nvcc runs").success() {
                let _ = fs::remove_file(image_path(out, &file));
                panic!("nvcc failed on {file}.cu; see above");
            }
        }
    }
}
