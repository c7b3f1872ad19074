// Accesses to memory that is nobody's, or that nobody has written.
#include "../../kernels/cuda/ptx.cuh"

extern "C" __global__ void write_at(float* out, long long index) { out[index] = 1.0f; }

extern "C" __global__ void read_at(float* out, const float* x, long long index) { out[0] = x[index]; }

// Before anybody writes it, shared memory of both kinds holds what is not a number.
extern "C" __global__ void read_unwritten_shared(float* out) {
    __shared__ float fixed[32];
    KVRELAY_DYNAMIC_SHARED(raw);
    const float* dynamic = reinterpret_cast<const float*>(raw);
    out[2 * threadIdx.x] = fixed[threadIdx.x];
    out[2 * threadIdx.x + 1] = dynamic[threadIdx.x];
    fixed[threadIdx.x] = 0.0f;
    reinterpret_cast<float*>(raw)[threadIdx.x] = 0.0f;
}

// Calls itself until its stack is full.
__device__ __noinline__ int descend(int depth, volatile int* seen) {
    volatile int frame[64];
    frame[depth % 64] = depth;
    *seen = depth;
    return depth == 0 ? 0 : descend(depth - 1, seen) + frame[depth % 64];
}

extern "C" __global__ void deep_recursion(int* out, int depth) { out[0] = descend(depth, out); }

// An index that is not the array's.
extern "C" __global__ void write_beside_an_array(float* out, int index) {
    __shared__ float values[32];
    values[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x == 7) {
        values[index] = 1.0f;
    }
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void write_dynamic_shared(float* out, int index) {
    KVRELAY_DYNAMIC_SHARED(raw);
    if (threadIdx.x == 7) {
        raw[index] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = raw[threadIdx.x];
}

// Sixteen bytes at once, from wherever the pointer is.
extern "C" __global__ void read_vector(float* out, const float* x, int from) {
    const float4 four = *reinterpret_cast<const float4*>(x + from);
    out[threadIdx.x] = four.x + four.y + four.z + four.w;
}
