//! The emulated driver: what it refuses, how errors come out, the order of streams, and several devices at a time.

use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUresult};
use half::bf16;
use retape_core::{DType, Device, MemoryKind, Tensor};
use std::ffi::{CStr, c_char, c_void};

/// `Tensor` in kernels/tensor.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arg {
    data: u64,
    dtype: i32,
    rank: i32,
    shape: [i64; 8],
    strides: [i64; 8],
}

impl Arg {
    /// `len` elements of f32 that lie together.
    fn floats(data: u64, len: i64) -> Arg {
        let mut arg = Arg { data, dtype: 1, rank: 1, shape: [0; 8], strides: [0; 8] };
        (arg.shape[0], arg.strides[0]) = (len, 1);
        arg
    }
}

/// The parameters of kernel `fill`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Fill {
    out: Arg,
    value: f64,
}

/// The driver used directly, on a stream of its own. None where tests run on a real GPU, whose context an error would
/// end.
struct Raw {
    stream: Stream,
    module: Module,
    _device: Device,
}

impl Raw {
    fn open() -> Option<Raw> {
        let device = retape_cuda_emulator::device();
        if retape_cuda_emulator::tests_gpu() {
            return None;
        }
        let image = std::fs::read(retape_cuda_emulator::kernels().join("copy.fatbin")).unwrap();
        let module = Module::from_fatbin(image, &[]).unwrap();
        Some(Raw { stream: Stream::new(StreamFlags::NON_BLOCKING, None).unwrap(), module, _device: device })
    }

    fn function(&self, name: &str) -> sys::CUfunction {
        self.module.get_function(name).unwrap().to_raw()
    }

    fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: writes one address.
        let taken = unsafe { sys::cuMemAllocAsync(&mut address, bytes, self.stream.as_inner()) };
        assert_eq!(taken, CUresult::CUDA_SUCCESS);
        address
    }

    fn free(&self, address: u64) -> CUresult {
        // SAFETY: the driver says so where it isn't an address that it gave.
        unsafe { sys::cuMemFreeAsync(address, self.stream.as_inner()) }
    }

    fn launch(&self, name: &str, grid: [u32; 3], block: [u32; 3], shared: u32, parameters: &Fill) -> CUresult {
        let mut arguments = [(&raw const *parameters).cast_mut().cast::<c_void>()];
        let (stream, none) = (self.stream.as_inner(), std::ptr::null_mut());
        let ([x, y, z], [a, b, c]) = (grid, block);
        // SAFETY: the emulator checks what can be checked; the parameters are those of `fill`.
        unsafe {
            let arguments = arguments.as_mut_ptr();
            sys::cuLaunchKernel(self.function(name), x, y, z, a, b, c, shared, stream, arguments, none)
        }
    }

    fn fill(&self, address: u64, len: i64) -> CUresult {
        self.launch("fill", [1, 1, 1], [64, 1, 1], 0, &Fill { out: Arg::floats(address, len), value: 2.5 })
    }

    fn wait(&self) -> CUresult {
        // SAFETY: the stream is alive.
        unsafe { sys::cuStreamSynchronize(self.stream.as_inner()) }
    }

    fn read(&self, address: u64, len: usize) -> Vec<f32> {
        let mut values = vec![0f32; len];
        // SAFETY: the vector has room for the bytes, and lives until the copy is waited for.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, 4 * len, self.stream.as_inner()) };
        assert_eq!((copied, self.wait()), (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS));
        values
    }
}

/// They end the process where a kernel goes wrong.
fn under_sanitizers() -> bool {
    std::env::var_os("RETAPE_CUDA_DRIVER").is_some()
}

