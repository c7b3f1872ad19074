// Writes past shared memory, alone in a file: beside the array lies nothing else.
#include "../../kernels/cuda/ptx.cuh"

// By way of a pointer of which no compiler knows the end.
extern "C" __global__ void write_static_shared(int* out, int index) {
    __shared__ int values[32];
    volatile int* all = values;
    all[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 7) {
        all[index] = 2;
    }
    out[threadIdx.x] = all[threadIdx.x];
}
