// Attention in float or double: any head size, strides and mixture of dtypes, every feature. The kernels of
// attention_mma_*.cu are much faster where they apply.
//
// Tiles: 64 queries by 64 keys, 256 threads as 16 x 16; thread (y, x) has the scores of queries y + 16 r and keys x +
// 16 c, r and c from 0 to 3. Products over the head size take it in slices of 32. Results of the second product (out,
// dq, dk, dv) stay in registers, CHUNKS times 64 columns of them; a larger head size is split among blocks, each of
// which makes the scores again, so that neither shared memory nor registers depend on it.
//
// Shared memory: two slices [64][33] of operands, or one [64][65] in the same place, and the weights [64][65]: 33 KiB
// in float, 66 in double. The odd row lengths keep the columns that threads read at once in different banks.
//
// Numerics: all sums in C, in an order that depends on the shapes alone. The running maximum is never clamped: where a
// row has seen nothing yet it is -inf, and 0 is subtracted in its place.
//
// Grids are one number that counts (tile, columns, head, sequence), the sequence fastest; tiles that take longest go
// first.
#include "attention.cuh"
#include "block.cuh"

struct AttentionDelta {
    Tensor out, g, delta;
    int32_t packed;  // rows of out and g can be read in packs
};

namespace {

constexpr int TILE = 64, SIDE = 16, CELLS = TILE / SIDE, DEPTH = 32, THREADS = SIDE * SIDE;
constexpr int SLICE_ROW = DEPTH + 1, TILE_ROW = TILE + 1;
constexpr int OPERANDS = 2 * TILE * SLICE_ROW;

// Columns of a result in one block, in tiles.
template <class C>
constexpr int CHUNKS = sizeof(C) == 4 ? 2 : 1;

// Steps of the innermost loops that are unrolled: more would not fit the registers.
template <class C>
constexpr int UNROLL = sizeof(C) == 4 ? 8 : 4;

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }

// A thread's part of a tile.
template <class C>
struct Cells {
    C x[CELLS][CELLS];
    DEVICE Cells() {
#pragma unroll
        for (int r = 0; r < CELLS; r++)
#pragma unroll
            for (int c = 0; c < CELLS; c++) x[r][c] = 0;
    }
};

// The rows (or columns) of thread y (or x).
DEVICE int cell(int thread, int n) { return thread + SIDE * n; }
DEVICE int thread_x() { return threadIdx.x % SIDE; }
DEVICE int thread_y() { return threadIdx.x / SIDE; }

// Where a block works.
struct Place {
    int64_t sequence, head, columns, tile;
    DEVICE Place(const Attention& p, int64_t heads, int64_t column_blocks) {
        int64_t rest = blockIdx.x;
        sequence = rest % p.sequences, rest /= p.sequences;
        head = rest % heads, rest /= heads;
        columns = rest % column_blocks, tile = rest / column_blocks;
    }
};

// to[r][c] = m[from + r][column + c], WIDTH columns; 0 outside of m.
template <int WIDTH, class C>
DEVICE void fetch(const Matrix& m, int from, int column, C* to) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
        const int r = i / WIDTH, c = i % WIDTH, row = from + r;
        const bool inside = row >= 0 && row < m.rows && column + c < m.columns;
        to[r * (WIDTH + 1) + c] = inside ? load<C>(m.tensor, m.at(row, column + c)) : C(0);
    }
}

// a[i + .] b[j + .]^T over the whole head size.
template <class C>
DEVICE Cells<C> products(const Matrix& a, int i, const Matrix& b, int j, C* operands) {
    Cells<C> s;
    const C* left = operands + thread_y() * SLICE_ROW;
    const C* right = operands + (TILE + thread_x()) * SLICE_ROW;
    for (int column = 0; column < a.columns; column += DEPTH) {
        __syncthreads();
        fetch<DEPTH>(a, i, column, operands);
        fetch<DEPTH>(b, j, column, operands + TILE * SLICE_ROW);
        __syncthreads();
#pragma unroll UNROLL<C>
        for (int d = 0; d < DEPTH; d++) {
            C u[CELLS], v[CELLS];
#pragma unroll
            for (int n = 0; n < CELLS; n++) {
                u[n] = left[SIDE * n * SLICE_ROW + d];
                v[n] = right[SIDE * n * SLICE_ROW + d];
            }
#pragma unroll
            for (int r = 0; r < CELLS; r++)
#pragma unroll
                for (int c = 0; c < CELLS; c++) s.x[r][c] += u[r] * v[c];
        }
    }
    return s;
}

