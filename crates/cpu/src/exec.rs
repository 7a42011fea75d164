//! How kernels use the machine: a pool of threads, SIMD chosen at run time, and scratch per thread.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use retape_core::{Error, Result};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

/// Work (in plain additions) below which a kernel runs on the calling thread: waking others costs some 10 us.
const PARALLEL_WORK: usize = 64 * 1024;

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

    /// Calls `body` with 0..tasks, in parallel where `work` is worth it, compiled for the machine's instruction set.
    /// Tasks must be cut by the shape alone, so that results don't depend on the number of threads. Closures passed
    /// here carry `#[inline(always)]`, so that they are compiled inside the dispatch.
    #[inline(always)]
    pub fn run(&self, tasks: usize, work: usize, body: impl Fn(usize) + Sync) {
        let inline = |task| self.arch.dispatch(Task { body: &body, task });
        match &self.threads {
            Some(pool) if tasks > 1 && work > PARALLEL_WORK => {
                pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(inline));
            }
            _ => (0..tasks).for_each(inline),
        }
    }

    /// As [`run`](Exec::run), collecting what the tasks return, in order.
    #[inline(always)]
    pub fn collect<R: Send>(&self, tasks: usize, work: usize, body: impl Fn(usize) -> R + Sync) -> Vec<R> {
        let inline = |task| self.arch.dispatch(Task { body: &body, task });
        match &self.threads {
            Some(pool) if tasks > 1 && work > PARALLEL_WORK => {
                pool.install(|| (0..tasks).into_par_iter().with_max_len(1).map(inline).collect())
            }
            _ => (0..tasks).map(inline).collect(),
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

    /// Bound on the scratch that this backend's threads hold.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_peak.load(Ordering::Relaxed) * self.thread_count() as u64
    }
}

/// One task, to be compiled for each instruction set. (A closure passed to `dispatch` as it is would be called through
/// a shim that isn't inlined, and so compiled for the baseline only.)
struct Task<'a, F> {
    body: &'a F,
    task: usize,
}

impl<R, F: Fn(usize) -> R> WithSimd for Task<'_, F> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> R {
        (self.body)(self.task)
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

fn no_threads(threads: usize, error: &rayon::ThreadPoolBuildError) -> Error {
    Error::Unsupported {
        kernel: "device_with_threads",
        device: "cpu".into(),
        reason: format!("{threads} threads: {error}"),
    }
}
