// dk and dv of attention for bf16 and f16 (attention_mma.cuh; the mathematics is in crates/cpu/src/attention_grad.rs).
//
// A block owns 64 keys of one kv head, a warp 16 of them, and goes through the query heads that the kv head serves, and
// through their queries, QUERIES at a time: every sum is made by one warp in a fixed order, without atomics. Scores are
// made transposed, keys by queries, so that the weights and their gradients are left operands of dv += P^T g and dk +=
// dS^T q as they lie in registers.
//
//   head size   QUERIES, with mask or dropout   shared memory
//   32          64       32                     25.5 KiB
//   64          64       32                     49.5 KiB
//   128         32       16                     64.75 KiB
//   256         32       16                    128.75 KiB, dk and dv by a kernel each: both would not fit the registers
//
// (a tile each of keys and values, two each of queries and g, and two times stats and delta; less with mask or dropout:
// docs/cuda.md). A weight that dropout takes is marked by its sign until both products are made: weights have none of
// their own.
#include "attention_mma.cuh"

enum Results { BOTH, ONLY_DK, ONLY_DV };

template <class T, int D, int QUERIES, Results RESULTS, bool MASKED>
DEVICE void grad_kv(const Attention& p) {
    constexpr int KEYS = WARPS * MMA_ROWS, N = QUERIES / MMA_COLUMNS;
    constexpr bool DK = RESULTS != ONLY_DV, DV = RESULTS != ONLY_DK;
    SHARED_MEMORY(shared);
    const Tile<T, D> k_tile = {reinterpret_cast<T*>(shared)}, v_tile = {k_tile.data + KEYS * D};
    const auto q_tile = [&](int step) { return Tile<T, D>{v_tile.data + (KEYS + step % 2 * QUERIES) * D}; };
    const auto g_tile = [&](int step) { return Tile<T, D>{v_tile.data + (KEYS + (2 + step % 2) * QUERIES) * D}; };
    float* const statistics = reinterpret_cast<float*>(v_tile.data + (KEYS + 4 * QUERIES) * D);
    // The largest scores, then the sums' logarithms (in base 2), then delta.
    const auto stats_of = [&](int step) { return statistics + step % 2 * 3 * QUERIES; };

    const Place place(p, p.k.shape[2]);
    const Sequence s(p, place.sequence);
    const int j = place.tile * KEYS;
    if (j >= s.keys) return;
    const int64_t kv_head = place.head, group = p.q.shape[2] / p.k.shape[2];
    // Steps go through the query tiles of one head, then those of the next.
    const int first = s.first_query(j) / QUERIES * QUERIES, end = s.end_query(min(j + KEYS, s.keys) - 1);
    const int tiles = max(end - first + QUERIES - 1, 0) / QUERIES, steps = tiles * int(group);
    const auto head_of = [&](int step) { return kv_head * group + step / tiles; };
    const auto query_of = [&](int step) { return first + step % tiles * QUERIES; };
    const auto fetch = [&](int step) {
        if (step < steps) {
            const int64_t head = head_of(step);
            const int i = query_of(step);
            q_tile(step).template fetch<QUERIES>(query_rows(p.q, s, head), i, p.aligned & ALIGNED_Q);
            g_tile(step).template fetch<QUERIES>(query_rows(p.g, s, head), i, p.aligned & ALIGNED_G);
            if (threadIdx.x < QUERIES) {
                const int query = i + int(threadIdx.x);
                const bool inside = query < s.queries;  // else the weights are 0
                const Statistics<float> stats = load_statistics_base2(p, s, head, query);
                float* const to = stats_of(step) + threadIdx.x;
                to[0] = stats.largest, to[QUERIES] = stats.log_sum;
                to[2 * QUERIES] = inside ? load<float>(p.delta, statistic_at(p.delta, s, head, query)) : 0.0f;
            }
        }
        cp_async_commit();
    };
    k_tile.template fetch<KEYS>(key_rows(p.k, s, kv_head), j, p.aligned & ALIGNED_K);
    v_tile.template fetch<KEYS>(key_rows(p.v, s, kv_head), j, p.aligned & ALIGNED_V);
    fetch(0);

    const int warp_row = threadIdx.x / 32 * MMA_ROWS;
    const float scale = float(p.scale), keep = float(p.keep);
    Fragment<D / MMA_COLUMNS> dk[1], dv[1];
    dk[0].clear();
    dv[0].clear();
    for (int step = 0; step < steps; step++) {
        cp_async_wait<0>();
        __syncthreads();
        fetch(step + 1);
        const int i = query_of(step);
        const float *const largest = stats_of(step), *const log_sum = largest + QUERIES;
        const float *const delta = log_sum + QUERIES;
        Fragment<N> w[1];
        w[0].clear();
        add_scores(w, k_tile, warp_row, q_tile(step));
        const bool edge = !s.sees_all(i, QUERIES, j, KEYS);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = w[0].x[n][e];
                const int column = fragment_column(n, e), query = i + column, key = j + warp_row + fragment_row(e / 2);
                if (MASKED) {
                    if (s.sees(query, key)) {
                        const Row<float> row(p, s, head_of(step), query);
                        x = weight_of(row.masked(scaled(x, scale), key), largest[column], log_sum[column]);
                        if (p.drops && row.kept(key) == 0.0f) x = -x;
                    } else {
                        x = 0.0f;
                    }
                } else {
                    x = weight_of(scaled(x, scale), largest[column], log_sum[column]);
                    if (edge && (key < s.first_key(query) || key >= s.end_key(query))) x = 0.0f;
                }
            }
        if (DK) {
            Fragment<N> ds[1];
            ds[0].clear();
            add_scores(ds, v_tile, warp_row, g_tile(step));
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float& dp = ds[0].x[n][e];
                    const float x = w[0].x[n][e];
                    if (MASKED) dp = signbit(x) ? 0.0f : dp * keep;
                    dp = (MASKED ? fabsf(x) : x) * (dp - delta[fragment_column(n, e)]);
                }
            add_product(dk, ds, q_tile(step));
        }
        if (DV) {
            if (MASKED) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) w[0].x[n][e] = signbit(w[0].x[n][e]) ? 0.0f : w[0].x[n][e] * keep;
            }
            add_product(dv, w, g_tile(step));
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // the keys' and values' tiles are there, if no step waited for them
    // Each warp has its own rows of these tiles for itself.
    if (DK) {
        dk[0].lay(k_tile, warp_row, {scale, scale});
        __syncwarp();
        k_tile.template write<MMA_ROWS>(warp_row, key_rows(p.dk, s, kv_head), j, p.aligned & ALIGNED_DK);
    }
    if (DV) {
        dv[0].lay(v_tile, warp_row, {1.0f, 1.0f});
        __syncwarp();
        v_tile.template write<MMA_ROWS>(warp_row, key_rows(p.dv, s, kv_head), j, p.aligned & ALIGNED_DV);
    }
}

