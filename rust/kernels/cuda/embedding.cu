// Rows of the embedding table, one block a token: out[t][d] = table[ids[t]][d].
#include "element.cuh"

template <class T>
__device__ __forceinline__ void embedding(T* out, const T* table, const int* ids, int dim) {
    const T* row = table + static_cast<size_t>(ids[blockIdx.x]) * dim;
    T* to = out + static_cast<size_t>(blockIdx.x) * dim;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        to[d] = row[d];
    }
}

extern "C" __global__ void embedding_bf16(bf16* out, const bf16* table, const int* ids, int dim) {
    embedding(out, table, ids, dim);
}

extern "C" __global__ void embedding_f16(f16* out, const f16* table, const int* ids, int dim) {
    embedding(out, table, ids, dim);
}
