// Softmax and its logarithm over the last dimension, their gradients, and triangles of matrices.
//
// A team of threads a row (rows.cuh). The sum of exponentials is made in one pass: each thread keeps the largest that it has
// seen and a sum relative to it, and the team puts these together (Milakov and Gimelshein 2018). Then a second pass writes.
#include "rows.cuh"
#include "exponentials.cuh"

struct Softmax {
    RowPlan plan;
    Tensor x, out;
};

// A row of only -inf: zeros, or for the logarithm -inf. With NaN or +inf all is NaN.
template <class C, bool LOG>
DEVICE void softmax(const Softmax& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const int64_t n = p.plan.width, step = int64_t(team.size) * PACK;
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
        const Exponentials<C> e = row_exponentials(team, x);
        const bool nothing = e.most == C(-INFINITY);
        const C factor = LOG ? log(e.sum) : C(1) / e.sum;
        C v[PACK];
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            x.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                if (nothing) v[j] = LOG ? C(-INFINITY) : C(0);
                else v[j] = LOG ? (v[j] - e.most) - factor : exp(v[j] - e.most) * factor;
            }
            out.write(i, v);
        }
    }
}
KERNEL softmax_f32(const Softmax p) { softmax<float, false>(p); }
KERNEL softmax_f64(const Softmax p) { softmax<double, false>(p); }
KERNEL log_softmax_f32(const Softmax p) { softmax<float, true>(p); }
KERNEL log_softmax_f64(const Softmax p) { softmax<double, true>(p); }

struct SoftmaxGrad {
    RowPlan plan;
    Tensor y, g, out;
};

// dx_i = sum over j of g_j dy_j/dx_i = y_i (g_i - sum(g y)). In place of g: a thread writes only what it alone reads.
template <class C>
DEVICE void softmax_grad(const SoftmaxGrad& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const int64_t n = p.plan.width, step = int64_t(team.size) * PACK;
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> y(p.y, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
        C u[PACK], v[PACK], sum = 0;
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            y.read(i, C(0), u);
            g.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) u[j] *= v[j];
            sum += pack_sum(u);
        }
        const C dot = team.sum(sum);
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            y.read(i, C(0), u);
            g.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) v[j] = u[j] * (v[j] - dot);
            out.write(i, v);
        }
    }
}
KERNEL softmax_grad_f32(const SoftmaxGrad p) { softmax_grad<float>(p); }
KERNEL softmax_grad_f64(const SoftmaxGrad p) { softmax_grad<double>(p); }

// dx = g - e^y sum(g); 0 in a row of only -inf. In place of g.
template <class C>
DEVICE void log_softmax_grad(const SoftmaxGrad& p) {
    SHARED_MEMORY(memory);
    const Team team(p.plan.team, memory);
    const int64_t n = p.plan.width, step = int64_t(team.size) * PACK;
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> y(p.y, r, p.plan), g(p.g, r, p.plan), out(p.out, r, p.plan);
        C u[PACK], v[PACK], sum = 0, most = C(-INFINITY);
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            y.read(i, C(-INFINITY), u);
            g.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) most = Larger()(most, u[j]);
            sum += pack_sum(v);
        }
        const C total = team.sum(sum);
        const bool nothing = team.fold(most, C(-INFINITY), Larger()) == C(-INFINITY);
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            y.read(i, C(0), u);
            g.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) v[j] = nothing ? C(0) : v[j] - exp(u[j]) * total;
            out.write(i, v);
        }
    }
}
KERNEL log_softmax_grad_f32(const SoftmaxGrad p) { log_softmax_grad<float>(p); }
KERNEL log_softmax_grad_f64(const SoftmaxGrad p) { log_softmax_grad<double>(p); }

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
    const int64_t n = p.plan.width, step = int64_t(team.size) * PACK;
    const C value = C(p.value);
    for (int64_t r = team.first; r < p.plan.rows; r += team.step) {
        const Row<C> x(p.x, r, p.plan), out(p.out, r, p.plan);
        const int64_t on = r % p.height + p.diagonal;
        C v[PACK];
        for (int64_t i = team.rank * PACK; i < n; i += step) {
            x.read(i, C(0), v);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                const bool kept = p.upper ? i + j >= on : i + j <= on;
                if (!kept) v[j] = value;
            }
            out.write(i, v);
        }
    }
}
KERNEL triangle_f32(const Triangle p) { triangle<float>(p); }
KERNEL triangle_f64(const Triangle p) { triangle<double>(p); }
