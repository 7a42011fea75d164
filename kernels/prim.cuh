// Everything that kernels use of the machine. Under nvcc it is CUDA's own headers and a few lines of inline PTX;
// under a host compiler the emulator's twins. Kernels use no `asm` and no CUDA header but this one, and obey three
// rules that keep them testable: shared memory is SHARED_MEMORY alone (no __shared__ variables); no atomics on
// floats; every kernel is `extern "C"`, has a name of its own in the whole folder, and takes one struct of parameters
// by value.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The block's dynamic shared memory, of the size that the launch asks for, 128-byte aligned.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__

DEVICE unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// d += a b for one warp: a 16x16 row major, b 16x8 column major, d 16x8 in f32. Lane l holds, with g = l / 4 and t =
// l % 4: a[0] = A[g][2t,2t+1], a[1] = A[g+8][..], a[2] = A[g][2t+8,2t+9], a[3] = A[g+8][2t+8,2t+9]; b0 =
// B[2t,2t+1][g], b1 = B[2t+8,2t+9][g]; d[0,1] = D[g][2t,2t+1], d[2,3] = D[g+8][2t,2t+1]. (PTX ISA, mma.m16n8k16.)
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane l gives the address (16-byte aligned) of row l % 8 of
// matrix l / 8, and receives in r[m] the elements [l / 4][2 (l % 4), + 1] of matrix m; transposed: [2 (l % 4), + 1][l
// / 4].
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts copying 16 bytes from global to shared memory, both 16-byte aligned; only the first `bytes` (0 to 16) are
// read, the rest is zeros. The bytes are there after cp_async_wait in this thread, and for other threads after a
// barrier that follows.
DEVICE void cp_async16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
// Closes the group of copies started since the last call; an empty group counts.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's newest groups are still on their way.
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Stores 16 bytes at once; `to` is 16-byte aligned global memory. (The compiler takes some structs' stores apart.)
DEVICE void store16(void* to, const uint32_t (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// 2^x within 2 units of the last place, denormals flushed; 0 at -inf.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#include "emulator.h"
struct alignas(16) SixteenBytes { uint32_t word[4]; };
DEVICE void store16(void* to, const uint32_t (&x)[4]) { *static_cast<SixteenBytes*>(to) = {{x[0], x[1], x[2], x[3]}}; }
#endif

typedef __nv_bfloat16 bf16;
typedef __half f16;

// Two floats rounded to 16 bits to nearest even, `low` in the low half: one instruction.
DEVICE uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}
DEVICE uint32_t pack_f16(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

constexpr unsigned FULL_WARP = 0xffffffffu;
