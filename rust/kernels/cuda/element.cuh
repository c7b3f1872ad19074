// The types of activations and weights: stored in 16 bits, computed with in f32.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16(x);
}

template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
    return __float2half(x);
}

// `x` as an element would hold it.
template <class T>
__device__ __forceinline__ float rounded(float x) {
    return to_float(from_float<T>(x));
}

// All bits of an element's exponent.
template <class T>
struct Exponent;

template <>
struct Exponent<bf16> {
    static constexpr unsigned BITS = 0x7f80;
};

template <>
struct Exponent<f16> {
    static constexpr unsigned BITS = 0x7c00;
};

// Two neighbours in one register, the first in the low half.
template <class T>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <>
__device__ __forceinline__ unsigned pack<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

template <class T>
__device__ __forceinline__ float2 unpack(unsigned pair);

template <>
__device__ __forceinline__ float2 unpack<bf16>(unsigned pair) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

template <>
__device__ __forceinline__ float2 unpack<f16>(unsigned pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Ones where a register of two neighbours holds a finite one, zeros where it is infinite or no number.
template <class T>
__device__ __forceinline__ unsigned finite_mask(unsigned pair) {
    constexpr unsigned EXPONENT = Exponent<T>::BITS;
    return ((pair & EXPONENT) != EXPONENT ? 0x0000ffffu : 0) |
           ((pair >> 16 & EXPONENT) != EXPONENT ? 0xffff0000u : 0);
}

// Eight neighbours, as 16 aligned bytes hold them.
template <class T>
__device__ __forceinline__ void unpack_8(const uint4& from, float (&to)[8]) {
    const unsigned words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(words[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

template <class T>
__device__ __forceinline__ uint4 pack_8(const float* from) {
    return make_uint4(pack<T>(from[0], from[1]), pack<T>(from[2], from[3]), pack<T>(from[4], from[5]),
                      pack<T>(from[6], from[7]));
}
