// Softmax cross-entropy, the loss of log-probabilities, and their gradients.
//
// With class weights w and a target distribution q = keep p + spread, where p is given or all on one class t, the loss
// of a row is sum over c of w_c q_c s_c, where s_c = -ln softmax_c = (m - x_c) + log with m = max x and log = ln sum
// exp(x - m); of a plain class it is w_t s_t. m and log are never added up: where logits are large, their sum has lost
// log. The derivative by x_c is softmax_c sum(w q) - w_c q_c. A team of threads a row (rows.cuh); m and log take one
// pass (exponentials.cuh), and the gradient one more, which may write over the logits. Rows' losses are f64 and are
// added in an order of their own.
//
// Targets are checked before the loss is taken (indices.cu). Gradients don't check again: a target that is neither a
// class nor ignored counts as ignored there.
#include "exponentials.cuh"

enum Reduction : int32_t { EACH, SUM, MEAN };

struct Scores {
    RowPlan plan;
    Tensor logits, target, weight;  // target: a number for each row, or rows
    const double* totals;           // what the mean divides by, and the sum of w
    int64_t ignore;
    double keep, spread;
    int32_t reduction;
    int32_t given;  // not 0: targets are distributions
};

// What relates a row's scores to probabilities: p = exp((x - most) - log).
template <class C>
struct Base {
    C most, log;
    // A row of only -inf.
    DEVICE bool nothing() const { return most == C(-INFINITY); }
    // The same, with inf and not NaN as -ln p in a row of only -inf.
    DEVICE Base finite() const { return nothing() ? Base{C(0), C(0)} : *this; }
    // -ln p
    DEVICE C surprise(C x) const { return (most - x) + log; }
    DEVICE double surprise_wide(C x) const { return (double(most) - double(x)) + double(log); }
};
// As found in the forward pass; of log-probabilities (no `stats`) 0 and 0.
template <class C>
DEVICE Base<C> row_base(const Tensor& stats, int64_t r) {
    return {number<C>(stats, 2 * r), number<C>(stats, 2 * r + 1)};
}

// The class of a row, -1 if its target is a distribution.
struct Class {
    int64_t at;
    bool counts;
};
DEVICE Class row_class(const Scores& s, int64_t r) {
    if (s.given) return {-1, true};
    const int64_t t = load_index(s.target, s.target.offset(r));
    return {t, t != s.ignore && t >= 0 && t < s.plan.width};
}

template <class C>
DEVICE C class_weight(const Scores& s, int64_t c) {
    return s.weight.present() ? Row<C>(s.weight, 0, s.plan).get(c) : C(1);
}

// w and q of a pack of classes, w 0 beyond the last; q without what is on one class.
template <class C>
DEVICE void weights_and_shares(const Scores& s, int64_t r, int64_t i, C (&w)[PACK], C (&q)[PACK]) {
    read_or(s.weight, i, s.plan, C(1), w);
    if (s.given) Row<C>(s.target, r, s.plan).read(i, C(0), q);
#pragma unroll
    for (int j = 0; j < PACK; j++) {
        if (place(s.plan, i, j) >= s.plan.width) w[j] = 0;
        q[j] = s.given ? fma(C(s.keep), q[j], C(s.spread)) : C(s.spread);
    }
}

// The gradient of a row's loss.
template <class C>
DEVICE C upstream(const Scores& s, const Tensor& g, int64_t r) {
    return C(double(number<C>(g, s.reduction == EACH ? r : 0)) / s.totals[0]);
}

struct Totals {
    Scores scores;
    double* totals;
};

// One block.
template <class C>
DEVICE void cross_entropy_totals(const Totals& p) {
    SHARED_MEMORY(memory);
    const Team team(blockDim.x, memory);
    const Scores& s = p.scores;
    double count = 0, total = 0;
    if (s.reduction == MEAN && !s.given)
        for (int64_t r = team.rank; r < s.plan.rows; r += team.size) {
            const Class c = row_class(s, r);
            if (c.counts) count += class_weight<C>(s, c.at);
        }
    for (int64_t c = team.rank; c < s.plan.width; c += team.size) total += class_weight<C>(s, c);
    count = team.sum(count);
    total = team.sum(total);
    if (team.rank != 0) return;
    p.totals[0] = s.reduction != MEAN ? 1 : s.given ? double(s.plan.rows) : count;
    p.totals[1] = total;
}
ONE_BLOCK_KERNEL cross_entropy_totals_f32(const Totals p) { cross_entropy_totals<float>(p); }
ONE_BLOCK_KERNEL cross_entropy_totals_f64(const Totals p) { cross_entropy_totals<double>(p); }

struct CrossEntropy {
    Scores scores;
    Tensor loss, stats;  // stats absent: the logits are log-probabilities
    double* losses;      // of each team's rows, where they are to be summed
    int64_t teams;
};

