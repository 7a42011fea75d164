//! A device: a backend's kernels and memory behind one meter.

use crate::kernel::{Kernel, Launch};
use crate::stand_in::StandIns;
use crate::{Contents, Error, MemoryKind, MemoryMeter, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU8, AtomicU64, AtomicUsize, Ordering};

/// A number that this process gives out once, larger than those before. As an id: an address won't do, it comes back
/// when its owner is dropped. As a time: it orders what happens on several devices.
pub(crate) fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of a backend. Only a backend makes one, and only its owner can write it or give it back.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer {
    address: usize,
    bytes: usize,
}

impl Buffer {
    /// Memory at `address`, in the backend's own space: a pointer on a CPU, a device pointer on a GPU.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are initialised memory that nothing else uses until the buffer comes back to
    /// [`Backend::release`].
    pub unsafe fn new(address: usize, bytes: usize) -> Buffer {
        Buffer { address, bytes }
    }

    /// No memory, however many bytes: what the meta device gives.
    pub(crate) fn nowhere(bytes: usize) -> Buffer {
        Buffer { address: 0, bytes }
    }

    /// Address in the backend's own space.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Requested bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The primitive kernels and the memory of one kind of device.
///
/// A backend knows tensors and kernels, never the tape. It allocates no tensor memory of its own: outputs and
/// workspaces come from core, which counts them. Object-safe, so that a model needs no type parameter.
///
/// # Safety
/// Kernels are called by safe code. Who implements this promises that
/// - [`allocate`](Backend::allocate) gives memory that its own kernels can use, of the size that was asked for;
/// - [`run`](Backend::run) touches only elements that the operands' layouts reach, and writes only to operands that the
///   kernel says it writes.
///
/// In return core promises with every [`Launch`]:
/// - The operands are living tensors of this backend's memory, of shapes and dtypes that the kernel takes.
/// - No two of them overlap, except as the kernel allows.
/// - No other kernel or copy that is running uses what this one writes.
pub unsafe trait Backend: fmt::Debug + Send + Sync {
    /// A short name, such as `cpu`.
    fn name(&self) -> String;

    /// False on the meta device only: its tensors hold no numbers.
    fn computes(&self) -> bool {
        true
    }

    /// Takes memory for `bytes` bytes (possibly 0), aligned for every dtype and for SIMD. Contents are any initialised
    /// bytes.
    fn allocate(&self, bytes: usize) -> Result<Buffer>;

    /// Gives back what [`allocate`](Backend::allocate) returned.
    fn release(&self, buffer: Buffer);

