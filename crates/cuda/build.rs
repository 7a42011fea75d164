//! Compiles kernels/*.cu and embeds their images, where there is an nvcc: the environment's `NVCC`, what
//! scripts/install-nvcc.sh has put into `.cuda`, or one on the path. Without one the crate builds all the same.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// GPUs with code of their own, then the oldest that later ones may be compiled for at run time.
const TARGETS: [&str; 3] =
    ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80"];

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
}

fn image_path(out: &Path, file: &str) -> PathBuf {
    out.join(format!("{file}.fatbin"))
}

/// An nvcc that starts.
fn find_nvcc(root: &Path) -> Option<PathBuf> {
    let named = env::var_os("NVCC").map(PathBuf::from);
    let candidates = named.into_iter().chain([root.join(".cuda/nvcc"), "nvcc".into()]);
    candidates.into_iter().find(|nvcc| Command::new(nvcc).arg("--version").output().is_ok_and(|o| o.status.success()))
}

/// As many files at a time as there are cores.
fn compile(nvcc: &Path, kernels: &Path, files: &[String], out: &Path) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for some in files.chunks(files.len().div_ceil(files.len().div_ceil(cores).max(1)).max(1)) {
        let running: Vec<_> = some
            .iter()
            .map(|file| {
                let mut command = Command::new(nvcc);
                command.args(["-std=c++17", "-O3", "-lineinfo", "-fatbin", "-o"]).arg(image_path(out, file));
                command.args(TARGETS.iter().map(|target| format!("-gencode={target}")));
                command.arg(kernels.join(format!("{file}.cu"))).spawn().expect("nvcc starts")
            })
            .collect();
        for mut child in running {
            assert!(child.wait().expect("nvcc runs").success(), "nvcc failed; see above");
        }
    }
}
