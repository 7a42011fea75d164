// One AdamW step in place (Loshchilov and Hutter 2019), with what depends on the step alone computed on the host.
#include "tensor.cuh"

struct AdamW {
    Tensor p, g, m, v;
    double grad_scale;
    double shrink;              // 1 - lr wd
    double beta1, rest1;        // b1, 1 - b1
    double beta2, rest2;        // b2, 1 - b2
    double rate;                // lr / (1 - b1^t)
    double root;                // 1 / sqrt(1 - b2^t)
    double eps;
    int64_t packs;              // whole packs may be loaded and stored
};

// The settings in the type of the arithmetic.
template <class C>
struct Settings {
    C grad_scale, shrink, beta1, rest1, beta2, rest2, rate, root, eps;

    DEVICE explicit Settings(const AdamW& s)
        : grad_scale(C(s.grad_scale)), shrink(C(s.shrink)), beta1(C(s.beta1)), rest1(C(s.rest1)), beta2(C(s.beta2)),
          rest2(C(s.rest2)), rate(C(s.rate)), root(C(s.root)), eps(C(s.eps)) {}

    DEVICE void step(C& p, C g, C& m, C& v) const {
        g *= grad_scale;
        m = beta1 * m + rest1 * g;
        v = beta2 * v + rest2 * (g * g);
        p = shrink * p - rate * m / (sqrt(v) * root + eps);
    }
};

template <class C>
DEVICE void adamw(const AdamW& s) {
    const Settings<C> settings(s);
    const int64_t n = s.p.count(), each = s.packs ? PACK : 1;
    const int64_t start = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = start * each; i < n; i += step * each) {
        if (s.packs && i + PACK <= n) {
            C p[PACK], g[PACK], m[PACK], v[PACK];
            load_pack(s.p, i, p);
            load_pack(s.g, i, g);
            load_pack(s.m, i, m);
            load_pack(s.v, i, v);
#pragma unroll
            for (int e = 0; e < PACK; e++) settings.step(p[e], g[e], m[e], v[e]);
            store_pack(s.p, i, p);
            store_pack(s.m, i, m);
            store_pack(s.v, i, v);
            continue;
        }
        for (int64_t j = i; j < i + each && j < n; j++) {
            const int64_t at_p = s.p.offset(j), at_m = s.m.offset(j), at_v = s.v.offset(j);
            C p = load<C>(s.p, at_p), m = load<C>(s.m, at_m), v = load<C>(s.v, at_v);
            settings.step(p, load<C>(s.g, s.g.offset(j)), m, v);
            store(s.p, at_p, p);
            store(s.m, at_m, m);
            store(s.v, at_v, v);
        }
    }
}
KERNEL adamw_f32(const AdamW s) { adamw<float>(s); }
KERNEL adamw_f64(const AdamW s) { adamw<double>(s); }
