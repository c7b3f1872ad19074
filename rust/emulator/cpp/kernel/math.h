// CUDA's mathematics. Intrinsics that a GPU computes roughly are exact here, so results are compared within
// tolerances; nothing is fused (-ffp-contract=off) but what says so.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "types.h"

// As CUDA's, the common type of the two: unsigned where one is.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __saturatef(float x) { return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline unsigned __float_as_uint(float x) { return kvrelay_emulated::bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return kvrelay_emulated::bits_of<float>(x); }
inline int __float_as_int(float x) { return kvrelay_emulated::bits_of<int>(x); }
inline float __int_as_float(int x) { return kvrelay_emulated::bits_of<float>(x); }
inline long long __double_as_longlong(double x) { return kvrelay_emulated::bits_of<long long>(x); }
inline double __longlong_as_double(long long x) { return kvrelay_emulated::bits_of<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// Four bytes picked from the eight of (high, low); the sign-replicating mode is not modelled.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned picked = 0;
    for (int i = 0; i < 4; ++i) {
        picked |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return picked;
}

inline int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) {
        sum += static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift);
    }
    return sum;
}
