// Softmax and its logarithm over the last dimension, their gradients, and triangles of matrices.
//
// A team of threads a row (rows.cuh), which keeps it in registers if it fits. Else the row is read twice: the sum of
// exponentials takes one pass (exponentials.cuh), the second writes.
#include "rows.cuh"
#include "exponentials.cuh"

struct Softmax {
    RowPlan plan;
    Tensor x, out;
};

// A row of only -inf: zeros, or for the logarithm -inf. With NaN or +inf all is NaN.
template <class C, int KEPT, bool LOG>
DEVICE void softmax(const Softmax& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const C none = C(-INFINITY);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
        C v[KEPT > 0 ? KEPT : 1][PACK];
        Exponentials<C> e{none, 0};
        if constexpr (KEPT > 0) {
            each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
                x.read(i, none, v[k]);
#pragma unroll
                for (int j = 0; j < PACK; j++) e.most = Larger()(e.most, v[k][j]);
            });
            e.most = team.fold(e.most, none, Larger());
            each_pack<KEPT>(team, p.plan, [&](int k, int64_t) {
                C power[PACK];
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    v[k][j] -= e.most;
                    power[j] = exp(v[k][j]);
                    if (!LOG) v[k][j] = power[j];
                }
                e.sum += pack_sum(power);
            });
            e.sum = team.sum(e.sum);
        } else {
            e = row_exponentials(team, x);
        }
        const C factor = LOG ? log(e.sum) : C(1) / e.sum;
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            if constexpr (KEPT == 0) x.read(i, C(0), v[k]);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                if constexpr (KEPT == 0) v[k][j] = LOG ? v[k][j] - e.most : exp(v[k][j] - e.most);
                v[k][j] = e.most == none ? (LOG ? none : C(0)) : LOG ? v[k][j] - factor : v[k][j] * factor;
            }
            out.write(i, v[k]);
        });
    }
}
KERNEL softmax_f32(const Softmax p) { softmax<float, HELD, false>(p); }
KERNEL softmax_wide_f32(const Softmax p) { softmax<float, 0, false>(p); }
KERNEL softmax_f64(const Softmax p) { softmax<double, 0, false>(p); }
KERNEL log_softmax_f32(const Softmax p) { softmax<float, HELD, true>(p); }
KERNEL log_softmax_wide_f32(const Softmax p) { softmax<float, 0, true>(p); }
KERNEL log_softmax_f64(const Softmax p) { softmax<double, 0, true>(p); }

struct SoftmaxGrad {
    RowPlan plan;
    Tensor y, g, out;
};

// dx_i = sum over j of g_j dy_j/dx_i = y_i (g_i - sum(g y)). In place of g: a thread writes only what it alone reads.
template <class C, int KEPT>
DEVICE void softmax_grad(const SoftmaxGrad& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> y(p.y, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
        C u[KEPT > 0 ? KEPT : 1][PACK], v[KEPT > 0 ? KEPT : 1][PACK], sum = 0;
        const auto read = [&](int k, int64_t i) {
            y.read(i, C(0), u[k]);
            g.read(i, C(0), v[k]);
        };
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            read(k, i);
            C product[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) product[j] = u[k][j] * v[k][j];
            sum += pack_sum(product);
        });
        const C dot = team.sum(sum);
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            if (KEPT == 0) read(k, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) v[k][j] = u[k][j] * (v[k][j] - dot);
            out.write(i, v[k]);
        });
    }
}
KERNEL softmax_grad_f32(const SoftmaxGrad p) { softmax_grad<float, HELD>(p); }
KERNEL softmax_grad_wide_f32(const SoftmaxGrad p) { softmax_grad<float, 0>(p); }
KERNEL softmax_grad_f64(const SoftmaxGrad p) { softmax_grad<double, 0>(p); }

// dx = g - e^y sum(g); 0 in a row of only -inf. In place of g.
template <class C, int KEPT>
DEVICE void log_softmax_grad(const SoftmaxGrad& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const C none = C(-INFINITY);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> y(p.y, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
        C u[KEPT > 0 ? KEPT : 1][PACK], v[KEPT > 0 ? KEPT : 1][PACK], sum = 0, most = none;
        const auto read = [&](int k, int64_t i) {
            y.read(i, none, u[k]);
            g.read(i, C(0), v[k]);
        };
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            read(k, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) most = Larger()(most, u[k][j]);
            sum += pack_sum(v[k]);
        });
        const C total = team.sum(sum);
        const bool nothing = team.fold(most, none, Larger()) == none;
        each_pack<KEPT>(team, p.plan, [&](int k, int64_t i) {
            if (KEPT == 0) read(k, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) v[k][j] = nothing ? C(0) : v[k][j] - exp(u[k][j]) * total;
            out.write(i, v[k]);
        });
    }
}
KERNEL log_softmax_grad_f32(const SoftmaxGrad p) { log_softmax_grad<float, HELD>(p); }
KERNEL log_softmax_grad_wide_f32(const SoftmaxGrad p) { log_softmax_grad<float, 0>(p); }
KERNEL log_softmax_grad_f64(const SoftmaxGrad p) { log_softmax_grad<double, 0>(p); }

struct Triangle {
    RowPlan plan;
    Tensor x, out;
    int64_t height;    // rows of a matrix
    int64_t diagonal;  // within +- the size of a matrix, and one more
    double value;
    int32_t upper, padding;
};

template <class C>
DEVICE void triangle(const Triangle& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const C value = C(p.value);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
        const int64_t on = r % p.height + p.diagonal;
        each_pack<0>(team, p.plan, [&](int, int64_t i) {
            C v[PACK];
            x.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                const int64_t column = place(p.plan, i, j);
                if (p.upper ? column < on : column > on) v[j] = value;
            }
            out.write(i, v);
        });
    }
}
KERNEL triangle_f32(const Triangle p) { triangle<float>(p); }
KERNEL triangle_f64(const Triangle p) { triangle<double>(p); }
