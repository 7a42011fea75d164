// Reductions over any dimensions, sums of squares, and gradients of reductions.
//
// The dimensions that are reduced are one index in row-major order, the group; those that are kept another.
// Two ways in:
// - reduce_rows, reduce_norms: a team of threads for each piece of a group (see rows.cuh);
// - reduce_columns, for what isn't a norm: where the innermost dimension is kept, a thread for PACK columns and some
//   rows.
// Which one, and how groups are cut, follows from the shape alone. Numerics: sums, maxima and minima join DEPTH
// elements in the arithmetic's type and what comes of these in f64, all else runs in f64; so the error doesn't grow
// with the length. Pieces are put together in f64, in an order of its own (reduce_parts); there are so few that what
// they leave is bounded. Variance and log-sum-exp take two passes by one team. So do norms whose sum of powers f64
// may not hold: those of f64 and of high orders.
#include "rows.cuh"
#include "scalar.cuh"

enum Kind : int32_t {
    SUM, MAX, MIN, PROD, LOG_SUM_EXP, VAR, STD, COUNT, NORM_1, NORM_2, NORM, NORM_MAX, NORM_MIN, SQUARES
};

// Elements that are joined in the arithmetic's type.
constexpr int DEPTH = 16;

struct Times {
    template <class C>
    DEVICE C operator()(C a, C b) const { return a * b; }
};
struct Smaller {  // NaN wins
    template <class C>
    DEVICE C operator()(C a, C b) const { return a != a || a < b ? a : b; }
};

// What is folded of each element, in which type, from where, and how.
template <class C>
struct Plain {
    typedef C Type;
    DEVICE Type operator()(C x) const { return x; }
};
template <class C>
struct Wide {
    typedef double Type;
    DEVICE Type operator()(C x) const { return x; }
};
template <class C>
struct Magnitude {
    int kind;
    double ord;
    DEVICE double operator()(C value) const {
        const double x = value;
        switch (kind) {
            case COUNT: return x == 0 ? 0 : 1;
            case NORM_2: case SQUARES: return x * x;
            case NORM: return pow(fabs(x), ord);
            default: return fabs(x);
        }
    }
};

DEVICE double finish(int kind, double ord, double total) {
    return kind == NORM_2 ? sqrt(total) : kind == NORM ? pow(total, 1 / ord) : total;
}

// Calls visit(map, join, start) for the plain folds.
template <class C, class Visit>
DEVICE void with_fold(int kind, Visit visit) {
    const double infinity = INFINITY;
    switch (kind) {
        case MAX: return visit(Plain<C>(), Larger(), -infinity);
        case MIN: return visit(Plain<C>(), Smaller(), infinity);
        case PROD: return visit(Wide<C>(), Times(), 1.0);
        default: return visit(Plain<C>(), Add(), 0.0);
    }
}
// And for norms: visit(join, start).
template <class Visit>
DEVICE void with_norm(int kind, Visit visit) {
    switch (kind) {
        case NORM_MAX: return visit(Larger(), 0.0);
        case NORM_MIN: return visit(Smaller(), double(INFINITY));
        default: return visit(Add(), 0.0);
    }
}

// Elements i .. i + PACK of a tensor that is one index, from `base`; `fill` from `end` on.
template <class C>
DEVICE void gather_pack(const Tensor& t, int64_t base, int64_t i, int64_t end, bool packs, C fill, C (&x)[PACK]) {
    if (packs && i + PACK <= end) return load_pack(t, base + i, x);
#pragma unroll 1
    for (int j = 0; j < PACK; j++) {
        const C value = i + j < end ? load<C>(t, base + t.offset(i + j)) : fill;
#pragma unroll
        for (int k = 0; k < PACK; k++)  // so that x stays in registers
            if (k == j) x[k] = value;
    }
}

struct ReduceRows {
    Tensor kept, reduced, out;  // x by its kept and by its reduced dimensions; a number for each output
    double* parts;              // [outputs][pieces], if there are several
    int64_t outputs, group, piece, pieces;
    double parameter;
    int32_t kind, team, packs, padding;
};

