// Symmetric absmax int8 by groups of consecutive elements of the last dimension: the scale is the largest magnitude,
// q = (x / scale) 127 rounded to nearest even, or by chance: floor((x / scale) 127 + u).
//
// quantize: a group of up to 256 elements is the work of 1 to 32 lanes of a warp; quantize_block: a longer one is
// that of a block. A thread takes packs of 8 elements (16-byte loads, 8-byte stores), one or up to 4 of them, and
// holds them between the maximum and the rounding: each element is read once. (Of groups beyond 8192, all but the
// last up to 8192 are read again.)
#include "block.cuh"
#include "philox.cuh"
#include "tensor.cuh"

struct Quantize {
    Tensor x, q, scales;  // one shape but for the last dimension of scales, which is `groups`
    int64_t rows, groups, group;
    RandomStream stream;
    int32_t by_chance;
    int32_t lanes;  // threads that work on a group, a power of 2: up to 32 in quantize
    int32_t packs;  // whole packs of x may be loaded
    int32_t bytes;  // whole packs of q may be stored
};

// A group that a team of threads works on; of length 0 if none is left.
struct Group {
    int64_t x, q, element, length;  // where it starts in x and q, and its first element's number
};

template <class C, int HELD>
DEVICE void load_held(const Quantize& p, const Group& g, int64_t from, C (&x)[HELD][PACK], int thread, int team) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int64_t j = from + PACK * (thread + int64_t(i) * team);
        if (p.packs && j + PACK <= g.length) {
            load_pack(p.x, g.x + j, x[i]);
        } else {
#pragma unroll
            for (int e = 0; e < PACK; e++)
                x[i][e] = j + e < g.length ? load<C>(p.x, g.x + (j + e) * p.x.last_stride()) : C(0);
        }
    }
}

// Words of elements first .. first + PACK, which start anywhere.
DEVICE void words_from(const RandomStream& stream, uint64_t first, uint32_t (&words)[PACK]) {
    uint32_t all[PACK + 4];
#pragma unroll
    for (int i = 0; i < PACK / 4 + 1; i++) {
        if (i == PACK / 4 && first % 4 == 0) break;
        const Words four = philox(stream, first / 4 + i);
#pragma unroll
        for (int j = 0; j < 4; j++) all[4 * i + j] = four.word[j];
    }
    // Indices that the compiler knows keep the words in registers.
#pragma unroll
    for (int i = 0; i < PACK; i++) {
        words[i] = first % 4 == 0 ? all[i] : first % 4 == 1 ? all[i + 1] : first % 4 == 2 ? all[i + 2] : all[i + 3];
    }
}

template <class C, int HELD>
DEVICE void store_held(const Quantize& p, const Group& g, int64_t from, const C (&x)[HELD][PACK], C scale, int thread,
                       int team) {
    const bool zeros = scale == C(0) || !isfinite(scale);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int64_t j = from + PACK * (thread + int64_t(i) * team);
        if (j >= g.length) continue;
        uint32_t words[PACK] = {};
        if (p.by_chance) words_from(p.stream, g.element + j, words);
        uint64_t bytes = 0;
#pragma unroll
        for (int e = 0; e < PACK; e++) {
            C y = x[i][e] / scale * C(127);  // no quotient is beyond 1
            if (p.by_chance) y = static_cast<C>(floor(static_cast<double>(y) + words[e] / 4294967296.0));
            const int32_t q = zeros ? 0 : static_cast<int32_t>(rint(y));
            bytes |= uint64_t(q & 255) << (8 * e);
        }
        if (p.bytes && j + PACK <= g.length) {
            *reinterpret_cast<uint64_t*>(p.q.data + g.q + j) = bytes;
        } else {
#pragma unroll
            for (int e = 0; e < PACK; e++) {
                if (j + e < g.length) p.q.data[g.q + (j + e) * p.q.last_stride()] = static_cast<char>(bytes >> (8 * e));
            }
        }
    }
}

