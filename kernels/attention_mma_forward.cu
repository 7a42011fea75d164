// Forward of attention for bf16 and f16 (attention_mma.cuh). A warp has 16 M queries, a block 64 M; keys come KEYS at a
// time.
//
//   head size   M   KEYS   shared memory
//   32          2   64      24 KiB
//   64          2   64      48 KiB
//   128         2   32      64 KiB
//   256         1   32      96 KiB
//
// (one tile of queries, two each of keys and values); `_extra` kernels have M = 1. Sums, maxima and out stay in
// registers, out goes through the queries' tile on its way to memory, whose rows each warp has for itself.
//
// The maximum is never clamped, and is a score as it was rounded: from step to step it is compared and subtracted as
// it is, so that what was gathered shrinks by exactly 1 where it stays, and the largest weight is 1. A row that has
// seen nothing yet has maximum -inf, and the least finite number is subtracted in its place; NaN scores, which fmaxf
// passes over, reach out by the sum.
#include "attention_mma.cuh"

constexpr float LEAST = -3.4028234663852886e38f;

template <class T, int D, int M, int KEYS, bool MASKED>
DEVICE void forward(const Attention& p) {
    constexpr int QUERIES = WARPS * MMA_ROWS * M, N = KEYS / MMA_COLUMNS;
    SHARED_MEMORY(shared);
    const Tile<T, D> q_tile = {reinterpret_cast<T*>(shared)};
    const auto k_tile = [&](int step) { return Tile<T, D>{q_tile.data + (QUERIES + step % 2 * KEYS) * D}; };
    const auto v_tile = [&](int step) { return Tile<T, D>{q_tile.data + (QUERIES + (2 + step % 2) * KEYS) * D}; };

    const Place place(p, p.q.shape[2]);
    const Sequence s(p, place.sequence);
    // The last queries see most keys: they go first.
    const int tiles = int((p.longest_q + QUERIES - 1) / QUERIES), i = (tiles - 1 - place.tile) * QUERIES;
    if (i >= s.queries) return;
    const int64_t head = place.head, kv_head = head / (p.q.shape[2] / p.k.shape[2]);
    const Matrix k = key_rows(p.k, s, kv_head), v = key_rows(p.v, s, kv_head);
    const int first = s.first_key(i) / KEYS * KEYS, end = s.end_key(min(i + QUERIES, s.queries) - 1);
    const int steps = max(end - first + KEYS - 1, 0) / KEYS;
    const auto fetch = [&](int step) {
        if (step < steps) {
            k_tile(step).template fetch<KEYS>(k, first + step * KEYS, p.aligned & ALIGNED_K);
            v_tile(step).template fetch<KEYS>(v, first + step * KEYS, p.aligned & ALIGNED_V);
        }
        cp_async_commit();
    };
    q_tile.template fetch<QUERIES>(query_rows(p.q, s, head), i, p.aligned & ALIGNED_Q);
    fetch(0);

    const int warp_row = threadIdx.x / 32 * MMA_ROWS * M;
    const auto query = [&](int m, int half) { return i + warp_row + MMA_ROWS * m + fragment_row(half); };
    const float scale = float(p.scale);
    Fragment<D / MMA_COLUMNS> o[M];
    float maximum[M][2], sum[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        o[m].clear();
        maximum[m][0] = maximum[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0.0f;
    }
    for (int step = 0; step < steps; step++) {
        const int j = first + step * KEYS;
        cp_async_wait<0>();
        __syncthreads();
        fetch(step + 1);
        Fragment<N> w[M];
#pragma unroll
        for (int m = 0; m < M; m++) w[m].clear();
        add_scores(w, q_tile, warp_row, k_tile(step));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) w[m].x[n][e] = scaled(w[m].x[n][e], scale);
        if (MASKED) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Row<float> row(p, s, head, query(m, half));
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) {
                            const int key = j + fragment_column(n, e);
                            const bool seen = s.sees(query(m, half), key);
                            w[m].x[n][e] = seen ? row.masked(w[m].x[n][e], key) : -INFINITY;
                        }
                }
        } else if (!s.sees_all(i, QUERIES, j, KEYS)) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int from = s.first_key(query(m, half)), to = s.end_key(query(m, half));
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++) {
                            const int key = j + fragment_column(n, e);
                            if (key < from || key >= to) w[m].x[n][e] = -INFINITY;
                        }
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float largest = -INFINITY;
#pragma unroll
                for (int n = 0; n < N; n++)
                    largest = fmaxf(largest, fmaxf(w[m].x[n][2 * half], w[m].x[n][2 * half + 1]));
                largest = fmaxf(maximum[m][half], row_max(largest));
                const float base = fmaxf(largest, LEAST);
                const float shrink = exp2_approx((maximum[m][half] - base) * LOG2_E);
                maximum[m][half] = largest;
                float total = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        const float weight = exp2_approx((w[m].x[n][e] - base) * LOG2_E);
                        w[m].x[n][e] = weight;
                        total += weight;
                    }
                sum[m][half] = sum[m][half] * shrink + total;
#pragma unroll
                for (int n = 0; n < D / MMA_COLUMNS; n++) {
                    o[m].x[n][2 * half] *= shrink;
                    o[m].x[n][2 * half + 1] *= shrink;
                }
            }
        if (MASKED && p.drops) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Row<float> row(p, s, head, query(m, half));
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 2 * half; e < 2 * half + 2; e++)
                            w[m].x[n][e] *= row.kept(j + fragment_column(n, e));
                }
        }
        add_product(o, w, v_tile(step));
    }
    cp_async_wait<0>();
    __syncthreads();  // the queries' tile is there, if no step waited for it
    const Matrix out = query_rows(p.out, s, head);
#pragma unroll
    for (int m = 0; m < M; m++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = row_sum(sum[m][half]);
            const bool seen = total != 0.0f;
            inverse[half] = seen ? 1.0f / total : 0.0f;
            if (threadIdx.x % 4 == 0 && query(m, half) < s.queries)
                store_statistics<float>(p, s, head, query(m, half), {maximum[m][half], seen ? logf(total) : 0.0f});
        }
        o[m].lay(q_tile, warp_row + MMA_ROWS * m, inverse);
    }
    __syncwarp();
    q_tile.template write<MMA_ROWS * M>(warp_row, out, i, p.aligned & ALIGNED_OUT);
}

#define PLAIN(T, D, M, KEYS) \
    KERNEL __launch_bounds__(THREADS) attention_##T##_##D(const Attention p) { forward<T, D, M, KEYS, false>(p); }
#define EXTRA(T, D, M, KEYS) \
    KERNEL __launch_bounds__(THREADS, 1) attention_##T##_##D##_extra(const Attention p) { \
        forward<T, D, M, KEYS, true>(p);                                                  \
    }
#define KERNELS(T)        \
    PLAIN(T, 32, 2, 64)   \
    PLAIN(T, 64, 2, 64)   \
    PLAIN(T, 128, 2, 32)  \
    PLAIN(T, 256, 1, 32)  \
    EXTRA(T, 32, 1, 64)   \
    EXTRA(T, 64, 1, 64)   \
    EXTRA(T, 128, 1, 32)  \
    EXTRA(T, 256, 1, 32)

KERNELS(bf16)
KERNELS(f16)
