// The largest element of a row and the sum of exponentials relative to it, in one pass: each thread keeps the largest
// that it has seen and a sum relative to it, and the team puts these together (Milakov and Gimelshein 2018).
#pragma once
#include "rows.cuh"

template <class C>
struct Exponentials {
    C most;  // -inf of nothing, NaN if any is NaN
    C sum;   // of exp(x - most); 0 where `most` is -inf, NaN where it is NaN or inf
};

template <class C>
DEVICE Exponentials<C> row_exponentials(const Team& team, const Row<C>& x) {
    const C none = C(-INFINITY);
    C most = none, sum = 0;
    each_pack<0>(team, x.plan, [&](int, int64_t i) {
        C v[PACK], larger = most;
        x.read(i, none, v);
#pragma unroll
        for (int j = 0; j < PACK; j++) larger = Larger()(larger, v[j]);
        if (larger == none) return;
        if (larger != most) sum *= exp(most - larger);
#pragma unroll
        for (int j = 0; j < PACK; j++) v[j] = exp(v[j] - larger);
        sum += pack_sum(v);
        most = larger;
    });
    const C total = team.fold(most, none, Larger());
    // A thread that has seen nothing but -inf has a sum of 0.
    return {total, team.sum(total == none || most == none ? C(0) : sum * exp(most - total))};
}
