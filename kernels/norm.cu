// Layer norm over the last dimension, and RMS norm, which is the same with 0 in place of the mean (no `mean` operand).
//
// A team of threads a row (rows.cuh), which keeps it in registers if it fits, else reads it again; all sums in the
// arithmetic's type, each thread's own first, then as a tree. Mean and variance are taken in two passes. A row whose
// squares overflow, or vanish with no eps to speak of, or which lies so far from 0 that the mean's rounding counts, is
// done again, scaled and in f64 (far_row).
//
// With xhat = (x - mean) rstd and e = g weight, as mean and rstd depend on every x of the row:
// dx = rstd (e - mean(e) - xhat mean(e xhat)).
//
// Gradients of weight and bias are sums over rows, in two stages: a block sums some rows of up to 256 columns, a thread
// for PACK columns and every few rows, and leaves its sums in the workspace; then these are added up, in f64.
#include "rows.cuh"

struct LayerNorm {
    RowPlan plan;
    Tensor x, weight, bias, out, mean, rstd;  // mean and rstd: a number for each row
    double eps;
};

// A row far from 1: scaled by a power of two, in f64, element by element.
template <class C>
DEVICE void far_row(const LayerNorm& p, const Team& team, int64_t r) {
    const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
    const int64_t n = p.plan.width;
    double most = 0, mean = 0, squares = 0;
    for (int64_t i = team.rank; i < n; i += team.size) most = Larger()(most, double(fabs(x.get(i))));
    most = team.fold(most, 0.0, Larger());
    // 1 for what is 0 or not finite.
    double scale = 1;
    if (most > 0 && isfinite(most)) {
        const int exponent = ilogb(most);
        scale = ldexp(1.0, exponent < -1022 ? 1022 : exponent > 1022 ? -1022 : -exponent);
    }
    if (p.mean.present()) {
        for (int64_t i = team.rank; i < n; i += team.size) mean += double(x.get(i)) * scale;
        mean = team.sum(mean) / double(n);
    }
    for (int64_t i = team.rank; i < n; i += team.size) {
        const double d = double(x.get(i)) * scale - mean;
        squares += d * d;
    }
    const double rstd = 1 / sqrt(team.sum(squares) / double(n) + p.eps * scale * scale);
    if (team.rank == 0) {
        if (p.mean.present()) store(p.mean, p.mean.offset(r), C(mean / scale));
        store(p.rstd, p.rstd.offset(r), C(rstd * scale));
    }
    for (int64_t i = team.rank; i < n; i += team.size) {
        const double w = p.weight.present() ? double(Row<C>(p.weight, 0, p.plan).get(i)) : 1.0;
        const double b = p.bias.present() ? double(Row<C>(p.bias, 0, p.plan).get(i)) : 0.0;
        store(p.out, out.start + i * out.stride, C(fma((double(x.get(i)) * scale - mean) * rstd, w, b)));
    }
}

// True where the mean's rounding counts beside the deviations; the forward pass has done such rows as far_row.
template <class C>
DEVICE bool is_far(C mean, C rstd) { return sizeof(C) == 4 && fabs(mean) * rstd > C(1e3); }

// xhat = (x/2 + shift) factor: x - mean may overflow where xhat does not.
template <class C>
struct Centring {
    C shift, factor;
    DEVICE Centring(C mean, C rstd) : shift(C(-0.5) * mean), factor(rstd + rstd) {}
    DEVICE C operator()(C x) const { return fma(x, C(0.5), shift) * factor; }
};

template <class C, int KEPT>
DEVICE void layer_norm(const LayerNorm& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const int64_t n = p.plan.width;
    // Squares that add up to less have lost digits; and so has a variance that is a smaller part of the mean's square.
    const C least = sizeof(C) == 4 ? C(1e-30) : C(1e-290), part = sizeof(C) == 4 ? C(1e-6) : C(0);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
        C v[KEPT > 0 ? KEPT : 1][PACK], mean = 0, sum = 0;
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            x.read(i, C(0), v[k]);
            sum += pack_sum(v[k]);
        });
        if (p.mean.present()) mean = team.sum(sum) / C(n);
        C squares = 0;
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            if (KEPT == 0) x.read(i, C(0), v[k]);
            C square[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                const C d = place(p.plan, i, j) < n ? v[k][j] - mean : C(0);
                square[j] = d * d;
            }
            squares += pack_sum(square);
        });
        const C variance = team.sum(squares) / C(n), spread = variance + C(p.eps);
        if (!(spread >= least && spread < C(INFINITY) && variance >= mean * mean * part)) {
            far_row<C>(p, team, r);
            continue;
        }
        const C rstd = C(1) / sqrt(spread);
        if (team.rank == 0) {
            if (p.mean.present()) store(p.mean, p.mean.offset(r), mean);
            store(p.rstd, p.rstd.offset(r), rstd);
        }
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            C w[PACK], b[PACK];
            if (KEPT == 0) x.read(i, C(0), v[k]);
            read_or(p.weight, i, p.plan, C(1), w);
            read_or(p.bias, i, p.plan, C(0), b);
