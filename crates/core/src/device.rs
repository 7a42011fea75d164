//! A device: a backend's kernels and memory behind one meter.

use crate::kernel::Kernel;
use crate::{Error, Holds, Kind, MemoryMeter, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Memory of a backend, owned by exactly one [`Storage`].
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address in the backend's own space (a pointer on a CPU, a device pointer on a GPU, 0 on meta).
    pub address: usize,
    /// Requested bytes.
    pub bytes: usize,
}

/// The primitive kernels and the memory of one kind of device.
///
/// A backend knows tensors and kernels, never the tape. It allocates no tensor memory of its own: outputs and
/// workspaces come from core, which counts them. Object-safe, so that a model needs no type parameter.
pub trait Backend: fmt::Debug + Send + Sync {
    /// A short name, such as `cpu`.
    fn name(&self) -> String;

    /// False on the meta device only: its tensors hold no numbers.
    fn computes(&self) -> bool {
        true
    }

    /// Takes memory for `bytes` bytes (possibly 0), aligned for every dtype and for SIMD. Contents are undefined.
    fn allocate(&self, bytes: usize) -> Result<Buffer>;

    /// Gives back what [`allocate`](Backend::allocate) returned.
    fn release(&self, buffer: Buffer);

    /// Writes host bytes to the buffer at `offset` bytes.
    fn upload(&self, buffer: &Buffer, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Reads host bytes from the buffer at `offset` bytes.
    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// Runs one kernel. Core has checked shapes, dtypes and devices; a kernel rejects only what depends on values
    /// (an index out of range) or what this backend lacks ([`Error::Unsupported`]).
    fn run(&self, kernel: &Kernel<'_>) -> Result<()>;

    /// Waits until all kernels have run. `run` may only queue them, in order; reading a tensor waits by itself.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Bytes of scratch that the kernels hold for themselves (tiles per thread, packing), outside the meter.
    fn scratch_bytes(&self) -> u64 {
        0
    }
}

#[derive(Debug)]
struct DeviceInner {
    backend: Box<dyn Backend>,
    meter: MemoryMeter,
}

/// A handle to one device with its own [`MemoryMeter`]. Two calls of `cpu()` give two devices that share nothing;
/// tensors of different devices don't mix.
#[derive(Debug, Clone)]
pub struct Device(Arc<DeviceInner>);

impl Device {
    /// Wraps a backend. Backend crates offer this under their own name (`retape_cpu::device()`).
    pub fn new(backend: impl Backend + 'static) -> Device {
        Device(Arc::new(DeviceInner { backend: Box::new(backend), meter: MemoryMeter::default() }))
    }

    /// The backend's kernels.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    /// The meter that counts this device's tensors.
    pub fn meter(&self) -> &MemoryMeter {
        &self.0.meter
    }

    /// The backend's name.
    pub fn name(&self) -> String {
        self.0.backend.name()
    }

    /// True unless this is the meta device.
    pub fn computes(&self) -> bool {
        self.0.backend.computes()
    }

    /// Waits until the device has done all that it was asked for: for measuring time, as a GPU's kernels are only queued
    /// when they are called. Reading a tensor waits by itself.
    pub fn synchronize(&self) -> Result<()> {
        self.backend().synchronize()
    }

    /// Takes counted memory. Errors with [`Error::OutOfMemory`] past the meter's limit.
    /// What is refused, by the limit or by the backend, leaves no trace on the meter.
    pub fn allocate(&self, bytes: usize, kind: Kind) -> Result<Storage> {
        self.meter().check(bytes as u64)?;
        let buffer = self.backend().allocate(bytes)?;
        match self.meter().charge(bytes as u64, kind) {
            Ok(number) => Ok(Storage { buffer, number, kind: AtomicU8::new(kind as u8), device: self.clone() }),
            Err(error) => {
                self.backend().release(buffer);
                Err(error)
            }
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Counted memory of a device; freed when the last tensor on it goes.
#[derive(Debug)]
pub struct Storage {
    buffer: Buffer,
    number: u64,
    kind: AtomicU8,
    device: Device,
}

impl Storage {
    /// Requested bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes
    }

    /// The backend's buffer.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it is counted as.
    pub fn kind(&self) -> Kind {
        Kind::from_index(self.kind.load(Ordering::Relaxed))
    }

    /// Counts it as another kind from now on.
    pub fn set_kind(&self, kind: Kind) {
        let old = Kind::from_index(self.kind.swap(kind as u8, Ordering::Relaxed));
        if old != kind {
            self.device.meter().reclassify(self.number, self.bytes() as u64, old, kind);
        }
    }
}

impl Storage {
    /// Tells the meter's log what lies here.
    pub(crate) fn note_contents(&self, holds: Holds) {
        self.device.meter().note_contents(self.number, self.bytes() as u64, self.kind(), holds);
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let buffer = std::mem::replace(&mut self.buffer, Buffer { address: 0, bytes: 0 });
        self.device.meter().release(self.number, buffer.bytes as u64, self.kind());
        self.device.backend().release(buffer);
    }
}

/// Fails where two tensors of one call lie on different devices.
pub(crate) fn same_device(what: &'static str, left: &Device, right: &Device) -> Result<()> {
    if left == right {
        return Ok(());
    }
    Err(Error::DeviceMismatch { what, left: left.name(), right: right.name() })
}