// Lays a tile of weights into shared memory; the barrier before whoever reads them is `add_product`'s.
template <class C>
DEVICE void lay(const Cells<C>& w, C* weights) {
    __syncthreads();  // the tile before may still be read
#pragma unroll
    for (int r = 0; r < CELLS; r++)
#pragma unroll
        for (int c = 0; c < CELLS; c++) weights[cell(thread_y(), r) * TILE_ROW + cell(thread_x(), c)] = w.x[r][c];
}

// o += weights m[from + .] (or weights^T), for the chunks of columns of m from `column` on.
template <bool TRANSPOSED, class C>
DEVICE void add_product(Cells<C> (&o)[CHUNKS<C>], const C* weights, const Matrix& m, int from, int column,
                        C* operands) {
    constexpr int ROW = TRANSPOSED ? 1 : TILE_ROW, STEP = TRANSPOSED ? TILE_ROW : 1;
    const C* left = weights + thread_y() * ROW;
    const C* right = operands + thread_x();
    __syncthreads();  // the weights are there, whatever columns follow
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS<C>; chunk++) {
        if (column + chunk * TILE >= m.columns) break;
        __syncthreads();
        fetch<TILE>(m, from, column + chunk * TILE, operands);
        __syncthreads();
#pragma unroll UNROLL<C>
        for (int k = 0; k < TILE; k++) {
            C u[CELLS], v[CELLS];
#pragma unroll
            for (int n = 0; n < CELLS; n++) {
                u[n] = left[SIDE * n * ROW + k * STEP];
                v[n] = right[k * TILE_ROW + SIDE * n];
            }
#pragma unroll
            for (int r = 0; r < CELLS; r++)
#pragma unroll
                for (int c = 0; c < CELLS; c++) o[chunk].x[r][c] += u[r] * v[c];
        }
    }
}

// Writes rows from .. of m, each multiplied by its factor.
template <class C>
DEVICE void write(const Cells<C> (&o)[CHUNKS<C>], const C (&factor)[CELLS], const Matrix& m, int from, int column) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS<C>; chunk++)
#pragma unroll
        for (int r = 0; r < CELLS; r++)
#pragma unroll
            for (int c = 0; c < CELLS; c++) {
                const int row = from + cell(thread_y(), r), at = column + chunk * TILE + cell(thread_x(), c);
                if (row < m.rows && at < m.columns) store(m.tensor, m.at(row, at), o[chunk].x[r][c] * factor[r]);
            }
}

