// Elementwise functions and their gradients, as retape_core::kernel names and defines them. The enums list them in the
// order of crates/core/src/kernel/functions.rs: crates/cuda doesn't build otherwise.
#include "map.cuh"
#include "scalar.cuh"

enum Unary : int32_t {
    NEG, SCALE, SHIFT, EXP, LOG, SQRT, RSQRT, RECIPROCAL, SQUARE, ABS, TANH, SIGMOID, RELU, SILU, GELU, GELU_TANH,
    SIN, COS, LOG1P, EXPM1, ERF, SOFTPLUS, LOG_SIGMOID, LEAKY_RELU, ELU, CLAMP, POW, POW_BASE,
};

// gelu's tanh form as x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): the factor, and 2u'.
template <class C>
DEVICE C gelu_tanh_gate(C x) { return sigmoid(C(1.5957691216057308) * x * (C(0.044715) * x * x + C(1))); }
template <class C>
DEVICE C gelu_tanh_slope(C x) { return C(1.5957691216057308) * (C(3 * 0.044715) * x * x + C(1)); }

// y = f(x). Towards -inf, x sigmoid(x) and x Phi(x) go to 0: x is limited to where they are 0 to the last bit, as
// -inf * 0 would be NaN.
template <class C>
struct UnaryForward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[1][W], C (&y)[W]) const {
        const C k = C(p.constants[0]), l = C(p.constants[1]);
        switch (p.function) {
            case NEG: MAP1(-a);
            case SCALE: MAP1(k * a);
            case SHIFT: MAP1(a + k);
            case EXP: MAP1(exp(a));
            case LOG: MAP1(log(a));
            case SQRT: MAP1(sqrt(a));
            case RSQRT: MAP1(C(1) / sqrt(a));
            case RECIPROCAL: MAP1(C(1) / a);
            case SQUARE: MAP1(a * a);
            case ABS: MAP1(fabs(a));
            case TANH: MAP1(tanh(a));
            case SIGMOID: MAP1(sigmoid(a));
            case RELU: MAP1(a < C(0) ? C(0) : a);
            case SILU: MAP1(limit(a, -saturated<C>(), infinity<C>()) * sigmoid(a));
            case GELU: MAP1(limit(a, C(-40), infinity<C>()) * normal_cdf(a));
            case GELU_TANH: MAP1(limit(a, C(-40), infinity<C>()) * gelu_tanh_gate(limit(a, C(-40), infinity<C>())));
            case SIN: MAP1(sin(a));
            case COS: MAP1(cos(a));
            case LOG1P: MAP1(log1p(a));
            case EXPM1: MAP1(expm1(a));
            case ERF: MAP1(erf(a));
            case SOFTPLUS: MAP1(k * a > l ? a : softplus(k * a) / k);
            case LOG_SIGMOID: MAP1(smaller(a, C(0)) - log1p(exp(-fabs(a))));
            case LEAKY_RELU: MAP1(a > C(0) ? a : k * a);
            case ELU: MAP1(a > C(0) ? a : k * expm1(a));
            case CLAMP: MAP1(limit(a, k, l));
            case POW: MAP1(pow(a, k));
            default: MAP1(pow(k, a));  // POW_BASE
        }
    }
};
MAP_KERNEL(unary, 1, UnaryForward)

// y = g f', where a is g, and b is f(x) or x as `UnaryFn::grad_reads_output` says; the derivatives are those of the
// table.
template <class C>
struct UnaryBackward {
    const Map& p;
    DEVICE static C silu(C x) {
        x = limit(x, -saturated<C>(), saturated<C>());
        const C s = sigmoid(x);
        return s + x * s * (C(1) - s);
    }
    DEVICE static C gelu(C x) {
        x = limit(x, C(-40), C(40));
        return normal_cdf(x) + x * exp(C(-0.5) * x * x) * C(0.3989422804014327);
    }
    DEVICE static C gelu_tanh(C x) {
        x = limit(x, C(-40), C(40));
        const C s = gelu_tanh_gate(x);
        return s + x * s * gelu_tanh_slope(x) * (C(1) - s);
    }
    template <int W>
    DEVICE void operator()(const C (&x)[2][W], C (&y)[W]) const {
        const C k = C(p.constants[0]), l = C(p.constants[1]);
        switch (p.function) {
            case EXP: MAP2(a * b);
            case LOG: MAP2(a / b);
            case SQRT: MAP2(a * C(0.5) / b);
            // From g on, as y^3, y^2 and 2x may be out of range where the product isn't.
            case RSQRT: MAP2(C(-0.5) * (a * b * b * b));
            case RECIPROCAL: MAP2(-(a * b * b));
            case SQUARE: MAP2(C(2) * (a * b));
            case ABS: MAP2(b > C(0) ? a : b < C(0) ? -a : C(0));
            case TANH: MAP2(a * (C(1) - b) * (C(1) + b));
            case SIGMOID: MAP2(a * (b * (C(1) - b)));
            case RELU: MAP2(b <= C(0) ? C(0) : a);
            case SILU: MAP2(a * silu(b));
            case GELU: MAP2(a * gelu(b));
            case GELU_TANH: MAP2(a * gelu_tanh(b));
            case SIN: MAP2(a * cos(b));
            case COS: MAP2(-(a * sin(b)));
            case LOG1P: MAP2(a / (C(1) + b));
            case EXPM1: MAP2(a * (b + C(1)));
            case ERF: MAP2(a * (C(1.1283791670955126) * exp(-b * b)));
            case SOFTPLUS: MAP2(k * b > l ? a : a * sigmoid(k * b));
            case LOG_SIGMOID: MAP2(a * sigmoid(-b));
            case LEAKY_RELU: MAP2(b > C(0) ? a : a * k);
            case ELU: MAP2(b > C(0) ? a : a * (k * exp(b)));
            // An infinite bound is none: nothing is at it, and nothing outside.
            case CLAMP: MAP2((k != -infinity<C>() && b <= k) || (l != infinity<C>() && b >= l) ? C(0) : a);
            case POW: MAP2(k == C(0) ? C(0) : a * k * pow(b, l));  // l is k - 1
            default: MAP2(k == C(0) && b < infinity<C>() ? C(0) : a * (b * l));  // POW_BASE; l is ln k
        }
    }
};
MAP_KERNEL(unary_grad, 2, UnaryBackward)

