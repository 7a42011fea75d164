// Sums and maxima over the threads of a block, in a fixed order.
#pragma once
#include "prim.cuh"

struct Add {
    template <class C>
    DEVICE C operator()(C a, C b) const { return a + b; }
};
struct Larger {  // NaN wins
    template <class C>
    DEVICE C operator()(C a, C b) const { return a != a || a > b ? a : b; }
};

// The fold of x over a warp, in every lane; all 32 lanes call it.
template <class C, class F>
DEVICE C warp_fold(C x, F f) {
    for (int step = 16; step > 0; step /= 2) x = f(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// The fold of x over the block, in every thread; all threads call it, and blockDim.x is a multiple of 32. `part` is
// shared memory for 32 values of C, free again after the next barrier.
template <class C, class F>
DEVICE C block_fold(C x, C neutral, C* part, F f) {
    x = warp_fold(x, f);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();  // a fold before may still be reading
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_fold(lane < warps ? part[lane] : neutral, f);
}
