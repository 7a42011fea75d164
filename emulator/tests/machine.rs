//! The instructions that kernels/prim.cuh wraps, against their definitions: the emulator's twins here, the machine's
//! own where the tests run on a GPU. Without this, a wrapper with a wrong operand would only be seen as wrong numbers
//! elsewhere.

use cust::context::Context;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys;
use half::{bf16, f16};
use std::ffi::c_void;

/// The device with the kernels of kernels/primitives.cu.
struct Machine {
    stream: Stream,
    module: Module,
    _context: Context,
}

/// The parameters of every kernel there.
#[repr(C)]
struct Case {
    input: u64,
    output: u64,
}

impl Machine {
    fn open() -> Machine {
        let options = retape_cuda_emulator::options().unwrap();
        if let Some(driver) = &options.driver {
            assert!(retape_cuda_driver::use_library(driver), "another driver is in use");
        }
        let folder = options.kernels.or_else(|| std::env::var_os("RETAPE_CUDA_KERNELS").map(Into::into));
        let image = folder.expect("a folder of kernels").join("primitives.fatbin");
        cust::init(cust::CudaFlags::empty()).unwrap();
        let _context = Context::new(cust::device::Device::get_device(0).unwrap()).unwrap();
        let module = Module::from_fatbin(std::fs::read(image).unwrap(), &[]).unwrap();
        Machine { stream: Stream::new(StreamFlags::DEFAULT, None).unwrap(), module, _context }
    }

    /// What one block of threads makes of `bytes` zero bytes.
    fn run(&self, kernel: &str, threads: u32, shared: u32, input: &[u8], bytes: usize) -> Vec<u8> {
        let function = self.module.get_function(format!("case_{kernel}")).unwrap();
        let input = DeviceBuffer::from_slice(input).unwrap();
        let output = DeviceBuffer::from_slice(&vec![0u8; bytes]).unwrap();
        let case = Case { input: input.as_device_ptr().as_raw(), output: output.as_device_ptr().as_raw() };
        let mut parameters = [(&raw const case).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one `Case`, whose buffers live until after the synchronisation, and are as long as
        // kernels/primitives.cu says.
        let launched = unsafe {
            let (stream, none) = (self.stream.as_inner(), std::ptr::null_mut());
            let parameters = parameters.as_mut_ptr();
            sys::cuLaunchKernel(function.to_raw(), 1, 1, 1, threads, 1, 1, shared, stream, parameters, none)
        };
        assert_eq!(launched, sys::CUresult::CUDA_SUCCESS, "{kernel}");
        self.stream.synchronize().unwrap();
        let mut out = vec![0; bytes];
        output.copy_to(&mut out).unwrap();
        out
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
}

/// Exact in 16 bits, and so are sums of products of some.
fn number(i: usize) -> f32 {
    (((i * 7919 + 5) % 31) as f32 - 15.0) / 4.0
}

#[test]
fn every_wrapped_instruction_is_its_definition() {
    let machine = Machine::open();
    products(&machine);
    matrices(&machine);
    copies(&machine);
    exponentials(&machine);
    shuffles(&machine);
}

fn products(machine: &Machine) {
    let half = |kernel, x| if kernel == "mma_bf16" { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() };
    for kernel in ["mma_bf16", "mma_f16"] {
        let input: Vec<u8> = (0..384).flat_map(|i| half(kernel, number(i)).to_ne_bytes()).collect();
        let actual: Vec<f32> =
            words(&machine.run(kernel, 32, 0, &input, 512)).into_iter().map(f32::from_bits).collect();
        for (at, actual) in actual.into_iter().enumerate() {
            let product = |k| number(at / 8 * 16 + k) * number(256 + at % 8 * 16 + k);
            assert_eq!(actual, 1.0 + (0..16).map(product).sum::<f32>(), "{kernel} at {at}");
        }
    }
}

fn matrices(machine: &Machine) {
    let element = |m: usize, i: usize, j: usize| ((64 * m + 8 * i + j) * 257 + 1) as u16 as u32;
    let input: Vec<u8> = (0..256).flat_map(|i| element(i / 64, i / 8 % 8, i % 8).to_ne_bytes()[..2].to_vec()).collect();
    for (kernel, transposed) in [("ldmatrix", false), ("ldmatrix_trans", true)] {
        for (at, actual) in words(&machine.run(kernel, 32, 512, &input, 512)).into_iter().enumerate() {
            let (g, t, m) = (at / 4 / 4, at / 4 % 4 * 2, at % 4);
            let pair = if transposed {
                [element(m, t, g), element(m, t + 1, g)]
            } else {
                [element(m, g, t), element(m, g, t + 1)]
            };
            assert_eq!(actual, pair[0] | pair[1] << 16, "{kernel} at {at}");
        }
    }
}

fn copies(machine: &Machine) {
    let input: Vec<u8> = (0..272).map(|i| (i + 1) as u8).collect();
    let out = machine.run("cp_async", 17, 17 * 32, &input, 17 * 32);
    for (at, actual) in out.into_iter().enumerate() {
        let (thread, byte) = (at / 16, at % 16);
        let expected = match thread {
            0..17 if byte < thread => input[at],
            0..17 => 0,
            _ => input[(33 - thread) * 16 + byte],
        };
        assert_eq!(actual, expected, "cp_async, thread {thread}, byte {byte}");
    }
}

fn exponentials(machine: &Machine) {
    let mut x: Vec<f32> = (0..60).map(|i| i as f32 * 4.7 - 150.0).collect();
    x.extend([f32::NEG_INFINITY, f32::INFINITY, 1e-42, 0.0]);
    let input: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    for (x, actual) in x.into_iter().zip(words(&machine.run("exp2", 64, 0, &input, 256))) {
        let (actual, expected) = (f32::from_bits(actual) as f64, (x as f64).exp2());
        let expected = if expected < f32::MIN_POSITIVE as f64 { 0.0 } else { expected };
        let expected = if expected > f32::MAX as f64 { f64::INFINITY } else { expected };
        let near = (actual - expected).abs() <= 3e-7 * expected;
        assert!(actual == expected || near, "2^{x} is {actual:e}, not {expected:e}");
    }
}

fn shuffles(machine: &Machine) {
    let x: Vec<f64> = (0..32).map(|i| ((i * 11 + 3) % 32) as f64).collect();
    let input: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let out = machine.run("shuffles", 32, 0, &input, 12 * 32 * 8);
    let thirds: u32 = (0..32).map(|i| u32::from((x[i] as u32).is_multiple_of(3)) << i).sum();
    for (at, actual) in out.chunks(8).map(|word| f64::from_ne_bytes(word.try_into().unwrap())).enumerate() {
        let lane = at % 32;
        let expected = match at / 32 {
            0 => x[5],
            1 => x[lane * 7 % 32],
            2 => x[lane / 8 * 8 + 3],
            3 => x[lane ^ 16],
            4 => x[lane ^ 5],
            5 => x[if lane + 3 < 32 { lane + 3 } else { lane }],
            6 => x[if lane % 16 + 3 < 16 { lane + 3 } else { lane }],
            7 => x[if lane >= 2 { lane - 2 } else { lane }],
            8 => x[if lane % 16 >= 9 { lane - 9 } else { lane }] * 2f64.powi(40),
            9 => f64::from(thirds),
            10 => 3.0,
            _ => x[if lane < 16 { lane ^ 1 } else { lane ^ 2 }],
        };
        assert_eq!(actual, expected, "shuffle {} in lane {lane}", at / 32);
    }
}
