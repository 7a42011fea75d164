// Rows along the last dimension, and the threads that share one. The twin of `RowPlan` is in crates/cuda/src/rows.rs.
//
// A row is cut into chunks of 32 PACK elements, one for each warp of a team in turn. Of a chunk each lane has a pack:
// PACK elements that lie together, loaded and stored 16 bytes at a time; or, where the row's length is no multiple of
// PACK, so that rows can't start on 16 bytes, every 32nd element (`interleaved`), so that a warp's accesses lie
// together all the same. Sums are made in the order that follows from that, which depends on the row's length alone,
// never on where its elements lie: a strided tensor gives the bits of its contiguous copy.
#pragma once
#include "block.cuh"
#include "tensor.cuh"

struct RowPlan {
    int64_t rows, width;
    int32_t team;   // threads of a row: 32, several rows a block; or the whole block
    int32_t packs;  // not 0: in all operands each row lies together and starts on 16 bytes; and it isn't interleaved
    int32_t interleaved, padding;
};

constexpr int CHUNK = 32 * PACK;
// Kernels that are one block: their registers must suffice for 1024 threads. (With teams of up to 256 they do
// anyway.)
#define ONE_BLOCK_KERNEL KERNEL __launch_bounds__(1024)
// Packs that a thread can keep in registers: of a row it then has no more.
constexpr int HELD = 4;

struct Team {
    int size, rank;
    int64_t first, step;    // rows of this team: first, first + step, ..
    unsigned char* shared;  // for folds: 32 values of 8 bytes

    DEVICE Team(int threads, unsigned char* memory) : shared(memory) {
        const bool whole = threads == int(blockDim.x);
        size = threads;
        rank = whole ? threadIdx.x : threadIdx.x & 31;
        const int teams = whole ? 1 : blockDim.x >> 5;
        first = int64_t(blockIdx.x) * teams + (whole ? 0 : threadIdx.x >> 5);
        step = int64_t(gridDim.x) * teams;
    }
    // The fold of x over the team, in every thread of it.
    template <class C, class F>
    DEVICE C fold(C x, C neutral, F f) const {
        return size == 32 ? warp_fold(x, f) : block_fold(x, neutral, reinterpret_cast<C*>(shared), f);
    }
    template <class C>
    DEVICE C sum(C x) const { return fold(x, C(0), Add()); }
};

// Calls body(k, i) for this thread's packs i of a row. With KEPT packs in registers the loop is unrolled, and k tells
// them apart; KEPT 0 is any number, and k is 0.
template <int KEPT, class Body>
DEVICE void each_pack(const Team& team, const RowPlan& plan, Body body) {
    const int64_t step = int64_t(team.size) * PACK;
    // A chunk that has begun concerns all lanes.
    const int64_t end = plan.interleaved ? (plan.width + CHUNK - 1) / CHUNK * CHUNK : plan.width;
    if constexpr (KEPT > 0) {
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            const int64_t i = team.rank * PACK + k * step;
            if (i < end) body(k, i);
        }
    } else {
        for (int64_t i = team.rank * PACK; i < end; i += step) body(0, i);
    }
}

// The place in the row of element j of pack i; may lie beyond the end.
DEVICE int64_t place(const RowPlan& plan, int64_t i, int j) {
    return plan.interleaved ? i / CHUNK * CHUNK + j * 32 + (i / PACK & 31) : i + j;
}

// The sum of a pack, as a tree.
template <class C>
DEVICE C pack_sum(const C (&x)[PACK]) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// PACK elements `hop` apart, of which `count` are there; the others are `fill`.
template <class T>
DEVICE void load_apart(const T* p, int64_t hop, int64_t count, float fill, float (&x)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++) x[j] = j < count ? widen(p[j * hop]) : fill;
}
template <class T>
DEVICE void store_apart(T* p, int64_t hop, int64_t count, const float (&x)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++)
        if (j < count) p[j * hop] = narrow<T>(x[j]);
}
DEVICE void load_apart(const Tensor& t, int64_t at, int64_t hop, int64_t count, float fill, float (&x)[PACK]) {
    switch (t.dtype) {
        case BF16: return load_apart(reinterpret_cast<const bf16*>(t.data) + at, hop, count, fill, x);
        case F16: return load_apart(reinterpret_cast<const f16*>(t.data) + at, hop, count, fill, x);
        default: return load_apart(reinterpret_cast<const float*>(t.data) + at, hop, count, fill, x);
    }
}
DEVICE void store_apart(const Tensor& t, int64_t at, int64_t hop, int64_t count, const float (&x)[PACK]) {
    switch (t.dtype) {
        case BF16: return store_apart(reinterpret_cast<bf16*>(t.data) + at, hop, count, x);
        case F16: return store_apart(reinterpret_cast<f16*>(t.data) + at, hop, count, x);
        default: return store_apart(reinterpret_cast<float*>(t.data) + at, hop, count, x);
    }
}
DEVICE void load_apart(const Tensor& t, int64_t at, int64_t hop, int64_t count, double fill, double (&x)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++) x[j] = j < count ? load<double>(t, at + j * hop) : fill;
}
DEVICE void store_apart(const Tensor& t, int64_t at, int64_t hop, int64_t count, const double (&x)[PACK]) {
#pragma unroll
    for (int j = 0; j < PACK; j++)
        if (j < count) store(t, at + j * hop, x[j]);
}

// One row of a tensor.
template <class C>
struct Row {
    const Tensor& t;
    const RowPlan& plan;
    int64_t start, stride;

    DEVICE Row(const Tensor& tensor, int64_t row, const RowPlan& rows)
        : t(tensor), plan(rows), start(tensor.row(row)), stride(tensor.last_stride()) {}

    DEVICE C get(int64_t i) const { return load<C>(t, start + i * stride); }
    // How many of the elements of pack i are there.
    DEVICE int64_t count(int64_t i) const {
        const int64_t left = plan.width - place(plan, i, 0);
        return plan.interleaved ? (left + 31) / 32 : left;
    }
    // Pack i, `fill` beyond the row's end.
    DEVICE void read(int64_t i, C fill, C (&x)[PACK]) const {
        if (plan.packs && i + PACK <= plan.width) return load_pack(t, start + i, x);
        load_apart(t, start + place(plan, i, 0) * stride, plan.interleaved ? 32 * stride : stride, count(i), fill, x);
    }
    DEVICE void write(int64_t i, const C (&x)[PACK]) const {
        if (plan.packs && i + PACK <= plan.width) return store_pack(t, start + i, x);
        store_apart(t, start + place(plan, i, 0) * stride, plan.interleaved ? 32 * stride : stride, count(i), x);
    }
};

// A vector that may be absent: then every element is `fill`.
template <class C>
DEVICE void read_or(const Tensor& t, int64_t i, const RowPlan& plan, C fill, C (&x)[PACK]) {
    if (t.present()) return Row<C>(t, 0, plan).read(i, fill, x);
#pragma unroll
    for (int j = 0; j < PACK; j++) x[j] = fill;
}

// Element number `index` of a tensor with one number a row; 0 of an absent one.
template <class C>
DEVICE C number(const Tensor& t, int64_t index) { return t.present() ? load<C>(t, t.offset(index)) : C(0); }