// `fold` gives the largest of a team's numbers to all of the team; every thread of the block or warp calls it.
template <class C, int HELD, class F>
DEVICE void quantize_group(const Quantize& p, int64_t number, int thread, int team, F fold) {
    Group g = {0, 0, 0, 0};
    const bool there = number < p.rows * p.groups;
    const int64_t row = there ? number / p.groups : 0, k = number - row * p.groups;
    if (there) {
        const int64_t width = p.x.last(), first = k * p.group;
        g = {p.x.row(row) + first * p.x.last_stride(), p.q.row(row) + first * p.q.last_stride(), row * width + first,
             width - first < p.group ? width - first : p.group};
    }
    const Larger larger;
    const int64_t held = int64_t(team) * HELD * PACK;
    C x[HELD][PACK], most = 0;
    int64_t from = 0;
    for (;; from += held) {
        load_held(p, g, from, x, thread, team);
#pragma unroll
        for (int i = 0; i < HELD; i++)
#pragma unroll
            for (int e = 0; e < PACK; e++) most = larger(most, fabs(x[i][e]));
        if (from + held >= g.length) break;
    }
    most = fold(most);  // NaN anywhere makes it NaN
    for (;; from -= held) {  // from what is held back to the start
        store_held(p, g, from, x, most, thread, team);
        if (from == 0) break;
        load_held(p, g, from - held, x, thread, team);
    }
    if (there && thread == 0)
        store(p.scales, p.scales.row(row) + k * p.scales.last_stride(), isfinite(most) ? most : C(NAN));
}

template <class C>
DEVICE void quantize_by_lanes(const Quantize& p) {
    const int lane = threadIdx.x % 32, together = 32 / p.lanes, lanes = p.lanes;
    const int64_t count = p.rows * p.groups, warps = int64_t(gridDim.x) * (blockDim.x / 32);
    const auto fold = [lanes](C most) {
        for (int step = lanes / 2; step > 0; step /= 2) most = Larger()(most, __shfl_xor_sync(FULL_WARP, most, step));
        return most;
    };
    const int64_t start = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    for (int64_t first = start * together; first < count; first += warps * together)
        quantize_group<C, 1>(p, first + lane / lanes, lane % lanes, lanes, fold);
}
KERNEL __launch_bounds__(256, 3) quantize_f32(const Quantize p) { quantize_by_lanes<float>(p); }
KERNEL __launch_bounds__(256, 1) quantize_f64(const Quantize p) { quantize_by_lanes<double>(p); }

template <class C>
DEVICE void quantize_by_blocks(const Quantize& p) {
    SHARED_MEMORY(shared);
    const auto fold = [&](C most) { return block_fold(most, C(0), reinterpret_cast<C*>(shared), Larger()); };
    for (int64_t number = blockIdx.x; number < p.rows * p.groups; number += gridDim.x)
        quantize_group<C, 4>(p, number, threadIdx.x, blockDim.x, fold);
}
KERNEL __launch_bounds__(256, 2) quantize_block_f32(const Quantize p) { quantize_by_blocks<float>(p); }
KERNEL __launch_bounds__(256, 1) quantize_block_f64(const Quantize p) { quantize_by_blocks<double>(p); }

struct Dequantize {
    Tensor q, scales, out;  // as in Quantize
    int64_t rows, group;
    int64_t packs;  // whole packs may be loaded and stored, and have one scale
};

// out = q / 127 scale: a pack of a row a thread.
template <class C>
DEVICE void dequantize(const Dequantize& p) {
    const int64_t width = p.out.last(), in_row = (width + PACK - 1) / PACK, step = int64_t(gridDim.x) * blockDim.x;
    const auto number = [](uint64_t byte) {
        return static_cast<C>(static_cast<int8_t>(byte)) * static_cast<C>(1.0 / 127.0);
    };
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows * in_row; i += step) {
        const int64_t row = i / in_row, first = (i - row * in_row) * PACK;
        const int64_t q = p.q.row(row), out = p.out.row(row), scales = p.scales.row(row);
        const auto scale = [&](int64_t j) { return load<C>(p.scales, scales + j / p.group * p.scales.last_stride()); };
        if (p.packs && first + PACK <= width) {
            const uint64_t bytes = *reinterpret_cast<const uint64_t*>(p.q.data + q + first);
            const C s = scale(first);
            C x[PACK];
#pragma unroll
            for (int e = 0; e < PACK; e++) x[e] = number(bytes >> (8 * e)) * s;
            store_pack(p.out, out + first, x);
        } else {
            for (int64_t j = first; j < first + PACK && j < width; j++) {
                const C x = number(static_cast<unsigned char>(p.q.data[q + j * p.q.last_stride()])) * scale(j);
                store(p.out, out + j * p.out.last_stride(), x);
            }
        }
    }
}
KERNEL dequantize_f32(const Dequantize p) { dequantize<float>(p); }
KERNEL dequantize_f64(const Dequantize p) { dequantize<double>(p); }
