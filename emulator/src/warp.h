// What threads do together: barriers, shuffles, votes, and the twins of the instructions in kernels/prim.cuh.
#pragma once
#include "halves.h"
#include "runtime.h"

// Of functions that read other lanes' operands, which the scheduler has ordered in a way that TSan isn't told of.
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))

inline void __syncthreads(EMULATOR_HERE) { emulator::barrier(false, at); }
inline int __syncthreads_count(int vote, EMULATOR_HERE) { return emulator::barrier(vote != 0, at); }
inline int __syncthreads_or(int vote, EMULATOR_HERE) { return emulator::barrier(vote != 0, at) > 0; }
inline int __syncthreads_and(int vote, EMULATOR_HERE) { return emulator::barrier(vote == 0, at) == 0; }

namespace emulator {

EMULATOR_UNSEEN inline void nothing_together(void* const*, uint32_t, Place) {}

template <class T>
struct Shuffle {
    T in, out;
    int source;
};
template <class T>
EMULATOR_UNSEEN void shuffle_together(void* const* data, uint32_t lanes, Place at) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(lanes >> lane & 1)) continue;
        auto* mine = static_cast<Shuffle<T>*>(data[lane]);
        if (!(lanes >> mine->source & 1)) fail("a shuffle reads a lane that takes no part in it", at);
        mine->out = static_cast<Shuffle<T>*>(data[mine->source])->in;
    }
}
template <class T>
T shuffle(uint32_t mask, T x, int source, Place at) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 and 8 bytes");
    Shuffle<T> mine{x, x, source};
    meet(mask, &mine, shuffle_together<T>, false, "shuffle", at);
    return mine.out;
}
// The lane that a shuffle reads: `wanted`, or one's own where that leaves the segment of `width` lanes.
inline int in_segment(int wanted, int width, Place at) {
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle's width is a power of two up to 32", at);
    const int lane = current->lane, first = lane & ~(width - 1);
    return wanted >= first && wanted < first + width ? wanted : lane;
}

struct Vote {
    bool in;
    uint32_t out;
};
EMULATOR_UNSEEN inline void vote_together(void* const* data, uint32_t lanes, Place) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) votes |= uint32_t(static_cast<Vote*>(data[lane])->in) << lane;
    for (int lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1) static_cast<Vote*>(data[lane])->out = votes;
}
inline uint32_t vote(uint32_t mask, bool x, const char* name, Place at) {
    Vote mine{x, 0};
    meet(mask, &mine, vote_together, false, name, at);
    return mine.out;
}


}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_HERE) {
    emulator::meet(mask, nullptr, emulator::nothing_together, true, "__syncwarp", at);
}
template <class T>
inline T __shfl_sync(unsigned mask, T x, int source, int width = 32, EMULATOR_HERE) {
    return emulator::shuffle(mask, x, (emulator::current->lane & ~(width - 1)) | (source & (width - 1)), at);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, EMULATOR_HERE) {
    return emulator::shuffle(mask, x, emulator::in_segment(emulator::current->lane ^ lanes, width, at), at);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned lanes, int width = 32, EMULATOR_HERE) {
    return emulator::shuffle(mask, x, emulator::in_segment(emulator::current->lane + int(lanes), width, at), at);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned lanes, int width = 32, EMULATOR_HERE) {
    return emulator::shuffle(mask, x, emulator::in_segment(emulator::current->lane - int(lanes), width, at), at);
}
inline unsigned __ballot_sync(unsigned mask, int x, EMULATOR_HERE) {
    return emulator::vote(mask, x != 0, "__ballot_sync", at);
}
inline int __any_sync(unsigned mask, int x, EMULATOR_HERE) {
    return emulator::vote(mask, x != 0, "__any_sync", at) != 0;
}
inline int __all_sync(unsigned mask, int x, EMULATOR_HERE) {
    return emulator::vote(mask, x == 0, "__all_sync", at) == 0;
}

