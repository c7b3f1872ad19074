// The types of activations and weights: stored in 16 bits, computed with in f32.
#pragma once

#include "ptx.cuh"

using bf16 = __nv_bfloat16;
using f16 = __half;

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
