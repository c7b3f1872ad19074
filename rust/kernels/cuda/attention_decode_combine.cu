// Adds up the splits of attention_decode in their order: out = sum of outputs / sum of sums, each made smaller by its
// distance from the largest score. One block a row and query head, one thread an element. Rows of length 0, which pad a
// batch, give zeros.
#include "element.cuh"

template <class T>
__device__ __forceinline__ void attention_decode_combine(T* out, const float* outputs, const float* sums,
                                                         const int* lengths, int split_tokens, int max_splits,
                                                         int head_dim) {
    const int row = blockIdx.x, d = threadIdx.x;
    if (d >= head_dim) {
        return;
    }
    const size_t head = static_cast<size_t>(row) * gridDim.y + blockIdx.y;
    const float* from = outputs + head * max_splits * head_dim + d;
    const float* of = sums + head * max_splits * 2;
    const int splits = (lengths[row] + split_tokens - 1) / split_tokens;
    float top = splits > 0 ? of[0] : 0.0f;
    for (int s = 1; s < splits; ++s) {
        top = fmaxf(top, of[2 * s]);
    }
    float weights = 0.0f, output = 0.0f;
    for (int s = 0; s < splits; ++s) {
        const float shrink = exp2_fast(of[2 * s] - top);
        weights += of[2 * s + 1] * shrink;
        output += from[static_cast<size_t>(s) * head_dim] * shrink;
    }
    out[head * head_dim + d] = from_float<T>(splits > 0 ? output / weights : 0.0f);
}

#define ATTENTION_DECODE_COMBINE(T)                                                                               \
    extern "C" __global__ void attention_decode_combine_##T(T* out, const float* outputs, const float* sums,      \
                                                            const int* lengths, int split_tokens, int max_splits, \
                                                            int head_dim) {                                       \
        attention_decode_combine(out, outputs, sums, lengths, split_tokens, max_splits, head_dim);                \
    }

ATTENTION_DECODE_COMBINE(bf16)
ATTENTION_DECODE_COMBINE(f16)