namespace emulator {

constexpr uint32_t ALL_LANES = 0xffffffffu;

// d += a b: see mma_bf16 in kernels/prim.cuh. Products are exact; sums are made in f32, in the order of k.
struct Multiply {
    float d[4];
    uint32_t a[4], b[2];
};
template <float (*widen)(uint16_t)>
EMULATOR_UNSEEN void multiply_together(void* const* data, uint32_t lanes, Place at) {
    if (lanes != ALL_LANES) fail("a matrix multiplication takes all 32 lanes", at);
    alignas(64) float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const auto& from = *static_cast<const Multiply*>(data[lane]);
        const int g = lane / 4, t = 2 * (lane % 4);
        for (int i = 0; i < 4; i++) {
            float* row = &a[g + 8 * (i % 2)][t + 8 * (i / 2)];
            row[0] = widen(uint16_t(from.a[i])), row[1] = widen(uint16_t(from.a[i] >> 16));
        }
        for (int i = 0; i < 2; i++) {
            b[t + 8 * i][g] = widen(uint16_t(from.b[i]));
            b[t + 8 * i + 1][g] = widen(uint16_t(from.b[i] >> 16));
        }
        for (int i = 0; i < 4; i++) d[g + 8 * (i / 2)][t + i % 2] = from.d[i];
    }
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            static_cast<Multiply*>(data[lane])->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}
template <float (*widen)(uint16_t)>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const char* name, Place at) {
    Multiply mine{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    meet(ALL_LANES, &mine, multiply_together<widen>, false, name, at);
    for (int i = 0; i < 4; i++) d[i] = mine.d[i];
}

struct Matrices {
    uint16_t row[8];
    uint32_t out[4];
};
EMULATOR_UNSEEN inline uint32_t element_of(void* const* data, int matrix, int row, int column) {
    return static_cast<const Matrices*>(data[8 * matrix + row])->row[column];
}
template <bool transposed>
EMULATOR_UNSEEN void load_together(void* const* data, uint32_t lanes, Place at) {
    if (lanes != ALL_LANES) fail("ldmatrix takes all 32 lanes", at);
    for (int lane = 0; lane < 32; lane++) {
        const int i = lane / 4, j = 2 * (lane % 4);
        for (int m = 0; m < 4; m++) {
            const uint32_t low = transposed ? element_of(data, m, j, i) : element_of(data, m, i, j);
            const uint32_t high = transposed ? element_of(data, m, j + 1, i) : element_of(data, m, i, j + 1);
            static_cast<Matrices*>(data[lane])->out[m] = low | high << 16;
        }
    }
}
template <bool transposed>
void load_matrices(uint32_t (&r)[4], const void* row, const char* name, Place at) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("a row's address is not 16-byte aligned in ldmatrix", at);
    Matrices mine;
    for (int i = 0; i < 8; i++) mine.row[i] = static_cast<const uint16_t*>(row)[i];  // here: the sanitizers see it
    meet(ALL_LANES, &mine, load_together<transposed>, false, name, at);
    for (int i = 0; i < 4; i++) r[i] = mine.out[i];
}

inline void copy_now(const AsyncCopy& copy) {
    auto* to = static_cast<unsigned char*>(copy.shared);
    auto* from = static_cast<const unsigned char*>(copy.global);
    for (int i = 0; i < copy.bytes; i++) to[i] = from[i];
    for (int i = copy.bytes; i < 16; i++) to[i] = 0;
}

}  // namespace emulator

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_HERE) {
    emulator::multiply<emulator::bf16_to_float>(d, a, b0, b1, "mma_bf16", at);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATOR_HERE) {
    emulator::multiply<emulator::f16_to_float>(d, a, b0, b1, "mma_f16", at);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATOR_HERE) {
    emulator::load_matrices<false>(r, row, "ldmatrix_x4", at);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMULATOR_HERE) {
    emulator::load_matrices<true>(r, row, "ldmatrix_x4_trans", at);
}

// The copy is made when it is waited for. Until then its destination is garbage, so that a wait that is missing
// shows, and so does a reader that still needs the old bytes.
inline void cp_async16(void* shared, const void* global, int bytes, EMULATOR_HERE) {
    if (bytes < 0 || bytes > 16) emulator::fail("cp_async16 reads 0 to 16 bytes", at);
    if (reinterpret_cast<uintptr_t>(shared) % 16 != 0)
        emulator::fail("cp_async16 to an address that is not 16-byte aligned", at);
    if (bytes > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0)
        emulator::fail("cp_async16 from an address that is not 16-byte aligned", at);
    for (int i = 0; i < 16; i++) static_cast<unsigned char*>(shared)[i] = 0xff;
    emulator::async_push({shared, global, bytes});
}
inline void cp_async_commit() { emulator::async_commit(); }
template <int N>
inline void cp_async_wait() {
    static_assert(N >= 0, "groups that may still be on their way");
    emulator::AsyncCopy copy;
    while (emulator::async_pop(N, &copy)) emulator::copy_now(copy);
}
