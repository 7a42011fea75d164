//! Every function of the CUDA driver that `cust_raw` declares, defined here, so that a program that uses cust links,
//! and starts, on a machine without CUDA. The first call of any of them binds to `libcuda.so.1`, or to the library
//! that [`use_library`] or the environment variable `RETAPE_CUDA_DRIVER` names; without one, every call returns
//! `CUDA_ERROR_NO_DEVICE`, and [`missing`] says why.
//!
//! Each function is a trampoline: it jumps to the address in its slot, which starts out empty and is filled by
//! `resolve`. Trampolines are written for x86-64 Linux; elsewhere every call returns `CUDA_ERROR_NO_DEVICE`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Overrides the driver's library for this process.
const VARIABLE: &str = "RETAPE_CUDA_DRIVER";

static CHOSEN: OnceLock<PathBuf> = OnceLock::new();
static DRIVER: OnceLock<Result<(PathBuf, libloading::Library), String>> = OnceLock::new();

/// Names the driver's library; false where another one is already in use, or was named before.
pub fn use_library(path: &Path) -> bool {
    let first = CHOSEN.set(path.to_path_buf()).is_ok() || CHOSEN.get().is_some_and(|chosen| chosen == path);
    first && DRIVER.get().is_none_or(|driver| driver.as_ref().is_ok_and(|(loaded, _)| loaded == path))
}

/// The library that is in use, loaded now if it wasn't.
pub fn library() -> Result<&'static Path, &'static str> {
    driver().as_ref().map(|(path, _)| path.as_path()).map_err(String::as_str)
}

/// Why there is no driver; None where there is one.
pub fn missing() -> Option<&'static str> {
    driver().as_ref().err().map(String::as_str)
}

/// The address of a function of the driver that cust_raw doesn't declare; None where this driver lacks it.
pub fn function(name: &str) -> Option<*const ()> {
    let (_, library) = driver().as_ref().ok()?;
    // SAFETY: the symbol is only looked up; who calls it vouches for its type.
    let symbol = unsafe { library.get::<*const ()>(name.as_bytes()) };
    symbol.ok().map(|symbol| *symbol).filter(|address| !address.is_null())
}

/// The library that the environment names; a variable that is set to nothing names none.
fn named() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn driver() -> &'static Result<(PathBuf, libloading::Library), String> {
    DRIVER.get_or_init(|| {
        let chosen = CHOSEN.get().cloned().or_else(named);
        let names = chosen.map_or_else(|| vec!["libcuda.so.1".into(), "libcuda.so".into()], |path| vec![path]);
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: loading runs the library's initialisers; it is the system's CUDA driver, or what the user named
            // as such.
            match unsafe { libloading::Library::new(&name) } {
                // SAFETY: the symbol is only looked up.
                Ok(library) if unsafe { library.get::<*const ()>(b"cuInit") }.is_ok() => return Ok((name, library)),
                Ok(_) => reasons.push(format!("{} is no CUDA driver: it lacks cuInit", name.display())),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(reasons.join("; "))
    })
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod absent;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod trampolines;
