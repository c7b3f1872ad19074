// A stand-in for cuBLAS: products of matrices, in the order of their stream, added up in f32 along k.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "../kernel/types.h"

#define CUBLAS_API extern "C" __attribute__((visibility("default")))

// Of the stand-in of the driver: a fault is an error of the context.
extern "C" int kvrelay_emulated_enqueue(void* stream, const char* what, void (*function)(void*), void* data);

namespace {

enum Status : int { success = 0, not_initialized = 1, invalid_value = 7, execution_failed = 13, not_supported = 15 };
enum DataType : int { f32 = 0, f16 = 2, bf16 = 14 };
enum Transpose : int { no = 0, yes = 1, conjugate = 2 };

struct Handle {
    void* stream = nullptr;
};

bool is_known(int type) { return type == f32 || type == f16 || type == bf16; }

float load(const void* matrix, size_t index, int type) {
    switch (type) {
        case f32: return static_cast<const float*>(matrix)[index];
        case f16: return static_cast<float>(static_cast<const __half*>(matrix)[index]);
        default: return static_cast<float>(static_cast<const __nv_bfloat16*>(matrix)[index]);
    }
}

void store(void* matrix, size_t index, int type, float value) {
    switch (type) {
        case f32: static_cast<float*>(matrix)[index] = value; break;
        case f16: static_cast<__half*>(matrix)[index] = __half(value); break;
        default: static_cast<__nv_bfloat16*>(matrix)[index] = __nv_bfloat16(value);
    }
}

// Column-major, as BLAS has it.
struct Matrix {
    void* at;
    int type, leading;
    bool transposed;
    long long stride;

    size_t index(int row, int column, int batch) const {
        const int i = transposed ? column : row, j = transposed ? row : column;
        return static_cast<size_t>(batch * stride) + static_cast<size_t>(j) * leading + i;
    }
};

// c = alpha · a · b + beta · c, of m × k, k × n and m × n, `batches` times.
struct Product {
    int m, n, k, batches;
    float alpha, beta;
    Matrix a, b, c;
};

void multiply(const Product& p, int batch) {
    const auto rows = static_cast<size_t>(p.m), columns = static_cast<size_t>(p.n), depth = static_cast<size_t>(p.k);
    std::vector<float> a(rows * depth), b(columns * depth);
    for (int i = 0; i < p.m; ++i) {
        for (int l = 0; l < p.k; ++l) {
            a[i * depth + l] = load(p.a.at, p.a.index(i, l, batch), p.a.type);
        }
    }
    for (int j = 0; j < p.n; ++j) {
        for (int l = 0; l < p.k; ++l) {
            b[j * depth + l] = load(p.b.at, p.b.index(l, j, batch), p.b.type);
        }
    }
    for (int j = 0; j < p.n; ++j) {
        for (int i = 0; i < p.m; ++i) {
            float sum = 0.0f;
            for (size_t l = 0; l < depth; ++l) {
                sum += a[i * depth + l] * b[j * depth + l];
            }
            const size_t to = p.c.index(i, j, batch);
            // Without beta c is not read: it may hold anything.
            const float before = p.beta != 0.0f ? p.beta * load(p.c.at, to, p.c.type) : 0.0f;
            store(p.c.at, to, p.c.type, p.alpha * sum + before);
        }
    }
}

void run(void* data) {
    const auto* product = static_cast<const Product*>(data);
    for (int batch = 0; batch < product->batches; ++batch) {
        multiply(*product, batch);
    }
}

// A graph that was captured runs it again and again, so what it needs is never freed.
Status enqueue(Handle* handle, const Product& product) {
    if (handle == nullptr) {
        return not_initialized;
    }
    const int types[] = {product.a.type, product.b.type, product.c.type};
    for (int type : types) {
        if (!is_known(type)) {
            std::fprintf(stderr, "kvrelay-emulator: cublasGemmEx knows the types 0, 2 and 14, not %d\n", type);
            return not_supported;
        }
    }
    const auto least = [](const Matrix& matrix, int rows, int columns) { return matrix.transposed ? columns : rows; };
    const bool wrong = product.m < 0 || product.n < 0 || product.k < 0 || product.a.leading < least(product.a, product.m, product.k) ||
                       product.b.leading < least(product.b, product.k, product.n) || product.c.leading < product.m;
    if (wrong) {
        return invalid_value;
    }
    auto* kept = new Product(product);
    return kvrelay_emulated_enqueue(handle->stream, "a product of matrices", run, kept) == 0 ? success : execution_failed;
}

}  // namespace

CUBLAS_API Status cublasCreate_v2(Handle** handle) {
    *handle = new Handle;
    return success;
}

CUBLAS_API Status cublasDestroy_v2(Handle* handle) {
    delete handle;
    return success;
}

CUBLAS_API Status cublasSetStream_v2(Handle* handle, void* stream) {
    handle->stream = stream;
    return success;
}

CUBLAS_API Status cublasSetMathMode(Handle*, int) { return success; }
CUBLAS_API Status cublasSetWorkspace_v2(Handle*, void*, size_t) { return success; }

CUBLAS_API Status cublasGemmEx(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                               const void* a, int type_a, int leading_a, const void* b, int type_b, int leading_b,
                               const void* beta, void* c, int type_c, int leading_c, int, int) {
    return enqueue(handle, {m, n, k, 1, *static_cast<const float*>(alpha), *static_cast<const float*>(beta),
                            {const_cast<void*>(a), type_a, leading_a, transpose_a != no, 0},
                            {const_cast<void*>(b), type_b, leading_b, transpose_b != no, 0},
                            {c, type_c, leading_c, false, 0}});
}

CUBLAS_API Status cublasGemmStridedBatchedEx(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k,
                                             const void* alpha, const void* a, int type_a, int leading_a, long long stride_a,
                                             const void* b, int type_b, int leading_b, long long stride_b, const void* beta,
                                             void* c, int type_c, int leading_c, long long stride_c, int batches, int, int) {
    return enqueue(handle, {m, n, k, batches, *static_cast<const float*>(alpha), *static_cast<const float*>(beta),
                            {const_cast<void*>(a), type_a, leading_a, transpose_a != no, stride_a},
                            {const_cast<void*>(b), type_b, leading_b, transpose_b != no, stride_b},
                            {c, type_c, leading_c, false, stride_c}});
}
