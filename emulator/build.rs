//! Compiles emulator/src/*.cpp and kernels/*.cu with g++ into libcudaemu.so, where there is a g++.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

/// Of the emulator's own files; kernels get these too.
const COMMON: [&str; 6] = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ftls-model=initial-exec"];
/// As nvcc compiles: multiplications and additions fused, and memory read as other types than it was written.
const KERNELS: [&str; 4] = ["-ffp-contract=fast", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-attributes"];

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).parent().unwrap().to_path_buf();
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    println!("cargo:rerun-if-changed={}", root.join("kernels").display());
    println!("cargo:rerun-if-changed={}", root.join("emulator/src").display());
    println!("cargo:rerun-if-changed={}", root.join("emulator/build.rs").display());
    println!("cargo:rerun-if-env-changed=CXX");
    let built = find_compiler().and_then(|compiler| build(&compiler, &root, &out).map(|()| compiler));
    if let Err(reason) = &built {
        println!("cargo:warning=no CUDA emulator: {}", reason.lines().next().unwrap_or_default());
    }
    let compiler = built.as_deref();
    fs::write(
        out.join("built.rs"),
        format!("const OUT: &str = {out:?};\nconst COMPILER: Result<&str, &str> = {compiler:?};\n"),
    )
    .unwrap();
}

/// A g++ of version 10 or later: the environment's `CXX`, or the one on the path.
fn find_compiler() -> Result<String, String> {
    let needs = "the emulator needs g++ 10 or later, on x86-64 Linux";
    if env::var("TARGET").unwrap() != env::var("HOST").unwrap()
        || env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64")
        || env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux")
    {
        return Err(format!("{needs}; this target is {}", env::var("TARGET").unwrap()));
    }
    let compiler = env::var("CXX").unwrap_or_else(|_| "g++".into());
    let version = Command::new(&compiler).arg("-dumpversion").output();
    let version = version.map_err(|error| format!("{needs}; {compiler} doesn't start: {error}"))?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major >= 10) {
        Ok(compiler)
    } else {
        Err(format!("{needs}; {compiler} is version {version:?}"))
    }
}

/// The files with this ending, without it.
fn stems(folder: &Path, ending: &str) -> Vec<String> {
    let mut stems: Vec<String> = fs::read_dir(folder)
        .expect("a folder of sources")
        .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(ending)?.to_owned()))
        .collect();
    stems.sort();
    stems
}

fn build(compiler: &str, root: &Path, out: &Path) -> Result<(), String> {
    let (sources, kernels) = (root.join("emulator/src"), root.join("kernels"));
    let (objects, images) = (out.join("objects"), out.join("kernels"));
    for folder in [&objects, &images] {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).unwrap();
    }
    let compile = |source: &Path, name: &str, more: &[&str]| {
        let mut command = Command::new(compiler);
        command.args(COMMON).args(more).arg("-I").arg(&sources).arg("-I").arg(&kernels);
        command.arg(format!("-fmacro-prefix-map={}/=", root.display()));
        command.arg("-c").arg(source).arg("-o").arg(objects.join(format!("{name}.o")));
        run(command, name)
    };
    let own = stems(&sources, ".cpp");
    let families = stems(&kernels, ".cu");
    // Fused multiplication and addition in one instruction, where this machine has it.
    let mut flags = KERNELS.to_vec();
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        flags.extend(["-mavx2", "-mfma"]);
    }
    // For scripts/sanitize-kernels.sh, which compiles the units again.
    let folders = [sources.display(), kernels.display()].map(|folder| format!("-I{folder}"));
    let all: Vec<&str> = COMMON.iter().chain(&flags).copied().chain(folders.iter().map(String::as_str)).collect();
    fs::write(objects.join("flags"), all.join("\n")).unwrap();
    in_parallel(own.len() + families.len(), |i| {
        // The kernels first: they take longest.
        if let Some(file) = families.get(i) {
            let source = kernels.join(format!("{file}.cu"));
            let names = kernel_names(compiler, &sources, &source)?;
            let unit = objects.join(format!("{file}.unit.cpp"));
            fs::write(&unit, registration(&source, &names)).unwrap();
            fs::write(images.join(format!("{file}.fatbin")), format!("retape emulator: {}\n", names.join(" ")))
                .unwrap();
            compile(&unit, &format!("{file}.unit"), &flags)
        } else {
            let file = &own[i - families.len()];
            compile(&sources.join(format!("{file}.cpp")), file, &["-Wall", "-Wextra", "-Wno-unused-parameter"])
        }
    })?;
    let mut link = Command::new(compiler);
    // -Bsymbolic: the library's own functions are what its calls mean, whatever else the process has.
    link.args(["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,nodelete", "-o"]).arg(out.join("libcudaemu.so"));
    link.args(stems(&objects, ".o").iter().map(|stem| objects.join(format!("{stem}.o")))).arg("-ldl").arg("-lpthread");
    run(link, "libcudaemu.so")
}

/// The kernels of a file, found in its preprocessed text: macros may have made them.
fn kernel_names(compiler: &str, sources: &Path, file: &Path) -> Result<Vec<String>, String> {
    let mut command = Command::new(compiler);
    command.args(["-x", "c++", "-std=c++17", "-E", "-P", "-DRETAPE_EMULATOR_SCAN", "-I"]).arg(sources).arg(file);
    let output = command.output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}:\n{}", file.display(), String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let after = text.split("RETAPE_EMULATOR_KERNEL").skip(1);
    let name = |rest: &str| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    Ok(after.map(name).collect())
}

/// A source file with the kernels of one `.cu` and their entries in the table. Each is in a namespace of its own, as
/// nvcc compiles each by itself: two may have different functions or structs of one name.
fn registration(source: &Path, names: &[String]) -> String {
    let entries = names
        .iter()
        .map(|name| format!("const emulator::Register<{name}> register_{name}(\"{name}\");\n"))
        .collect::<String>();
    format!("#include \"prim.cuh\"\nnamespace {{\n#include {source:?}\n{entries}}}\n")
}

fn run(mut command: Command, what: &str) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{what}: {error}"))?;
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprintln!("{messages}");
        return Err(format!("g++ failed for {what}:\n{messages}"));
    }
    if !messages.is_empty() {
        eprintln!("{messages}");
    }
    Ok(())
}

/// Runs tasks 0 .. count, one at a time on each core.
fn in_parallel(count: usize, task: impl Fn(usize) -> Result<(), String> + Sync) -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let worker = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    return Ok(());
                }
                task(i)?;
            }
        };
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap())
    })
}
