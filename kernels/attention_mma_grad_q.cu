// dq of attention for bf16 and f16 (attention_mma.cuh; the mathematics is in crates/cpu/src/attention_grad.rs).
//
// A block owns 64 queries of one head, a warp 16 of them, and goes through their keys, KEYS at a time.
//
//   head size   KEYS   shared memory
//   32          64      24 KiB
//   64          64      48 KiB
//   128         32      64 KiB
//   256         32     128 KiB
//
// (a tile each of queries and g, two each of keys and values).
#include "attention_mma.cuh"

template <class T, int D, int KEYS, bool MASKED>
DEVICE void grad_q(const Attention& p) {
    constexpr int QUERIES = WARPS * MMA_ROWS, N = KEYS / MMA_COLUMNS;
    SHARED_MEMORY(shared);
    const Tile<T, D> q_tile = {reinterpret_cast<T*>(shared)}, g_tile = {q_tile.data + QUERIES * D};
    const auto k_tile = [&](int step) { return Tile<T, D>{g_tile.data + (QUERIES + step % 2 * KEYS) * D}; };
    const auto v_tile = [&](int step) { return Tile<T, D>{g_tile.data + (QUERIES + (2 + step % 2) * KEYS) * D}; };

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
    g_tile.template fetch<QUERIES>(query_rows(p.g, s, head), i, p.aligned & ALIGNED_G);
    fetch(0);

    const int warp_row = threadIdx.x / 32 * MMA_ROWS;
    const auto query = [&](int half) { return i + warp_row + fragment_row(half); };
    Statistics<float> stats[2];
    float delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = query(half) < s.queries;  // else the weights are 0
        stats[half] = load_statistics_base2(p, s, head, query(half));
        delta[half] = inside ? load<float>(p.delta, statistic_at(p.delta, s, head, query(half))) : 0.0f;
    }
    const float scale = float(p.scale);
    Fragment<D / MMA_COLUMNS> dq[1];
    dq[0].clear();
    for (int step = 0; step < steps; step++) {
        const int j = first + step * KEYS;
        cp_async_wait<0>();
        __syncthreads();
        fetch(step + 1);
        Fragment<N> w[1], ds[1];
        w[0].clear();
        ds[0].clear();
        add_scores(w, q_tile, warp_row, k_tile(step));
        add_scores(ds, g_tile, warp_row, v_tile(step));
        const bool edge = !s.sees_all(i, QUERIES, j, KEYS);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Row<float> row(p, s, head, query(half));
            const int from = s.first_key(query(half)), to = s.end_key(query(half));
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    const int key = j + fragment_column(n, e);
                    float x = scaled(w[0].x[n][e], scale), &dp = ds[0].x[n][e];
                    if (MASKED) {
                        if (s.sees(query(half), key)) {
                            x = weight_of(row.masked(x, key), stats[half].largest, stats[half].log_sum);
                            dp *= row.kept(key);
                        } else {
                            x = 0.0f;
                        }
                    } else {
                        x = weight_of(x, stats[half].largest, stats[half].log_sum);
                        if (edge && (key < from || key >= to)) x = 0.0f;
                    }
                    dp = x * (dp - delta[half]);
                }
        }
        add_product(dq, ds, k_tile(step));
    }
    cp_async_wait<0>();
    __syncthreads();  // the queries' tile is there, if no step waited for it
    dq[0].lay(q_tile, warp_row, {scale, scale});
    __syncwarp();
    q_tile.template write<MMA_ROWS>(warp_row, query_rows(p.dq, s, head), i, p.aligned & ALIGNED_DQ);
}

#define PLAIN(T, D, KEYS) \
    KERNEL __launch_bounds__(THREADS) attention_grad_q_##T##_##D(const Attention p) { grad_q<T, D, KEYS, false>(p); }
#define EXTRA(T, D, KEYS) \
    KERNEL __launch_bounds__(THREADS, 1) attention_grad_q_##T##_##D##_extra(const Attention p) { \
        grad_q<T, D, KEYS, true>(p);                                                             \
    }
#define KERNELS(T)     \
    PLAIN(T, 32, 64)   \
    PLAIN(T, 64, 64)   \
    PLAIN(T, 128, 32)  \
    PLAIN(T, 256, 32)  \
    EXTRA(T, 32, 64)   \
    EXTRA(T, 64, 64)   \
    EXTRA(T, 128, 32)  \
    EXTRA(T, 256, 32)

KERNELS(bf16)
KERNELS(f16)
