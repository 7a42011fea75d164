// Random numbers by Philox: a number depends on the stream and the element's number alone, as on every other device.
// A thread makes PACK elements, from two counter blocks.
#include "philox.cuh"
#include "tensor.cuh"

struct Random {
    Tensor x, out;  // x: Dropout's; else absent
    RandomStream stream;
    uint64_t threshold;  // Dropout drops what has a word below it
    double factor;       // Dropout's 1 / (1 - p), Normal's standard deviation
    int32_t drop;        // Uniform: low bits of a word that out's dtype can't hold
    int32_t packs;       // whole packs may be loaded and stored
};

// Words of elements first .. first + PACK, where first is a multiple of PACK.
DEVICE void words_of(const RandomStream& stream, int64_t first, uint32_t (&words)[PACK]) {
#pragma unroll
    for (int i = 0; i < PACK / 4; i++) {
        const Words four = philox(stream, first / 4 + i);
#pragma unroll
        for (int j = 0; j < 4; j++) words[4 * i + j] = four.word[j];
    }
}

template <class C>
DEVICE void write(const Random& p, int64_t first, int64_t n, const C (&x)[PACK]) {
    if (p.packs && first + PACK <= n) {
        store_pack(p.out, first, x);
    } else {
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            if (first + i < n) store(p.out, p.out.offset(first + i), x[i]);
        }
    }
}

DEVICE int64_t first_pack() { return (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * PACK; }
DEVICE int64_t next_pack() { return int64_t(gridDim.x) * blockDim.x * PACK; }

template <class C>
DEVICE void uniforms(const Random& p) {
    const int64_t n = p.out.count();
    const C unit = C(1) / static_cast<C>(uint64_t(1) << (32 - p.drop));
    for (int64_t first = first_pack(); first < n; first += next_pack()) {
        uint32_t words[PACK];
        words_of(p.stream, first, words);
        C x[PACK];
#pragma unroll
        for (int i = 0; i < PACK; i++) x[i] = static_cast<C>(words[i] >> p.drop) * unit;
        write(p, first, n, x);
    }
}
KERNEL uniform_f32(const Random p) { uniforms<float>(p); }
KERNEL uniform_f64(const Random p) { uniforms<double>(p); }

// Element i is std sqrt(-2 ln u) cos(2 pi v) with u and v in (0, 1) from words 2i and 2i + 1 (Box and Muller 1958),
// all in f64. A thread makes the two elements of one counter block.
KERNEL normal(const Random p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    const auto unit = [](uint32_t word) { return (word + 0.5) / 4294967296.0; };
    for (int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; 2 * pair < n; pair += step) {
        const Words words = philox(p.stream, pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const double u = unit(words.word[2 * i]), v = unit(words.word[2 * i + 1]);
            const double x = p.factor * (sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
            if (2 * pair + i < n) store(p.out, p.out.offset(2 * pair + i), x);
        }
    }
}

template <class C>
DEVICE void dropout(const Random& p) {
    const int64_t n = p.out.count();
    const C keep = static_cast<C>(p.factor);
    for (int64_t first = first_pack(); first < n; first += next_pack()) {
        uint32_t words[PACK];
        words_of(p.stream, first, words);
        C x[PACK];
        if (p.packs && first + PACK <= n) {
            load_pack(p.x, first, x);
        } else {
#pragma unroll
            for (int i = 0; i < PACK; i++) x[i] = first + i < n ? load<C>(p.x, p.x.offset(first + i)) : C(0);
        }
#pragma unroll
        for (int i = 0; i < PACK; i++) x[i] = words[i] < p.threshold ? C(0) : x[i] * keep;
        write(p, first, n, x);
    }
}
KERNEL dropout_f32(const Random p) { dropout<float>(p); }
KERNEL dropout_f64(const Random p) { dropout<double>(p); }
