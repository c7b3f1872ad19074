// Kernels that limits are tried on.
#include "../../kernels/cuda/ptx.cuh"

extern "C" __global__ void __launch_bounds__(64) at_most_64_threads(int* out) { out[threadIdx.x] = 1; }

extern "C" __global__ void some_static_shared(int* out) {
    __shared__ int values[1024];
    KVRELAY_DYNAMIC_SHARED(raw);
    values[threadIdx.x] = static_cast<int>(threadIdx.x);
    raw[threadIdx.x] = 0;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x ^ 1] + raw[threadIdx.x ^ 1];
}

// The host's compiler and the device's see different parameters.
#ifdef KVRELAY_EMULATED
using Count = long long;
#else
using Count = int;
#endif

extern "C" __global__ void two_kinds_of_count(int* out, Count count) { out[0] = static_cast<int>(count); }
