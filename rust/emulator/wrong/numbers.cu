// Integers that have no quotient.

extern "C" __global__ void divide(int* out, int by) { out[threadIdx.x] = 100 / (static_cast<int>(threadIdx.x) - by); }

extern "C" __global__ void remainder_by(unsigned* out, unsigned by) { out[threadIdx.x] = 100u % (threadIdx.x - by); }
