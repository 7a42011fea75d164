// Products of matrices of any strides and dtypes, without tensor cores: sums are in f32 (not TF32), in f64 for f64.
//
// matmul_simt: a block of 256 threads makes a tile of 64x64 of out, 16 of k at a time. Each thread loads its share of
// the next two operand tiles into registers while it works on those in shared memory, [k][row] and [k][column] in
// rows of 68, from which it takes 4 + 4 elements for 16 products. Sums go over k in its order.
//
// matmul_dot: a warp an element of out, for products with few rows or columns whose operands lie along k: each lane
// sums every 32nd pack of 8, then the lanes are folded.
#include "block.cuh"
#include "matmul.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 64, DEPTH = 16;
constexpr int ROW = TILE + 4;  // of a tile in shared memory

// One operand: `outer` is m or n.
struct Source {
    const Tensor& tensor;
    int64_t at, outer_stride, k_stride, outer, k;
};

// This thread's share of the tile of an operand at (outer, k), zeros outside. Neighbours read along the smaller stride.
template <class C>
struct Share {
    static constexpr int COUNT = TILE * DEPTH / THREADS;
    C x[COUNT];

    static DEVICE void position(bool along_k, int i, int& outer, int& k) {
        const int index = threadIdx.x + i * THREADS;
        outer = along_k ? index / DEPTH : index % TILE;
        k = along_k ? index % DEPTH : index / TILE;
    }
    DEVICE void fetch(const Source& s, bool along_k, int64_t outer0, int64_t k0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int outer, k;
            position(along_k, i, outer, k);
            const bool inside = outer0 + outer < s.outer && k0 + k < s.k;
            x[i] = inside ? load<C>(s.tensor, s.at + (outer0 + outer) * s.outer_stride + (k0 + k) * s.k_stride) : C(0);
        }
    }
    DEVICE void put(C* shared, bool along_k) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int outer, k;
            position(along_k, i, outer, k);
            shared[k * ROW + outer] = x[i];
        }
    }
};

template <class C>
struct alignas(16) Four {
    C x[4];
};

template <class C>
DEVICE void product(const Matmul& p) {
    SHARED_MEMORY(shared);
    C* shared_a = reinterpret_cast<C*>(shared);
    C* shared_b = shared_a + DEPTH * ROW;
    const int across = threadIdx.x % 16 * 4, down = threadIdx.x / 16 * 4;  // of this thread's 4x4
    const C alpha = static_cast<C>(p.alpha);
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile, TILE);
        const Source a = {p.a, p.a.offset(place.batch), p.a_steps.row, p.a_steps.column, p.m, p.k};
        const Source b = {p.b, p.b.offset(place.batch), p.b_steps.column, p.b_steps.row, p.n, p.k};
        const bool a_along_k = a.k_stride < a.outer_stride, b_along_k = b.k_stride < b.outer_stride;
        C sum[4][4] = {};
        Share<C> next_a, next_b;
        next_a.fetch(a, a_along_k, place.row, 0);
        next_b.fetch(b, b_along_k, place.column, 0);
        for (int64_t k0 = 0; k0 < p.k; k0 += DEPTH) {
            next_a.put(shared_a, a_along_k);
            next_b.put(shared_b, b_along_k);
            __syncthreads();
            if (k0 + DEPTH < p.k) {
                next_a.fetch(a, a_along_k, place.row, k0 + DEPTH);
                next_b.fetch(b, b_along_k, place.column, k0 + DEPTH);
            }
#pragma unroll 4
            for (int kk = 0; kk < DEPTH; kk++) {
                const Four<C> x = *reinterpret_cast<const Four<C>*>(shared_a + kk * ROW + down);
                const Four<C> y = *reinterpret_cast<const Four<C>*>(shared_b + kk * ROW + across);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[i][j] += x.x[i] * y.x[j];
            }
            __syncthreads();
        }
        const int64_t out = p.out.offset(place.batch);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int64_t row = place.row + down + i, column = place.column + across + j;
                if (row >= p.m || column >= p.n) continue;
                const int64_t at = out + row * p.out_steps.row + column * p.out_steps.column;
                const C before = p.accumulate ? load<C>(p.out, at) : C(0);
                store(p.out, at, p.accumulate ? before + alpha * sum[i][j] : alpha * sum[i][j]);
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS, 2) matmul_simt_f32(const Matmul p) { product<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) matmul_simt_f64(const Matmul p) { product<double>(p); }

template <class C>
DEVICE void dots(const Matmul& p) {
    const int lane = threadIdx.x % 32;
    const bool packs = p.aligned_a && p.aligned_b && p.a_steps.column == 1 && p.b_steps.row == 1;
    const int64_t in_packs = packs ? p.k / PACK * PACK : 0;
    const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
    for (int64_t tile = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; tile < p.tiles; tile += warps) {
        const Place place = place_of(p, tile, 1);
        const int64_t a = p.a.offset(place.batch) + place.row * p.a_steps.row;
        const int64_t b = p.b.offset(place.batch) + place.column * p.b_steps.column;
        C sum = 0;
        for (int64_t k = PACK * lane; k < in_packs; k += 32 * PACK) {
            C x[PACK], y[PACK];
            load_pack(p.a, a + k, x);
            load_pack(p.b, b + k, y);
            for (int e = 0; e < PACK; e++) sum += x[e] * y[e];
        }
        for (int64_t k = in_packs + lane; k < p.k; k += 32)
            sum += load<C>(p.a, a + k * p.a_steps.column) * load<C>(p.b, b + k * p.b_steps.row);
        sum = static_cast<C>(p.alpha) * warp_fold(sum, Add());
        if (lane == 0) {
            const int64_t at =
                p.out.offset(place.batch) + place.row * p.out_steps.row + place.column * p.out_steps.column;
            store(p.out, at, p.accumulate ? load<C>(p.out, at) + sum : sum);
        }
    }
}

KERNEL __launch_bounds__(THREADS, 2) matmul_dot_f32(const Matmul p) { dots<float>(p); }
KERNEL __launch_bounds__(THREADS, 2) matmul_dot_f64(const Matmul p) { dots<double>(p); }
