//! Recycles freed buffers: the page faults of fresh memory cost more than many kernels.
//!
//! Every buffer is rounded up to a cache line (large ones to a page) and kept when freed. A request takes the best fit
//! among those at most a sixteenth too large. What the pool holds, in use and cached, stays within
//! `peak + peak/10 + 8 MiB`, where `peak` is the most that was ever requested at one time: beyond that the longest
//! unused buffers go back to the system. Large buffers are mapped each by itself, so that they really go back (an
//! allocator may keep what it is given). The promise to users is 10% + 16 MiB of resident memory; the rest is for what
//! libraries hold.

use memmap2::MmapMut;
use retape_core::{Buffer, Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// Alignment of every buffer: a cache line, and the widest SIMD register.
const ALIGN: usize = 64;
const PAGE: usize = 4096;
/// From this size on a buffer is a mapping of its own.
const MAPPED: usize = 128 << 10;
const SLACK: usize = 8 << 20;

#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Buffers in use, by address.
    in_use: HashMap<usize, Memory>,
    /// Cached buffers by (bytes, age); of equal ones the youngest comes first.
    by_size: BTreeMap<(usize, u64), Memory>,
    /// Age to bytes. Ages count down, so the oldest buffer is the last.
    by_age: BTreeMap<u64, usize>,
    clock: u64,
    held: usize,
    requested: usize,
    peak: usize,
}

/// Memory from the system, given back when dropped.
#[derive(Debug)]
enum Memory {
    Mapped(MmapMut),
    Heap { address: usize, layout: Layout },
}

impl Memory {
    /// `None` where the system has no more.
    fn take(size: usize) -> Option<Memory> {
        if size >= MAPPED {
            return MmapMut::map_anon(size).ok().map(Memory::Mapped);
        }
        let layout = Layout::from_size_align(size, ALIGN).ok()?;
        // SAFETY: `size` is not zero (a request of zero bytes never comes here).
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() { None } else { Some(Memory::Heap { address: address as usize, layout }) }
    }

    fn address(&self) -> usize {
        match self {
            Memory::Mapped(map) => map.as_ptr() as usize,
            Memory::Heap { address, .. } => *address,
        }
    }

    fn size(&self) -> usize {
        match self {
            Memory::Mapped(map) => map.len(),
            Memory::Heap { layout, .. } => layout.size(),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Heap { address, layout } = *self {
            // SAFETY: `address` came from `alloc_zeroed(layout)`, and this is its only owner.
            unsafe { dealloc(address as *mut u8, layout) }
        }
    }
}

impl Pool {
    pub fn allocate(&self, bytes: usize) -> Result<Buffer> {
        if bytes == 0 {
            // SAFETY: no byte is at this address.
            return Ok(unsafe { Buffer::new(ALIGN, 0) });
        }
        let state = &mut *self.0.lock().unwrap_or_else(|e| e.into_inner());
        let full = |state: &State| Error::OutOfMemory {
            requested: bytes as u64,
            in_use: state.requested as u64,
            limit: state.requested as u64,
        };
        let unit = if bytes >= MAPPED { PAGE } else { ALIGN };
        let size = bytes.checked_next_multiple_of(unit).filter(|&n| n <= isize::MAX as usize - PAGE);
        let size = size.ok_or_else(|| full(state))?;
        state.peak = state.peak.max(state.requested + bytes);
        let fit = state.by_size.range((size, 0)..=(size + size / 16, u64::MAX)).next().map(|(&key, _)| key);
        let memory = match fit.and_then(|key| state.uncache(key)) {
            Some(memory) => memory,
            None => {
                state.shrink(size);
                // A full machine may still serve the request once nothing is cached.
                let memory = Memory::take(size).or_else(|| {
                    state.shrink(usize::MAX / 2);
                    Memory::take(size)
                });
                let memory = memory.ok_or_else(|| full(state))?;
                state.held += size;
                memory
            }
        };
        state.requested += bytes;
        let address = memory.address();
        state.in_use.insert(address, memory);
        // SAFETY: the system's memory is zeroed, and this is in use until it is released.
        Ok(unsafe { Buffer::new(address, bytes) })
    }

    /// Fails unless the buffer is one that this pool has given.
    pub fn owns(&self, what: &'static str, buffer: &Buffer) -> Result<()> {
        let state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if buffer.bytes() == 0 || state.in_use.contains_key(&buffer.address()) {
            return Ok(());
        }
        Err(Error::InvalidTensor { what, reason: "the buffer is another device's".into() })
    }

    pub fn release(&self, buffer: Buffer) {
        if buffer.bytes() == 0 {
            return;
        }
        let state = &mut *self.0.lock().unwrap_or_else(|e| e.into_inner());
        let Some(memory) = state.in_use.remove(&buffer.address()) else {
            debug_assert!(false, "a buffer that this pool didn't give");
            return;
        };
        state.requested -= buffer.bytes();
        state.clock += 1;
        let age = u64::MAX - state.clock;
        state.by_age.insert(age, memory.size());
        state.by_size.insert((memory.size(), age), memory);
        state.shrink(0);
    }

    /// Bytes held from the system, in use and cached.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.0.lock().unwrap().held
    }
}

impl State {
    /// Takes a buffer out of the cache.
    fn uncache(&mut self, (size, age): (usize, u64)) -> Option<Memory> {
        self.by_age.remove(&age);
        self.by_size.remove(&(size, age))
    }

    /// Frees the longest unused buffers until `more` bytes fit under the bound.
    fn shrink(&mut self, more: usize) {
        let bound = self.peak + self.peak / 10 + SLACK;
        while self.held.saturating_add(more) > bound {
            let Some((&age, &size)) = self.by_age.last_key_value() else { return };
            drop(self.uncache((size, age)));
            self.held -= size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_stays_within_the_bound() {
        let pool = Pool::default();
        let (mut live, mut requested, mut peak) = (Vec::new(), 0usize, 0usize);
        let mut seed = 1u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = (seed >> 33) as usize;
            if !draw.is_multiple_of(3) || live.is_empty() {
                let bytes = draw % 3_000_000;
                live.push(pool.allocate(bytes).unwrap());
                requested += bytes;
                peak = peak.max(requested);
            }
            while live.len() > 100 || (draw.is_multiple_of(3) && !live.is_empty()) {
                let buffer: Buffer = live.swap_remove(draw % live.len());
                requested -= buffer.bytes();
                pool.release(buffer);
                if !draw.is_multiple_of(7) {
                    break;
                }
            }
            assert!(pool.held() <= peak + peak / 10 + SLACK, "{} held, {peak} at peak", pool.held());
        }
        live.drain(..).for_each(|b| pool.release(b));
    }

    #[test]
    fn recycles_aligns_and_refuses() {
        let pool = Pool::default();
        let first = pool.allocate(1000).unwrap();
        let address = first.address();
        assert_eq!(address % ALIGN, 0);
        pool.release(first);
        let again = pool.allocate(990).unwrap();
        assert_eq!(again.address(), address);
        pool.release(again);
        assert!(matches!(pool.allocate(isize::MAX as usize), Err(Error::OutOfMemory { .. })));
        assert!(matches!(pool.allocate(1 << 60), Err(Error::OutOfMemory { .. })));
        pool.release(pool.allocate(0).unwrap());
    }
}
