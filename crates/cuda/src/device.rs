//! The only file that calls the driver: the context, the stream, modules and launches, memory and copies, through
//! cust and, where cust has no wrapper, raw calls. All of it runs on one stream, in the order of the calls.

use crate::Options;
use crate::kernels::{self, Images};
use cust::context::{Context, CurrentContext};
use cust::error::CudaError;
use cust::memory::LockedBuffer;
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys;
use retape_core::{Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, MutexGuard};

/// Bytes of page-locked memory that host copies go through.
const STAGING: usize = 4 << 20;
/// Tables of constants that are kept on the device; then all are dropped.
const TABLES: usize = 64;
/// The workspace's size is a multiple of this.
const WORKSPACE_STEP: usize = 64 << 10;
/// Shared memory that a launch may ask for without saying so first.
const SHARED_BY_DEFAULT: u32 = 48 << 10;

/// A call of the driver: the error is its code (`CUresult`), as cust's `CudaError` can't be made from one.
type Driver<T> = std::result::Result<T, u32>;

const INVALID_DEVICE: u32 = sys::CUresult::CUDA_ERROR_INVALID_DEVICE as u32;
const NO_BINARY: u32 = sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
const NOT_FOUND: u32 = sys::CUresult::CUDA_ERROR_NOT_FOUND as u32;
const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

fn check(result: sys::CUresult) -> Driver<()> {
    if result == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result as u32) }
}

fn code(error: CudaError) -> u32 {
    error as u32
}

/// Parameters of a kernel: one struct with the layout of its C++ twin.
///
/// # Safety
/// The type is `repr(C)`, has no padding that matters, and has the fields of the struct that the kernels named in the
/// launch take, in the same order. Its size is checked against the kernel's where the driver can tell (CUDA 12.4).
pub(crate) unsafe trait Parameters: Copy {}

/// Where a launch goes and how much of the device it takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

#[derive(Debug, Clone, Copy)]
struct Function {
    raw: sys::CUfunction,
    /// Shared memory that it was set to allow.
    shared: u32,
}

// SAFETY: a function handle is a pointer into the driver that any thread with the context current may use.
unsafe impl Send for Function {}

/// One GPU with a context, a stream and the project's kernels.
pub(crate) struct Gpu {
    name: String,
    // Dropped in this order.
    functions: Mutex<HashMap<String, Function>>,
    modules: HashMap<&'static str, Module>,
    tables: Mutex<HashMap<Vec<i32>, usize>>,
    staging: Mutex<LockedBuffer<u8>>,
    workspace: Mutex<Range>,
    stream: Stream,
    context: Context,
    pool: sys::CUmemoryPool,
    properties: Properties,
}

// SAFETY: the handles in it may be used from any thread that has the context current, which `enter` sees to; what
// changes lies behind a Mutex.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Device memory.
#[derive(Debug, Clone, Copy, Default)]
struct Range {
    address: usize,
    bytes: usize,
}

/// Memory for what the launches of one kernel pass on to each other, taken until it is dropped.
#[derive(Debug)]
pub(crate) struct Workspace<'a>(MutexGuard<'a, Range>);

impl Workspace<'_> {
    /// Where it starts, 256-byte aligned. Contents are undefined.
    pub fn address(&self) -> usize {
        self.0.address
    }
}

/// The addresses of some tables, which stay until this is dropped: after the last launch that reads them is queued.
#[derive(Debug)]
pub(crate) struct Tables<'a, const N: usize> {
    pub addresses: [u64; N],
    _kept: MutexGuard<'a, HashMap<Vec<i32>, usize>>,
}

/// What launches depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory that a block may ask for.
    pub shared: u32,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("name", &self.name).field("properties", &self.properties).finish_non_exhaustive()
    }
}

impl Gpu {
    pub fn open(ordinal: usize, options: &Options) -> Result<Gpu> {
        let name = format!("cuda:{ordinal}");
        let fail = |reason: String| Error::Device { device: name.clone(), reason };
        if let Some(path) = &options.driver
            && !retape_cuda_driver::use_library(path)
        {
            return Err(fail(format!("this process already uses another CUDA driver than {}", path.display())));
        }
        if let Some(reason) = retape_cuda_driver::missing() {
            return Err(fail(format!(
                "there is no CUDA driver here ({reason}); install NVIDIA's driver, or take the device cpu"
            )));
        }
        let images = kernels::images(options.kernels.as_deref()).map_err(&fail)?;
        Gpu::start(ordinal, &name, &images).map_err(|(step, error)| fail(format!("{step}: {}", describe(error))))
    }