template <class C>
DEVICE void cross_entropy(const CrossEntropy& p) {
    SHARED_MEMORY(memory);
    const Scores& s = p.scores;
    const Team team(s.plan.team, memory);
    double losses = 0;
    for (int64_t r = team.first; r < s.plan.rows; r += team.step) {
        const Row<C> x(s.logits, r, s.plan);
        Base<C> base{C(0), C(0)};
        if (p.stats.present()) {
            const Exponentials<C> e = row_exponentials(team, x);
            base.most = e.most;
            if (!base.nothing()) base.log = log(e.sum);
            if (team.rank == 0) {
                store(p.stats, p.stats.offset(2 * r), base.most);
                store(p.stats, p.stats.offset(2 * r + 1), base.log);
            }
            base = base.finite();
        }
        const Class c = row_class(s, r);
        double loss = 0;
        if (c.counts && c.at >= 0) {
            const double share = double(C(s.keep)) * double(class_weight<C>(s, c.at));
            if (share != 0) loss = share * base.surprise_wide(x.get(c.at));
        }
        if (c.counts && (s.given || s.spread != 0)) {
            C rest = 0;
            each_pack<0>(team, s.plan, [&](int, int64_t i) {
                C v[PACK], w[PACK], q[PACK];
                x.read(i, C(0), v);
                weights_and_shares(s, r, i, w, q);
#pragma unroll
                for (int j = 0; j < PACK; j++) {
                    // What has no share counts nothing, were it infinite.
                    const C share = place(s.plan, i, j) < s.plan.width ? w[j] * q[j] : C(0);
                    v[j] = share == C(0) ? C(0) : share * base.surprise(v[j]);
                }
                rest += pack_sum(v);
            });
            loss += team.sum(rest);
        }
        if (team.rank != 0) continue;
        if (s.reduction == EACH) store(p.loss, p.loss.offset(r), C(loss));
        losses += loss;
    }
    if (team.rank == 0 && s.reduction != EACH && team.first < s.plan.rows) p.losses[team.first] = losses;
}
KERNEL cross_entropy_f32(const CrossEntropy p) { cross_entropy<float>(p); }
KERNEL cross_entropy_f64(const CrossEntropy p) { cross_entropy<double>(p); }

// The teams' losses put together by one block.
DEVICE void sum_losses(const CrossEntropy& p) {
    SHARED_MEMORY(memory);
    const Team team(blockDim.x, memory);
    double sum = 0;
    for (int64_t k = team.rank; k < p.teams; k += team.size) sum += p.losses[k];
    sum = team.sum(sum);
    if (team.rank == 0) store(p.loss, p.loss.offset(0), sum / p.scores.totals[0]);
}
ONE_BLOCK_KERNEL cross_entropy_sum(const CrossEntropy p) { sum_losses(p); }

struct CrossEntropyGrad {
    Scores scores;
    Tensor stats, g, out;
};

// out = g (softmax sum(w q) - w q) / count. In place of the logits: a thread writes only what it alone reads.
template <class C>
DEVICE void cross_entropy_grad(const CrossEntropyGrad& p) {
    SHARED_MEMORY(memory);
    const Scores& s = p.scores;
    const Team team(s.plan.team, memory);
    for (int64_t r = team.first; r < s.plan.rows; r += team.step) {
        const Row<C> x(s.logits, r, s.plan), out(p.out, r, s.plan);
        const Base<C> base = row_base<C>(p.stats, r);
        const Class c = base.nothing() ? Class{-1, false} : row_class(s, r);
        const C scale = upstream<C>(s, p.g, r);
        C mass = 0, own = 0;
        if (s.given) {
            each_pack<0>(team, s.plan, [&](int, int64_t i) {
                C w[PACK], q[PACK];
                weights_and_shares(s, r, i, w, q);
#pragma unroll
                for (int j = 0; j < PACK; j++) w[j] = place(s.plan, i, j) < s.plan.width ? w[j] * q[j] : C(0);
                mass += pack_sum(w);
            });
            mass = team.sum(mass);
        } else if (c.counts) {
            own = C(s.keep) * class_weight<C>(s, c.at);
            mass = own + C(s.spread) * C(s.totals[1]);
        }
        const C whole = scale * mass, at_class = scale * own;
        each_pack<0>(team, s.plan, [&](int, int64_t i) {
            C v[PACK], w[PACK], q[PACK];
            x.read(i, C(0), v);
            weights_and_shares(s, r, i, w, q);
#pragma unroll
            for (int j = 0; j < PACK; j++) {
                C grad = whole * exp((v[j] - base.most) - base.log) - scale * w[j] * q[j];
                if (place(s.plan, i, j) == c.at) grad -= at_class;
                v[j] = c.counts ? grad : C(0);
            }
            out.write(i, v);
        });
    }
}
KERNEL cross_entropy_grad_f32(const CrossEntropyGrad p) { cross_entropy_grad<float>(p); }
KERNEL cross_entropy_grad_f64(const CrossEntropyGrad p) { cross_entropy_grad<double>(p); }

