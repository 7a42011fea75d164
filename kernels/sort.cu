// Sorting of 64-bit keys: a bitonic network (Batcher 1968), whose result can't depend on the order of threads. Every
// merge begins by comparing each key with its mirror image, so that all exchanges put the smaller key first: keys
// beyond the end, which would be the largest, needn't be there. For n keys, rounded up to a power of 2, the network
// takes log2(n) (log2(n) + 1) / 2 steps; those within a chunk are made in shared memory (SORT_CHUNK keys).
#include "prim.cuh"

constexpr int SORT_CHUNK = 2048;

struct Sort {
    uint64_t* keys;
    int64_t count;
    int64_t run;       // sorted runs of this length come out
    int64_t distance;  // of the keys that are compared; half the run's length: mirror images
};

// The lower key of a pair, at `distance` of its partner or (with half a run) of its run's start, and that partner.
DEVICE int64_t lower(int64_t pair, int64_t distance) { return (pair & ~(distance - 1)) * 2 + (pair & (distance - 1)); }
DEVICE int64_t upper(int64_t i, int64_t distance, bool mirrored) {
    return mirrored ? (i | (2 * distance - 1)) - (i & (distance - 1)) : i + distance;
}

DEVICE void exchange(uint64_t& a, uint64_t& b) {
    if (a > b) {
        const uint64_t t = a;
        a = b;
        b = t;
    }
}

// The steps at distances distance, distance / 2, .. 1 of a chunk in shared memory; the first of mirror images, if said.
DEVICE void merge_chunk(uint64_t* chunk, int distance, bool mirrored) {
    for (; distance > 0; distance /= 2, mirrored = false) {
        for (int pair = threadIdx.x; pair < SORT_CHUNK / 2; pair += blockDim.x) {
            const int64_t i = lower(pair, distance);
            exchange(chunk[i], chunk[upper(i, distance, mirrored)]);
        }
        __syncthreads();
    }
}

// With distance 0 sorts chunks from nothing, else takes the last steps of `run`. A block for each chunk.
KERNEL sort_chunks(const Sort p) {
    SHARED_MEMORY(memory);
    uint64_t* chunk = reinterpret_cast<uint64_t*>(memory);
    for (int64_t start = int64_t(blockIdx.x) * SORT_CHUNK; start < p.count; start += int64_t(gridDim.x) * SORT_CHUNK) {
        for (int i = threadIdx.x; i < SORT_CHUNK; i += blockDim.x)
            chunk[i] = start + i < p.count ? p.keys[start + i] : UINT64_MAX;
        __syncthreads();
        if (p.distance > 0) merge_chunk(chunk, SORT_CHUNK / 2, false);
        else
            for (int run = 2; run <= SORT_CHUNK; run *= 2) merge_chunk(chunk, run / 2, true);
        for (int i = threadIdx.x; i < SORT_CHUNK; i += blockDim.x)
            if (start + i < p.count) p.keys[start + i] = chunk[i];
        __syncthreads();
    }
}

// One step of `run` at a distance of a chunk or more. One thread a pair.
KERNEL sort_far(const Sort p) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, pairs = (p.count + p.run - 1) / p.run * (p.run / 2);
    for (int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; pair < pairs; pair += step) {
        const int64_t i = lower(pair, p.distance), j = upper(i, p.distance, 2 * p.distance == p.run);
        if (j < p.count) exchange(p.keys[i], p.keys[j]);
    }
}