    fn start(ordinal: usize, name: &str, images: &Images) -> std::result::Result<Gpu, (String, u32)> {
        let failed = |step: &'static str| move |error: u32| (step.to_owned(), error);
        let during = |step: &'static str| move |error: CudaError| (step.to_owned(), error as u32);
        cust::init(cust::CudaFlags::empty()).map_err(during("starting the CUDA driver"))?;
        let device = u32::try_from(ordinal).map_err(|_| INVALID_DEVICE);
        let device = device.and_then(|ordinal| cust::device::Device::get_device(ordinal).map_err(code));
        let device = device.map_err(failed("there is no such device"))?;
        let attribute = |which| {
            device.get_attribute(which).map(|value| value as u32).map_err(during("asking for the device's properties"))
        };
        use cust::device::DeviceAttribute as A;
        let capability = 10 * attribute(A::ComputeCapabilityMajor)? + attribute(A::ComputeCapabilityMinor)?;
        if capability < 80 {
            // Said before the driver refuses to load the kernels.
            let capability = f64::from(capability) / 10.0;
            let reason = format!("it has compute capability {capability}, and the kernels need 8.0 (Ampere) or later");
            return Err((reason, NO_BINARY));
        }
        let mut shared = 0;
        let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        // SAFETY: writes one i32; the device handle is valid. (cust's enum lacks this attribute.)
        check(unsafe { sys::cuDeviceGetAttribute(&mut shared, which, device.as_raw()) })
            .map_err(failed("asking for the device's properties"))?;
        let properties = Properties { multiprocessors: attribute(A::MultiprocessorCount)?, shared: shared as u32 };
        let context = Context::new(device).map_err(during("making a context"))?;
        CurrentContext::set_current(&context).map_err(during("making a context"))?;
        let stream = Stream::new(StreamFlags::DEFAULT, None).map_err(during("making a stream"))?;
        let pool = Self::open_pool(device.as_raw()).map_err(failed("setting up the memory pool"))?;
        let mut modules = HashMap::new();
        for (file, image) in images {
            let module = Module::from_fatbin(image, &[]);
            modules.insert(*file, module.map_err(|error| (format!("loading the kernels of {file}.cu"), error as u32))?);
        }
        let staging = LockedBuffer::new(&0u8, STAGING).map_err(during("taking page-locked memory"))?;
        let (name, staging, functions) = (name.to_owned(), Mutex::new(staging), Mutex::default());
        let (workspace, tables) = (Mutex::default(), Mutex::default());
        Ok(Gpu { name, functions, modules, tables, staging, workspace, stream, context, pool, properties })
    }

    /// The device's own pool, set to keep what is given back.
    fn open_pool(device: sys::CUdevice) -> Driver<sys::CUmemoryPool> {
        let mut pool = std::ptr::null_mut();
        let mut threshold = u64::MAX;
        // SAFETY: both write or read one value of the type that the driver API names for it; the device handle is
        // valid.
        unsafe {
            check(sys::cuDeviceGetDefaultMemPool(&mut pool, device))?;
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            check(sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()))?;
        }
        Ok(pool)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn properties(&self) -> Properties {
        self.properties
    }

    fn error(&self, what: &str, error: u32) -> Error {
        Error::Device { device: self.name.clone(), reason: format!("{what}: {}", describe(error)) }
    }

    /// The stream, for a library that queues work on it.
    pub fn stream(&self) -> *mut c_void {
        self.stream.as_inner().cast()
    }

    /// The driver's context is a thread's: every call comes from some thread.
    pub fn enter(&self) -> Result<()> {
        CurrentContext::set_current(&self.context).map_err(|error| self.error("entering the context", code(error)))
    }

    /// Waits for all work that was asked for.
    pub fn synchronize(&self) -> Result<()> {
        self.enter()?;
        self.wait().map_err(|error| self.error("waiting for the device", error))
    }

    fn wait(&self) -> Driver<()> {
        self.stream.synchronize().map_err(code)
    }

    /// Memory in the order of the stream. 0 bytes are at address 0.
    pub fn allocate(&self, bytes: usize) -> Result<usize> {
        if bytes == 0 {
            return Ok(0);
        }
        self.enter()?;
        let take = || {
            let mut address = 0;
            // SAFETY: writes one address; the stream is alive.
            check(unsafe { sys::cuMemAllocAsync(&mut address, bytes, self.stream.as_inner()) }).map(|()| address)
        };
        match self.with_room(take) {
            Ok(address) => Ok(address as usize),
            Err(OUT_OF_MEMORY) => {
                let (mut free, mut total) = (0, 0);
                // SAFETY: writes two sizes.
                let known = check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
                known.map_err(|error| self.error("asking for free memory", error))?;
                let (in_use, limit) = ((total - free) as u64, total as u64);
                Err(Error::OutOfMemory { requested: bytes as u64, in_use, limit })
            }
            Err(error) => Err(self.error("allocating memory", error)),
        }
    }

