// Windows that slide over planes: columns for convolutions and their transpose, and pooling. One thread for each
// element of the output gathers what it needs, in the order of the window or of the outputs that see it: no atomics.
//
// Output (y, x) sees the inputs at (y, x) stride - before + (i, j) dilation for (i, j) within the kernel.
#include "tensor.cuh"

struct Window {
    int64_t kernel[2], stride[2], before[2], dilation[2];
};

struct Size {
    int64_t height, width;
};

// Where along dimension d output `o` sees at place `k`: may lie outside.
DEVICE int64_t seen_at(const Window& w, int d, int64_t o, int64_t k) {
    return o * w.stride[d] + k * w.dilation[d] - w.before[d];
}
// Which of `outputs` sees element `i` at place `k`, -1 if none.
DEVICE int64_t seer(const Window& w, int d, int64_t i, int64_t k, int64_t outputs) {
    const int64_t from = i + w.before[d] - k * w.dilation[d];
    if (from < 0 || from % w.stride[d] != 0) return -1;
    const int64_t o = from / w.stride[d];
    return o < outputs ? o : -1;
}

DEVICE int64_t at4(const Tensor& t, int64_t n, int64_t c, int64_t y, int64_t x) {
    return n * t.strides[0] + c * t.strides[1] + y * t.strides[2] + x * t.strides[3];
}

// An element of [n, channels, height, width].
struct Place {
    int64_t n, c, y, x;

    DEVICE Place(int64_t i, const int64_t* shape) {
        x = i % shape[3], i /= shape[3];
        y = i % shape[2], i /= shape[2];
        c = i % shape[1], n = i / shape[1];
    }
};

template <class Body>
DEVICE void each_of(int64_t count, Body body) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) body(i);
}

struct Columns {
    Tensor image;    // [n, channels, height, width]
    Tensor columns;  // [n channels, kernel height, kernel width, out height, out width], contiguous, as one index
    Window window;
    int64_t out_height, out_width;
};

template <class C>
DEVICE void im2col(const Columns& p) {
    const Window& w = p.window;
    const Size size{p.image.shape[2], p.image.shape[3]};
    each_of(p.columns.count(), [&](int64_t i) {
        int64_t rest = i;
        const int64_t ox = rest % p.out_width;
        rest /= p.out_width;
        const int64_t oy = rest % p.out_height;
        rest /= p.out_height;
        const int64_t kx = rest % w.kernel[1];
        rest /= w.kernel[1];
        const int64_t y = seen_at(w, 0, oy, rest % w.kernel[0]), x = seen_at(w, 1, ox, kx);
        const int64_t plane = rest / w.kernel[0], channels = p.image.shape[1];
        const bool inside = y >= 0 && y < size.height && x >= 0 && x < size.width;
        store(p.columns, i, inside ? load<C>(p.image, at4(p.image, plane / channels, plane % channels, y, x)) : C(0));
    });
}
KERNEL im2col_f32(const Columns p) { im2col<float>(p); }
KERNEL im2col_f64(const Columns p) { im2col<double>(p); }

template <class C>
DEVICE void col2im(const Columns& p) {
    const Window& w = p.window;
    each_of(p.image.count(), [&](int64_t i) {
        const Place at(i, p.image.shape);
        const int64_t plane = at.n * p.image.shape[1] + at.c;
        double sum = 0;
        for (int64_t ky = 0; ky < w.kernel[0]; ky++) {
            const int64_t oy = seer(w, 0, at.y, ky, p.out_height);
            if (oy < 0) continue;
            for (int64_t kx = 0; kx < w.kernel[1]; kx++) {
                const int64_t ox = seer(w, 1, at.x, kx, p.out_width);
                if (ox < 0) continue;
                const int64_t place = (plane * w.kernel[0] + ky) * w.kernel[1] + kx;
                sum += load<C>(p.columns, (place * p.out_height + oy) * p.out_width + ox);
            }
        }
        store(p.image, at4(p.image, at.n, at.c, at.y, at.x), C(sum));
    });
}
KERNEL col2im_f32(const Columns p) { col2im<float>(p); }
KERNEL col2im_f64(const Columns p) { col2im<double>(p); }

enum Divisor : int32_t { INSIDE, PADDED, FIXED };

struct Pool {
    Tensor image, out, index;  // [n, channels, ..] each; the index only for maxima
    Window window;
    double fixed;
    int32_t divisor, padding;
};

template <class C>
DEVICE void max_pool(const Pool& p) {
    const Window& w = p.window;
    const Size size{p.image.shape[2], p.image.shape[3]};
    each_of(p.out.count(), [&](int64_t i) {
        const Place at(i, p.out.shape);
        // A window that sees nothing: -inf, and an index that is none.
        C most = C(-INFINITY);
        int64_t place = -1;
        for (int64_t ky = 0; ky < w.kernel[0]; ky++) {
            const int64_t y = seen_at(w, 0, at.y, ky);
            if (y < 0 || y >= size.height) continue;
            for (int64_t kx = 0; kx < w.kernel[1]; kx++) {
                const int64_t x = seen_at(w, 1, at.x, kx);
                if (x < 0 || x >= size.width) continue;
                const C v = load<C>(p.image, at4(p.image, at.n, at.c, y, x));
                if (place < 0 || v > most || v != v) most = v, place = y * size.width + x;
            }
        }
        store(p.out, at4(p.out, at.n, at.c, at.y, at.x), most);
        const int64_t to = at4(p.index, at.n, at.c, at.y, at.x);
        if (p.index.dtype == I32) reinterpret_cast<int32_t*>(p.index.data)[to] = static_cast<int32_t>(place);
        else reinterpret_cast<int64_t*>(p.index.data)[to] = place;
    });
}
KERNEL max_pool_f32(const Pool p) { max_pool<float>(p); }
KERNEL max_pool_f64(const Pool p) { max_pool<double>(p); }

