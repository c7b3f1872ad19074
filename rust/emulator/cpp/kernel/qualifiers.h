// CUDA's qualifiers, as g++ is to read them.
#pragma once

#define __global__ __attribute__((visibility("default"), noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __constant__ static const
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
// A block stays on its thread of the operating system, and that thread runs one block at a time.
#define __shared__ static thread_local
