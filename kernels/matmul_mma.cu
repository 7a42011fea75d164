// Products of matrices of one 16-bit dtype on tensor cores (mma.sync m16n8k16), summed in f32 and rounded once as
// they are stored, to any dtype.
//
// A block makes a tile of out of TILE x TILE, 32 of k at a time: 128 with 8 warps (2 x 4, 64x32 each), 64 with 4 warps
// (2 x 2, 32x32 each). Operand tiles come in by cp.async, two ahead of the one in work, so that shared memory holds 3
// of each: 48 KB and 24 KB. An operand lies either along k or along its other dimension (m of a, n of b) and is kept
// in shared memory as it lies; ldmatrix transposes those that lie across. The kernels' endings say how a and b lie: k
// along k, o along the other.
//
// Rows of a shared tile are 4 chunks of 16 bytes (along k) or TILE / 8 (across). Chunk c of row r is at place
// c ^ (r / 2 % 4) or c ^ (r % 8) of its row, so that the 8 rows that ldmatrix reads at a time are in different banks.
//
// What lies outside an operand is filled with zeros. Operands whose rows aren't 16-byte aligned are loaded element by
// element. At the end the warps bring their sums into rows by way of shared memory, 16 rows of 32 at a time, to store
// 8 elements a lane.
#include "matmul.cuh"

constexpr int DEPTH = 32;  // of k at a time
constexpr int STAGES = 3;
constexpr int CHUNK = 8;  // elements of 16 bytes

DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) { mma_bf16(d, a, b0, b1); }
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) { mma_f16(d, a, b0, b1); }

// How a tile of an operand lies in shared memory.
template <int TILE, bool ALONG_K>
struct Shape {
    static constexpr int ROWS = ALONG_K ? TILE : DEPTH;
    static constexpr int CHUNKS = (ALONG_K ? DEPTH : TILE) / CHUNK;
    // Where chunk `chunk` of row `row` starts, in elements.
    static DEVICE int at(int row, int chunk) {
        return (row * CHUNKS + (ALONG_K ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7))) * CHUNK;
    }
};

// Brings tiles of one operand into shared memory, from the first k on. A thread has one chunk in every PASS-th row.
template <class T, int TILE, bool ALONG_K, int THREADS>
struct Loader {
    using Lie = Shape<TILE, ALONG_K>;
    static constexpr int PASS = THREADS / Lie::CHUNKS, PASSES = Lie::ROWS / PASS;
    static_assert(PASS % 8 == 0, "all rows of a thread are swizzled alike");

    const T* from;     // this thread's chunk in the first row
    int rows;          // left from the first row on: of the operand along k, of k across
    int width;         // elements left from the chunk's first on: of k along k, of the operand across
    int target;        // in the shared tile

    DEVICE Loader(const T* matrix, int64_t stride, int outer, int k) {
        const int row = threadIdx.x / Lie::CHUNKS, chunk = threadIdx.x % Lie::CHUNKS;
        from = matrix + row * stride + chunk * CHUNK;
        rows = (ALONG_K ? outer : k) - row;
        width = (ALONG_K ? k : outer) - chunk * CHUNK;
        target = Lie::at(row, chunk);
    }
    DEVICE void load(T* tile, int64_t stride, bool aligned) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const int left = i * PASS < rows ? width : 0;
            const int take = left < 0 ? 0 : left > CHUNK ? CHUNK : left;
            const T* source = from + i * PASS * stride;
            T* shared = tile + target + i * PASS * Lie::CHUNKS * CHUNK;
            if (aligned) {
                cp_async16(shared, source, take * int(sizeof(T)));
            } else {
                alignas(16) T chunk[CHUNK];
#pragma unroll
                for (int e = 0; e < CHUNK; e++) chunk[e] = e < take ? source[e] : narrow<T>(0.0f);
                *reinterpret_cast<Quad*>(shared) = *reinterpret_cast<const Quad*>(chunk);
            }
        }
        from += ALONG_K ? DEPTH : DEPTH * stride;
        (ALONG_K ? width : rows) -= DEPTH;
    }
};

// The fragments of a (16 rows from `first` on) for 16 of k from `16 step` on.
template <int TILE, bool ALONG_K, class T>
DEVICE void take_a(uint32_t (&a)[4], const T* tile, int first, int step) {
    const int lane = threadIdx.x % 32, row = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
    if (ALONG_K) ldmatrix_x4(a, tile + Shape<TILE, true>::at(first + row + 8 * low, 2 * step + high));
    else ldmatrix_x4_trans(a, tile + Shape<TILE, false>::at(16 * step + row + 8 * high, first / CHUNK + low));
}
// The fragments of b for 16 columns from `first` on: b[0], b[1] those of the first 8, then those of the others.
template <int TILE, bool ALONG_K, class T>
DEVICE void take_b(uint32_t (&b)[4], const T* tile, int first, int step) {
    const int lane = threadIdx.x % 32, row = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
    if (ALONG_K) ldmatrix_x4(b, tile + Shape<TILE, true>::at(first + row + 8 * high, 2 * step + low));
    else ldmatrix_x4_trans(b, tile + Shape<TILE, false>::at(16 * step + row + 8 * low, first / CHUNK + high));
}

