// Tensors as kernels see them: an address, a dtype known at run time, and strides. The twin of `TensorArg` in
// crates/cuda/src/argument.rs.
//
// Arithmetic is in C: float for tensors of f32, bf16 and f16 (mixed as they come), double for f64. A kernel is
// instantiated for these two, under the names `name_f32` and `name_f64`, and tells the dtypes apart as it loads and
// stores.
#pragma once
#include "prim.cuh"

constexpr int MAX_RANK = 8;

enum DType : int32_t { F64, F32, BF16, F16, I64, I32, U8, BOOL };

struct Tensor {
    char* data;  // the first element
    int32_t dtype;
    int32_t rank;  // -1: an operand that is absent
    int64_t shape[MAX_RANK];
    int64_t strides[MAX_RANK];  // in elements; 0 repeats

    DEVICE bool present() const { return rank >= 0; }
    DEVICE int64_t last() const { return rank > 0 ? shape[rank - 1] : 1; }
    DEVICE int64_t last_stride() const { return rank > 0 ? strides[rank - 1] : 1; }
    DEVICE int64_t count() const {
        int64_t n = 1;
        for (int d = 0; d < rank; d++) n *= shape[d];
        return n;
    }
    // Position of the element that is number `index` in row-major order of the first `dims` dimensions.
    DEVICE int64_t offset(int64_t index, int dims) const {
        int64_t at = 0;
        for (int d = dims - 1; d > 0; d--) {
            int64_t rest = index / shape[d];
            at += (index - rest * shape[d]) * strides[d];
            index = rest;
        }
        return dims > 0 ? at + index * strides[0] : 0;
    }
    DEVICE int64_t offset(int64_t index) const { return offset(index, rank); }
    // Position of the first element of row `row`, where rows lie along the last dimension.
    DEVICE int64_t row(int64_t row) const { return offset(row, rank - 1); }
};

DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 x) { return __bfloat162float(x); }
DEVICE float widen(f16 x) { return __half2float(x); }
template <class T>
DEVICE T narrow(float x);
template <>
DEVICE float narrow<float>(float x) { return x; }
template <>
DEVICE bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
DEVICE f16 narrow<f16>(float x) { return __float2half_rn(x); }

// Element `at` of a float tensor, widened.
template <class C>
DEVICE C load(const Tensor& t, int64_t at);
template <>
DEVICE float load<float>(const Tensor& t, int64_t at) {
    switch (t.dtype) {
        case BF16: return widen(reinterpret_cast<const bf16*>(t.data)[at]);
        case F16: return widen(reinterpret_cast<const f16*>(t.data)[at]);
        default: return reinterpret_cast<const float*>(t.data)[at];
    }
}
template <>
DEVICE double load<double>(const Tensor& t, int64_t at) {
    return t.dtype == F64 ? reinterpret_cast<const double*>(t.data)[at] : static_cast<double>(load<float>(t, at));
}

// Writes element `at` of a float tensor, rounded once to nearest even.
DEVICE void store(const Tensor& t, int64_t at, float x) {
    switch (t.dtype) {
        case BF16: reinterpret_cast<bf16*>(t.data)[at] = narrow<bf16>(x); break;
        case F16: reinterpret_cast<f16*>(t.data)[at] = narrow<f16>(x); break;
        default: reinterpret_cast<float*>(t.data)[at] = x;
    }
}
DEVICE void store(const Tensor& t, int64_t at, double x) {
    if (t.dtype == F64) reinterpret_cast<double*>(t.data)[at] = x;
    else store(t, at, static_cast<float>(x));
}

// Element `at` of an index tensor (i64 or i32).
DEVICE int64_t load_index(const Tensor& t, int64_t at) {
    return t.dtype == I32 ? reinterpret_cast<const int32_t*>(t.data)[at] : reinterpret_cast<const int64_t*>(t.data)[at];
}

// PACK elements that lie together, from `at` on: 16 bytes a load or store (8 for bf16 and f16 in half a pack: PACK is
// 8).
constexpr int PACK = 8;
struct alignas(16) Quad { uint32_t word[4]; };

template <class T>
DEVICE void load_pack_as(const T* p, float (&x)[PACK]) {
    alignas(16) T raw[PACK];
    for (int i = 0; i < int(PACK * sizeof(T) / 16); i++)
        reinterpret_cast<Quad*>(raw)[i] = reinterpret_cast<const Quad*>(p)[i];
    for (int i = 0; i < PACK; i++) x[i] = widen(raw[i]);
}
template <class T>
DEVICE void store_pack_as(T* p, const float (&x)[PACK]) {
    alignas(16) T raw[PACK];
    for (int i = 0; i < PACK; i++) raw[i] = narrow<T>(x[i]);
    for (int i = 0; i < int(PACK * sizeof(T) / 16); i++)
        store16(reinterpret_cast<Quad*>(p) + i, reinterpret_cast<const Quad*>(raw)[i].word);
}
DEVICE void load_pack(const Tensor& t, int64_t at, float (&x)[PACK]) {
    switch (t.dtype) {
        case BF16: load_pack_as(reinterpret_cast<const bf16*>(t.data) + at, x); break;
        case F16: load_pack_as(reinterpret_cast<const f16*>(t.data) + at, x); break;
        default: load_pack_as(reinterpret_cast<const float*>(t.data) + at, x);
    }
}
DEVICE void store_pack(const Tensor& t, int64_t at, const float (&x)[PACK]) {
    switch (t.dtype) {
        case BF16: store_pack_as(reinterpret_cast<bf16*>(t.data) + at, x); break;
        case F16: store_pack_as(reinterpret_cast<f16*>(t.data) + at, x); break;
        default: store_pack_as(reinterpret_cast<float*>(t.data) + at, x);
    }
}
DEVICE void load_pack(const Tensor& t, int64_t at, double (&x)[PACK]) {
    for (int i = 0; i < PACK; i++) x[i] = load<double>(t, at + i);
}
DEVICE void store_pack(const Tensor& t, int64_t at, const double (&x)[PACK]) {
    for (int i = 0; i < PACK; i++) store(t, at + i, x[i]);
}
