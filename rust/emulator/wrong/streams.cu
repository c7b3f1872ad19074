// A value handed from one kernel to the next, and atomics between blocks.

extern "C" __global__ void produce(int* value, int to) { value[threadIdx.x] = to; }

extern "C" __global__ void consume(int* out, const int* value) { out[threadIdx.x] = value[threadIdx.x] + 1; }

// out[0] += 1 for every thread of every block.
extern "C" __global__ void count_threads(int* out) { atomicAdd(out, 1); }
