//! How kernels use the machine: a pool of threads, SIMD chosen at run time, and scratch per thread.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use retape_core::{Error, Result};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Work (in plain additions) below which a kernel runs on the calling thread: waking others costs some 10 us.
const PARALLEL_WORK: usize = 64 * 1024;

/// More threads than any machine has use for; starting them may well bring it down.
const MOST_THREADS: usize = 4096;

/// Threads and instruction set of one backend.
#[derive(Debug)]
pub(crate) struct Exec {
    arch: Arch,
    threads: Option<rayon::ThreadPool>,
    scratch_peak: AtomicU64,
}

impl Exec {
    /// `threads` = 0 takes what the machine offers.
    pub fn new(threads: usize) -> Result<Exec> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        };
        let build =
            || rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("retape-cpu-{i}")).build();
        let mut exec = Exec::single();
        if threads > 1 {
            if threads > MOST_THREADS {
                return Err(no_threads(
                    threads,
                    &format!("at most {MOST_THREADS}, and 0 for the number that the machine offers"),
                ));
            }
            exec.threads = Some(build().map_err(|e| no_threads(threads, &e))?);
        }
        Ok(exec)
    }

    /// The calling thread alone.
    pub fn single() -> Exec {
        Exec { arch: Arch::new(), threads: None, scratch_peak: AtomicU64::new(0) }
    }

    pub fn thread_count(&self) -> usize {
        self.threads.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Calls `body` with 0..tasks, in parallel where `work` is worth it, compiled for the machine's best instruction
    /// set as far as `T` asks for it. Tasks must be cut by the shape alone, so that results don't depend on the number
    /// of threads. Closures passed here carry `#[inline(always)]`, so that they are compiled inside the dispatch; for
    /// the same reason their loops are `for` loops: `for_each`, `array::map` and the like become functions of their
    /// own.
    #[inline(always)]
    pub fn run<T: Target>(&self, tasks: usize, work: usize, body: impl Fn(usize) + Sync) {
        self.spread(tasks, work, &|task| self.compiled::<T, _, _>(&body, task));
    }

    /// Sorts distinct keys, on all threads where there are many.
    pub fn sort(&self, keys: &mut [u64]) {
        match &self.threads {
            Some(pool) if keys.len() > PARALLEL_WORK => pool.install(|| keys.par_sort_unstable()),
            _ => keys.sort_unstable(),
        }
    }

    /// Calls `body` with `argument`, compiled for `T`'s instruction set.
    #[inline(always)]
    pub fn compiled<T: Target, A, R>(&self, body: &impl Fn(A) -> R, argument: A) -> R {
        T::compile(self.arch, Call { body, argument })
    }

    /// Calls `body` with 0..tasks. Threads take the tasks in this order, each the next one left.
    fn spread(&self, tasks: usize, work: usize, body: &(dyn Fn(usize) + Sync)) {
        match &self.threads {
            Some(pool) if tasks > 1 && work > PARALLEL_WORK => {
                let next = AtomicUsize::new(0);
                let claim = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&task| task < tasks);
                let workers = pool.current_num_threads().min(tasks);
                pool.install(|| {
                    (0..workers).into_par_iter().with_max_len(1).for_each(|_| std::iter::from_fn(claim).for_each(body));
                });
            }
            _ => (0..tasks).for_each(body),
        }
    }

    /// Takes `len` elements of this thread's scratch: contents undefined, 64-byte aligned.
    pub fn scratch<T: Scratch>(&self, len: usize) -> Lent<T> {
        let mut lines = SCRATCH.take();
        let needed = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        self.scratch_peak.fetch_max((needed * size_of::<Line>()) as u64, Ordering::Relaxed);
        if lines.len() < needed {
            lines.resize(needed, Line([0; 64]));
        }
        Lent { lines, len, elements: PhantomData }
    }

    /// Bound on the scratch that this backend's threads and the calling one hold.
    pub fn scratch_bytes(&self) -> u64 {
        let threads = self.threads.as_ref().map_or(0, |pool| pool.current_num_threads());
        self.scratch_peak.load(Ordering::Relaxed) * (threads as u64 + 1)
    }
}

/// A call to be compiled for an instruction set. (A closure passed to pulp as it is would be called through a shim that
/// isn't inlined, and so compiled for the baseline only.)
struct Call<'a, F, A> {
    body: &'a F,
    argument: A,
}

impl<A, R, F: Fn(A) -> R> WithSimd for Call<'_, F, A> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> R {
        (self.body)(self.argument)
    }
}

/// How far a kernel's inner loops are specialised: to AVX2 and FMA where the machine has them for f32; not at all for
/// f64, which serves for checking, and for moving bytes, which memory bounds. Each step multiplies the code to be
/// compiled, which is why there is no AVX-512 one: it doubled the build and gained little.
pub(crate) trait Target {
    fn compile<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output;
}

impl Target for f32 {
    #[inline(always)]
    fn compile<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        arch.dispatch(op)
    }
}

/// The machine's baseline.
pub(crate) struct Baseline;

impl Target for Baseline {
    #[inline(always)]
    fn compile<Op: WithSimd>(_: Arch, op: Op) -> Op::Output {
        Simd::vectorize(pulp::Scalar, op)
    }
}

impl Target for f64 {
    #[inline(always)]
    fn compile<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        Baseline::compile(arch, op)
    }
}

/// One cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A thread's scratch, given back when dropped.
pub(crate) struct Lent<T> {
    lines: Vec<Line>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Scratch> Lent<T> {
    #[inline(always)]
    pub fn memory(&mut self) -> &mut [T] {
        // SAFETY: the lines hold at least `len` elements, are aligned to 64 bytes, and any bits are a valid T.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<T>(), self.len) }
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        SCRATCH.set(std::mem::take(&mut self.lines));
    }
}

/// Types of which any bits are a value.
pub(crate) trait Scratch: Copy {}
impl Scratch for f32 {}
impl Scratch for f64 {}

fn no_threads(threads: usize, reason: &dyn std::fmt::Display) -> Error {
    Error::Unsupported {
        kernel: "device_with_threads",
        device: "cpu".into(),
        reason: format!("{threads} threads: {reason}"),
    }
}
