// What all attention kernels share: their parameters, where a sequence lies in the tensors, which keys a query sees,
// the user's mask, and dropout. The twin of `Attention` in crates/cuda/src/attention.rs.
//
// The mathematics is derived once, in crates/cpu/src/attention_grad.rs (and with the tape's names in
// crates/core/src/ops/attention.rs); causal and window are aligned at the bottom right (`AttentionSpec`).
#pragma once
#include "philox.cuh"
#include "tensor.cuh"

struct Attention {
    Tensor q, k, v;           // [batch, time, heads, head size]; k and v have a time and heads of their own, v a size
    Tensor mask;              // absent, or [batch, heads, Tq, Tk]: added to the scores, or bool
    Tensor out, g;            // [batch, Tq, heads, size of v]
    Tensor stats;             // [batch, heads, Tq, 2]: see `Statistics`
    Tensor delta;             // [batch, heads, Tq]
    Tensor dq, dk, dv;        // as q, k, v
    Tensor dmask;             // [batch or 1, heads or 1, Tq or 1, Tk]
    // Null, or where sequences begin in tensors of batch 1, and behind the last one where it ends: [sequences + 1].
    // Queries of sequence s are times cumulative_q[s] .. cumulative_q[s + 1]; they see keys of their own sequence only,
    // and `causal` and `window` count in the sequence. All else is as if it were one long sequence with such a mask.
    const int32_t *cumulative_q, *cumulative_k;
    int64_t sequences;        // the batch, if they aren't given
    int64_t longest_q, longest_k;
    RandomStream stream;
    uint64_t threshold;       // a weight is dropped where its word is below this
    double scale, keep;       // keep: 1 / (1 - p)
    int64_t window;           // -1: none; else below the number of keys
    int32_t causal, drops;
    int32_t aligned;          // bits of ALIGNED_*: whose rows can be copied 16 bytes at a time
};
enum Aligned : int32_t {
    ALIGNED_Q = 1,
    ALIGNED_K = 2,
    ALIGNED_V = 4,
    ALIGNED_G = 8,
    ALIGNED_OUT = 16,
    ALIGNED_DQ = 32,
    ALIGNED_DK = 64,
    ALIGNED_DV = 128,
};

// Where a sequence lies, and what its queries see. Times i and j count in the sequence.
struct Sequence {
    int64_t batch, first_q, first_k;
    int queries, keys;
    int shift;  // query i stands at key i + shift
    bool causal, windowed;
    int window;

    DEVICE Sequence(const Attention& p, int64_t index) {
        const bool ragged = p.cumulative_q != nullptr;
        batch = ragged ? 0 : index;
        first_q = ragged ? p.cumulative_q[index] : 0;
        first_k = ragged ? p.cumulative_k[index] : 0;
        queries = ragged ? p.cumulative_q[index + 1] - int(first_q) : int(p.q.shape[1]);
        keys = ragged ? p.cumulative_k[index + 1] - int(first_k) : int(p.k.shape[1]);
        shift = keys - queries;
        causal = p.causal;
        windowed = p.window >= 0;
        window = int(p.window);
    }

    // Keys that query i sees: first_key(i) .. end_key(i).
    DEVICE int first_key(int i) const { return windowed ? max(i + shift + 1 - window, 0) : 0; }
    DEVICE int end_key(int i) const { return causal ? max(min(i + shift + 1, keys), 0) : keys; }
    // Queries that see any of the keys from `from` up to and with `last`: first_query(from) .. end_query(last).
    DEVICE int first_query(int from) const { return causal ? max(from - shift, 0) : 0; }
    DEVICE int end_query(int last) const { return windowed ? min(last + window - shift, queries) : queries; }

    DEVICE bool sees(int i, int j) const {
        return i >= 0 && i < queries && j >= max(first_key(i), 0) && j < end_key(i);
    }
    // True where all of `rows` queries from i, those behind the last one included, see all of `columns` keys from j.
    DEVICE bool sees_all(int i, int rows, int j, int columns) const {
        return j >= first_key(i + rows - 1) && j + columns <= end_key(i);
    }
};

