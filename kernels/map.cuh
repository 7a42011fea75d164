// Elementwise kernels: out = f(in[0], .., in[N-1]) over tensors of one shape. The twin of `Map` in crates/cuda/src/map.rs.
//
// A thread takes PACK elements at a time. Where the host found that every operand can be read in packs (`packed`: its elements
// lie together along the last dimension, or repeat, and packs start at multiples of 16 bytes), they are moved by 16-byte
// accesses; otherwise one by one. Which function it is, is decided once a pack, not once an element. A thread reads its
// elements before it writes them, so `out` may be an operand.
#pragma once
#include "tensor.cuh"

struct Map {
    Tensor in[4];
    Tensor out;
    double constants[2];
    int32_t function;
    int32_t packed;
};

// Elements index .. index + PACK - 1 in row-major order, of which the first `n` exist. An absent operand is all ones.
template <class C>
DEVICE void map_load(const Tensor& t, int64_t index, int n, bool packed, C (&x)[PACK]) {
    if (t.present() && packed && n == PACK) {
        const int64_t at = t.offset(index);
        if (t.last_stride() != 0) return load_pack(t, at, x);
        x[0] = load<C>(t, at);
#pragma unroll
        for (int i = 1; i < PACK; i++) x[i] = x[0];
        return;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) x[i] = i < n && t.present() ? load<C>(t, t.offset(index + i)) : C(1);
}

// f(x, y) computes y[i] from x[0][i], .., x[N-1][i] for all i below PACK.
template <class C, int N, class F>
DEVICE void map_elements(const Map& p, F f) {
    const int64_t count = p.out.count(), step = int64_t(gridDim.x) * blockDim.x * PACK;
    for (int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * PACK; index < count; index += step) {
        const int n = count - index < PACK ? int(count - index) : PACK;
        C x[N][PACK], y[PACK];
#pragma unroll
        for (int k = 0; k < N; k++) map_load<C>(p.in[k], index, n, p.packed, x[k]);
        f(x, y);
        if (p.packed && n == PACK) {
            store_pack(p.out, p.out.offset(index), y);
        } else {
#pragma unroll
            for (int i = 0; i < PACK; i++)
                if (i < n) store(p.out, p.out.offset(index + i), y[i]);
        }
    }
}

// In a function of `map_elements`: y = an expression in `a`, `b`, `c`, `d`, the elements of the operands.
#define MAP1(expression) \
    _Pragma("unroll") for (int i = 0; i < PACK; i++) { const C a = x[0][i]; y[i] = expression; } return
#define MAP2(expression) \
    _Pragma("unroll") for (int i = 0; i < PACK; i++) { const C a = x[0][i], b = x[1][i]; y[i] = expression; } return
#define MAP3(expression) \
    _Pragma("unroll") for (int i = 0; i < PACK; i++) { const C a = x[0][i], b = x[1][i], c = x[2][i]; y[i] = expression; } return
#define MAP4(expression)                                                                      \
    _Pragma("unroll") for (int i = 0; i < PACK; i++) {                                        \
        const C a = x[0][i], b = x[1][i], c = x[2][i], d = x[3][i];                           \
        y[i] = expression;                                                                    \
    }                                                                                         \
    return

// Both instantiations of an elementwise kernel with N operands, from a functor template.
#define MAP_KERNEL(name, N, Functor)                                                    \
    KERNEL name##_f32(const Map p) { map_elements<float, N>(p, Functor<float>{p}); }    \
    KERNEL name##_f64(const Map p) { map_elements<double, N>(p, Functor<double>{p}); }
