// RMSNorm (Zhang and Sennrich 2019), one block a row, with the residual added before where there is one:
// h = round(x + residual), written back into residual; out = round(round(h / rms(h)) * weight). Llama rounds the
// normalised value before the weight, and so do we. How a row is added depends on its length alone.
#include "element.cuh"
#include "reduce.cuh"

template <class T>
__device__ __forceinline__ void rms_norm(T* out, const T* x, T* residual, const T* weight, int dim, float eps) {
    __shared__ float scratch[32];
    const size_t row = static_cast<size_t>(blockIdx.x) * dim;
    float squares = 0.0f;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float h = to_float(x[row + d]);
        if (residual != nullptr) {
            const T sum = from_float<T>(h + to_float(residual[row + d]));
            residual[row + d] = sum;
            h = to_float(sum);
        }
        squares += h * h;
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / static_cast<float>(dim) + eps);
    // Each thread reads back only what it wrote itself.
    const T* h = residual != nullptr ? residual : x;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        out[row + d] = from_float<T>(rounded<T>(to_float(h[row + d]) * scale) * to_float(weight[d]));
    }
}

#define RMS_NORM(T)                                                                                               \
    extern "C" __global__ void rms_norm_##T(T* out, const T* x, T* residual, const T* weight, int dim,            \
                                            float eps) {                                                          \
        rms_norm(out, x, residual, weight, dim, eps);                                                             \
    }

RMS_NORM(bf16)
RMS_NORM(f16)
