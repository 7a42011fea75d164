// Attention for bf16 and f16 by mma.sync: tiles in shared memory and fragments in registers. The kernels that are made
// of them are in attention_mma_forward.cu, attention_mma_grad_kv.cu and attention_mma_grad_q.cu.
//
// A block is 4 warps. A tile is ROWS rows of D elements, D the head size rounded up to a template's (32, 64, 128 or
// 256): what lies behind the head size, or behind the last row, is zeros. Rows are cut into chunks of 8 elements, 16
// bytes, and the chunks of a row are permuted (XOR with the row) so that the 8 rows that ldmatrix reads at a time, one
// chunk each, lie in different banks.
//
// Copies from global memory are asynchronous where a tensor's rows are 16-byte aligned, else element by element: any
// strides. They run one step ahead: each step waits for its own tiles, passes the one barrier, which also says that all
// warps are done with the step before, and starts the copies of the next step into the tiles just left.
//
// Numerics: products of 16-bit operands summed in f32; weights and score gradients are rounded to 16 bits once, as
// operands of the second product. Scores are natural ones; differences of them become exponents of base 2. A kernel
// that takes a mask or dropout is its own instantiation, `_extra`, to keep these out of the others' loops.
#pragma once
#include "attention.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int MMA_ROWS = 16, MMA_COLUMNS = 8, MMA_DEPTH = 16, CHUNK = 8;
constexpr float LOG2_E = 1.4426950408889634f;

DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) { mma_bf16(d, a, b0, b1); }
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) { mma_f16(d, a, b0, b1); }
DEVICE uint32_t pack(float low, float high, bf16) { return pack_bf16(low, high); }
DEVICE uint32_t pack(float low, float high, f16) { return pack_f16(low, high); }

// A tile of D columns in shared memory.
template <class T, int D>
struct Tile {
    T* data;

    static constexpr int CHUNKS = D / CHUNK;
    DEVICE T* chunk(int row, int c) const {
        // The banks span 128 bytes: two rows of 32 elements, which share a permutation.
        const int turn = CHUNKS >= 8 ? row & 7 : (row >> 1) & 3;
        return data + (row * CHUNKS + (c ^ turn)) * CHUNK;
    }

    // Starts copying rows from .. from + ROWS of m.
    template <int ROWS>
    DEVICE void fetch(const Matrix& m, int from, bool aligned) const {
        const T* const source = reinterpret_cast<const T*>(m.tensor.data);
        if (aligned) {
            // A thread has one chunk of every STEP-th row.
            static_assert(THREADS % CHUNKS == 0, "rows that a thread can step over");
            constexpr int STEP = THREADS / CHUNKS;
            const int r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
            const int bytes = max(min(m.columns - c * CHUNK, CHUNK), 0) * int(sizeof(T));
            const T* part = source + m.start + (from + r) * m.row + c * CHUNK;
            const int64_t stride = STEP * m.row;
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++) {
                // Where no bytes are read, the address may be anything.
                cp_async16(chunk(r + n * STEP, c), part, from + r + n * STEP < m.rows ? bytes : 0);
                part += stride;
            }
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS, c = i % CHUNKS, row = from + r;
            const int columns = row < m.rows ? m.columns - c * CHUNK : 0;
            T* const part = chunk(r, c);
#pragma unroll 1
            for (int e = 0; e < CHUNK; e++) part[e] = e < columns ? source[m.at(row, c * CHUNK + e)] : narrow<T>(0.0f);
        }
    }

    // Writes ROWS rows, those of one warp from `first` on, to rows from + first .. of m.
    template <int ROWS>
    DEVICE void write(int first, const Matrix& m, int from, bool aligned) const {
        T* const target = reinterpret_cast<T*>(m.tensor.data);
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < ROWS * CHUNKS; i += 32) {
            const int r = first + i / CHUNKS, c = i % CHUNKS, row = from + r, columns = m.columns - c * CHUNK;
            if (row >= m.rows || columns <= 0) continue;
            const T* part = chunk(r, c);
            if (aligned && columns >= CHUNK) {
                T* const to = target + m.start + row * m.row + c * CHUNK;
                *reinterpret_cast<Quad*>(to) = *reinterpret_cast<const Quad*>(part);
            } else {
                for (int e = 0; e < min(columns, CHUNK); e++) target[m.at(row, c * CHUNK + e)] = part[e];
            }
        }
    }
};

