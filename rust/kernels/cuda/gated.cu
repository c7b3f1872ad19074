// SwiGLU and GeGLU (Shazeer, "GLU Variants Improve Transformer", 2020): out = round(round(act(gate)) * up), where a
// row of `gate_up` is the gate's `width` elements, then the up projection's. The activation is rounded before the
// product, as Llama and Gemma do. Grid: x rows, of which there may be more than y takes; y shares of a row.
#include "element.cuh"

struct Silu {
    static __device__ __forceinline__ float of(float x) { return x / (1.0f + expf(-x)); }
};

// The approximation by tanh (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), which Gemma uses. As
// (1 + tanh y) / 2 = 1 / (1 + exp(-2y)), nothing cancels where it is all but 0.
struct GeluTanh {
    static __device__ __forceinline__ float of(float x) {
        const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return x / (1.0f + expf(-2.0f * inner));
    }
};

template <class T, class Activation>
__device__ __forceinline__ void gated(T* out, const T* gate_up, int width) {
    const T* gate = gate_up + static_cast<size_t>(blockIdx.x) * 2 * width;
    const T* up = gate + width;
    T* to = out + static_cast<size_t>(blockIdx.x) * width;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        to[i] = from_float<T>(rounded<T>(Activation::of(to_float(gate[i]))) * to_float(up[i]));
    }
}

#define GATED(NAME, T, ACTIVATION)                                                                                \
    extern "C" __global__ void NAME##_##T(T* out, const T* gate_up, int width) {                                  \
        gated<T, ACTIVATION>(out, gate_up, width);                                                                \
    }

GATED(swiglu, bf16, Silu)
GATED(swiglu, f16, Silu)
GATED(geglu, bf16, GeluTanh)
GATED(geglu, f16, GeluTanh)