fn text(code: CUresult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: writes the address of a text that lives forever.
    unsafe {
        assert_eq!(sys::cuGetErrorString(code, &mut text), CUresult::CUDA_SUCCESS);
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

#[test]
fn what_a_device_cannot_launch_is_refused() {
    let Some(raw) = Raw::open() else { return };
    let address = raw.allocate(400);
    let parameters = Fill { out: Arg::floats(address, 100), value: 1.0 };
    let launch = |grid, block, shared| raw.launch("fill", grid, block, shared, &parameters);
    for (grid, block, shared) in [
        ([1, 1, 1], [1025, 1, 1], 0),
        ([1, 1, 1], [32, 64, 1], 0),
        ([1, 1, 1], [1, 1, 65], 0),
        ([1, 65536, 1], [32, 1, 1], 0),
        ([0, 1, 1], [32, 1, 1], 0),
        ([1, 1, 1], [0, 1, 1], 0),
        ([1, 1, 1], [32, 1, 1], (48 << 10) + 1),
    ] {
        assert_eq!(launch(grid, block, shared), CUresult::CUDA_ERROR_INVALID_VALUE, "{grid:?} {block:?} {shared}");
    }
    let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the handle is valid.
    let allow = |bytes| unsafe { sys::cuFuncSetAttribute(raw.function("fill"), which, bytes) };
    assert_eq!(allow((227 << 10) + 1), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(allow(227 << 10), CUresult::CUDA_SUCCESS);
    assert_eq!(launch([1, 1, 1], [1024, 1, 1], 227 << 10), CUresult::CUDA_SUCCESS);
    assert_eq!(raw.read(address, 100), [1.0; 100]);
    assert_eq!(raw.free(address), CUresult::CUDA_SUCCESS);
}

#[test]
fn kernels_and_their_parameters_are_known() {
    let Some(raw) = Raw::open() else { return };
    assert!(raw.module.get_function("no_such_kernel").is_err());
    assert!(Module::from_fatbin(b"no image", &[]).is_err());
    type ParamInfo = unsafe extern "C" fn(sys::CUfunction, usize, *mut usize, *mut usize) -> CUresult;
    let address = retape_cuda_driver::function("cuFuncGetParamInfo").unwrap();
    // SAFETY: the driver API's type.
    let param_info: ParamInfo = unsafe { std::mem::transmute(address) };
    let (mut offset, mut size) = (1, 0);
    for (name, bytes) in [("fill", size_of::<Fill>()), ("copy_1", 2 * size_of::<Arg>())] {
        let function = raw.function(name);
        // SAFETY: writes two sizes; the handle is valid.
        let codes = [0, 1].map(|index| unsafe { param_info(function, index, &mut offset, &mut size) });
        assert_eq!(codes, [CUresult::CUDA_SUCCESS, CUresult::CUDA_ERROR_INVALID_VALUE]);
        assert_eq!((offset, size), (0, bytes), "{name}");
    }
}

#[test]
fn addresses_are_checked() {
    let Some(raw) = Raw::open() else { return };
    let address = raw.allocate(64);
    let stream = raw.stream.as_inner();
    let mut host = [0u8; 100];
    // SAFETY: the driver refuses what it must not touch.
    let (down, up, set) = unsafe {
        (
            sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), address, 65, stream),
            sys::cuMemcpyHtoDAsync_v2(address - 1, host.as_ptr().cast(), 8, stream),
            sys::cuMemsetD8Async(address + 60, 0, 5, stream),
        )
    };
    assert_eq!([down, up, set], [CUresult::CUDA_ERROR_INVALID_VALUE; 3]);
    let mut none = 0;
    // SAFETY: writes one address.
    assert_eq!(unsafe { sys::cuMemAllocAsync(&mut none, 0, stream) }, CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(raw.free(address + 4), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(raw.free(address), CUresult::CUDA_SUCCESS);
    assert_eq!(raw.free(address), CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn an_access_to_nowhere_is_an_error_that_stays() {
    if under_sanitizers() {
        return;
    }
    let Some(raw) = Raw::open() else { return };
    let address = raw.allocate(64);
    assert_eq!(raw.fill(0x1000, 10), CUresult::CUDA_SUCCESS);
    let error = raw.wait();
    assert_eq!(error, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let reason = text(error);
    assert!(reason.starts_with("fill: an access to where there is no memory (address 0x1000)"), "{reason}");
    assert!(reason.ends_with("block (0,0,0), thread (0,0,0)"), "{reason}");
    assert_eq!([raw.fill(address, 10), raw.wait(), raw.free(address)], [error; 3]);
    // Streams of others go on.
    let other = Raw::open().unwrap();
    let address = other.allocate(40);
    assert_eq!(other.fill(address, 10), CUresult::CUDA_SUCCESS);
    assert_eq!(other.read(address, 10), [2.5; 10]);
}

#[test]
fn a_write_past_an_allocation_is_an_error_of_the_kernel() {
    if under_sanitizers() {
        return;
    }
    let Some(raw) = Raw::open() else { return };
    let address = raw.allocate(40);
    assert_eq!(raw.fill(address, 11), CUresult::CUDA_SUCCESS);
    let error = raw.wait();
    assert_ne!(error, CUresult::CUDA_SUCCESS);
    assert_eq!(text(error), "fill: byte 0 after an allocation of 40 bytes was written");
}

#[test]
fn memory_given_back_stays_until_queued_work_is_done() {
    let Some(raw) = Raw::open() else { return };
    let (first, second) = (raw.allocate(4000), raw.allocate(4000));
    let stream = raw.stream.as_inner();
    assert_eq!(raw.fill(first, 1000), CUresult::CUDA_SUCCESS);
    // SAFETY: both are allocations of this size.
    assert_eq!(unsafe { sys::cuMemcpyDtoDAsync_v2(second, first, 4000, stream) }, CUresult::CUDA_SUCCESS);
    assert_eq!(raw.free(first), CUresult::CUDA_SUCCESS);
    assert_eq!(raw.read(second, 1000), [2.5; 1000]);
    assert_eq!(raw.free(second), CUresult::CUDA_SUCCESS);
}

#[test]
fn new_memory_is_not_a_number() {
    let device = retape_cuda_emulator::device();
    if retape_cuda_emulator::tests_gpu() {
        return;
    }
    let fresh = Tensor::uninit(&device, &[100], DType::F32, MemoryKind::Input).unwrap();
    assert!(fresh.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
}

#[test]
fn tensors_are_freed_in_the_order_of_the_stream() {
    let device = retape_cuda_emulator::device();
    let mut kept = Vec::new();
    for i in 0..50 {
        let x = Tensor::full(&device, &[64, 33], DType::F32, f64::from(i)).unwrap();
        kept.push(x.transpose(0, 1).unwrap().copy(MemoryKind::Input).unwrap());
        drop(x);
        let _other = Tensor::full(&device, &[64, 33], DType::F32, -1.0).unwrap();
    }
    for (i, tensor) in kept.iter().enumerate() {
        assert_eq!(tensor.to_vec::<f32>().unwrap(), [i as f32; 64 * 33]);
    }
}

#[test]
fn nothing_and_ends_of_buffers() {
    let device = retape_cuda_emulator::device();
    let empty = Tensor::full(&device, &[0, 3], DType::F32, 1.0).unwrap();
    assert_eq!(empty.cast(DType::F16, MemoryKind::Input).unwrap().to_bytes().unwrap(), Vec::<u8>::new());
    let numbers: Vec<u8> = (1..=10).collect();
    let tensor = Tensor::from_slice(&device, &[10], &numbers).unwrap();
    assert_eq!(tensor.narrow(0, 7, 3).unwrap().to_vec::<u8>().unwrap(), [8, 9, 10]);
    assert_eq!(tensor.narrow(0, 10, 0).unwrap().to_vec::<u8>().unwrap(), [0u8; 0]);
}

/// More than the page-locked memory that copies go through holds.
#[test]
fn large_copies() {
    let device = retape_cuda_emulator::device();
    let values: Vec<i32> = (0..3_000_000).collect();
    let tensor = Tensor::from_slice(&device, &[values.len()], &values).unwrap();
    assert_eq!(tensor.to_vec::<i32>().unwrap(), values);
}

#[test]
fn devices_in_threads_at_a_time() {
    let work = |salt: i32| {
        let device = retape_cuda_emulator::device();
        for round in 0..20 {
            let values: Vec<i32> = (0..35 * 64).map(|i| i * salt + round).collect();
            let tensor = Tensor::from_slice(&device, &[35, 64], &values).unwrap();
            let halves = tensor.transpose(0, 1).unwrap().cast(DType::F32, MemoryKind::Input).unwrap();
            let back = halves.cast(DType::I32, MemoryKind::Input).unwrap().to_vec::<i32>().unwrap();
            let expected: Vec<i32> =
                (0..64).flat_map(|j| (0..35).map(move |i| i * 64 + j)).map(|i| values[i]).collect();
            assert_eq!(back, expected);
        }
    };
    std::thread::scope(|scope| {
        for salt in 1..7 {
            scope.spawn(move || work(salt));
        }
    });
}

/// A device made by one thread, used by several, and let go by another.
#[test]
fn one_device_in_threads() {
    let device = retape_cuda_emulator::device();
    let tensors = std::thread::scope(|scope| {
        let make = |value: f64| Tensor::full(&device, &[777], DType::BF16, value).unwrap();
        let threads: Vec<_> =
            (0..6).map(|i| scope.spawn(move || (0..20).map(|_| make(f64::from(i))).collect())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Vec<Tensor>>>()
    });
    drop(device);
    std::thread::spawn(move || {
        for (i, some) in tensors.into_iter().enumerate() {
            for tensor in some {
                assert_eq!(tensor.to_vec::<bf16>().unwrap(), [bf16::from_f32(i as f32); 777]);
            }
        }
    })
    .join()
    .unwrap();
}
