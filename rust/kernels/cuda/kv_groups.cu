// Layer groups of KV blocks, gathered from a pool into one contiguous buffer and scattered back, for transfers. A
// block is one run of `block_words` 16-byte words, a layer group `words` of them from `offset` on; the buffer is
// [count][words]. Grid: x one a block, y shares of a group.
#include "ptx.cuh"

extern "C" __global__ void gather_kv_groups(uint4* buffer, const uint4* pool, const int* blocks,
                                            long long block_words, long long offset, long long words) {
    const uint4* from = pool + blocks[blockIdx.x] * block_words + offset;
    uint4* to = buffer + blockIdx.x * words;
    for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < words; i += gridDim.y * blockDim.x) {
        to[i] = from[i];
    }
}

extern "C" __global__ void scatter_kv_groups(uint4* pool, const uint4* buffer, const int* blocks,
                                             long long block_words, long long offset, long long words) {
    const uint4* from = buffer + blockIdx.x * words;
    uint4* to = pool + blocks[blockIdx.x] * block_words + offset;
    for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < words; i += gridDim.y * blockDim.x) {
        to[i] = from[i];
    }
}
