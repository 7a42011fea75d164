// Sorting of distinct 64-bit keys: a bitonic network (Batcher 1968), whose result can't depend on the order of threads.
// The number of keys is a power of 2, a multiple of SORT_CHUNK; the network takes log2(n) (log2(n) + 1) / 2 steps, and
// those within a chunk are made in shared memory (SORT_CHUNK keys).
#include "prim.cuh"

constexpr int SORT_CHUNK = 2048;

struct Sort {
    uint64_t* keys;
    int64_t count;
    int64_t run;       // sorted runs of this length come out, alternately rising and falling
    int64_t distance;  // of the keys that are compared
};

// Puts two keys in order; those at `index` rise where its bit of the run's length isn't set.
DEVICE void exchange(uint64_t& a, uint64_t& b, int64_t index, int64_t run) {
    const bool falling = (index & run) != 0;
    if ((a > b) != falling) {
        const uint64_t t = a;
        a = b;
        b = t;
    }
}

// The steps of `run` at distances distance, distance / 2, .. 1 of a chunk in shared memory, which starts at `start`.
DEVICE void merge_chunk(uint64_t* chunk, int64_t start, int64_t run, int distance) {
    for (; distance > 0; distance /= 2) {
        for (int pair = threadIdx.x; pair < SORT_CHUNK / 2; pair += blockDim.x) {
            const int i = (pair & ~(distance - 1)) * 2 + (pair & (distance - 1));
            exchange(chunk[i], chunk[i + distance], start + i, run);
        }
        __syncthreads();
    }
}

// With run = SORT_CHUNK and distance 0 sorts chunks from nothing, else takes the last steps of `run`. A block for each
// chunk.
KERNEL sort_chunks(const Sort p) {
    SHARED_MEMORY(memory);
    uint64_t* chunk = reinterpret_cast<uint64_t*>(memory);
    for (int64_t start = int64_t(blockIdx.x) * SORT_CHUNK; start < p.count; start += int64_t(gridDim.x) * SORT_CHUNK) {
        for (int i = threadIdx.x; i < SORT_CHUNK; i += blockDim.x) chunk[i] = p.keys[start + i];
        __syncthreads();
        if (p.distance > 0) merge_chunk(chunk, start, p.run, SORT_CHUNK / 2);
        else
            for (int run = 2; run <= SORT_CHUNK; run *= 2) merge_chunk(chunk, start, run, run / 2);
        for (int i = threadIdx.x; i < SORT_CHUNK; i += blockDim.x) p.keys[start + i] = chunk[i];
        __syncthreads();
    }
}

// One step of `run` at a distance of a chunk or more. One thread a pair.
KERNEL sort_far(const Sort p) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; pair < p.count / 2; pair += step) {
        const int64_t i = (pair & ~(p.distance - 1)) * 2 + (pair & (p.distance - 1));
        exchange(p.keys[i], p.keys[i + p.distance], i, p.run);
    }
}
