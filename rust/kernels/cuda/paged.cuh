// Where the KV of a token lies. A block of the pool holds `block_size` tokens of all layers; in it each layer is its
// keys [kv_head][token][head_dim] and then its values in the same order. `layer` points at the layer's keys in block
// 0, and blocks follow each other at `block_stride` elements.
#pragma once

#include "element.cuh"

template <class T>
struct PagedKv {
    T* layer;
    long long block_stride;
    int block_size, kv_heads, head_dim;

    // Elements from a token's key to its value.
    __device__ __forceinline__ size_t value_offset() const {
        return static_cast<size_t>(kv_heads) * block_size * head_dim;
    }

    // The key of a token, `offset` tokens into `block`.
    __device__ __forceinline__ T* key(long long block, int offset, int kv_head) const {
        return layer + block * block_stride + (static_cast<size_t>(kv_head) * block_size + offset) * head_dim;
    }
};