// The fold over the SIDE threads of one y.
template <class C, class F>
DEVICE C side_fold(C x, F f) {
    for (int step = SIDE / 2; step > 0; step /= 2) x = f(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// One block: a tile of queries of one head, and some columns of out.
template <class C>
DEVICE void forward(const Attention& p) {
    SHARED_MEMORY(shared);
    C* const operands = reinterpret_cast<C*>(shared);
    C* const weights = operands + OPERANDS;
    const int64_t wide = CHUNKS<C> * TILE, tiles = (p.longest_q + TILE - 1) / TILE;
    const Place place(p, p.q.shape[2], max((p.v.shape[3] + wide - 1) / wide, int64_t(1)));
    const Sequence s(p, place.sequence);
    const int i = int(tiles - 1 - place.tile) * TILE, column = int(place.columns * wide);
    if (i >= s.queries) return;
    const int64_t head = place.head, kv_head = head / (p.q.shape[2] / p.k.shape[2]);
    const Matrix q = query_rows(p.q, s, head), out = query_rows(p.out, s, head);
    const Matrix k = key_rows(p.k, s, kv_head), v = key_rows(p.v, s, kv_head);
    const int last = min(i + TILE, s.queries) - 1, end = s.end_key(last);
    C maximum[CELLS], sum[CELLS];
    for (int r = 0; r < CELLS; r++) maximum[r] = -C(INFINITY), sum[r] = 0;
    Cells<C> o[CHUNKS<C>];
    for (int j = s.first_key(i) / TILE * TILE; j < end; j += TILE) {
        Cells<C> w = products(q, i, k, j, operands);
#pragma unroll
        for (int r = 0; r < CELLS; r++) {
            const int query = i + cell(thread_y(), r);
            const Row<C> row(p, s, head, query);
            C largest = maximum[r];
#pragma unroll
            for (int c = 0; c < CELLS; c++) {
                const int key = j + cell(thread_x(), c);
                w.x[r][c] = s.sees(query, key) ? row.masked(scaled(w.x[r][c], C(p.scale)), key) : -C(INFINITY);
                largest = Larger()(largest, w.x[r][c]);
            }
            largest = side_fold(largest, Larger());
            const C base = largest == -C(INFINITY) ? C(0) : largest, shrink = exponential(maximum[r] - base);
            C total = 0;
#pragma unroll
            for (int c = 0; c < CELLS; c++) {
                const C weight = exponential(w.x[r][c] - base);
                total += weight;
                w.x[r][c] = weight * row.kept(j + cell(thread_x(), c));
            }
            sum[r] = sum[r] * shrink + side_fold(total, Add());
            maximum[r] = largest;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS<C>; chunk++)
#pragma unroll
                for (int c = 0; c < CELLS; c++) o[chunk].x[r][c] *= shrink;
        }
        lay(w, weights);
        add_product<false>(o, weights, v, j, column, operands);
    }
    C factor[CELLS];
#pragma unroll
    for (int r = 0; r < CELLS; r++) {
        const int query = i + cell(thread_y(), r);
        const bool seen = sum[r] != 0;
        factor[r] = seen ? 1 / sum[r] : C(0);
        if (thread_x() == 0 && column == 0 && query < s.queries)
            store_statistics<C>(p, s, head, query, {maximum[r], seen ? logarithm(sum[r]) : C(0)});
    }
    write(o, factor, out, i, column);
}

// delta = sum of g o. A row has a lane of a warp for each of its packs, at most all of them; and all of them if its
// elements have to be read one by one.
template <class C>
DEVICE void delta_rows(const AttentionDelta& p) {
    const Tensor &o = p.out, &g = p.g;
    const int64_t heads = o.shape[2], times = o.shape[1], n = o.shape[0] * times * heads, size = o.shape[3];
    int lanes = 32;
    while (p.packed && lanes > 1 && lanes / 2 * PACK >= size) lanes /= 2;
    const int rows = 32 / lanes, lane = threadIdx.x % lanes;
    const int64_t warps = int64_t(gridDim.x) * blockDim.x / 32;
    const int64_t warp = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    for (int64_t from = warp * rows; from < n; from += warps * rows) {
        const int64_t row = from + threadIdx.x % 32 / lanes;
        const int64_t head = row % heads, time = row / heads % times, batch = row / heads / times;
        const int64_t o_at = batch * o.strides[0] + time * o.strides[1] + head * o.strides[2];
        const int64_t g_at = batch * g.strides[0] + time * g.strides[1] + head * g.strides[2];
        C sum = 0;
        if (row < n && p.packed) {
            for (int64_t d = lane * PACK; d < size; d += lanes * PACK) {
                C u[PACK], v[PACK];
                if (d + PACK <= size) {
                    load_pack(o, o_at + d, u);
                    load_pack(g, g_at + d, v);
                    for (int e = 0; e < PACK; e++) sum += u[e] * v[e];
                } else {
                    for (int64_t e = d; e < size; e++) sum += load<C>(o, o_at + e) * load<C>(g, g_at + e);
                }
            }
        } else if (row < n) {
            for (int64_t d = lane; d < size; d += lanes)
                sum += load<C>(o, o_at + d * o.strides[3]) * load<C>(g, g_at + d * g.strides[3]);
        }
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        if (row < n && lane == 0)
            store(p.delta, batch * p.delta.strides[0] + head * p.delta.strides[1] + time * p.delta.strides[2], sum);
    }
}

// The operands of backward for one query head.
struct Operands {
    Matrix q, k, v, g;
    DEVICE Operands(const Attention& p, const Sequence& s, int64_t head, int64_t kv_head)
        : q(query_rows(p.q, s, head)), k(key_rows(p.k, s, kv_head)), v(key_rows(p.v, s, kv_head)),
          g(query_rows(p.g, s, head)) {}
};

// A tile of weights p, made again, and of gradients of the scores: w = z p, ds = p (z dp - delta), 0 where nothing is
// seen.
template <class C>
DEVICE void weights_of(const Attention& p, const Sequence& s, int64_t head, const Operands& x, int i, int j,
                       C* operands, Cells<C>& w, Cells<C>& ds) {
    w = products(x.q, i, x.k, j, operands);
    ds = products(x.g, i, x.v, j, operands);
#pragma unroll
    for (int r = 0; r < CELLS; r++) {
        const int query = i + cell(thread_y(), r);
        const bool inside = query >= 0 && query < s.queries;
        const Row<C> row(p, s, head, query);
        const Statistics<C> stats = load_statistics<C>(p, s, head, query);
        const C delta = inside ? load<C>(p.delta, statistic_at(p.delta, s, head, query)) : C(0);
#pragma unroll
        for (int c = 0; c < CELLS; c++) {
            const int key = j + cell(thread_x(), c);
            C weight = 0, grad = 0;
            const C score = s.sees(query, key) ? row.masked(scaled(w.x[r][c], C(p.scale)), key) : -C(INFINITY);
            if (score != -C(INFINITY)) {
                // At most 1, whatever made the statistics; a NaN among the row's scores is in its sum.
                weight = exponential(min(score - stats.largest, C(0)) - stats.log_sum);
                const C z = row.kept(key);
                grad = weight * (z * ds.x[r][c] - delta);
                weight *= z;
            }
            w.x[r][c] = weight, ds.x[r][c] = grad;
        }
    }
}

// One block: a tile of keys of one kv head, and some columns of dk and dv; it goes through the query heads in their
// order.
template <class C>
DEVICE void grad_kv(const Attention& p) {
    SHARED_MEMORY(shared);
    C* const operands = reinterpret_cast<C*>(shared);
    C* const weights = operands + OPERANDS;
    const int64_t wide = CHUNKS<C> * TILE, size = max(p.k.shape[3], p.v.shape[3]);
    const Place place(p, p.k.shape[2], (size + wide - 1) / wide);
    const Sequence s(p, place.sequence);
    const int j = int(place.tile) * TILE, column = int(place.columns * wide);
    if (j >= s.keys) return;
    const int64_t group = p.q.shape[2] / p.k.shape[2], kv_head = place.head;
    const int first = s.first_query(j) / TILE * TILE, end = s.end_query(min(j + TILE, s.keys) - 1);
    Cells<C> dk[CHUNKS<C>], dv[CHUNKS<C>];
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const Operands x(p, s, head, kv_head);
        for (int i = first; i < end; i += TILE) {
            Cells<C> w, ds;
            weights_of(p, s, head, x, i, j, operands, w, ds);
            lay(w, weights);
            add_product<true>(dv, weights, x.g, i, column, operands);
            lay(ds, weights);
            add_product<true>(dk, weights, x.q, i, column, operands);
        }
    }
    const C scale = C(p.scale), scales[CELLS] = {scale, scale, scale, scale}, ones[CELLS] = {1, 1, 1, 1};
    write(dk, scales, key_rows(p.dk, s, kv_head), j, column);
    write(dv, ones, key_rows(p.dv, s, kv_head), j, column);
}

