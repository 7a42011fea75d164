// Fill, and copy with conversion between any two dtypes and layouts.
//
// Conversion is as core defines it: through int64 from integers, through double from floats; they hold every value of
// the source, so that one rounding is made. Floats saturate in integers, NaN becomes 0, and bool is what isn't 0.
#include "tensor.cuh"

// double to float such that a second rounding, to fewer bits, is right: inexact results get an odd last bit.
DEVICE float round_to_odd(double x) {
    float near = static_cast<float>(x);
    double back = static_cast<double>(near);
    if (back == x || x != x || isinf(x)) return near;
    uint32_t bits;
    memcpy(&bits, &near, 4);
    if (fabs(back) > fabs(x)) bits -= 1;  // rounded away from zero: take the last bit back first
    bits |= 1;
    memcpy(&near, &bits, 4);
    return near;
}

template <class T>
DEVICE T of_double(double x, double low, double high, T least, T most) {
    if (x != x) return 0;
    if (x <= low) return least;
    return x >= high ? most : static_cast<T>(x);
}

// int64 to double such that a second rounding, to fewer bits, is right: of large ones the bits that double has no
// room for are cut off, and the last that stays is set if they weren't all 0.
DEVICE double whole_to_odd(int64_t x) {
    const int64_t cut = (1 << 11) - 1;
    const bool large = x >= (int64_t(1) << 53) || x <= -(int64_t(1) << 53);
    return static_cast<double>(large ? (x & ~cut) | (int64_t((x & cut) != 0) << 11) : x);
}

DEVICE bool is_integer(int dtype) { return dtype >= I64; }

// Floats and integers by their dtype, as the types that hold them all.
DEVICE double read_double(const Tensor& t, int64_t at) {
    switch (t.dtype) {
        case F64: return reinterpret_cast<const double*>(t.data)[at];
        default: return load<float>(t, at);
    }
}
DEVICE int64_t read_integer(const Tensor& t, int64_t at) {
    switch (t.dtype) {
        case I64: return reinterpret_cast<const int64_t*>(t.data)[at];
        case I32: return reinterpret_cast<const int32_t*>(t.data)[at];
        default: return reinterpret_cast<const uint8_t*>(t.data)[at];
    }
}
DEVICE void write_double(const Tensor& t, int64_t at, double x) {
    switch (t.dtype) {
        case F64: reinterpret_cast<double*>(t.data)[at] = x; break;
        case F32: reinterpret_cast<float*>(t.data)[at] = static_cast<float>(x); break;
        case BF16: case F16: store(t, at, round_to_odd(x)); break;
        case I64:
            reinterpret_cast<int64_t*>(t.data)[at] = of_double<int64_t>(x, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX);
            break;
        case I32:
            reinterpret_cast<int32_t*>(t.data)[at] = of_double<int32_t>(x, -0x1p31, 0x1p31 - 1, INT32_MIN, INT32_MAX);
            break;
        case U8: reinterpret_cast<uint8_t*>(t.data)[at] = of_double<uint8_t>(x, 0.0, 255.0, 0, 255); break;
        default: reinterpret_cast<uint8_t*>(t.data)[at] = x != 0.0;
    }
}
DEVICE void write_integer(const Tensor& t, int64_t at, int64_t x) {
    switch (t.dtype) {
        case F64: reinterpret_cast<double*>(t.data)[at] = static_cast<double>(x); break;
        case F32: reinterpret_cast<float*>(t.data)[at] = static_cast<float>(x); break;
        case BF16: case F16: store(t, at, round_to_odd(whole_to_odd(x))); break;
        case I64: reinterpret_cast<int64_t*>(t.data)[at] = x; break;
        case I32: reinterpret_cast<int32_t*>(t.data)[at] = static_cast<int32_t>(x); break;
        case U8: reinterpret_cast<uint8_t*>(t.data)[at] = static_cast<uint8_t>(x); break;
        default: reinterpret_cast<uint8_t*>(t.data)[at] = x != 0;
    }
}

struct Fill {
    Tensor out;
    double value;
};

KERNEL fill(const Fill p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        write_double(p.out, p.out.offset(i), p.value);
}

struct Copy {
    Tensor x, out;
};

// Between dtypes. One thread an element, in the order of out.
KERNEL copy_convert(const Copy p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    const bool integer = is_integer(p.x.dtype);
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const int64_t from = p.x.offset(i), to = p.out.offset(i);
        if (integer) write_integer(p.out, to, read_integer(p.x, from));
        else write_double(p.out, to, read_double(p.x, from));
    }
}

// Between f32, bf16 and f16, both together in memory: PACK elements a thread.
KERNEL copy_packs(const Copy p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x * PACK;
    for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * PACK; i < n; i += step) {
        if (i + PACK <= n) {
            float x[PACK];
            load_pack(p.x, i, x);
            store_pack(p.out, i, x);
        } else {
            for (int64_t j = i; j < n; j++) store(p.out, j, load<float>(p.x, j));
        }
    }
}

// Of one dtype, by the size of its elements. Strides may be negative: a flip is a copy from the last element.
template <class T>
DEVICE void copy_same(const Copy& p) {
    const int64_t n = p.out.count(), step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        reinterpret_cast<T*>(p.out.data)[p.out.offset(i)] = reinterpret_cast<const T*>(p.x.data)[p.x.offset(i)];
}
KERNEL copy_1(const Copy p) { copy_same<uint8_t>(p); }
KERNEL copy_2(const Copy p) { copy_same<uint16_t>(p); }
KERNEL copy_4(const Copy p) { copy_same<uint32_t>(p); }
KERNEL copy_8(const Copy p) { copy_same<uint64_t>(p); }
