// CUDA's vectors and 16-bit floats. No header of NVIDIA's is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

#define KVRELAY_VECTORS(T, NAME)                                                   \
    struct alignas(2 * sizeof(T)) NAME##2 {                                        \
        T x, y;                                                                    \
    };                                                                             \
    struct alignas(4 * sizeof(T)) NAME##4 {                                        \
        T x, y, z, w;                                                              \
    };                                                                             \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                     \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

KVRELAY_VECTORS(float, float)
KVRELAY_VECTORS(int, int)
KVRELAY_VECTORS(unsigned, uint)
KVRELAY_VECTORS(short, short)
KVRELAY_VECTORS(unsigned short, ushort)
KVRELAY_VECTORS(signed char, char)
KVRELAY_VECTORS(unsigned char, uchar)
#undef KVRELAY_VECTORS

namespace kvrelay_emulated {

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Rounded to nearest, ties to even; not a number stays one.
inline uint16_t bf16_bits(float value) {
    const uint32_t bits = bits_of<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace kvrelay_emulated

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) : bits(kvrelay_emulated::bf16_bits(value)) {}
    explicit operator float() const { return kvrelay_emulated::bits_of<float>(static_cast<uint32_t>(bits) << 16); }
};

struct __half {
    uint16_t bits;
    __half() = default;
    explicit __half(float value) : bits(kvrelay_emulated::bits_of<uint16_t>(static_cast<_Float16>(value))) {}
    explicit operator float() const { return static_cast<float>(kvrelay_emulated::bits_of<_Float16>(bits)); }
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

struct alignas(4) __half2 {
    __half x, y;
};

using half = __half;
using half2 = __half2;

inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return kvrelay_emulated::bits_of<__nv_bfloat16>(bits);
}

inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return kvrelay_emulated::bits_of<__half>(bits); }