// One block: a tile of queries of one head, and some columns of dq.
template <class C>
DEVICE void grad_q(const Attention& p) {
    SHARED_MEMORY(shared);
    C* const operands = reinterpret_cast<C*>(shared);
    C* const weights = operands + OPERANDS;
    const int64_t wide = CHUNKS<C> * TILE, tiles = (p.longest_q + TILE - 1) / TILE;
    const Place place(p, p.q.shape[2], (p.q.shape[3] + wide - 1) / wide);
    const Sequence s(p, place.sequence);
    const int i = int(tiles - 1 - place.tile) * TILE, column = int(place.columns * wide);
    if (i >= s.queries) return;
    const int64_t head = place.head;
    const Operands x(p, s, head, head / (p.q.shape[2] / p.k.shape[2]));
    const int end = s.end_key(min(i + TILE, s.queries) - 1);
    Cells<C> dq[CHUNKS<C>];
    for (int j = s.first_key(i) / TILE * TILE; j < end; j += TILE) {
        Cells<C> w, ds;
        weights_of(p, s, head, x, i, j, operands, w, ds);
        lay(ds, weights);
        add_product<false>(dq, weights, x.k, j, column, operands);
    }
    const C scale = C(p.scale), scales[CELLS] = {scale, scale, scale, scale};
    write(dq, scales, query_rows(p.dq, s, head), i, column);
}

