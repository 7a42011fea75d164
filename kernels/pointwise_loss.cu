// Elementwise losses and their derivatives, as retape_core::kernel::LossFn gives them. Operands: a is x, b the
// target, c the weight of the positives (all ones if absent), d the gradient.
#include "map.cuh"
#include "scalar.cuh"

enum Loss : int32_t { SQUARED, ABSOLUTE, SMOOTH_L1, HUBER, KL_DIVERGENCE, KL_DIVERGENCE_LOG, BINARY_LOGITS };

template <class C>
DEVICE C smooth_l1(C d, C beta) { return d < beta ? C(0.5) * d * (d / beta) : d - C(0.5) * beta; }
template <class C>
DEVICE C huber(C d, C delta) { return d <= delta ? C(0.5) * d * d : delta * (d - C(0.5) * delta); }

template <class C>
struct LossForward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[3][W], C (&y)[W]) const {
        const C k = C(p.constants[0]);
        switch (p.function) {
            case SQUARED: MAP3((a - b) * (a - b));
            case ABSOLUTE: MAP3(fabs(a - b));
            case SMOOTH_L1: MAP3(smooth_l1(fabs(a - b), k));
            case HUBER: MAP3(huber(fabs(a - b), k));
            case KL_DIVERGENCE: MAP3((b == C(0) ? C(0) : b * log(b)) - part(b, a));
            case KL_DIVERGENCE_LOG: MAP3(part(exp(b), b - a));
            // max(x, 0) and max(-x, 0) apart, so that a sure and right x cancels nothing.
            default: MAP3(part(a > C(0) ? C(1) - b : -(c * b), a) + ((c - C(1)) * b + C(1)) * beyond(a));
        }
    }
};
MAP_KERNEL(loss, 3, LossForward)

// The second constant says by which operand: 0 x, 1 target, 2 weight. By the target it is the opposite of that by x,
// where the loss is a function of x - t.
template <class C>
struct LossBackward {
    const Map& p;
    template <int W>
    DEVICE void operator()(const C (&x)[4][W], C (&y)[W]) const {
        const C k = C(p.constants[0]);
        const int by = int(p.constants[1]);
        const C toward = by == 0 ? C(1) : C(-1);
        switch (p.function) {
            case SQUARED: MAP4(C(2) * (d * toward * (a - b)));
            case ABSOLUTE: MAP4(d * toward * sign(a - b));
            case SMOOTH_L1: MAP4(d * toward * limit((a - b) / k, C(-1), C(1)));
            case HUBER: MAP4(d * toward * limit(a - b, -k, k));
            case KL_DIVERGENCE:
                if (by == 0) { MAP4(-d * b); }
                MAP4(d * (log(b) + C(1) - a));
            case KL_DIVERGENCE_LOG:
                if (by == 0) { MAP4(-d * exp(b)); }
                MAP4(d * exp(b) * (b - a + C(1)));
            default:
                if (by == 0) { MAP4(d * ((C(1) - b) * sigmoid(a) - c * b * sigmoid(-a))); }
                // (c - 1) softplus(-a) - a, with -a of the softplus and of the rest together.
                if (by == 1) { MAP4(d * ((c - C(1)) * beyond(a) - part(a > C(0) ? C(1) : c, a))); }
                MAP4(d * part(b, softplus(-a)));
        }
    }
};
MAP_KERNEL(loss_grad, 4, LossBackward)
