// Rows along the last dimension, and the threads that share one. The twin of `RowPlan` is in crates/cuda/src/rows.rs.
//
// A row is cut into packs of PACK elements; thread `rank` of a team takes packs rank, rank + size, .. Sums are made in the
// order that follows from that, which depends on the row's length alone, never on where its elements lie: a strided tensor
// gives the bits of its contiguous copy. What a kernel reads twice it reads through the caches again.
#pragma once
#include "block.cuh"
#include "tensor.cuh"

struct RowPlan {
    int64_t rows, width;
    int32_t team;   // threads of a row: 32, several rows a block; or the whole block
    int32_t packs;  // not 0: in all operands each row lies together and starts on 16 bytes
};

// Shared memory for folds: 32 values of 8 bytes.
constexpr int FOLD_BYTES = 256;

struct Team {
    int size, rank;
    int64_t first, step;  // rows of this team: first, first + step, ..
    unsigned char* shared;

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

// The sum of a pack, as a tree.
template <class C>
DEVICE C pack_sum(const C (&x)[PACK]) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// One row of a tensor.
template <class C>
struct Row {
    const Tensor& t;
    int64_t start, stride, width;
    bool packs;

    DEVICE Row(const Tensor& tensor, int64_t row, int64_t n, int32_t packed)
        : t(tensor), start(tensor.row(row)), stride(tensor.last_stride()), width(n), packs(packed != 0) {}
    DEVICE Row(const Tensor& tensor, int64_t row, const RowPlan& plan) : Row(tensor, row, plan.width, plan.packs) {}

    DEVICE C get(int64_t i) const { return load<C>(t, start + i * stride); }
    DEVICE void put(int64_t i, C x) const { store(t, start + i * stride, x); }
    // The pack from i on, `fill` beyond the row's end.
    DEVICE void read(int64_t i, C fill, C (&x)[PACK]) const {
        if (packs && i + PACK <= width) return load_pack(t, start + i, x);
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] = i + j < width ? get(i + j) : fill;
    }
    DEVICE void write(int64_t i, const C (&x)[PACK]) const {
        if (packs && i + PACK <= width) return store_pack(t, start + i, x);
#pragma unroll
        for (int j = 0; j < PACK; j++)
            if (i + j < width) put(i + j, x[j]);
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
