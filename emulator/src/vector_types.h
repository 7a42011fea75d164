// CUDA's vector types, with their alignment.
#pragma once
#include <stdint.h>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

#define VECTOR_TYPES(type, scalar, align2, align4)                                                       \
    struct alignas(align2) type##2 {                                                                     \
        scalar x, y;                                                                                     \
    };                                                                                                   \
    struct alignas(align4) type##4 {                                                                     \
        scalar x, y, z, w;                                                                               \
    };                                                                                                   \
    inline type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }                                 \
    inline type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

VECTOR_TYPES(char, signed char, 2, 4)
VECTOR_TYPES(uchar, unsigned char, 2, 4)
VECTOR_TYPES(short, short, 4, 8)
VECTOR_TYPES(ushort, unsigned short, 4, 8)
VECTOR_TYPES(int, int, 8, 16)
VECTOR_TYPES(uint, unsigned, 8, 16)
VECTOR_TYPES(longlong, long long, 16, 16)
VECTOR_TYPES(ulonglong, unsigned long long, 16, 16)
VECTOR_TYPES(float, float, 8, 16)
VECTOR_TYPES(double, double, 16, 16)
#undef VECTOR_TYPES
