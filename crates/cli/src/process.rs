//! What this process uses of the machine.

use std::time::Duration;

/// CPU time of all threads of this process so far.
#[cfg(unix)]
pub fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Without that clock: time on the wall.
#[cfg(not(unix))]
pub fn cpu_time() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}

/// Bytes of a `kB` line of a file in Linux' /proc.
fn proc_bytes(file: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb * 1024)
}

/// Memory that the machine can still give, where the system says.
pub fn available_bytes() -> Option<u64> {
    proc_bytes("/proc/meminfo", "MemAvailable")
}

/// Resident bytes of this process, where the system says.
pub fn resident_bytes() -> Option<u64> {
    proc_bytes("/proc/self/status", "VmRSS")
}

/// Sets the high-water mark of resident bytes to what is resident now. False where the system can't.
pub fn reset_high_water() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The most bytes that were resident since [`reset_high_water`].
pub fn high_water_bytes() -> Option<u64> {
    proc_bytes("/proc/self/status", "VmHWM")
}