// One block: 64 keys by 64 of dmask's rows (its one row, if it has one) of one of its heads. It adds up what the mask
// was repeated over in order: sequences, heads, tiles of queries, and last the rows of a tile. Rows and keys are
// counted over all sequences here, so that what no sequence holds is 0.
template <class C>
DEVICE void grad_mask(const Attention& p) {
    SHARED_MEMORY(shared);
    C* const operands = reinterpret_cast<C*>(shared);
    const Tensor& out = p.dmask;
    const bool one_row = out.shape[2] == 1;
    const int64_t heads = p.q.shape[2], queries = p.q.shape[1], keys = p.k.shape[1];
    const int64_t key_tiles = (keys + TILE - 1) / TILE, row_tiles = (out.shape[2] + TILE - 1) / TILE;
    int64_t rest = blockIdx.x;
    const int64_t j = rest % key_tiles * TILE;
    rest /= key_tiles;
    const int64_t row_tile = rest % row_tiles;
    rest /= row_tiles;
    const int64_t own_head = rest % out.shape[1], own_batch = rest / out.shape[1];
    const int64_t first = one_row ? 0 : row_tile * TILE, end = one_row ? queries : min(first + TILE, queries);
    const int64_t first_head = out.shape[1] == 1 ? 0 : own_head, end_head = out.shape[1] == 1 ? heads : own_head + 1;
    Cells<C> sum;
    for (int64_t index = 0; index < p.sequences; index++) {
        const Sequence s(p, index);
        if (out.shape[0] != 1 && s.batch != own_batch) continue;
        if (j >= s.first_k + s.keys || j + TILE <= s.first_k) continue;
        for (int64_t head = first_head; head < end_head; head++) {
            const Operands x(p, s, head, head / (heads / p.k.shape[2]));
            for (int64_t i = first; i < end; i += TILE) {
                if (i >= s.first_q + s.queries || i + TILE <= s.first_q) continue;
                Cells<C> w, ds;
                weights_of(p, s, head, x, int(i - s.first_q), int(j - s.first_k), operands, w, ds);
#pragma unroll
                for (int r = 0; r < CELLS; r++)
#pragma unroll
                    for (int c = 0; c < CELLS; c++) sum.x[r][c] += ds.x[r][c];
            }
        }
    }
    const int64_t start = own_batch * out.strides[0] + own_head * out.strides[1];
    if (!one_row) {
#pragma unroll
        for (int r = 0; r < CELLS; r++)
#pragma unroll
            for (int c = 0; c < CELLS; c++) {
                const int64_t row = first + cell(thread_y(), r), key = j + cell(thread_x(), c);
                if (row < out.shape[2] && key < keys)
                    store(out, start + row * out.strides[2] + key * out.strides[3], sum.x[r][c]);
            }
        return;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < CELLS; c++) {
        C column = 0;
        for (int r = 0; r < CELLS; r++) column += sum.x[r][c];
        operands[thread_y() * TILE + cell(thread_x(), c)] = column;
    }
    __syncthreads();
    if (threadIdx.x < TILE && j + threadIdx.x < keys) {
        C total = 0;
        for (int y = 0; y < SIDE; y++) total += operands[y * TILE + threadIdx.x];
        store(out, start + (j + threadIdx.x) * out.strides[3], total);
    }
}

}  // namespace

KERNEL __launch_bounds__(THREADS, 1) attention_f32(const Attention p) { forward<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_f64(const Attention p) { forward<double>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_delta_f32(const AttentionDelta p) { delta_rows<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_delta_f64(const AttentionDelta p) { delta_rows<double>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_kv_f32(const Attention p) { grad_kv<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_kv_f64(const Attention p) { grad_kv<double>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_q_f32(const Attention p) { grad_q<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_q_f64(const Attention p) { grad_q<double>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_mask_f32(const Attention p) { grad_mask<float>(p); }
KERNEL __launch_bounds__(THREADS, 1) attention_grad_mask_f64(const Attention p) { grad_mask<double>(p); }