// The fold of map(x) over the elements from .. end of the group of output o, by packs; for maps of little code.
template <class C, class Map, class Join>
DEVICE double fold_packs(const ReduceRows& p, const Team& team, int64_t o, int64_t from, int64_t end,
                                     Map map, Join join, typename Map::Type start) {
    typedef typename Map::Type A;
    const int64_t base = p.kept.offset(o);
    double total = start;
    for (int64_t i = from + team.rank * PACK; i < end;) {
        A lanes[PACK];
        for (int j = 0; j < PACK; j++) lanes[j] = start;
        for (int d = 0; d < DEPTH && i < end; d++, i += team.size * PACK) {
            C x[PACK];
            gather_pack(p.reduced, base, i, end, p.packs != 0, C(start), x);
#pragma unroll
            for (int j = 0; j < PACK; j++) lanes[j] = join(lanes[j], map(x[j]));
        }
#pragma unroll
        for (int step = PACK / 2; step > 0; step /= 2)
#pragma unroll
            for (int j = 0; j < step; j++) lanes[j] = join(lanes[j], lanes[j + step]);
        total = join(total, double(lanes[0]));
    }
    return team.fold(total, double(start), join);
}

// The same in f64, element by element.
template <class C, class Map, class Join>
DEVICE double fold_each(const ReduceRows& p, const Team& team, int64_t o, int64_t from, int64_t end, Map map, Join join,
                        double start) {
    const int64_t base = p.kept.offset(o);
    double total = start;
    for (int64_t i = from + team.rank; i < end; i += team.size)
        total = join(total, map(load<C>(p.reduced, base + p.reduced.offset(i))));
    return team.fold(total, start, join);
}

// Calls fold(team, o, from, end), which gives every thread the fold, for each piece of each output.
template <class Fold>
DEVICE void reduce_pieces(const ReduceRows& p, Fold fold) {
    SHARED_MEMORY(memory);
    const Team team(p.team, memory);
    for (int64_t item = team.first; item < p.outputs * p.pieces; item += team.step) {
        const int64_t o = item / p.pieces, from = (item - o * p.pieces) * p.piece;
        const double total = fold(team, o, from, from + p.piece < p.group ? from + p.piece : p.group);
        if (team.rank != 0) continue;
        if (p.pieces > 1) p.parts[item] = total;
        else store(p.out, p.out.offset(o), finish(p.kind, p.parameter, total));
    }
}

template <class C>
DEVICE void reduce_rows(const ReduceRows& p) {
    with_fold<C>(p.kind, [&](auto map, auto join, double start) {
        reduce_pieces(p, [&](const Team& team, int64_t o, int64_t from, int64_t end) -> double {
            return fold_packs<C>(p, team, o, from, end, map, join, typename decltype(map)::Type(start));
        });
    });
}
KERNEL reduce_rows_f32(const ReduceRows p) { reduce_rows<float>(p); }
KERNEL reduce_rows_f64(const ReduceRows p) { reduce_rows<double>(p); }

template <class C>
DEVICE void reduce_norms(const ReduceRows& p) {
    with_norm(p.kind, [&](auto join, double start) {
        reduce_pieces(p, [&](const Team& team, int64_t o, int64_t from, int64_t end) {
            return fold_each<C>(p, team, o, from, end, Magnitude<C>{p.kind, p.parameter}, join, start);
        });
    });
}
KERNEL reduce_norms_f32(const ReduceRows p) { reduce_norms<float>(p); }
KERNEL reduce_norms_f64(const ReduceRows p) { reduce_norms<double>(p); }

template <class C>
struct ExpAbove {
    C most;
    DEVICE double operator()(C x) const { return exp(x - most); }
};
template <class C>
struct SquareAround {
    double mean;
    DEVICE double operator()(C x) const { return (x - mean) * (x - mean); }
};
template <class C>
struct Equal {
    C value;
    bool magnitude;
    DEVICE double operator()(C x) const { return (magnitude ? fabs(x) : x) == value ? 1 : 0; }
};

