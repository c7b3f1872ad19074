// Rows of the embedding table, one block a token: out[t][d] = table[ids[t]][d], rounded to the activations' type
// where the table is quantised. Ids outside the table (such as -1 for a padded row) give zeros.
#include "quantised.cuh"

template <class T>
__device__ __forceinline__ void embedding(T* out, const T* table, const int* ids, int vocab, int dim) {
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < vocab;
    // The launcher asks for rows of whole 16-byte words.
    const auto* from = reinterpret_cast<const uint4*>(table + static_cast<size_t>(known ? id : 0) * dim);
    auto* to = reinterpret_cast<uint4*>(out + static_cast<size_t>(blockIdx.x) * dim);
    for (int i = threadIdx.x; i < dim / 8; i += blockDim.x) {
        to[i] = known ? from[i] : make_uint4(0, 0, 0, 0);
    }
}

template <class T, class Format>
__device__ __forceinline__ void embedding_quantised(T* out, const unsigned char* table, const int* ids, int vocab,
                                                    int dim) {
    const int id = ids[blockIdx.x], blocks = dim / QUANTISED_BLOCK;
    const bool known = id >= 0 && id < vocab;
    const unsigned char* row = table + static_cast<size_t>(known ? id : 0) * blocks * Format::BYTES;
    T* to = out + static_cast<size_t>(blockIdx.x) * dim;
    for (int i = threadIdx.x; i < blocks * 2; i += blockDim.x) {
        const int block = i / 2, half = i % 2;
        float values[16] = {};
        if (known) {
            Format::unpack(Format::read(row + static_cast<size_t>(block) * Format::BYTES, half), values);
        }
        T* at = to + block * QUANTISED_BLOCK;
        *reinterpret_cast<uint4*>(at + Format::first(half)) = pack_8<T>(values);
        *reinterpret_cast<uint4*>(at + Format::second(half)) = pack_8<T>(values + 8);
    }
}

#define EMBEDDING(T)                                                                                              \
    extern "C" __global__ void embedding_##T(T* out, const T* table, const int* ids, int vocab, int dim) {        \
        embedding(out, table, ids, vocab, dim);                                                                   \
    }

#define EMBEDDING_QUANTISED(T, FORMAT, NAME)                                                                      \
    extern "C" __global__ void embedding_##T##_##NAME(T* out, const unsigned char* table, const int* ids,         \
                                                      int vocab, int dim) {                                       \
        embedding_quantised<T, FORMAT>(out, table, ids, vocab, dim);                                              \
    }

EMBEDDING(bf16)
EMBEDDING(f16)
EMBEDDING_QUANTISED(bf16, Q4_0, q4_0)
EMBEDDING_QUANTISED(bf16, Q4_1, q4_1)
EMBEDDING_QUANTISED(bf16, Q8_0, q8_0)
EMBEDDING_QUANTISED(f16, Q4_0, q4_0)
EMBEDDING_QUANTISED(f16, Q4_1, q4_1)
EMBEDDING_QUANTISED(f16, Q8_0, q8_0)