// By log-probabilities: -g w / count at the class, else 0.
template <class C>
DEVICE void nll_loss_grad(const CrossEntropyGrad& p) {
    SHARED_MEMORY(memory);
    const Scores& s = p.scores;
    const Team team(s.plan.team, memory);
    for (int64_t r = team.first; r < s.plan.rows; r += team.step) {
        const Row<C> out(p.out, r, s.plan);
        const Class c = row_class(s, r);
        const C grad = c.counts ? -(upstream<C>(s, p.g, r) * class_weight<C>(s, c.at)) : C(0);
        each_pack<0>(team, s.plan, [&](int, int64_t i) {
            C v[PACK];
#pragma unroll
            for (int j = 0; j < PACK; j++) v[j] = place(s.plan, i, j) == c.at ? grad : C(0);
            out.write(i, v);
        });
    }
}
KERNEL nll_loss_grad_f32(const CrossEntropyGrad p) { nll_loss_grad<float>(p); }
KERNEL nll_loss_grad_f64(const CrossEntropyGrad p) { nll_loss_grad<double>(p); }

// By target distributions: g keep w ((m - x) + log) / count.
template <class C>
DEVICE void cross_entropy_target_grad(const CrossEntropyGrad& p) {
    SHARED_MEMORY(memory);
    const Scores& s = p.scores;
    const Team team(s.plan.team, memory);
    for (int64_t r = team.first; r < s.plan.rows; r += team.step) {
        const Row<C> x(s.logits, r, s.plan), out(p.out, r, s.plan);
        const Base<C> base = row_base<C>(p.stats, r).finite();
        const C scale = upstream<C>(s, p.g, r) * C(s.keep);
        each_pack<0>(team, s.plan, [&](int, int64_t i) {
            C v[PACK], w[PACK];
            x.read(i, C(0), v);
            read_or(s.weight, i, s.plan, C(1), w);
#pragma unroll
            for (int j = 0; j < PACK; j++)  // no share of a class without weight would count
                v[j] = C(s.keep) * w[j] == C(0) ? C(0) : scale * w[j] * base.surprise(v[j]);
            out.write(i, v);
        });
    }
}
KERNEL cross_entropy_target_grad_f32(const CrossEntropyGrad p) { cross_entropy_target_grad<float>(p); }
KERNEL cross_entropy_target_grad_f64(const CrossEntropyGrad p) { cross_entropy_target_grad<double>(p); }

struct CrossEntropyWeightGrad {
    Scores scores;
    Tensor stats, g, out;
    double *sums, *counts;  // of each class: sum over rows of g q_c s_c / count, and rows with this target
};

// Two kernels, for class weights are seldom learned: first a thread sums one class over all rows.
template <class C>
DEVICE void cross_entropy_weight_sums(const CrossEntropyWeightGrad& p) {
    const Scores& s = p.scores;
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; c < s.plan.width; c += step) {
        double sum = 0, count = 0;
        for (int64_t r = 0; r < s.plan.rows; r++) {
            const Class target = row_class(s, r);
            if (!target.counts) continue;
            C q = C(s.spread);
            if (s.given) q = fma(C(s.keep), Row<C>(s.target, r, s.plan).get(c), q);
            if (target.at == c) {
                q += C(s.keep);
                count += 1;
            }
            // Of what has no share nothing counts, were it infinite.
            if (q == 0) continue;
            const double surprise = row_base<C>(p.stats, r).finite().surprise_wide(Row<C>(s.logits, r, s.plan).get(c));
            sum += double(upstream<C>(s, p.g, r)) * double(q) * surprise;
        }
        p.sums[c] = sum;
        p.counts[c] = count;
    }
}
KERNEL cross_entropy_weight_sums_f32(const CrossEntropyWeightGrad p) { cross_entropy_weight_sums<float>(p); }
KERNEL cross_entropy_weight_sums_f64(const CrossEntropyWeightGrad p) { cross_entropy_weight_sums<double>(p); }

// Then one block takes off what a weight takes from the mean by being in its divisor: with L the mean, the derivative
// of sum / count by w_c has the term -L count_c / count.
template <class C>
DEVICE void cross_entropy_weight_grad(const CrossEntropyWeightGrad& p) {
    SHARED_MEMORY(memory);
    const Scores& s = p.scores;
    const Team team(blockDim.x, memory);
    double mean = 0;
    if (s.reduction == MEAN)
        for (int64_t c = team.rank; c < s.plan.width; c += team.size) {
            const double weight = class_weight<C>(s, c);
            if (weight != 0) mean += weight * p.sums[c];
        }
    mean = team.sum(mean) / s.totals[0];
    for (int64_t c = team.rank; c < s.plan.width; c += team.size) {
        const double grad = p.counts[c] > 0 ? p.sums[c] - mean * p.counts[c] : p.sums[c];
        store(p.out, p.out.offset(c), C(grad));
    }
}
ONE_BLOCK_KERNEL cross_entropy_weight_grad_f32(const CrossEntropyWeightGrad p) { cross_entropy_weight_grad<float>(p); }
ONE_BLOCK_KERNEL cross_entropy_weight_grad_f64(const CrossEntropyWeightGrad p) { cross_entropy_weight_grad<double>(p); }
