// Functions of one number, for C = float and double, with the CPU backend's rules for NaN and extremes.
#pragma once
#include "prim.cuh"

template <class C>
DEVICE C infinity() { return C(INFINITY); }
// Beyond +- this, sigmoid is 0 or 1 and its derivative 0 to the last bit.
template <class C>
DEVICE C saturated() { return sizeof(C) == 4 ? C(100) : C(800); }

template <class C>
DEVICE C sigmoid(C x) { return C(1) / (C(1) + exp(-x)); }
// The larger and the smaller; NaN if either is NaN.
template <class C>
DEVICE C larger(C a, C b) { return a > b || a != a ? a : b; }
template <class C>
DEVICE C smaller(C a, C b) { return a < b || a != a ? a : b; }
// Limited to [low, high], high where low > high; NaN stays.
template <class C>
DEVICE C limit(C x, C low, C high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}
// The normal distribution function.
template <class C>
DEVICE C normal_cdf(C x) { return C(0.5) * erfc(-x * C(0.70710678118654752440)); }
// ln(1 + e^-|x|): what softplus has beyond max(x, 0).
template <class C>
DEVICE C beyond(C x) { return log1p(exp(-fabs(x))); }
// ln(1 + e^x), without overflow or cancellation.
template <class C>
DEVICE C softplus(C x) { return larger(x, C(0)) + beyond(x); }
// share x, 0 where there is no share, were x infinite.
template <class C>
DEVICE C part(C share, C x) { return share == C(0) ? C(0) : share * x; }
// -1, 0 or 1 as x; NaN stays.
template <class C>
DEVICE C sign(C x) { return x > C(0) ? C(1) : x < C(0) ? C(-1) : x * C(0); }
