//! A CPU backend with something wrong or watched, for tests of the checkers.

use retape_core::{Backend, Buffer, Device, Error, Kernel, Launch, Result, Tensor, kernel};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What a wrapped backend does besides running kernels.
#[derive(Debug, Default)]
pub struct Watch {
    /// Names of the kernels run, in order.
    pub kernels: Mutex<Vec<&'static str>>,
    /// Flip one bit of element 5 of the output of the n-th `unary` kernel (counted from 1; 0: never).
    pub flip_unary: AtomicUsize,
    /// Fail the n-th kernel (counted from 1; 0: never).
    pub fail_kernel: AtomicUsize,
    /// Allocations made.
    pub allocations: AtomicUsize,
    /// Fail the n-th allocation (counted from 1; 0: never).
    pub fail_allocation: AtomicUsize,
    /// Fill outputs with NaN before each kernel.
    pub poison: bool,
    /// Bytes that the kernels run have touched, see `touched`.
    pub bytes: AtomicU64,
}

/// Bytes of the elements that a kernel reads or writes: of its operands, but for those that it reaches through indices,
/// where these count.
fn touched(kernel: &Kernel<'_>) -> u64 {
    let bytes = |tensors: &[&Tensor]| tensors.iter().map(|t| (t.len() * t.dtype().size()) as u64).sum::<u64>();
    match kernel {
        Kernel::Fill(k) => bytes(&[k.out]),
        Kernel::Copy(k) => bytes(&[k.x, k.out]),
        Kernel::Unary(k) => bytes(&[k.x, k.out]),
        Kernel::Reduce(k) => bytes(&[k.x, k.out]),
        Kernel::Binary(k) => bytes(&[k.a, k.b, k.out]),
        Kernel::Gather(k) => bytes(&[k.out]) + bytes(k.indices),
        Kernel::ScatterAdd(k) => bytes(&[k.source, k.source]) + bytes(k.indices),
        Kernel::Embedding(k) => bytes(&[k.ids, k.out, k.out]),
        Kernel::EmbeddingGrad(k) => bytes(&[k.ids, k.g, k.order, k.out]),
        _ => 0,
    }
}

#[derive(Debug)]
struct Wrapped {
    cpu: retape_cpu::Cpu,
    watch: Arc<Watch>,
}

/// A CPU device (one thread) under watch.
pub fn device(watch: Arc<Watch>) -> Device {
    Device::new(Wrapped { cpu: retape_cpu::Cpu::new(1).unwrap(), watch })
}

// SAFETY: memory and kernels are the CPU's; the bit that `run` flips lies in the output.
unsafe impl Backend for Wrapped {
    fn name(&self) -> String {
        "wrapped cpu".into()
    }
    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let count = self.watch.allocations.fetch_add(1, Ordering::Relaxed) + 1;
        if count == self.watch.fail_allocation.load(Ordering::Relaxed) {
            return Err(Error::OutOfMemory { requested: bytes as u64, in_use: 0, limit: 0 });
        }
        let mut buffer = self.cpu.allocate(bytes)?;
        if self.watch.poison {
            self.cpu.upload(&mut buffer, 0, &vec![0xff; bytes])?;
        }
        Ok(buffer)
    }
    fn release(&self, buffer: Buffer) {
        self.cpu.release(buffer)
    }
    fn upload(&self, buffer: &mut Buffer, offset: usize, bytes: &[u8]) -> Result<()> {
        self.cpu.upload(buffer, offset, bytes)
    }
    fn download(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.cpu.download(buffer, offset, bytes)
    }
    fn run(&self, launch: &Launch<'_>) -> Result<()> {
        let kernel = launch.kernel();
        let mut kernels = self.watch.kernels.lock().unwrap();
        kernels.push(kernel.name());
        self.watch.bytes.fetch_add(touched(kernel), Ordering::Relaxed);
        if kernels.len() == self.watch.fail_kernel.load(Ordering::Relaxed) {
            return Err(Error::InvalidValue { kernel: kernel.name(), reason: "planted failure".into() });
        }
        let unary = kernels.iter().filter(|k| **k == "unary").count();
        drop(kernels);
        self.cpu.run(launch)?;
        if let Kernel::Unary(kernel::Unary { out, .. }) = kernel
            && unary == self.watch.flip_unary.load(Ordering::Relaxed)
        {
            let byte = (out.storage().address() + 5 * out.dtype().size()) as *mut u8;
            // SAFETY: a byte of the output, whose address is the CPU's and which the launch has locked.
            unsafe { *byte ^= 4 };
        }
        Ok(())
    }
}
