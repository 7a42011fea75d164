//! Sorting of distinct keys on the device: kernels/sort.cu.

use crate::argument::blocks;
use crate::device::{Gpu, Launch, Parameters};
use retape_core::Result;

/// Keys that a block sorts in shared memory: SORT_CHUNK in kernels/sort.cu.
const CHUNK: usize = 2048;
const THREADS: usize = 512;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Sort {
    keys: u64,
    count: i64,
    run: i64,
    distance: i64,
}
// SAFETY: the fields of `Sort` in kernels/sort.cu.
unsafe impl Parameters for Sort {}

/// Sorts `count` keys of 64 bits.
pub(crate) fn sort(gpu: &Gpu, keys: u64, count: usize) -> Result<()> {
    let step = |kernel, grid, run: usize, distance: usize| {
        let launch = Launch { kernel, grid, block: THREADS as u32, shared: (CHUNK * 8) as u32 };
        gpu.launch(launch, &Sort { keys, count: count as i64, run: run as i64, distance: distance as i64 })
    };
    let chunks = blocks(count, CHUNK);
    step("sort_chunks", chunks, CHUNK, 0)?;
    let mut run = 2 * CHUNK;
    while run < 2 * count {
        let pairs = blocks(count.next_multiple_of(run) / 2, THREADS);
        let mut distance = run / 2;
        while distance >= CHUNK {
            step("sort_far", pairs, run, distance)?;
            distance /= 2;
        }
        step("sort_chunks", chunks, run, distance)?;
        run *= 2;
    }
    Ok(())
}