    /// Calls what may find the device full, and if it is, once more without what the pool keeps for later: it may lie
    /// there in pieces of other sizes, and the driver itself needs memory for kernels when they are first used.
    fn with_room<T>(&self, call: impl Fn() -> Driver<T>) -> Driver<T> {
        match call() {
            Err(OUT_OF_MEMORY) => {
                self.wait()?;
                // SAFETY: the pool is the device's own, and lives as long as the driver.
                check(unsafe { sys::cuMemPoolTrimTo(self.pool, 0) })?;
                call()
            }
            result => result,
        }
    }

    /// Gives memory back in the order of the stream.
    pub fn release(&self, address: usize) {
        if address == 0 || self.enter().is_err() {
            return;
        }
        // SAFETY: the address came from cuMemAllocAsync and is given back once. A failure means that the context is
        // lost, and the memory with it; a destructor has nobody to tell.
        let _ = unsafe { sys::cuMemFreeAsync(address as u64, self.stream.as_inner()) };
    }

    /// At least `bytes` bytes of scratch that outlive the call: one buffer for all kernels, which grows to what the
    /// largest asked for. As launches run in the order in which they are queued, it may be dropped, for the next
    /// kernel to use, once the last launch that needs it is queued.
    pub fn workspace(&self, bytes: usize) -> Result<Workspace<'_>> {
        let mut range = self.workspace.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if range.bytes < bytes {
            self.release(std::mem::take(&mut *range).address);
            let bytes = bytes.next_multiple_of(WORKSPACE_STEP);
            *range = Range { address: self.allocate(bytes)?, bytes };
        }
        Ok(Workspace(range))
    }

    /// Bytes that `workspace` holds.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).bytes
    }

    /// Copies host bytes to the device; they are there for whatever runs after.
    pub fn upload(&self, address: usize, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let mut staging = self.staging.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (i, chunk) in bytes.chunks(STAGING).enumerate() {
            staging[..chunk.len()].copy_from_slice(chunk);
            let target = (address + i * STAGING) as u64;
            // SAFETY: the caller checked that the range lies in its allocation; the staging memory is locked until
            // the copy, which is waited for, has ended.
            check(unsafe {
                sys::cuMemcpyHtoDAsync_v2(target, staging.as_ptr().cast(), chunk.len(), self.stream.as_inner())
            })
            .and_then(|()| self.wait())
            .map_err(|error| self.error("copying to the device", error))?;
        }
        Ok(())
    }

    /// Copies device bytes to the host, after all that was asked for before.
    pub fn download(&self, address: usize, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        let mut staging = self.staging.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for (i, chunk) in bytes.chunks_mut(STAGING).enumerate() {
            let source = (address + i * STAGING) as u64;
            // SAFETY: as in upload.
            check(unsafe {
                sys::cuMemcpyDtoHAsync_v2(staging.as_mut_ptr().cast(), source, chunk.len(), self.stream.as_inner())
            })
            .and_then(|()| self.wait())
            .map_err(|error| self.error("copying from the device", error))?;
            chunk.copy_from_slice(&staging[..chunk.len()]);
        }
        Ok(())
    }

    /// Constants on the device, copied there when they are first asked for.
    pub fn tables<const N: usize>(&self, all: [&[i32]; N]) -> Result<Tables<'_, N>> {
        let mut kept = self.tables.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // At once, before any of these is looked up: none of them may go.
        if kept.len() + N > TABLES {
            // Kernels that read them were launched before: memory is given back in that order.
            kept.drain().for_each(|(_, address)| self.release(address));
        }
        let mut addresses = [0; N];
        for (address, values) in addresses.iter_mut().zip(all) {
            if !kept.contains_key(values) {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                kept.insert(values.to_vec(), self.allocate(bytes.len())?);
                if let Err(error) = self.upload(kept[values], &bytes) {
                    kept.remove(values).into_iter().for_each(|address| self.release(address));
                    return Err(error);
                }
            }
            *address = kept[values] as u64;
        }
        Ok(Tables { addresses, _kept: kept })
    }

    /// Bytes of the tables.
    pub fn table_bytes(&self) -> u64 {
        let tables = self.tables.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        tables.keys().map(|values| 4 * values.len() as u64).sum()
    }

    /// Fills bytes with one value.
    pub fn fill_bytes(&self, address: usize, value: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's range lies in its allocation.
        check(unsafe { sys::cuMemsetD8Async(address as u64, value, bytes, self.stream.as_inner()) })
            .map_err(|error| self.error("filling memory", error))
    }

    /// Copies between two ranges of the device's memory that don't overlap.
    pub fn copy_bytes(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the caller's ranges lie in their allocations.
        check(unsafe { sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, self.stream.as_inner()) })
            .map_err(|error| self.error("copying memory", error))
    }

    /// Queues a kernel. An empty grid is nothing to do.
    pub fn launch<P: Parameters>(&self, launch: Launch<'_>, parameters: &P) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        self.enter()?;
        let fail = |error| self.error(&format!("kernel {}", launch.kernel), error);
        let function = self.function(launch, size_of::<P>())?;
        let [x, y, z] = launch.grid;
        let mut arguments = [(&raw const *parameters).cast_mut().cast::<c_void>()];
        // SAFETY: the function takes one struct by value, of this size (checked) and layout (`Parameters`), which the
        // call copies. What the struct's addresses reach is the contract of core: tensors of this device, alive and
        // in bounds.
        let queue = |parameters| unsafe {
            let (stream, none) = (self.stream.as_inner(), std::ptr::null_mut());
            sys::cuLaunchKernel(function, x, y, z, launch.block, 1, 1, launch.shared, stream, parameters, none)
        };
        let parameters = arguments.as_mut_ptr();
        self.with_room(|| check(queue(parameters))).map_err(fail)
    }

    /// The kernel in whichever module has it.
    fn look_up(&self, kernel: &str) -> Driver<sys::CUfunction> {
        for module in self.modules.values() {
            match module.get_function(kernel).map_err(code) {
                Err(NOT_FOUND) => (),
                found => return found.map(|function| function.to_raw()),
            }
        }
        Err(NOT_FOUND)
    }

    /// Looks the kernel up at its first launch.
    fn function(&self, launch: Launch<'_>, parameter_bytes: usize) -> Result<sys::CUfunction> {
        let fail = |error| self.error(&format!("kernel {}", launch.kernel), error);
        let mut functions = self.functions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let function = match functions.get_mut(launch.kernel) {
            Some(function) => function,
            None => {
                let raw = self.with_room(|| self.look_up(launch.kernel)).map_err(fail)?;
                check_parameters(raw, launch.kernel, parameter_bytes)
                    .map_err(|reason| Error::Device { device: self.name.clone(), reason })?;
                functions.entry(launch.kernel.to_owned()).or_insert(Function { raw, shared: SHARED_BY_DEFAULT })
            }
        };
        if launch.shared > function.shared {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the handle is valid.
            check(unsafe { sys::cuFuncSetAttribute(function.raw, which, launch.shared as i32) }).map_err(fail)?;
            function.shared = launch.shared;
        }
        Ok(function.raw)
    }
}

