//! An emulated GPU: retape's CUDA kernels, compiled by g++, and a CUDA driver that runs them on the CPU, so that the
//! CUDA backend is tested where there is no GPU. emulator/README.md says what it can see and what it can't.
//!
//! Tests open [`device`]. With the environment variable `RETAPE_TEST_GPU` set, that is the real GPU, so that the same
//! tests run there.

use retape_core::Device;
use std::path::{Path, PathBuf};

// Written by build.rs: `OUT`, the folder that it has built in, and `COMPILER`, the g++ that it used or why it built
// nothing.
include!(concat!(env!("OUT_DIR"), "/built.rs"));

/// The emulated driver's library.
///
/// # Errors
/// Why it wasn't built: the emulator needs g++ 10 or later, or a kernel doesn't compile.
pub fn library() -> Result<PathBuf, String> {
    compiler().map(|_| Path::new(OUT).join("libcudaemu.so"))
}

/// The g++ that the emulator was built with.
///
/// # Errors
/// As [`library`].
pub fn compiler() -> Result<&'static str, String> {
    COMPILER.map_err(str::to_owned)
}

/// The emulator's own object files (`scheduler.o` and so on), for a program of C++ that runs kernels.
pub fn objects() -> PathBuf {
    Path::new(OUT).join("objects")
}

/// A folder with a stand-in for each kernels/*.cu's image.
pub fn kernels() -> PathBuf {
    Path::new(OUT).join("kernels")
}

/// Whether tests are to run on the real GPU.
pub fn tests_gpu() -> bool {
    std::env::var_os("RETAPE_TEST_GPU").is_some_and(|value| !value.is_empty() && value != "0")
}

/// What [`retape_cuda::device_with`] needs for the emulator, or for the GPU if tests are to run there.
///
/// # Errors
/// As [`library`].
pub fn options() -> Result<retape_cuda::Options, String> {
    if tests_gpu() {
        return Ok(retape_cuda::Options::default());
    }
    Ok(retape_cuda::Options { driver: Some(driver()?), kernels: Some(kernels()) })
}

/// The driver that this process uses: the one that `RETAPE_CUDA_DRIVER` names (a build with sanitizers), or
/// [`library`].
fn driver() -> Result<PathBuf, String> {
    std::env::var_os("RETAPE_CUDA_DRIVER").map_or_else(library, |path| Ok(path.into()))
}

/// A device on the emulator, or on the GPU if tests are to run there.
///
/// # Panics
/// Where it can't be opened.
pub fn device() -> Device {
    let opened = options().and_then(|options| retape_cuda::device_with(0, &options).map_err(|error| error.to_string()));
    opened.unwrap_or_else(|reason| panic!("no CUDA device for tests: {reason}"))
}

/// What the emulated driver has counted in this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Allocations of device memory that are alive.
    pub allocations: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes that the memory pool keeps for later.
    pub kept: u64,
    /// Times that the pool was trimmed.
    pub trims: u64,
    /// Kernels launched.
    pub launches: u64,
    /// Modules loaded and not unloaded.
    pub modules: u64,
    /// Streams made and not destroyed.
    pub streams: u64,
    /// Allocations of page-locked memory that are alive.
    pub pinned: u64,
}

/// The emulated driver's counts now.
///
/// # Panics
/// Where there is no emulator.
pub fn counts() -> Counts {
    let mut counts = Counts::default();
    // SAFETY: the function in driver_memory.cpp, which writes one struct of this layout.
    unsafe { function::<unsafe extern "C" fn(*mut Counts)>("retape_emulator_counts", |count| count(&mut counts)) };
    counts
}

/// Sets how much memory the emulated device has, in this process, from now on.
///
/// # Panics
/// Where there is no emulator.
pub fn set_memory(bytes: u64) {
    // SAFETY: the function in driver_memory.cpp, which takes one integer.
    unsafe { function::<unsafe extern "C" fn(u64)>("retape_emulator_set_memory", |set| set(bytes)) }
}

/// Calls with a function of the emulator's library.
///
/// # Safety
/// `F` is the function's type.
unsafe fn function<F>(name: &str, call: impl FnOnce(&F)) {
    let path: PathBuf = driver().unwrap_or_else(|reason| panic!("{reason}"));
    // SAFETY: the library's initialisation fills a table, and does nothing else.
    let library = unsafe { libloading::Library::new::<&Path>(&path) }.unwrap_or_else(|error| panic!("{error}"));
    // SAFETY: the caller vouches for the type.
    let found = unsafe { library.get::<F>(name.as_bytes()) }.unwrap_or_else(|error| panic!("{error}"));
    call(&found);
}
