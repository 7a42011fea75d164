// Elements by their position: gathered by index, added at an index, reversed, and the position of the largest.
#include "block.cuh"
#include "tensor.cuh"

constexpr int MAX_INDICES = 8;

// Index tensors of one shape, and the dimensions that they index.
struct Indices {
    Tensor index[MAX_INDICES];
    int64_t sizes[MAX_INDICES], strides[MAX_INDICES];
    int32_t count, padding;

    // What the indices of element i add to an offset, negative ones counting from the end; -1 if one is out of range.
    DEVICE int64_t offset(int64_t i) const {
        int64_t at = 0;
        for (int k = 0; k < count; k++) {
            int64_t place = load_index(index[k], index[k].offset(i));
            if (place < 0) place += sizes[k];
            if (place < 0 || place >= sizes[k]) return -1;
            at += place * strides[k];
        }
        return at;
    }
};

struct Gather {
    Tensor x, out;  // x without the dimensions that are indexed
    Indices indices;
};

// One thread an element. Indices were checked.
template <class T>
DEVICE void gather(const Gather& p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const int64_t from = p.x.offset(i) + p.indices.offset(i);
        reinterpret_cast<T*>(p.out.data)[p.out.offset(i)] = reinterpret_cast<const T*>(p.x.data)[from];
    }
}
KERNEL gather_1(const Gather p) { gather<uint8_t>(p); }
KERNEL gather_2(const Gather p) { gather<uint16_t>(p); }
KERNEL gather_4(const Gather p) { gather<uint32_t>(p); }
KERNEL gather_8(const Gather p) { gather<uint64_t>(p); }

// Scatter-add without atomics. An entry is a combination of the dimensions in which the index differs or `out` repeats;
// the other dimensions, the columns, are independent of each other. Where entries may meet, all are sorted by (place in
// out, number), so those that meet in one place follow each other in their order. One thread for each place and column
// adds them up: DEPTH at a time in the arithmetic's type, and these sums in f64. Then it adds the total to out.
constexpr int DEPTH = 16;

struct Scatter {
    Tensor out_entry, out_column, source_entry, source_column;
    Indices indices;  // of entries
    uint64_t* keys;   // place * entries + entry; the largest number is no entry; null where no two entries meet
    int64_t entries, columns;
    double alpha;
};

constexpr uint64_t NO_ENTRY = UINT64_MAX;

DEVICE uint64_t scatter_key(const Scatter& p, int64_t i) {
    const int64_t at = p.indices.offset(i);
    return at < 0 ? NO_ENTRY : uint64_t(p.out_entry.offset(i) + at) * uint64_t(p.entries) + uint64_t(i);
}

KERNEL scatter_keys(const Scatter p) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.entries; i += step)
        p.keys[i] = scatter_key(p, i);
}

template <class C>
DEVICE void scatter_add(const Scatter& p) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x, n = p.entries * p.columns;
    const uint64_t entries = p.entries;
    for (int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; item < n; item += step) {
        int64_t k = item / p.columns;
        const int64_t column = item - k * p.columns, end = p.keys ? p.entries : k + 1;
        uint64_t key = p.keys ? p.keys[k] : scatter_key(p, k);
        if (key == NO_ENTRY) continue;
        const uint64_t place = key / entries, first = place * entries;
        if (p.keys && k > 0 && p.keys[k - 1] >= first) continue;  // another thread's
        const int64_t at = int64_t(place) + p.out_column.offset(column), from = p.source_column.offset(column);
        double total = 0;
        while (key - first < entries) {
            C sum = 0;
            for (int d = 0; d < DEPTH && key - first < entries; d++) {
                sum += load<C>(p.source_entry, p.source_entry.offset(int64_t(key - first)) + from);
                key = ++k < end ? p.keys[k] : NO_ENTRY;
            }
            total += sum;
        }
        store(p.out_entry, at, C(double(load<C>(p.out_entry, at)) + p.alpha * total));
    }
}
KERNEL scatter_add_f32(const Scatter p) { scatter_add<float>(p); }
KERNEL scatter_add_f64(const Scatter p) { scatter_add<double>(p); }

struct MaxIndex {
    Tensor others, line, values, indices;  // x by its other dimensions and along the one
    int64_t lines, length;
    int32_t team, padding;  // threads of a line: 1 or 32
};

// True where (a, i) comes before (b, j): larger, NaN largest of all, the first of equals.
template <class C>
DEVICE bool wins(C a, int64_t i, C b, int64_t j) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return a_nan;
    return (!a_nan && a != b) ? a > b : i < j;
}

template <class C>
DEVICE void max_index(const MaxIndex& p) {
    const int64_t threads = int64_t(gridDim.x) * blockDim.x, thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int lane = p.team == 32 ? threadIdx.x & 31 : 0;
    for (int64_t k = thread / p.team; k < p.lines; k += threads / p.team) {
        const int64_t base = p.others.offset(k), stride = p.line.strides[0];
        C most = C(-INFINITY);
        int64_t at = INT64_MAX;
        for (int64_t i = lane; i < p.length; i += p.team) {
            const C x = load<C>(p.line, base + i * stride);
            if (wins(x, i, most, at)) most = x, at = i;
        }
        if (p.team == 32) {
            for (int step = 16; step > 0; step /= 2) {
                const C other = __shfl_xor_sync(FULL_WARP, most, step);
                const int64_t there = __shfl_xor_sync(FULL_WARP, at, step);
                if (wins(other, there, most, at)) most = other, at = there;
            }
        }
        if (lane != 0) continue;
        store(p.values, p.values.offset(k), most);
        reinterpret_cast<int64_t*>(p.indices.data)[p.indices.offset(k)] = at;
    }
}
KERNEL max_index_f32(const MaxIndex p) { max_index<float>(p); }
KERNEL max_index_f64(const MaxIndex p) { max_index<double>(p); }

struct MaxIndexGrad {
    Tensor indices, g, out;  // of out's shape: indices and g repeat along the dimension
    int64_t length, inner;   // of the dimension, and elements of out from one of its places to the next
};

template <class C>
DEVICE void max_index_grad(const MaxIndexGrad& p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const bool here = load_index(p.indices, p.indices.offset(i)) == i / p.inner % p.length;
        store(p.out, p.out.offset(i), here ? load<C>(p.g, p.g.offset(i)) : C(0));
    }
}
KERNEL max_index_grad_f32(const MaxIndexGrad p) { max_index_grad<float>(p); }
KERNEL max_index_grad_f64(const MaxIndexGrad p) { max_index_grad<double>(p); }
