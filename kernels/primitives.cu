// Each primitive of prim.cuh by itself, for tests alone: what the machine does is held against its definition, on the
// emulator and on a GPU (emulator/tests/machine.rs).
#include "prim.cuh"

struct Case {
    const void* in;
    void* out;
};

// One warp. in: a, 16x16 row major, then b, 16x8 as rows of columns (8x16), 16-bit floats; out: d, 16x8.
template <bool is_bf16>
DEVICE void multiply_case(const Case& p) {
    const auto* a = static_cast<const uint16_t*>(p.in);
    const auto* b = a + 256;
    const int lane = threadIdx.x, g = lane / 4, t = 2 * (lane % 4);
    uint32_t fragment[4], columns[2];
    for (int i = 0; i < 4; i++) memcpy(&fragment[i], a + (g + i % 2 * 8) * 16 + t + i / 2 * 8, 4);
    for (int i = 0; i < 2; i++) memcpy(&columns[i], b + g * 16 + t + i * 8, 4);
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (is_bf16) mma_bf16(d, fragment, columns[0], columns[1]);
    else mma_f16(d, fragment, columns[0], columns[1]);
    auto* out = static_cast<float*>(p.out);
    for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + t + i % 2] = d[i];
}
KERNEL case_mma_bf16(const Case p) { multiply_case<true>(p); }
KERNEL case_mma_f16(const Case p) { multiply_case<false>(p); }

// One warp. in: four 8x8 matrices of 16-bit words, one after the other; out: each lane's four registers.
template <bool transposed>
DEVICE void matrices_case(const Case& p) {
    SHARED_MEMORY(shared);
    auto* tile = reinterpret_cast<uint16_t*>(shared);
    for (int i = threadIdx.x; i < 256; i += 32) tile[i] = static_cast<const uint16_t*>(p.in)[i];
    __syncwarp();
    uint32_t r[4];
    if (transposed) ldmatrix_x4_trans(r, tile + threadIdx.x * 8);
    else ldmatrix_x4(r, tile + threadIdx.x * 8);
    for (int i = 0; i < 4; i++) static_cast<uint32_t*>(p.out)[threadIdx.x * 4 + i] = r[i];
}
KERNEL case_ldmatrix(const Case p) { matrices_case<false>(p); }
KERNEL case_ldmatrix_trans(const Case p) { matrices_case<true>(p); }

// 17 threads. in: 17 x 16 bytes; out: of thread t, the first t bytes of its 16 and then zeros; in two groups.
KERNEL case_cp_async(const Case p) {
    SHARED_MEMORY(shared);
    const int t = threadIdx.x;
    cp_async16(shared + 16 * t, static_cast<const char*>(p.in) + 16 * t, t);
    cp_async_commit();
    cp_async16(shared + 16 * (17 + t), static_cast<const char*>(p.in) + 16 * t, 16);
    cp_async_commit();
    auto* out = static_cast<unsigned char*>(p.out);
    cp_async_wait<1>();
    for (int i = 0; i < 16; i++) out[16 * t + i] = shared[16 * t + i];
    cp_async_wait<0>();
    __syncthreads();
    const int other = 16 - t;
    for (int i = 0; i < 16; i++) out[16 * (17 + t) + i] = shared[16 * (17 + other) + i];
}

// One warp. in: 32 doubles; out: what each shuffle gave each lane, as doubles: 12 x 32.
KERNEL case_shuffles(const Case p) {
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x;
    const double x = static_cast<const double*>(p.in)[lane];
    const float f = static_cast<float>(x);
    const int i = static_cast<int>(x);
    double* out = static_cast<double*>(p.out) + lane;
    out[32 * 0] = __shfl_sync(all, x, 5);
    out[32 * 1] = __shfl_sync(all, f, lane * 7);
    out[32 * 2] = __shfl_sync(all, i, 3, 8);
    out[32 * 3] = __shfl_xor_sync(all, x, 16);
    out[32 * 4] = __shfl_xor_sync(all, f, 5, 8);
    out[32 * 5] = __shfl_down_sync(all, i, 3u);
    out[32 * 6] = __shfl_down_sync(all, x, 3u, 16);
    out[32 * 7] = __shfl_up_sync(all, f, 2u);
    out[32 * 8] = static_cast<double>(__shfl_up_sync(all, static_cast<long long>(i) << 40, 9u, 16));
    out[32 * 9] = __ballot_sync(all, i % 3 == 0);
    out[32 * 10] = 2 * __any_sync(all, i == 7) + __all_sync(all, i >= 0);
    // Halves of the warp by themselves, each with its mask.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    if (lane < 16) out[32 * 11] = __shfl_xor_sync(half, x, 1);
    else out[32 * 11] = __shfl_xor_sync(half, x, 2);
}

// 70 threads, of which some end before the barriers. out: three integers each.
KERNEL case_barriers(const Case p) {
    SHARED_MEMORY(shared);
    auto* values = reinterpret_cast<int*>(shared);
    const int t = threadIdx.x;
    auto* out = static_cast<int*>(p.out);
    values[t] = t;
    if (t >= 66) return;
    __syncthreads();
    out[3 * t] = values[65 - t];
    out[3 * t + 1] = __syncthreads_count(t % 2);
    out[3 * t + 2] = 2 * __syncthreads_or(t == 7) + __syncthreads_and(t < 66);
}

// 300 threads. out: results of atomics, zeros at first.
KERNEL case_atomics(const Case p) {
    const int t = threadIdx.x;
    auto* ints = static_cast<int*>(p.out);
    auto* words = static_cast<unsigned*>(p.out) + 8;
    auto* longs = reinterpret_cast<unsigned long long*>(static_cast<char*>(p.out) + 64);
    atomicAdd(ints, t);
    atomicMin(ints + 1, -t);
    atomicMax(ints + 2, t);
    atomicOr(words, 1u << t % 32);
    atomicAdd(longs, 1ull << 33);
    atomicMax(longs + 1, static_cast<unsigned long long>(t) << 40);
    if (atomicCAS(words + 1, 0u, 7u) == 0u) atomicAdd(words + 2, 1u);
}

// 64 threads. in: floats; out: exp2_approx of each.
KERNEL case_exp2(const Case p) {
    static_cast<float*>(p.out)[threadIdx.x] = exp2_approx(static_cast<const float*>(p.in)[threadIdx.x]);
}
