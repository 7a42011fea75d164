// CUDA's 16-bit floats: conversions round to nearest even, and a NaN becomes 0x7fff, as on the device.
#pragma once
#include <stdint.h>
#include <string.h>
#include "vector_types.h"

namespace emulator {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline float bf16_to_float(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float f16_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // exact
    return sign ? -magnitude : magnitude;
}
inline uint16_t float_to_f16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // from 65520 on: infinity
    if (magnitude >= 0x38800000) {                                            // from 2^-14 on: normal
        const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
    }
    // In units of 2^-24. Adding 1.5 x 2^23 (and taking it away) rounds to a whole number, to nearest even.
    const float units = float_of(magnitude) * 0x1p24f;
    const uint32_t whole = bits_of(units + 0x1.8p23f) - bits_of(0x1.8p23f);
    return static_cast<uint16_t>(sign | whole);
}

}  // namespace emulator

#define HALF_TYPE(type, type2, name, Name)                                                              \
    struct type {                                                                                       \
        uint16_t bits;                                                                                  \
        type() = default;                                                                               \
        type(float x) : bits(emulator::float_to_##name(x)) {}                                           \
        operator float() const { return emulator::name##_to_float(bits); }                              \
    };                                                                                                  \
    struct alignas(4) type2 {                                                                           \
        type x, y;                                                                                      \
    };                                                                                                  \
    inline type __float2##Name##_rn(float x) { return type(x); }                                        \
    inline type __float2##Name(float x) { return type(x); }                                             \
    inline float __##Name##2float(type x) { return x; }                                                 \
    inline type2 __floats2##Name##2_rn(float x, float y) { return {type(x), type(y)}; }                 \
    inline type2 __float22##Name##2_rn(float2 v) { return {type(v.x), type(v.y)}; }                     \
    inline type2 __halves2##Name##2(type x, type y) { return {x, y}; }                                  \
    inline float2 __##Name##22float2(type2 v) { return {float(v.x), float(v.y)}; }                      \
    inline float __low2float(type2 v) { return v.x; }                                                   \
    inline float __high2float(type2 v) { return v.y; }                                                  \
    inline unsigned short __##Name##_as_ushort(type x) { return x.bits; }                               \
    inline type __ushort_as_##Name(unsigned short bits) {                                               \
        type x;                                                                                         \
        x.bits = bits;                                                                                  \
        return x;                                                                                       \
    }

HALF_TYPE(__nv_bfloat16, __nv_bfloat162, bf16, bfloat16)
HALF_TYPE(__half, __half2, f16, half)
#undef HALF_TYPE