// Stores 16 rows of 32 columns of sums, which start at (row, column) of the matrix at `out`. `stage` is the warp's
// own shared memory.
DEVICE void store_rows(const Matmul& p, int64_t out, int64_t row, int64_t column, const float (&sum)[4][4],
                       float* stage) {
    constexpr int ROW = 32 + 4;
    const int lane = threadIdx.x % 32;
    const float alpha = static_cast<float>(p.alpha);
    __syncwarp();  // the rows before have been read
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) stage[(lane / 4 + e / 2 * 8) * ROW + 8 * j + lane % 4 * 2 + e % 2] = sum[j][e];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = lane / 4 + 8 * i, c = lane % 4 * PACK;
        const int64_t left = p.n - column - c, at = out + (row + r) * p.out_steps.row + column + c;
        if (row + r >= p.m || left <= 0) continue;
        float x[PACK];
#pragma unroll
        for (int e = 0; e < PACK; e++) x[e] = alpha * stage[r * ROW + c + e];
        if (p.aligned_out && left >= PACK) {
            if (p.accumulate) {
                float before[PACK];
                load_pack(p.out, at, before);
#pragma unroll
                for (int e = 0; e < PACK; e++) x[e] += before[e];
            }
            store_pack(p.out, at, x);
        } else {
#pragma unroll
            for (int e = 0; e < PACK; e++) {
                if (e < left) store(p.out, at + e, p.accumulate ? load<float>(p.out, at + e) + x[e] : x[e]);
            }
        }
    }
}

template <class T, int TILE, bool A_ALONG_K, bool B_ALONG_K>
DEVICE void product(const Matmul& p) {
    constexpr int THREADS = TILE * 2, DOWN = TILE / 2 / 16;  // of 16 rows, for a warp
    constexpr int TILE_ELEMENTS = TILE * DEPTH;
    SHARED_MEMORY(shared);
    T* tiles_a = reinterpret_cast<T*>(shared);
    T* tiles_b = tiles_a + STAGES * TILE_ELEMENTS;
    const int warp = threadIdx.x / 32, warp_row = warp % 2 * (TILE / 2), warp_column = warp / 2 * 32;
    const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);  // each below 2^31
    const int steps = (k + DEPTH - 1) / DEPTH;
    const int64_t a_stride = A_ALONG_K ? p.a_steps.row : p.a_steps.column;
    const int64_t b_stride = B_ALONG_K ? p.b_steps.column : p.b_steps.row;
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Place place = place_of(p, tile, TILE);
        const int row = static_cast<int>(place.row), column = static_cast<int>(place.column);
        const T* matrix_a = reinterpret_cast<const T*>(p.a.data) + p.a.offset(place.batch);
        const T* matrix_b = reinterpret_cast<const T*>(p.b.data) + p.b.offset(place.batch);
        Loader<T, TILE, A_ALONG_K, THREADS> a(matrix_a + row * (A_ALONG_K ? a_stride : 1), a_stride, m - row, k);
        Loader<T, TILE, B_ALONG_K, THREADS> b(matrix_b + column * (B_ALONG_K ? b_stride : 1), b_stride, n - column, k);
        const auto load = [&](int stage) {
            a.load(tiles_a + stage * TILE_ELEMENTS, a_stride, p.aligned_a);
            b.load(tiles_b + stage * TILE_ELEMENTS, b_stride, p.aligned_b);
        };
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            if (stage < steps) load(stage);
            cp_async_commit();
        }
        float sum[DOWN][4][4];
#pragma unroll
        for (int i = 0; i < DOWN; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[i][j][e] = 0;
        int stage = 0;
        for (int step = 0; step < steps; step++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();  // this step's tiles are there, and the last step's are read
            if (step + STAGES - 1 < steps) load(stage == 0 ? STAGES - 1 : stage - 1);
            cp_async_commit();
            const T *tile_a = tiles_a + stage * TILE_ELEMENTS, *tile_b = tiles_b + stage * TILE_ELEMENTS;
#pragma unroll
            for (int kk = 0; kk < DEPTH / 16; kk++) {
                uint32_t fragment_a[4], fragments_b[2][4];
#pragma unroll
                for (int j = 0; j < 2; j++) take_b<TILE, B_ALONG_K>(fragments_b[j], tile_b, warp_column + 16 * j, kk);
#pragma unroll
                for (int i = 0; i < DOWN; i++) {
                    take_a<TILE, A_ALONG_K>(fragment_a, tile_a, warp_row + 16 * i, kk);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        mma(sum[i][j], fragment_a, fragments_b[j / 2][j % 2 * 2], fragments_b[j / 2][j % 2 * 2 + 1],
                            T());
                }
            }
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        cp_async_wait<0>();
        __syncthreads();  // the tiles' memory becomes the warps' own
        const int64_t out = p.out.offset(place.batch);
        float* own = reinterpret_cast<float*>(shared) + warp * 16 * (32 + 4);
#pragma unroll
        for (int i = 0; i < DOWN; i++)
            store_rows(p, out, row + warp_row + 16 * i, column + warp_column, sum[i], own);
        __syncthreads();  // before the next tiles come in
    }
}

#define PRODUCT(T, TILE, name, A_ALONG_K, B_ALONG_K)                                                    \
    KERNEL __launch_bounds__(2 * TILE, 256 / TILE) matmul_mma_##T##_##TILE##_##name(const Matmul p) {   \
        product<T, TILE, A_ALONG_K, B_ALONG_K>(p);                                                      \
    }
#define PRODUCTS(T, TILE)               \
    PRODUCT(T, TILE, kk, true, true)    \
    PRODUCT(T, TILE, ko, true, false)   \
    PRODUCT(T, TILE, ok, false, true)   \
    PRODUCT(T, TILE, oo, false, false)
PRODUCTS(bf16, 128)
PRODUCTS(bf16, 64)
PRODUCTS(f16, 128)
PRODUCTS(f16, 64)