template <class C>
struct BinaryForward {
    enum Binary : int32_t { ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, POW };
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[2][W], C (&y)[W]) const {
        switch (p.function) {
            case ADD: MAP2(a + b);
            case SUB: MAP2(a - b);
            case MUL: MAP2(a * b);
            case DIV: MAP2(a / b);
            case MAXIMUM: MAP2(larger(a, b));
            case MINIMUM: MAP2(smaller(a, b));
            default: MAP2(pow(a, b));  // POW
        }
    }
};
MAP_KERNEL(binary, 2, BinaryForward)

// The gradient c of the larger of a and b (of the smaller, where the constant is -1) that goes to a.
template <class C>
struct ExtremumBackward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[3][W], C (&y)[W]) const {
        const C k = C(p.constants[0]);
        MAP3(k * a == k * b ? C(0.5) * c : k * a < k * b ? C(0) : c);
    }
};
MAP_KERNEL(extremum_grad, 3, ExtremumBackward)

enum Ternary : int32_t { LERP, ADDCMUL, ADDCDIV, POW_GRAD_BASE, POW_GRAD_EXPONENT, DIV_GRAD_DIVISOR };

// From a to b; the difference is taken of halves, so that it doesn't overflow.
template <class C>
DEVICE C lerp(C a, C b, C c) {
    const C step = b * C(0.5) - a * C(0.5), rest = C(1) - c;
    return fabs(c) < C(0.5) ? a + C(2) * (c * step) : b - C(2) * (rest * step);
}

template <class C>
struct TernaryForward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[3][W], C (&y)[W]) const {
        const C k = C(p.constants[0]);
        switch (p.function) {
            case LERP: MAP3(lerp(a, b, c));
            case ADDCMUL: MAP3(a + k * b * c);
            case ADDCDIV: MAP3(a + k * b / c);
            case POW_GRAD_BASE: MAP3(b == C(0) ? C(0) : c * b * pow(a, b - C(1)));
            case POW_GRAD_EXPONENT: MAP3(a == C(0) && b >= C(0) ? C(0) : c * (pow(a, b) * log(a)));
            default: MAP3(-(c * (a / b)) / b);  // DIV_GRAD_DIVISOR
        }
    }
};
MAP_KERNEL(ternary, 3, TernaryForward)

enum ClampInput : int32_t { CLAMP_X, CLAMP_LOW, CLAMP_HIGH };

// a: x; b: low; c: high; d: g. The constants say which bounds there are (0 for none).
template <class C>
struct ClampBackward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[4][W], C (&y)[W]) const {
        const bool low = p.constants[0] != 0, high = p.constants[1] != 0;
        switch (p.function) {
            case CLAMP_X: MAP4((low && a < b) || (high && a > c) ? C(0) : d);
            case CLAMP_LOW: MAP4(a < b && (!high || b < c) ? d : C(0));
            default: MAP4(a > c || (low && c < b) ? d : C(0));
        }
    }
};
MAP_KERNEL(clamp_grad, 4, ClampBackward)

struct Select {
    Tensor condition, a, b, out;
};

// Elements of any type, by their size.
template <class T>
DEVICE void select_sized(const Select& p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const Tensor& from = reinterpret_cast<const uint8_t*>(p.condition.data)[p.condition.offset(i)] ? p.a : p.b;
        reinterpret_cast<T*>(p.out.data)[p.out.offset(i)] = reinterpret_cast<const T*>(from.data)[from.offset(i)];
    }
}
KERNEL select_1(const Select p) { select_sized<uint8_t>(p); }
KERNEL select_2(const Select p) { select_sized<uint16_t>(p); }
KERNEL select_4(const Select p) { select_sized<uint32_t>(p); }
KERNEL select_8(const Select p) { select_sized<uint64_t>(p); }
