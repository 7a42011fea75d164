// Elementwise kernels: out = f(in[0], .., in[N-1]) over tensors of one shape. The twin of `Map` in
// crates/cuda/src/map.rs.
//
// Where the host found that every operand can be read in packs of WIDTH elements (`packed`: its elements
// lie together along the last dimension, or repeat, and packs start at multiples of 16 bytes), they are moved by
// 16-byte accesses; otherwise a thread takes one at a time. Which function it is, is decided once a pack, not once an
// element. A thread reads its elements before it writes them, so `out` may be an operand.
#pragma once
#include "tensor.cuh"

struct Map {
    Tensor in[4];
    Tensor out;
    double constants[2];
    int32_t function;
    int32_t packed;
};

// Elements that a thread computes at a time. Of double fewer: their functions are long, and bandwidth isn't what they
// wait for.
template <class C>
constexpr int WIDTH = sizeof(C) == sizeof(float) ? PACK : 2;

DEVICE void map_load_pack(const Tensor& t, int64_t at, float (&x)[PACK]) { load_pack(t, at, x); }
DEVICE void map_store_pack(const Tensor& t, int64_t at, const float (&x)[PACK]) { store_pack(t, at, x); }
DEVICE void map_load_pack(const Tensor& t, int64_t at, double (&x)[2]) {
    for (int i = 0; i < 2; i++) x[i] = load<double>(t, at + i);
}
DEVICE void map_store_pack(const Tensor& t, int64_t at, const double (&x)[2]) {
    for (int i = 0; i < 2; i++) store(t, at + i, x[i]);
}

// The pack of operand `t` that begins at `index` in row-major order. An absent operand is all ones.
template <class C>
DEVICE void map_load(const Tensor& t, int64_t index, C (&x)[WIDTH<C>]) {
    if (t.present() && t.last_stride() != 0) return map_load_pack(t, t.offset(index), x);
    const C repeated = t.present() ? load<C>(t, t.offset(index)) : C(1);
#pragma unroll
    for (int i = 0; i < WIDTH<C>; i++) x[i] = repeated;
}

// f(x, y) computes y[i] from x[0][i], .., x[N-1][i] for all i. Whole packs come first, then single elements.
template <class C, int N, class F>
DEVICE void map_elements(const Map& p, F f) {
    const int64_t count = p.out.count(), packs = p.packed ? count / WIDTH<C> : 0;
    const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64_t(gridDim.x) * blockDim.x;
    for (int64_t pack = thread; pack < packs; pack += threads) {
        C x[N][WIDTH<C>], y[WIDTH<C>];
#pragma unroll
        for (int k = 0; k < N; k++) map_load<C>(p.in[k], pack * WIDTH<C>, x[k]);
        f(x, y);
        map_store_pack(p.out, p.out.offset(pack * WIDTH<C>), y);
    }
    for (int64_t index = packs * WIDTH<C> + thread; index < count; index += threads) {
        C x[N][1], y[1];
#pragma unroll
        for (int k = 0; k < N; k++) x[k][0] = p.in[k].present() ? load<C>(p.in[k], p.in[k].offset(index)) : C(1);
        f(x, y);
        store(p.out, p.out.offset(index), y[0]);
    }
}

// In a function of `map_elements`: y = an expression in `a`, `b`, `c`, `d`, the elements of the operands.
#define MAP1(expression) \
    _Pragma("unroll") for (int i = 0; i < W; i++) { const C a = x[0][i]; y[i] = expression; } return
#define MAP2(expression) \
    _Pragma("unroll") for (int i = 0; i < W; i++) { const C a = x[0][i], b = x[1][i]; y[i] = expression; } return
#define MAP3(expression)                                                                      \
    _Pragma("unroll") for (int i = 0; i < W; i++) {                                           \
        const C a = x[0][i], b = x[1][i], c = x[2][i];                                        \
        y[i] = expression;                                                                    \
    }                                                                                         \
    return
#define MAP4(expression)                                                                      \
    _Pragma("unroll") for (int i = 0; i < W; i++) {                                           \
        const C a = x[0][i], b = x[1][i], c = x[2][i], d = x[3][i];                           \
        y[i] = expression;                                                                    \
    }                                                                                         \
    return

// Both instantiations of an elementwise kernel with N operands, from a functor template.
#define MAP_KERNEL(name, N, Functor)                                                    \
    KERNEL name##_f32(const Map p) { map_elements<float, N>(p, Functor<float>{p}); }    \
    KERNEL name##_f64(const Map p) { map_elements<double, N>(p, Functor<double>{p}); }