#pragma unroll
            for (int j = 0; j < PACK; j++) w[j] = fma((v[k][j] - mean) * rstd, w[j], b[j]);
            out.write(i, w);
        });
    }
}
KERNEL layer_norm_f32(const LayerNorm p) { layer_norm<float, HELD>(p); }
KERNEL layer_norm_wide_f32(const LayerNorm p) { layer_norm<float, 0>(p); }
KERNEL layer_norm_f64(const LayerNorm p) { layer_norm<double, 0>(p); }

struct LayerNormGrad {
    RowPlan plan;
    Tensor x, weight, mean, rstd, g, out;
};

// The gradient by a row that is far, all in f64, element by element.
template <class C>
DEVICE void far_row_grad(const LayerNormGrad& p, const Team& team, int64_t r, double rstd) {
    const Row<C> x(p.x, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
    const int64_t n = p.plan.width;
    double mean = 0, e_mean = 0, ex_mean = 0;
    for (int64_t i = team.rank; i < n; i += team.size) mean += double(x.get(i));
    mean = team.sum(mean) / double(n);
    const auto xhat = [&](int64_t i) { return (double(x.get(i)) - mean) * rstd; };
    const auto e = [&](int64_t i) {
        return double(g.get(i)) * (p.weight.present() ? double(Row<C>(p.weight, 0, p.plan).get(i)) : 1.0);
    };
    for (int64_t i = team.rank; i < n; i += team.size) {
        e_mean += e(i);
        ex_mean += xhat(i) * e(i);
    }
    e_mean = team.sum(e_mean) / double(n);
    ex_mean = team.sum(ex_mean) / double(n);
    for (int64_t i = team.rank; i < n; i += team.size)
        store(p.out, out.start + i * out.stride, C(rstd * (e(i) - e_mean - xhat(i) * ex_mean)));
}

// In place of g: a thread writes only what it alone reads.
template <class C, int KEPT>
DEVICE void layer_norm_grad(const LayerNormGrad& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
        const C mean = number<C>(p.mean, r), rstd = number<C>(p.rstd, r);
        if (is_far(mean, rstd)) {
            far_row_grad<C>(p, team, r, rstd);
            continue;
        }
        const Centring<C> centred(mean, rstd);
        C xhat[KEPT > 0 ? KEPT : 1][PACK], e[KEPT > 0 ? KEPT : 1][PACK];
        const auto read = [&](int k, int64_t i) {
            C w[PACK];
            x.read(i, mean, xhat[k]);
            g.read(i, C(0), e[k]);
            read_or(p.weight, i, p.plan, C(1), w);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                xhat[k][j] = centred(xhat[k][j]);
                e[k][j] *= w[j];
            }
        };
        C e_sum = 0, ex_sum = 0;
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            read(k, i);
            C product[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) product[j] = e[k][j] * xhat[k][j];
            e_sum += pack_sum(e[k]);
            ex_sum += pack_sum(product);
        });
        const C e_mean = p.mean.present() ? team.sum(e_sum) / C(p.plan.width) : C(0);
        const C ex_mean = team.sum(ex_sum) / C(p.plan.width);
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            if (KEPT == 0) read(k, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) e[k][j] = rstd * (e[k][j] - e_mean - xhat[k][j] * ex_mean);
            out.write(i, e[k]);
        });
    }
}
KERNEL layer_norm_grad_f32(const LayerNormGrad p) { layer_norm_grad<float, HELD>(p); }
KERNEL layer_norm_grad_wide_f32(const LayerNormGrad p) { layer_norm_grad<float, 0>(p); }
KERNEL layer_norm_grad_f64(const LayerNormGrad p) { layer_norm_grad<double, 0>(p); }

// Rows that are added up in the arithmetic's type; these sums are added in f64.
constexpr int DEPTH = 16;

struct LayerNormParamGrad {
    RowPlan plan;  // not interleaved
    Tensor x, mean, rstd, g;
    double* parts;  // [pieces][2][width]: sums of g xhat, and of g
    int64_t piece, pieces;
    int64_t together;        // rows that were normalised as one
    int32_t lanes, padding;  // threads that lie along a row, a power of 2
};

// The mean of the rows that were normalised with row `first` and as one, unrounded; each thread by itself.
template <class C>
DEVICE double wide_mean(const LayerNormParamGrad& p, int64_t first) {
    double sum = 0;
#pragma unroll 1
    for (int64_t r = first; r < first + p.together; r++) {
        const Row<C> x(p.x, r, p.plan);
#pragma unroll 1
        for (int64_t i = 0; i < p.plan.width; i++) sum += double(x.get(i));
    }
    return sum / (double(p.together) * double(p.plan.width));
}