// One head of one sequence as a matrix [times, head size].
struct Matrix {
    const Tensor& tensor;
    int64_t start, row, column;
    int rows, columns;

    DEVICE Matrix(const Tensor& t, int64_t batch, int64_t first, int64_t head, int times)
        : tensor(t), start(batch * t.strides[0] + first * t.strides[1] + head * t.strides[2]), row(t.strides[1]),
          column(t.strides[3]), rows(times), columns(int(t.shape[3])) {}
    DEVICE int64_t at(int r, int c) const { return start + r * row + c * column; }
};

DEVICE Matrix query_rows(const Tensor& t, const Sequence& s, int64_t head) {
    return Matrix(t, s.batch, s.first_q, head, s.queries);
}
DEVICE Matrix key_rows(const Tensor& t, const Sequence& s, int64_t kv_head) {
    return Matrix(t, s.batch, s.first_k, kv_head, s.keys);
}

// What a row of scores needs to be masked and dropped: query i of a sequence, one head.
template <class C>
struct Row {
    const Attention& p;
    int64_t mask, first_k;
    uint64_t element;

    DEVICE Row(const Attention& p, const Sequence& s, int64_t head, int i) : p(p), mask(0), first_k(s.first_k) {
        const int64_t time = s.first_q + i;
        const Tensor& m = p.mask;
        if (m.present()) mask = s.batch * m.strides[0] + head * m.strides[1] + time * m.strides[2];
        element = (uint64_t(s.batch) * p.q.shape[2] + head) * p.q.shape[1] + time;
        element *= uint64_t(p.k.shape[1]);
    }
    // A scaled score by the user's mask; what this hides is -inf whatever the score.
    DEVICE C masked(C score, int j) const {
        if (!p.mask.present()) return score;
        const int64_t at = mask + (first_k + j) * p.mask.strides[3];
        if (p.mask.dtype == BOOL) return p.mask.data[at] ? score : -C(INFINITY);
        const C added = load<C>(p.mask, at);
        return added == -C(INFINITY) ? added : score + added;
    }
    // What dropout multiplies a weight by.
    DEVICE C kept(int j) const {
        if (!p.drops) return C(1);
        return random_word(p.stream, element + first_k + j) >= p.threshold ? C(p.keep) : C(0);
    }
};

// A product scaled, rounded by itself. (Fused with the subtraction of the largest score, it would differ from it by
// what rounding left of that one, which where scores are large is more than 1.)
DEVICE float scaled(float product, float scale) { return __fmul_rn(product, scale); }
DEVICE double scaled(double product, double scale) { return __dmul_rn(product, scale); }

// Of a row of scores: the largest, and ln of the sum of exp(score - largest); -inf and 0 of one that sees nothing.
// Weights are exp((score - largest) - log_sum). All passes make a score's product in the same order of the head size,
// so that it has the same bits in each.
template <class C>
struct Statistics {
    C largest, log_sum;
};

DEVICE int64_t statistic_at(const Tensor& t, const Sequence& s, int64_t head, int i) {
    return s.batch * t.strides[0] + head * t.strides[1] + (s.first_q + i) * t.strides[2];
}

template <class C>
DEVICE void store_statistics(const Attention& p, const Sequence& s, int64_t head, int i, const Statistics<C>& x) {
    const int64_t at = statistic_at(p.stats, s, head, i);
    store(p.stats, at, x.largest);
    store(p.stats, at + p.stats.strides[3], x.log_sum);
}
// Those of query i. Where it sees nothing, or isn't of the sequence, the largest is +inf: all weights are 0 then.
template <class C>
DEVICE Statistics<C> load_statistics(const Attention& p, const Sequence& s, int64_t head, int i) {
    if (i < 0 || i >= s.queries) return {C(INFINITY), C(0)};
    const int64_t at = statistic_at(p.stats, s, head, i);
    const C largest = load<C>(p.stats, at);
    return {largest == -C(INFINITY) ? C(INFINITY) : largest, load<C>(p.stats, at + p.stats.strides[3])};
}
