// RMSNorm of every query and key head by itself, in place, as Qwen3 does before it rotates them. A row of `qkv` is
// [q_heads + 2 * kv_heads][head_dim]; values are left alone. One block a row, one warp a head; rounded as rms_norm.
#include "element.cuh"
#include "reduce.cuh"

template <class T>
__device__ __forceinline__ void head_norm(T* qkv, const T* q_weight, const T* k_weight, int q_heads, int kv_heads,
                                          int head_dim, float eps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    T* row = qkv + static_cast<size_t>(blockIdx.x) * (q_heads + 2 * kv_heads) * head_dim;
    for (int head = warp; head < q_heads + kv_heads; head += warps) {
        T* x = row + head * head_dim;
        const T* weight = head < q_heads ? q_weight : k_weight;
        float squares = 0.0f;
        for (int d = lane; d < head_dim; d += 32) {
            squares += to_float(x[d]) * to_float(x[d]);
        }
        const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
        for (int d = lane; d < head_dim; d += 32) {
            x[d] = from_float<T>(rounded<T>(to_float(x[d]) * scale) * to_float(weight[d]));
        }
    }
}

#define HEAD_NORM(T)                                                                                              \
    extern "C" __global__ void head_norm_##T(T* qkv, const T* q_weight, const T* k_weight, int q_heads,           \
                                             int kv_heads, int head_dim, float eps) {                             \
        head_norm(qkv, q_weight, k_weight, q_heads, kv_heads, head_dim, eps);                                     \
    }

HEAD_NORM(bf16)
HEAD_NORM(f16)