template <class C>
DEVICE double mean_of_group(const ReduceRows& p, const Team& team, int64_t o) {
    return fold_each<C>(p, team, o, 0, p.group, Wide<C>(), Add(), 0.0) / p.group;
}

template <class C>
struct Relative {
    double most, ord;
    DEVICE double operator()(C value) const {
        const double x = fabs(double(value)) / most;
        return ord == 2 ? x * x : pow(x, ord);
    }
};
template <class C>
struct ScaledSquare {
    double by, mean;
    DEVICE double operator()(C x) const { return (x / by - mean) * (x / by - mean); }
};
template <class C>
struct Scaled {
    double by;
    DEVICE double operator()(C x) const { return x / by; }
};

// A sum of powers that f64 holds with all its digits.
DEVICE bool is_held(double sum) { return sum >= 1e-290 && sum < INFINITY; }

DEVICE double order(const ReduceRows& p) { return p.kind == NORM_2 ? 2.0 : p.parameter; }

// (sum |x / most|^ord)^(1/ord): the norm relative to its leading magnitude; 1 where that isn't finite, and is the norm.
template <class C>
DEVICE double relative_norm(const ReduceRows& p, const Team& team, int64_t o, double most) {
    if (!isfinite(most)) return 1;
    const double sum = fold_each<C>(p, team, o, 0, p.group, Relative<C>{most, order(p)}, Add(), 0.0);
    return finish(p.kind, p.parameter, sum);
}

// The largest magnitude, or of a norm of negative order the smallest.
template <class C>
DEVICE double leading(const ReduceRows& p, const Team& team, int64_t o) {
    const Magnitude<C> magnitude{NORM_1, 0};
    if (p.kind == NORM && p.parameter < 0)
        return fold_each<C>(p, team, o, 0, p.group, magnitude, Smaller(), double(INFINITY));
    return fold_each<C>(p, team, o, 0, p.group, magnitude, Larger(), 0.0);
}

// The reductions of two passes: a team for each group.
template <class C>
DEVICE void reduce_twice(const ReduceRows& p) {
    SHARED_MEMORY(memory);
    const Team team(p.team, memory);
    for (int64_t o = team.first; o < p.outputs; o += team.step) {
        double y;
        if (p.kind == LOG_SUM_EXP) {
            const C most = fold_packs<C>(p, team, o, 0, p.group, Plain<C>(), Larger(), C(-INFINITY));
            y = most;
            // Of only -inf it is -inf; +inf and NaN pass.
            if (isfinite(most)) y += log(fold_each<C>(p, team, o, 0, p.group, ExpAbove<C>{most}, Add(), 0.0));
        } else if (p.kind == NORM_2 || p.kind == NORM) {
            const double sum = fold_each<C>(p, team, o, 0, p.group, Magnitude<C>{p.kind, p.parameter}, Add(), 0.0);
            y = finish(p.kind, p.parameter, sum);
            if (!is_held(sum)) {
                const double most = leading<C>(p, team, o);
                y = most == 0 ? 0 : most * relative_norm<C>(p, team, o, most);
            }
        } else {
            const double mean = mean_of_group<C>(p, team, o), rest = fmax(p.group - p.parameter, 0.0);
            y = fold_each<C>(p, team, o, 0, p.group, SquareAround<C>{mean}, Add(), 0.0) / rest;
            if (p.kind == STD) {
                const bool held = is_held(y);
                y = sqrt(y);
                const double most = held ? 0 : leading<C>(p, team, o);
                if (most > 0 && isfinite(most)) {
                    const double scaled = fold_each<C>(p, team, o, 0, p.group, Scaled<C>{most}, Add(), 0.0) / p.group;
                    const ScaledSquare<C> square{most, scaled};
                    y = most * sqrt(fold_each<C>(p, team, o, 0, p.group, square, Add(), 0.0) / rest);
                }
            }
        }
        if (team.rank == 0) store(p.out, p.out.offset(o), y);
    }
}
KERNEL reduce_twice_f32(const ReduceRows p) { reduce_twice<float>(p); }
KERNEL reduce_twice_f64(const ReduceRows p) { reduce_twice<double>(p); }

