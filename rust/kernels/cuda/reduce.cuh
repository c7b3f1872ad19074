// Sums over a warp and over a block; every thread gets the sum, added in the same order whatever the data.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// `scratch` holds 32 floats in shared memory, and is free again when this returns. The block is whole warps.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    value = warp_sum(lane < warps ? scratch[lane] : 0.0f);
    __syncthreads();
    return value;
}
