// A tiled matrix multiplication, c = a b^T with a of shape (m, k), b of shape (n, k) in bf16 and c in f32, with every
// mechanism that a kernel may get wrong, and faults planted in it by number. A block computes 32 x 16 of c with two
// warps, 16 x 16 each, over tiles of k that arrive in two buffers by cp.async. k is a multiple of 8 and n of 4.
#pragma once
#include "prim.cuh"

enum Bug {
    NONE,
    NO_BARRIER,          // between the copies' arrival and their reading
    NO_SECOND_BARRIER,   // between the reading and the next copies
    NO_WAIT,             // for the copies
    OUT_OF_BOUNDS,       // writes one row too many
    READ_OUT_OF_BOUNDS,  // copies one row too many
    MISALIGNED,          // a 16-byte load at a multiple of 4
    DIVERGENT_SHUFFLE,   // half of the lanes take part, by a full mask
    ENDED_LANE,          // a shuffle reads a lane that has ended
    WRONG_MASK,          // a lane takes part that the mask leaves out
    DIVERGENT_BARRIER,   // warps at different barriers
    SKIPPED_BARRIER,     // a warp leaves out a barrier
    SHARED_OVERFLOW,     // writes past the end of shared memory
    UNWRITTEN,           // reads shared memory that nobody wrote
    BLOCKS_RACE,         // blocks write to one place
    STACK_OVERFLOW,      // a recursion that goes too deep
};

struct Multiply {
    const __nv_bfloat16* a;
    const __nv_bfloat16* b;
    float* c;
    int* blocks_done;
    int m, n, k;
};

constexpr int ROWS = 32, COLUMNS = 16, DEPTH = 16;
constexpr int TILE = (ROWS + COLUMNS) * DEPTH;  // elements of a buffer: first those of a, then those of b
constexpr int SHARED = 2 * TILE * 2 + ROWS * COLUMNS * 4;

struct alignas(16) Quad4 {
    float at[4];
};

template <int BUG>
DEVICE void load_tile(const Multiply& p, __nv_bfloat16* tile, int tile_k) {
    // 96 pieces of 16 bytes for 64 threads.
    for (int piece = threadIdx.x; piece < TILE / 8; piece += blockDim.x) {
        const int row = piece / 2, k = tile_k * DEPTH + piece % 2 * 8;
        const bool of_a = row < ROWS;
        const int global = of_a ? blockIdx.y * ROWS + row : blockIdx.x * COLUMNS + row - ROWS;
        const int rows = (of_a ? p.m : p.n) + (BUG == READ_OUT_OF_BOUNDS && of_a ? 1 : 0);
        const bool inside = global < rows && k < p.k;
        const __nv_bfloat16* from = of_a ? p.a : p.b;
        cp_async16(tile + row * DEPTH + piece % 2 * 8, from + (inside ? int64_t(global) * p.k + k : 0),
                   inside ? 16 : 0);
    }
}

__device__ __noinline__ int recurse(int depth) {
    volatile int much[64];
    much[depth % 64] = depth;
    return depth == 0 ? 0 : recurse(depth - 1) + much[depth % 64];
}

template <int BUG>
DEVICE void multiply(const Multiply& p) {
    SHARED_MEMORY(shared);
    auto* buffers = reinterpret_cast<__nv_bfloat16*>(shared);
    auto* result = reinterpret_cast<float*>(shared + 2 * TILE * 2);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float d[2][4] = {};
    if (BUG == STACK_OVERFLOW && threadIdx.x == 1) d[0][0] = static_cast<float>(recurse(100000));
    const int tiles = (p.k + DEPTH - 1) / DEPTH;
    load_tile<BUG>(p, buffers, 0);
    cp_async_commit();
    for (int t = 0; t < tiles; t++) {
        if (t + 1 < tiles) load_tile<BUG>(p, buffers + (t + 1) % 2 * TILE, t + 1);
        cp_async_commit();
        if (BUG != NO_WAIT) cp_async_wait<1>();
        if (BUG == DIVERGENT_BARRIER && warp == 1)
            __syncthreads();
        else if (BUG != NO_BARRIER && !(BUG == SKIPPED_BARRIER && warp == 1 && t == 1))
            __syncthreads();
        const auto* tile = buffers + t % 2 * TILE;
        uint32_t a[4], b[4];
        ldmatrix_x4(a, tile + (warp * 16 + lane % 16) * DEPTH + lane / 16 * 8);
        ldmatrix_x4(b, tile + (ROWS + lane / 16 * 8 + lane % 8) * DEPTH + lane / 8 % 2 * 8);
        mma_bf16(d[0], a, b[0], b[1]);
        mma_bf16(d[1], a, b[2], b[3]);
        if (BUG != NO_SECOND_BARRIER) __syncthreads();
    }
    cp_async_wait<0>();
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            if (BUG == UNWRITTEN && threadIdx.x == 5 && i == 3) continue;
            const int row = warp * 16 + lane / 4 + i / 2 * 8, column = half * 8 + lane % 4 * 2 + i % 2;
            result[row * COLUMNS + column] = d[half][i];
        }
    if (BUG == SHARED_OVERFLOW && threadIdx.x == 63) result[ROWS * COLUMNS] = 1.0f;
    // The warps' sums, which nothing is done with but where shuffles go wrong.
    float sum = d[0][0];
    if (BUG == ENDED_LANE && lane == 7 && warp == 1) return;
    if (BUG == DIVERGENT_SHUFFLE ? lane < 16 : true)
        sum += __shfl_xor_sync(BUG == WRONG_MASK ? 0xfffffff7u : 0xffffffffu, sum, 1);
    __syncthreads();
    for (int quad = threadIdx.x; quad < ROWS * COLUMNS / 4; quad += blockDim.x) {
        const int row = blockIdx.y * ROWS + quad / 4, column = blockIdx.x * COLUMNS + quad % 4 * 4;
        if (row >= p.m + (BUG == OUT_OF_BOUNDS ? 1 : 0) || column >= p.n) continue;
        const float* from = result + 4 * quad - (BUG == MISALIGNED && quad == 9 ? 1 : 0);
        Quad4 four = *reinterpret_cast<const Quad4*>(from);
        if (sum == -1e30f) four.at[0] = sum;
        *reinterpret_cast<Quad4*>(p.c + int64_t(row) * p.n + column) = four;
    }
    if (threadIdx.x == 0) {
        if (BUG == BLOCKS_RACE) *p.blocks_done += 1;
        else atomicAdd(p.blocks_done, 1);
    }
}