struct ReduceColumns {
    Tensor outer, rows, columns, out;  // x by the kept dimensions before the reduced ones, those, and the kept behind
    double* parts;                     // [outputs][pieces], if there are several
    int64_t outers, count, width, piece, pieces;
    double parameter;
    int32_t kind;
    int32_t lanes;  // threads that lie along a row, a power of 2; the others take other rows
    int32_t packs, padding;
};

// Shared memory: PACK values of 8 bytes for each thread.
template <class C>
DEVICE void reduce_columns(const ReduceColumns& p) {
    SHARED_MEMORY(memory);
    const int lane = threadIdx.x & (p.lanes - 1), first = threadIdx.x / p.lanes, step = blockDim.x / p.lanes;
    const int strip = p.lanes * PACK;
    const int64_t strips = (p.width + strip - 1) / strip;
    with_fold<C>(p.kind, [&](auto map, auto join, double start) {
        typedef typename decltype(map)::Type A;
        double* part = reinterpret_cast<double*>(memory);
        for (int64_t item = blockIdx.x; item < p.outers * strips * p.pieces; item += gridDim.x) {
            const int64_t piece = item % p.pieces, rest = item / p.pieces;
            const int64_t o = rest / strips, left = rest % strips * strip;
            const int64_t column = left + lane * PACK;
            const int64_t end = (piece + 1) * p.piece < p.count ? (piece + 1) * p.piece : p.count;
            double totals[PACK];
            for (int j = 0; j < PACK; j++) totals[j] = start;
            for (int64_t r = piece * p.piece + first; r < end;) {
                A sums[PACK];
                for (int j = 0; j < PACK; j++) sums[j] = A(start);
                for (int d = 0; d < DEPTH && r < end; d++, r += step) {
                    const int64_t base = p.outer.offset(o) + p.rows.offset(r);
                    C x[PACK];
                    gather_pack(p.columns, base, column, p.width, p.packs != 0, C(start), x);
#pragma unroll
                    for (int j = 0; j < PACK; j++) sums[j] = join(sums[j], map(x[j]));
                }
#pragma unroll
                for (int j = 0; j < PACK; j++) totals[j] = join(totals[j], double(sums[j]));
            }
            for (int j = 0; j < PACK; j++) part[first * strip + lane * PACK + j] = totals[j];
            __syncthreads();
            for (int c = threadIdx.x; c < strip && left + c < p.width; c += blockDim.x) {
                double total = part[c];
                for (int k = 1; k < step; k++) total = join(total, part[k * strip + c]);
                const int64_t index = o * p.width + left + c;
                if (p.pieces > 1) p.parts[index * p.pieces + piece] = total;
                else store(p.out, p.out.offset(index), finish(p.kind, p.parameter, total));
            }
            __syncthreads();
        }
    });
}
KERNEL reduce_columns_f32(const ReduceColumns p) { reduce_columns<float>(p); }
KERNEL reduce_columns_f64(const ReduceColumns p) { reduce_columns<double>(p); }

struct ReduceParts {
    Tensor out;
    const double* parts;
    int64_t outputs, pieces;
    double parameter;
    int32_t kind, padding;
};

// A warp puts the pieces of an output together.
KERNEL reduce_parts(const ReduceParts p) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int64_t first = int64_t(blockIdx.x) * warps + (threadIdx.x >> 5), step = int64_t(gridDim.x) * warps;
    const auto put_together = [&](auto join, double start) {
        for (int64_t o = first; o < p.outputs; o += step) {
            double total = start;
            for (int64_t i = lane; i < p.pieces; i += 32) total = join(total, p.parts[o * p.pieces + i]);
            total = warp_fold(total, join);
            if (lane == 0) store(p.out, p.out.offset(o), finish(p.kind, p.parameter, total));
        }
    };
    const auto plain = [&](auto, auto join, double start) { put_together(join, start); };
    if (p.kind < LOG_SUM_EXP) with_fold<double>(p.kind, plain);
    else with_norm(p.kind, put_together);
}

