// A sum through shared memory, right and with its barrier forgotten; and blocks that part at a barrier.

constexpr int THREADS = 128;

// One block of THREADS: out[i] = x[i] + x[THREADS - 1 - i].
template <bool BARRIER>
__device__ __forceinline__ void add_mirrored(float* out, const float* x) {
    __shared__ float values[THREADS];
    values[threadIdx.x] = x[threadIdx.x];
    if (BARRIER) {
        __syncthreads();
    }
    out[threadIdx.x] = values[threadIdx.x] + values[THREADS - 1 - threadIdx.x];
}

extern "C" __global__ void mirrored(float* out, const float* x) { add_mirrored<true>(out, x); }

extern "C" __global__ void mirrored_without_barrier(float* out, const float* x) { add_mirrored<false>(out, x); }

// Half of the block waits at one barrier, the other half at another.
extern "C" __global__ void two_barriers(float* out) {
    if (threadIdx.x < THREADS / 2) {
        __syncthreads();
        out[threadIdx.x] = 1.0f;
    } else {
        __syncthreads();
        out[threadIdx.x] = 2.0f;
    }
}

// One lane waits for its warp, the others for the block.
extern "C" __global__ void barrier_and_shuffle(float* out) {
    if (threadIdx.x == 9) {
        out[0] = __shfl_sync(0xffffffffu, 1.0f, 0);
    } else {
        __syncthreads();
    }
}

// A lane that is not in its own mask.
extern "C" __global__ void shuffle_of_others(float* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0); }

// Threads that have ended are waited for no more: out[0] = how many are left, counted two ways.
extern "C" __global__ void early_exits(int* out, int stay) {
    if (static_cast<int>(threadIdx.x) >= stay) {
        return;
    }
    const int counted = __syncthreads_count(1);
    int sum = 1;
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (threadIdx.x == 0) {
        out[0] = counted;
        out[1] = sum;
    }
}
