// Rotary position embeddings (Su et al., "RoFormer", 2021) on queries, in place, and on keys, which go with their
// values into the paged KV. A row of `qkv` is [q_heads + 2 * kv_heads][head_dim]. `rotations` is, of each position,
// head_dim / 2 cosines and then as many sines in f32: made on the host, so that every scaling kind is covered. Pair i
// of a head is elements i and i + head_dim / 2, or, if `interleaved`, 2i and 2i + 1.
//
// `slots` says where a row's token goes: block * block_size + offset in the block; -1 is a padded row, which
// writes nothing to the KV. One block a row.
#include "paged.cuh"

template <class T>
__device__ __forceinline__ void rope_append(T* qkv, PagedKv<T> kv, const float* rotations, const int* positions,
                                            const long long* slots, int q_heads, int interleaved) {
    const int head_dim = kv.head_dim, half = head_dim / 2, row = blockIdx.x;
    T* heads = qkv + static_cast<size_t>(row) * (q_heads + 2 * kv.kv_heads) * head_dim;
    const float* cosines = rotations + static_cast<size_t>(positions[row]) * head_dim;
    const float* sines = cosines + half;
    const long long slot = slots[row];
    const long long block = slot / kv.block_size;
    const int offset = static_cast<int>(slot % kv.block_size);
    const int last = slot >= 0 ? q_heads + kv.kv_heads : q_heads;

    for (int i = threadIdx.x; i < last * half; i += blockDim.x) {
        const int head = i / half, pair = i % half;
        const int low = interleaved ? 2 * pair : pair, high = interleaved ? low + 1 : pair + half;
        const T* from = heads + head * head_dim;
        const float a = to_float(from[low]), b = to_float(from[high]);
        const float c = cosines[pair], s = sines[pair];
        T* to = head < q_heads ? heads + head * head_dim : kv.key(block, offset, head - q_heads);
        to[low] = from_float<T>(a * c - b * s);
        to[high] = from_float<T>(b * c + a * s);
    }
    if (slot < 0) {
        return;
    }
    const T* values = heads + (q_heads + kv.kv_heads) * head_dim;
    for (int i = threadIdx.x; i < kv.kv_heads * head_dim; i += blockDim.x) {
        kv.key(block, offset, i / head_dim)[kv.value_offset() + i % head_dim] = values[i];
    }
}

#define ROPE_APPEND(T)                                                                                            \
    extern "C" __global__ void rope_append_##T(T* qkv, T* layer, const float* rotations, const int* positions,    \
                                               const long long* slots, long long block_stride, int block_size,    \
                                               int q_heads, int kv_heads, int head_dim, int interleaved) {        \
        const PagedKv<T> kv = {layer, block_stride, block_size, kv_heads, head_dim};                              \
        rope_append(qkv, kv, rotations, positions, slots, q_heads, interleaved);                                  \
    }

ROPE_APPEND(bf16)
ROPE_APPEND(f16)