struct ReduceStat {
    ReduceRows x;  // out: f64
    Tensor y;      // by the kept dimensions
};

// What a gradient needs to know of its group: of maxima and minima how many are equal to y, of variances the mean, and
// where y is what the reduction is taken relative to, the sum or the norm relative to that.
template <class C>
DEVICE void reduce_stat(const ReduceStat& q) {
    SHARED_MEMORY(memory);
    const ReduceRows& p = q.x;
    const Team team(p.team, memory);
    for (int64_t o = team.first; o < p.outputs; o += team.step) {
        double stat;
        if (p.kind == VAR || p.kind == STD) {
            stat = mean_of_group<C>(p, team, o);
        } else if (p.kind == LOG_SUM_EXP) {
            const ExpAbove<C> above{load<C>(q.y, q.y.offset(o))};
            stat = fold_each<C>(p, team, o, 0, p.group, above, Add(), 0.0);
        } else if (p.kind == NORM_2 || p.kind == NORM) {
            stat = relative_norm<C>(p, team, o, double(load<C>(q.y, q.y.offset(o))));
        } else {
            const C y = load<C>(q.y, q.y.offset(o));
            const Equal<C> wins{y, p.kind == NORM_MAX || p.kind == NORM_MIN};
            stat = fold_each<C>(p, team, o, 0, p.group, wins, Add(), 0.0);
        }
        if (team.rank == 0) store(p.out, p.out.offset(o), stat);
    }
}
KERNEL reduce_stat_f32(const ReduceStat p) { reduce_stat<float>(p); }
KERNEL reduce_stat_f64(const ReduceStat p) { reduce_stat<double>(p); }

struct ReduceGrad {
    Tensor x, y, g, out, stat;  // all of x's shape: y, g and stat repeat
    int64_t group;
    double parameter;
    int32_t kind, padding;
};

// The derivatives are listed at `ReduceFn` in crates/core/src/kernel/reduce.rs; y is x reduced by
// `ReduceFn::in_grad`. One thread an element.
template <class C>
DEVICE C reduce_derivative(const ReduceGrad& p, int64_t i) {
    const C x = load<C>(p.x, p.x.offset(i)), y = load<C>(p.y, p.y.offset(i)), g = load<C>(p.g, p.g.offset(i));
    const double stat = p.stat.present() ? load<double>(p.stat, p.stat.offset(i)) : 0;
    const double rest = fmax(p.group - p.parameter, 0.0);
    switch (p.kind) {
        // Of no winner y is NaN, and says so.
        case MAX: case MIN: return x == y ? g / C(stat) : y != y ? y : C(0);
        // With inf or NaN there is no sum.
        case LOG_SUM_EXP: return y == C(-INFINITY) ? C(0) : (isfinite(y) ? g / C(stat) : g) * exp(x - y);
        case VAR: return C((x - stat) * (2.0 * g / rest));
        case STD: return C((x - stat) * (y == 0 ? 0.0 : g / (y * rest)));
        case NORM_MAX: case NORM_MIN: return fabs(x) == y ? g / C(stat) * sign(x) : C(0);
        case COUNT: return 0;
        case NORM_1: return g * sign(x);
        case NORM_2: return y == 0 ? C(0) : x / y * (g / C(stat));
        default:
            return x == 0 || y == 0 ? C(0) : g * sign(x) * C(pow(fabs(double(x)) / y / stat, p.parameter - 1));
    }
}
template <class C>
DEVICE void reduce_grad(const ReduceGrad& p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        store(p.out, p.out.offset(i), reduce_derivative<C>(p, i));
}
KERNEL reduce_grad_f32(const ReduceGrad p) { reduce_grad<float>(p); }
KERNEL reduce_grad_f64(const ReduceGrad p) { reduce_grad<double>(p); }
