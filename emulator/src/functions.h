// Functions of CUDA's device library that a host lacks: arithmetic, bits, atomics on integers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include "halves.h"

// 2^x, see kernels/prim.cuh.
inline float exp2_approx(float x) {
    const float y = exp2f(fabsf(x) < FLT_MIN ? 0.0f : x);
    return y < FLT_MIN ? 0.0f : y;  // false for NaN
}

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmin(T(a), T(b));
    else return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return fmax(T(a), T(b));
    else return T(a) > T(b) ? T(a) : T(b);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678118654752440f); }
inline double normcdf(double x) { return 0.5 * erfc(x * -0.70710678118654752440); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }

// These are never fused with others, so that they need the barrier of a volatile.
#define ROUNDED(name, type, op)                    \
    inline type name(type a, type b) {             \
        volatile type result = a op b;             \
        return result;                             \
    }
ROUNDED(__fadd_rn, float, +)
ROUNDED(__fsub_rn, float, -)
ROUNDED(__fmul_rn, float, *)
ROUNDED(__fdiv_rn, float, /)
ROUNDED(__dadd_rn, double, +)
ROUNDED(__dsub_rn, double, -)
ROUNDED(__dmul_rn, double, *)
ROUNDED(__ddiv_rn, double, /)
#undef ROUNDED
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

#define SAME_BITS(name, to, from)                           \
    inline to name(from x) {                                \
        static_assert(sizeof(to) == sizeof(from), "size");  \
        to bits;                                            \
        memcpy(&bits, &x, sizeof(to));                      \
        return bits;                                        \
    }
SAME_BITS(__float_as_int, int, float)
SAME_BITS(__float_as_uint, unsigned, float)
SAME_BITS(__int_as_float, float, int)
SAME_BITS(__uint_as_float, float, unsigned)
SAME_BITS(__double_as_longlong, long long, double)
SAME_BITS(__longlong_as_double, double, long long)
#undef SAME_BITS

namespace emulator {
// Saturating, NaN is 0: as the device converts.
template <class T, class C>
inline T to_integer(C x) {
    constexpr C limit =
        std::is_signed_v<T> ? C(uint64_t(1) << (8 * sizeof(T) - 1)) : C(2) * C(uint64_t(1) << (8 * sizeof(T) - 1));
    if (x != x) return 0;
    if (x >= limit) return std::is_signed_v<T> ? T((uint64_t(1) << (8 * sizeof(T) - 1)) - 1) : T(~T(0));
    if (x < (std::is_signed_v<T> ? -limit : C(0)))
        return std::is_signed_v<T> ? T(uint64_t(1) << (8 * sizeof(T) - 1)) : T(0);
    return static_cast<T>(x);
}
}  // namespace emulator
inline int __float2int_rn(float x) { return emulator::to_integer<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return emulator::to_integer<int>(truncf(x)); }
inline int __float2int_rd(float x) { return emulator::to_integer<int>(floorf(x)); }
inline int __float2int_ru(float x) { return emulator::to_integer<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return emulator::to_integer<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return emulator::to_integer<unsigned>(truncf(x)); }
inline int __double2int_rn(double x) { return emulator::to_integer<int>(nearbyint(x)); }
inline long long __float2ll_rn(float x) { return emulator::to_integer<long long>(nearbyintf(x)); }
inline long long __double2ll_rn(double x) { return emulator::to_integer<long long>(nearbyint(x)); }
inline long long __double2ll_rz(double x) { return emulator::to_integer<long long>(trunc(x)); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}

template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline void __stcs(T* p, T x) { *p = x; }
template <class T>
inline void __stcg(T* p, T x) { *p = x; }

// Atomics on integers alone: those on floats depend on the order of threads, and no kernel may use them.
#define ATOMIC_TYPES(one) one(int) one(unsigned) one(unsigned long long)
#define ATOMIC(type)                                                                                             \
    inline type atomicAdd(type* p, type x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }                \
    inline type atomicOr(type* p, type x) { return __atomic_fetch_or(p, x, __ATOMIC_RELAXED); }                  \
    inline type atomicAnd(type* p, type x) { return __atomic_fetch_and(p, x, __ATOMIC_RELAXED); }                \
    inline type atomicXor(type* p, type x) { return __atomic_fetch_xor(p, x, __ATOMIC_RELAXED); }                \
    inline type atomicExch(type* p, type x) { return __atomic_exchange_n(p, x, __ATOMIC_RELAXED); }              \
    inline type atomicCAS(type* p, type expected, type x) {                                                      \
        __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                 \
        return expected;                                                                                         \
    }                                                                                                            \
    inline type atomicMin(type* p, type x) {                                                                     \
        type old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                         \
        while (x < old && !__atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                        \
        return old;                                                                                              \
    }                                                                                                            \
    inline type atomicMax(type* p, type x) {                                                                     \
        type old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                         \
        while (x > old && !__atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                        \
        return old;                                                                                              \
    }
ATOMIC_TYPES(ATOMIC)
#undef ATOMIC
#undef ATOMIC_TYPES
inline int atomicSub(int* p, int x) { return __atomic_fetch_sub(p, x, __ATOMIC_RELAXED); }
inline unsigned atomicSub(unsigned* p, unsigned x) { return __atomic_fetch_sub(p, x, __ATOMIC_RELAXED); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