    /// Writes host bytes to the buffer at `offset` bytes. Fails where they reach past its end.
    fn upload(&self, buffer: &mut Buffer, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Reads host bytes from the buffer at `offset` bytes. Fails where they reach past its end.
    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()>;

    /// Runs one kernel. Core has checked its operands; a kernel rejects only what depends on values (an index out of
    /// range) or what this backend lacks ([`Error::Unsupported`]).
    fn run(&self, launch: &Launch<'_>) -> Result<()>;

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
    /// How many of its storages are held as stand-ins by storages of other devices.
    stand_ins: AtomicUsize,
}

/// A handle to one device with its own [`MemoryMeter`]. Two calls of `cpu()` give two devices that share nothing;
/// tensors of different devices don't mix.
#[derive(Debug, Clone)]
pub struct Device(Arc<DeviceInner>);

impl Device {
    /// Wraps a backend. Backend crates offer this under their own name (`retape_cpu::device()`).
    pub fn new(backend: impl Backend + 'static) -> Device {
        let meter = MemoryMeter::default();
        meter.reset_peak();
        Device(Arc::new(DeviceInner { backend: Box::new(backend), meter, stand_ins: AtomicUsize::new(0) }))
    }

    /// The backend's kernels. Not for users: they run checked kernels.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    /// Runs one kernel on this device's tensors.
    ///
    /// A sealed tensor doesn't change under those who hold it. A kernel writes only to one of two kinds of tensor:
    /// - one from [`Tensor::uninit`] or [`Tensor::full`] that is neither sealed nor known to a tape yet;
    /// - one that nobody holds but the operands themselves.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] or [`Error::Unsupported`] for operands that the kernel can't take, before anything is
    /// written; [`Error::DeviceMismatch`] for tensors of another device; and what the backend finds.
    ///
    /// [`Tensor::uninit`]: crate::Tensor::uninit
    /// [`Tensor::full`]: crate::Tensor::full
    pub fn run<'a>(&self, kernel: impl Into<Kernel<'a>>) -> Result<()> {
        self.backend().run(&Launch::new(kernel.into(), self)?)
    }

    /// Bytes of scratch that the kernels hold for themselves, see [`Backend::scratch_bytes`].
    pub fn scratch_bytes(&self) -> u64 {
        self.backend().scratch_bytes()
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

    /// Waits until the device has done all that it was asked for: for measuring time, as a GPU's kernels are only
    /// queued when they are called. Reading a tensor waits by itself.
    pub fn synchronize(&self) -> Result<()> {
        self.backend().synchronize()
    }

    /// Takes counted memory. Errors with [`Error::OutOfMemory`] past the meter's limit.
    /// What is refused, by the limit or by the backend, leaves no trace on the meter.
    pub fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Storage> {
        self.allocate_since(None, bytes, kind)
    }

    /// Memory that stands for a storage of another device, and counts from when that one was made.
    pub(crate) fn allocate_for(&self, original: &Storage) -> Result<Storage> {
        self.allocate_since(Some(original.made), original.bytes(), original.kind())
    }

    fn allocate_since(&self, original: Option<u64>, bytes: usize, kind: MemoryKind) -> Result<Storage> {
        self.meter().check(bytes as u64)?;
        let buffer = self.backend().allocate(bytes)?;
        match self.meter().charge(original, bytes as u64, kind) {
            Ok(number) => Ok(Storage {
                buffer,
                number,
                made: original.unwrap_or_else(unique),
                kind: AtomicU8::new(kind as u8),
                device: self.clone(),
                open: AtomicBool::new(true),
                users: AtomicIsize::new(0),
                stand_ins: StandIns::default(),
            }),
            Err(error) => {
                self.backend().release(buffer);
                Err(error)
            }
        }
    }

    /// One more (1) or less (-1) of its storages is held as a stand-in.
    pub(crate) fn count_stand_in(&self, change: isize) {
        self.0.stand_ins.fetch_add(change as usize, Ordering::Relaxed);
    }

    /// True where nothing knows this device any more but storages that are held as stand-ins.
    pub(crate) fn has_stand_ins_only(&self) -> bool {
        Arc::strong_count(&self.0) == self.0.stand_ins.load(Ordering::Relaxed)
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
    /// When it was made, by [`unique`]; a stand-in: when its original was.
    made: u64,
    kind: AtomicU8,
    device: Device,
    /// Still being made: kernels may write it, whoever holds it.
    open: AtomicBool,
    /// Kernels and copies that read it at this moment, or -1: one that writes it.
    users: AtomicIsize,
    /// What stands for it on meta devices.
    stand_ins: StandIns,
}

impl Storage {
    /// Requested bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes
    }

    /// Where it lies in the backend's own space.
    pub fn address(&self) -> usize {
        self.buffer.address
    }

    /// Its number among all that the device has allocated.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// When it was made, by [`unique`]; a stand-in: when its original was.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// What stands for it on meta devices.
    pub(crate) fn stand_ins(&self) -> &StandIns {
        &self.stand_ins
    }

    /// The device it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it is counted as.
    pub fn kind(&self) -> MemoryKind {
        MemoryKind::from_index(self.kind.load(Ordering::Relaxed))
    }

    /// Counts it as another kind from now on.
    pub fn set_kind(&self, kind: MemoryKind) {
        let old = MemoryKind::from_index(self.kind.swap(kind as u8, Ordering::Relaxed));
        if old != kind {
            self.device.meter().reclassify(self.number, self.bytes() as u64, old, kind);
            self.stand_ins.follow_kind(self);
        }
    }
}

/// A storage in use by one kernel or copy.
#[derive(Debug)]
pub(crate) struct Lock<'a> {
    storage: &'a Storage,
    writes: bool,
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.storage.users.fetch_add(if self.writes { 1 } else { -1 }, Ordering::Release);
    }
}

impl Storage {
    /// Locks it for reading beside other readers, or for writing alone; `None` where another thread is in the way.
    pub(crate) fn lock(&self, writes: bool) -> Option<Lock<'_>> {
        let next = |users| match (writes, users) {
            (true, 0) => Some(-1),
            (false, 0..) => Some(users + 1),
            _ => None,
        };
        let locked = self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, next);
        locked.ok().map(|_| Lock { storage: self, writes })
    }

    /// Host bytes to memory that nobody shares yet.
    pub(crate) fn upload(&mut self, bytes: &[u8]) -> Result<()> {
        self.device.0.backend.upload(&mut self.buffer, 0, bytes)
    }

    /// Bytes from `offset` on to the host.
    pub(crate) fn download(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let busy = || Error::tensor("reading a tensor", "another thread writes it at this moment");
        let _lock = self.lock(false).ok_or_else(busy)?;
        self.device.backend().download(&self.buffer, offset, bytes)
    }

    /// True while it is being made.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Its numbers are a value from now on (`open` false), or are made once more by one who alone holds it.
    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Its numbers are a value from now on; tells the meter's log which.
    pub(crate) fn note_contents(&self, holds: Contents) {
        self.set_open(false);
        self.device.meter().note_contents(self.number, self.bytes() as u64, self.kind(), holds);
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let buffer = std::mem::replace(&mut self.buffer, Buffer::nowhere(0));
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

/// The example of a backend in the docs is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/adding-a-backend.md")]
struct AddingABackend;