// Calls visit(oy, ox) for the outputs that see element (y, x), in their order: those of later places come first.
template <class Visit>
DEVICE void each_seer(const Window& w, const Place& at, const Size& outputs, Visit visit) {
    for (int64_t ky = w.kernel[0] - 1; ky >= 0; ky--) {
        const int64_t oy = seer(w, 0, at.y, ky, outputs.height);
        if (oy < 0) continue;
        for (int64_t kx = w.kernel[1] - 1; kx >= 0; kx--) {
            const int64_t ox = seer(w, 1, at.x, kx, outputs.width);
            if (ox >= 0) visit(oy, ox);
        }
    }
}

// Gradients: `out` is the gradient of the output, `image` becomes that of the input.
template <class C>
DEVICE void max_pool_grad(const Pool& p) {
    const Size outputs{p.out.shape[2], p.out.shape[3]};
    each_of(p.image.count(), [&](int64_t i) {
        const Place at(i, p.image.shape);
        const int64_t own = at.y * p.image.shape[3] + at.x;
        double sum = 0;
        each_seer(p.window, at, outputs, [&](int64_t oy, int64_t ox) {
            if (load_index(p.index, at4(p.index, at.n, at.c, oy, ox)) == own)
                sum += load<C>(p.out, at4(p.out, at.n, at.c, oy, ox));
        });
        store(p.image, at4(p.image, at.n, at.c, at.y, at.x), C(sum));
    });
}
KERNEL max_pool_grad_f32(const Pool p) { max_pool_grad<float>(p); }
KERNEL max_pool_grad_f64(const Pool p) { max_pool_grad<double>(p); }

// Along dimension d, how many elements output `o` sees: of the input, or of it and its padding.
DEVICE int64_t seen_count(const Pool& p, int d, int64_t o) {
    const Window& w = p.window;
    const int64_t size = p.image.shape[2 + d], start = o * w.stride[d];
    if (p.divisor == PADDED) {
        const int64_t end = start + w.kernel[d], last = size + 2 * w.before[d];
        const int64_t seen = (end < last ? end : last) - start;
        return seen > 0 ? seen : 0;
    }
    int64_t count = 0;
    for (int64_t k = 0; k < w.kernel[d]; k++) {
        const int64_t i = seen_at(w, d, o, k);
        count += i >= 0 && i < size;
    }
    return count;
}
template <class C>
DEVICE C divisor(const Pool& p, int64_t oy, int64_t ox) {
    return p.divisor == FIXED ? C(p.fixed) : C(seen_count(p, 0, oy) * seen_count(p, 1, ox));
}

template <class C>
DEVICE void avg_pool(const Pool& p) {
    const Window& w = p.window;
    const Size size{p.image.shape[2], p.image.shape[3]};
    each_of(p.out.count(), [&](int64_t i) {
        const Place at(i, p.out.shape);
        double sum = 0;
        bool nothing = true;  // then 0
        for (int64_t ky = 0; ky < w.kernel[0]; ky++) {
            const int64_t y = seen_at(w, 0, at.y, ky);
            if (y < 0 || y >= size.height) continue;
            for (int64_t kx = 0; kx < w.kernel[1]; kx++) {
                const int64_t x = seen_at(w, 1, at.x, kx);
                if (x < 0 || x >= size.width) continue;
                sum += load<C>(p.image, at4(p.image, at.n, at.c, y, x));
                nothing = false;
            }
        }
        store(p.out, at4(p.out, at.n, at.c, at.y, at.x), nothing ? C(0) : C(sum / divisor<C>(p, at.y, at.x)));
    });
}
KERNEL avg_pool_f32(const Pool p) { avg_pool<float>(p); }
KERNEL avg_pool_f64(const Pool p) { avg_pool<double>(p); }

template <class C>
DEVICE void avg_pool_grad(const Pool& p) {
    const Size outputs{p.out.shape[2], p.out.shape[3]};
    each_of(p.image.count(), [&](int64_t i) {
        const Place at(i, p.image.shape);
        double sum = 0;
        each_seer(p.window, at, outputs, [&](int64_t oy, int64_t ox) {
            sum += load<C>(p.out, at4(p.out, at.n, at.c, oy, ox)) / divisor<C>(p, oy, ox);
        });
        store(p.image, at4(p.image, at.n, at.c, at.y, at.x), C(sum));
    });
}
KERNEL avg_pool_grad_f32(const Pool p) { avg_pool_grad<float>(p); }
KERNEL avg_pool_grad_f64(const Pool p) { avg_pool_grad<double>(p); }
