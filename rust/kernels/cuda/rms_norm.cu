// RMSNorm of rows, one block a row, with the residual added before where there is one:
// h = x + residual (written back into residual), out = round(h / rms(h)) * weight, as Llama rounds.
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
    const float scale = rsqrtf(block_sum(squares, scratch) / dim + eps);
    const T* h = residual != nullptr ? residual : x;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        const T normalised = from_float<T>(to_float(h[row + d]) * scale);
        out[row + d] = from_float<T>(to_float(normalised) * to_float(weight[d]));
    }
}

extern "C" __global__ void rms_norm_bf16(bf16* out, const bf16* x, bf16* residual, const bf16* weight, int dim,
                                         float eps) {
    rms_norm(out, x, residual, weight, dim, eps);
}

extern "C" __global__ void rms_norm_f16(f16* out, const f16* x, f16* residual, const f16* weight, int dim,
                                        float eps) {
    rms_norm(out, x, residual, weight, dim, eps);
}