#define PLAIN(T, D, QUERIES, RESULTS, name) \
    KERNEL __launch_bounds__(THREADS) attention_grad_##name(const Attention p) { \
        grad_kv<T, D, QUERIES, RESULTS, false>(p);                               \
    }
#define EXTRA(T, D, QUERIES, RESULTS, name) \
    KERNEL __launch_bounds__(THREADS, 1) attention_grad_##name##_extra(const Attention p) { \
        grad_kv<T, D, QUERIES, RESULTS, true>(p);                                           \
    }
#define KERNELS(T)                             \
    PLAIN(T, 32, 64, BOTH, kv_##T##_32)        \
    PLAIN(T, 64, 64, BOTH, kv_##T##_64)        \
    PLAIN(T, 128, 32, BOTH, kv_##T##_128)      \
    PLAIN(T, 256, 32, ONLY_DK, k_##T##_256)    \
    PLAIN(T, 256, 32, ONLY_DV, v_##T##_256)    \
    EXTRA(T, 32, 32, BOTH, kv_##T##_32)        \
    EXTRA(T, 64, 32, BOTH, kv_##T##_64)        \
    EXTRA(T, 128, 16, BOTH, kv_##T##_128)      \
    EXTRA(T, 256, 16, ONLY_DK, k_##T##_256)    \
    EXTRA(T, 256, 16, ONLY_DV, v_##T##_256)

KERNELS(bf16)
KERNELS(f16)
