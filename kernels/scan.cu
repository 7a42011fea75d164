// Running folds along a dimension, and gradients of products; all in f64.
//
// Lines lie along the dimension. Where neighbouring lines lie side by side, each thread walks one from end to end; else
// a warp takes a line, TILE elements at a time, by a parallel scan over its lanes (Hillis and Steele 1986) and what it
// carries from tile to tile. Which of the two follows from the shape alone.
#include "tensor.cuh"

constexpr int TILE = 32;

enum Fold : int32_t { SUM, SUM_TO_END, PROD };

struct Scan {
    Tensor x_others, x_line, out_others, out_line;
    int64_t lines, length;
    int32_t fold, team;
};

// In place of x: each element is read by the thread that writes it, before.
template <class C>
DEVICE void scan(const Scan& p) {
    const int64_t threads = int64_t(gridDim.x) * blockDim.x, thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int lane = p.team == 32 ? threadIdx.x & 31 : 0;
    const double neutral = p.fold == PROD ? 1 : 0;
    const auto join = [&](double a, double b) { return p.fold == PROD ? a * b : a + b; };
    for (int64_t k = thread / p.team; k < p.lines; k += threads / p.team) {
        const int64_t from = p.x_others.offset(k), to = p.out_others.offset(k);
        double carried = neutral;
        for (int64_t start = 0; start < p.length; start += p.team) {
            const int64_t i = p.fold == SUM_TO_END ? p.length - 1 - (start + lane) : start + lane;
            const bool inside = start + lane < p.length;
            double x = inside ? load<C>(p.x_line, from + i * p.x_line.strides[0]) : neutral;
            if (p.team == 32)
                for (int step = 1; step < 32; step *= 2) {
                    const double before = __shfl_up_sync(FULL_WARP, x, step);
                    if (lane >= step) x = join(before, x);
                }
            x = join(carried, x);
            if (inside) store(p.out_line, to + i * p.out_line.strides[0], C(x));
            carried = p.team == 32 ? __shfl_sync(FULL_WARP, x, 31) : x;
        }
    }
}
KERNEL scan_f32(const Scan p) { scan<float>(p); }
KERNEL scan_f64(const Scan p) { scan<double>(p); }

// Gradients of a running product, and of the product of all (`whole`), without division, so exact with zeros. With P_i
// the product of all x before i: of the running one out_i = P_i S_i with S_i = g_i + x_(i+1) S_(i+1); of the whole one
// out_i = P_i S_i with S_i = x_(i+1) S_(i+1), and S = g at the last. Both are maps S -> a S + b put one after the
// other, which a warp scans from the end, tile by tile; it leaves what each tile gets from those behind it in `carries`
// ([lines][tiles]), and walks the tiles forward then with the products before them.
struct ProductGrad {
    Tensor x_lines, x_line, g_lines, g_line, out_lines, out_line;  // a line may be several dimensions
    double* carries;
    int64_t lines, length;
    int32_t whole, padding;
};

// The map from `behind`, which is x S of the first element behind some others, to x S of the first of these.
struct Affine {
    double a, b;
};

template <class C>
DEVICE void product_grad(const ProductGrad& p) {
    const int64_t threads = int64_t(gridDim.x) * blockDim.x, thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x & 31;
    const int64_t tiles = (p.length + TILE - 1) / TILE;
    for (int64_t k = thread / 32; k < p.lines; k += threads / 32) {
        const int64_t x_at = p.x_lines.offset(k), g_at = p.g_lines.offset(k), out_at = p.out_lines.offset(k);
        // x_i and g_i; beyond the end 1 and 0, which change nothing.
        const auto read = [&](int64_t i, double& x, double& g) {
            x = i < p.length ? load<C>(p.x_line, x_at + p.x_line.offset(i)) : C(1);
            g = i < p.length && !p.whole ? load<C>(p.g_line, g_at + p.g_line.offset(i)) : C(0);
        };
        // S of this lane's element; of `behind`, from behind the tile, it makes what the tile gives to the one before.
        const auto pass = [&](double x, double g, double& behind) {
            // For this lane and those after it: of one element, x S = x (g + behind).
            Affine f{x, x * g};
            for (int step = 1; step < 32; step *= 2) {
                const double a = __shfl_down_sync(FULL_WARP, f.a, step), b = __shfl_down_sync(FULL_WARP, f.b, step);
                if (lane + step < 32) f = {f.a * a, f.a * b + f.b};
            }
            if (__all_sync(FULL_WARP, isfinite(f.a) && isfinite(f.b))) {
                const double a = __shfl_down_sync(FULL_WARP, f.a, 1), b = __shfl_down_sync(FULL_WARP, f.b, 1);
                const double s = g + (lane < 31 ? a * behind + b : behind);
                behind = __shfl_sync(FULL_WARP, f.a * behind + f.b, 0);
                return s;
            }
            // Element by element: maps put together have inf 0 and inf - inf where one after the other has not.
            double s = 0;
            for (int k = 31; k >= 0; k--) {
                const double next = __shfl_sync(FULL_WARP, g, k) + behind;
                if (lane == k) s = next;
                behind = __shfl_sync(FULL_WARP, x, k) * next;
            }
            return s;
        };
        double x, g, behind = p.whole ? double(load<C>(p.g_lines, g_at)) : 0;
        for (int64_t t = tiles - 1; t >= 0; t--) {
            if (lane == 0) p.carries[k * tiles + t] = behind;
            read(t * TILE + lane, x, g);
            pass(x, g, behind);
        }
        __syncwarp();
        double before = 1;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t i = t * TILE + lane;
            read(i, x, g);
            behind = p.carries[k * tiles + t];
            const double s = pass(x, g, behind);
            double product = x;
            for (int step = 1; step < 32; step *= 2) {
                const double other = __shfl_up_sync(FULL_WARP, product, step);
                if (lane >= step) product *= other;
            }
            const double up = __shfl_up_sync(FULL_WARP, product, 1);
            if (i < p.length) store(p.out_line, out_at + p.out_line.offset(i), C(before * (lane > 0 ? up : 1) * s));
            before *= __shfl_sync(FULL_WARP, product, 31);
        }
    }
}
KERNEL product_grad_f32(const ProductGrad p) { product_grad<float>(p); }
KERNEL product_grad_f64(const ProductGrad p) { product_grad<double>(p); }