impl Drop for Gpu {
    /// The last handle may go in a thread that never used the device; without its context nothing would be given back.
    /// Queued kernels still need their modules, which go next.
    fn drop(&mut self) {
        let _ = self.synchronize();
        let workspace = std::mem::take(self.workspace.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let tables = std::mem::take(self.tables.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()));
        tables.into_values().chain([workspace.address]).for_each(|address| self.release(address));
        // The pool is the process's: what it keeps would be hidden from all others.
        let _ = self.synchronize();
        // SAFETY: as in `with_room`.
        let _ = check(unsafe { sys::cuMemPoolTrimTo(self.pool, 0) });
    }
}

/// Asks the driver whether a kernel takes exactly one parameter of this size. Drivers before CUDA 12.4 can't tell.
fn check_parameters(function: sys::CUfunction, kernel: &str, bytes: usize) -> std::result::Result<(), String> {
    type ParamInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> sys::CUresult;
    let Some(address) = retape_cuda_driver::function("cuFuncGetParamInfo") else { return Ok(()) };
    // SAFETY: the type is the driver API's (CUDA 12.4).
    let param_info: ParamInfo = unsafe { std::mem::transmute(address) };
    let size = |index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: writes two sizes; the handle is valid.
        check(unsafe { param_info(function, index, &mut offset, &mut size) }).ok().map(|()| size)
    };
    match (size(0), size(1)) {
        (Some(actual), None) if actual == bytes => Ok(()),
        (first, second) => Err(format!(
            "kernel {kernel} takes parameters of {first:?} and {second:?} bytes, but is launched with one of {bytes}: \
             the kernels' image is of another version than this crate"
        )),
    }
}

/// The driver's text for an error code.
fn describe(code: u32) -> String {
    type Text = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    let mut text = std::ptr::null();
    let known = retape_cuda_driver::function("cuGetErrorString").is_some_and(|address| {
        // SAFETY: the driver API's type, with the enum of codes as the integer that it is: newer drivers know more
        // codes than cust's enum. It writes the address of a text that lives forever.
        unsafe { std::mem::transmute::<*const (), Text>(address)(code, &mut text) == 0 }
    });
    if known && !text.is_null() {
        // SAFETY: a C string of the driver.
        return unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    }
    format!("CUDA error {code}")
}