// Sums of one warp: 16 rows by N times 8 columns. Lane l has rows l / 4 and l / 4 + 8 (`half` 0 and 1) and columns
// 8 n + 2 (l % 4) and the next.
template <int N>
struct Fragment {
    float x[N][4];

    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < N; n++) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
    }
    // Columns 16 k .. 16 k + 16 as the left operand of a product.
    template <class T>
    DEVICE void as_left(int k, uint32_t (&a)[4], T type) const {
        a[0] = pack(x[2 * k][0], x[2 * k][1], type);
        a[1] = pack(x[2 * k][2], x[2 * k][3], type);
        a[2] = pack(x[2 * k + 1][0], x[2 * k + 1][1], type);
        a[3] = pack(x[2 * k + 1][2], x[2 * k + 1][3], type);
    }
    // Rounded, to rows from `row` of a tile; each row of the half multiplied by its factor.
    template <class T, int D>
    DEVICE void lay(const Tile<T, D>& tile, int row, const float (&factor)[2]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t pair = pack(x[n][2 * half] * factor[half], x[n][2 * half + 1] * factor[half], T());
                memcpy(tile.chunk(row + lane / 4 + 8 * half, n) + 2 * (lane % 4), &pair, 4);
            }
    }
};

DEVICE int fragment_row(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
DEVICE int fragment_column(int n, int e) { return MMA_COLUMNS * n + 2 * (threadIdx.x % 4) + (e & 1); }

// The left operand: 16 rows from `row`, elements 16 k .. 16 k + 16.
template <class T, int D>
DEVICE void left_operand(const Tile<T, D>& tile, int row, int k, uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile.chunk(row + lane % 16, 2 * k + lane / 16));
}

// s[m] += left rows (left_row + 16 m ..) times right^T, right having 8 N rows, over all D elements.
template <int M, int N, class T, int D>
DEVICE void add_scores(Fragment<N> (&s)[M], const Tile<T, D>& left, int left_row, const Tile<T, D>& right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / MMA_DEPTH; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) left_operand(left, left_row + MMA_ROWS * m, k, a[m]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, right.chunk(MMA_COLUMNS * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(s[m].x[n], a[m], b[0], b[1], T());
                mma(s[m].x[n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// o[m] += weights[m] times right, whose 8 N rows stand for the columns of the weights.
template <int M, int N, class T, int D>
DEVICE void add_product(Fragment<D / MMA_COLUMNS> (&o)[M], const Fragment<N> (&weights)[M], const Tile<T, D>& right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) weights[m].as_left(k, a[m], T());
#pragma unroll
        for (int n = 0; n < D / MMA_COLUMNS; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, right.chunk(MMA_DEPTH * k + lane % 16, n + lane / 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(o[m].x[n], a[m], b[0], b[1], T());
                mma(o[m].x[n + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// The largest and the sum over the four lanes that share a row.
DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Where a block works: `blockIdx.x` counts (tile, sequence, head), the head fastest, so that the query heads of a kv
// head run at the same time.
struct Place {
    int64_t sequence, head;
    int tile;
    DEVICE Place(const Attention& p, int64_t heads) {
        const int64_t rest = blockIdx.x / heads;
        head = blockIdx.x % heads;
        sequence = rest % p.sequences;
        tile = int(rest / p.sequences);
    }
};

// The statistics of a row with its sum's logarithm in base 2.
DEVICE Statistics<float> load_statistics_base2(const Attention& p, const Sequence& s, int64_t head, int i) {
    const Statistics<float> x = load_statistics<float>(p, s, head, i);
    return {x.largest, x.log_sum * LOG2_E};
}
// A weight by its score and its row's statistics, the logarithm in base 2. It is at most 1, should a product ever round
// otherwise than forward's. A NaN among the row's scores is in its sum.
DEVICE float weight_of(float score, float largest, float log_sum) {
    return exp2_approx(fminf(score - largest, 0.0f) * LOG2_E - log_sum);
}