// Shared memory: 2 PACK f64 for each thread.
template <class C>
DEVICE void layer_norm_param_grad(const LayerNormParamGrad& p) {
    SHARED_MEMORY(memory);
    double* shared = reinterpret_cast<double*>(memory);
    const int lane = threadIdx.x & (p.lanes - 1), first = threadIdx.x / p.lanes, step = blockDim.x / p.lanes;
    const int strip = p.lanes * PACK;
    const int64_t width = p.plan.width, strips = (width + strip - 1) / strip;
    for (int64_t item = blockIdx.x; item < strips * p.pieces; item += gridDim.x) {
        const int64_t piece = item / strips, left = (item - piece * strips) * strip, column = left + lane * PACK;
        const int64_t end = (piece + 1) * p.piece < p.plan.rows ? (piece + 1) * p.piece : p.plan.rows;
        double dw_total[PACK], db_total[PACK];
        for (int j = 0; j < PACK; j++) dw_total[j] = db_total[j] = 0;
        // The first of the far rows that were met last, and their mean.
        int64_t far = -1;
        double far_mean = 0;
        for (int64_t r = piece * p.piece + first; column < width && r < end;) {
            C dw[PACK], db[PACK];
            for (int j = 0; j < PACK; j++) dw[j] = db[j] = 0;
            for (int d = 0; d < DEPTH && r < end; d++, r += step) {
                C x[PACK], g[PACK];
                const C mean = number<C>(p.mean, r), rstd = number<C>(p.rstd, r);
                const bool is_far_row = is_far(mean, rstd);
                if (is_far_row && far != r / p.together * p.together) {
                    far = r / p.together * p.together;
                    far_mean = wide_mean<C>(p, far);
                }
                const Centring<C> centred(mean, rstd);
                Row<C>(p.x, r, p.plan).read(column, mean, x);
                Row<C>(p.g, r, p.plan).read(column, C(0), g);
                if (is_far_row) {
#pragma unroll
                    for (int j = 0; j < PACK; j++) x[j] = C((double(x[j]) - far_mean) * double(rstd));
                } else {
#pragma unroll
                    for (int j = 0; j < PACK; j++) x[j] = centred(x[j]);
                }
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    dw[j] = fma(g[j], x[j], dw[j]);
                    db[j] += g[j];
                }
            }
#pragma unroll
            for (int j = 0; j < PACK; j++) dw_total[j] += dw[j], db_total[j] += db[j];
        }
        for (int j = 0; j < PACK; j++) {
            shared[(first * 2 + 0) * strip + lane * PACK + j] = dw_total[j];
            shared[(first * 2 + 1) * strip + lane * PACK + j] = db_total[j];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < 2 * strip; c += blockDim.x) {
            const int which = c >= strip;
            const int64_t at = left + c - which * strip;
            if (at >= width) continue;
            double total = shared[c];
            for (int k = 1; k < step; k++) total += shared[k * 2 * strip + c];
            p.parts[(piece * 2 + which) * width + at] = total;
        }
        __syncthreads();
    }
}
// Blocks of 256 threads, of which two fit.
KERNEL __launch_bounds__(256, 2) layer_norm_param_grad_f32(const LayerNormParamGrad p) {
    layer_norm_param_grad<float>(p);
}
KERNEL layer_norm_param_grad_f64(const LayerNormParamGrad p) { layer_norm_param_grad<double>(p); }

struct LayerNormParamSum {
    Tensor dweight, dbias;
    const double* parts;
    int64_t width, pieces;
};

// A block for 32 columns: each warp adds every few pieces of these, then the first adds up the warps'. Shared memory: 8
// bytes for each thread.
template <class C>
DEVICE void layer_norm_param_sum(const LayerNormParamSum& p) {
    SHARED_MEMORY(memory);
    double* shared = reinterpret_cast<double*>(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int64_t start = int64_t(blockIdx.x) * 32; start < 2 * p.width; start += int64_t(gridDim.x) * 32) {
        const int64_t i = start + lane, which = i >= p.width, column = i - which * p.width;
        double total = 0;
        if (i < 2 * p.width)
            for (int64_t k = warp; k < p.pieces; k += warps) total += p.parts[k * 2 * p.width + i];
        shared[threadIdx.x] = total;
        __syncthreads();
        const Tensor& out = which ? p.dbias : p.dweight;
        if (warp == 0 && i < 2 * p.width && out.present()) {
            for (int w = 1; w < warps; w++) total += shared[w * 32 + lane];
            store(out, out.offset(column), C(total));
        }
        __syncthreads();
    }
}
KERNEL layer_norm_param_sum_f32(const LayerNormParamSum p) { layer_norm_param_sum<float>(p); }
KERNEL layer_norm_param_sum_f64(const LayerNormParamSum p) { layer_norm_param_sum<double>(p); }
