// y = x * w^T on tensor cores: x is [m][k], w is [n][k] as model files store it, y is [m][n] in the type of x or f32.
//
// There are two shapes of block, for few rows and for many. Both add the products of an output in steps of 16 along k,
// in order, into one accumulator of one warp: so a row's outputs depend on k alone, bit for bit, not on how many rows
// there are, which shape was chosen, or where in a block the row lies. That is why few rows have no kernel of dot
// products: it could not add as a tensor core does.
//
// Tiles of x and w go through shared memory in stages, the later ones on their way while the first is worked on.
// Quantised weights are unpacked between registers and shared memory, and rounded to the type of x.
#pragma once

#include "quantised.cuh"

namespace gemm {

template <int ROWS_, int COLUMNS_, int DEPTH_, int STAGES_, int WARP_ROWS_, int WARP_COLUMNS_>
struct Shape {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, STAGES = STAGES_;
    static constexpr int WARP_ROWS = WARP_ROWS_, WARP_COLUMNS = WARP_COLUMNS_;
    static constexpr int ACROSS = COLUMNS / WARP_COLUMNS;
    static constexpr int THREADS = ROWS / WARP_ROWS * ACROSS * 32;
    // Eight elements more than a tile is deep, so that the eight rows of a matrix lie in different banks.
    static constexpr int STRIDE = DEPTH + 8;
    static constexpr int X_TILE = ROWS * STRIDE, W_TILE = COLUMNS * STRIDE, STAGE = X_TILE + W_TILE;
    static constexpr int SHARED_BYTES = STAGES * STAGE * 2;
    static_assert(SHARED_BYTES <= 99 * 1024, "tiles beyond the shared memory of small devices");
    static_assert(WARP_ROWS % 16 == 0 && WARP_COLUMNS % 16 == 0 && DEPTH % QUANTISED_BLOCK == 0, "whole products");
    static_assert(ROWS * DEPTH / 8 % THREADS == 0 && COLUMNS * DEPTH / 16 % THREADS == 0, "threads share evenly");
};

using FewRows = Shape<16, 64, 64, 4, 16, 16>;
using ManyRows = Shape<128, 128, 32, 4, 64, 32>;

// Starts copying a tile of a matrix of 16-bit elements: LINES of its rows from `first`, S::DEPTH of k; zeros outside.
template <class S, int LINES, class T>
__device__ __forceinline__ void fetch_tile(T* to, const T* from, long long stride, int first, int lines, int depth,
                                           int k) {
    constexpr int WORDS = S::DEPTH / 8;
#pragma unroll
    for (int i = threadIdx.x; i < LINES * WORDS; i += S::THREADS) {
        const int line = i / WORDS, word = i % WORDS;
        const bool valid = first + line < lines && depth + word * 8 < k;
        const T* source = valid ? from + (first + line) * stride + depth + word * 8 : from;
        copy_16(to + line * S::STRIDE + word * 8, source, valid);
    }
}

// Weights of the type of x, copied as they are.
template <class S, class T>
struct Plain {
    const T* w;
    int first, n, k;

    __device__ __forceinline__ Plain(const void* weights, int first_, int n_, int k_)
        : w(static_cast<const T*>(weights)), first(first_), n(n_), k(k_) {}

    __device__ __forceinline__ void fetch(T* tile, int depth) {
        fetch_tile<S, S::COLUMNS>(tile, w, k, first, n, depth, k);
    }

    __device__ __forceinline__ void store(T*) const {}
};

// Weights in blocks: `fetch` reads them into registers, `store` unpacks them into the tile.
template <class S, class T, class Format>
struct Quantised {
    static constexpr int HALVES = S::DEPTH / 16, SHARE = S::COLUMNS * HALVES / S::THREADS;
    const unsigned char* w;
    int first, n, k;
    HalfBlock fetched[SHARE];

    __device__ __forceinline__ Quantised(const void* weights, int first_, int n_, int k_)
        : w(static_cast<const unsigned char*>(weights)), first(first_), n(n_), k(k_) {}

    __device__ __forceinline__ void fetch(T*, int depth) {
        const size_t row_bytes = static_cast<size_t>(k / QUANTISED_BLOCK) * Format::BYTES;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int unit = threadIdx.x + i * S::THREADS, line = first + unit / HALVES;
            const int half = depth / 16 + unit % HALVES;
            fetched[i] = {};
            if (line < n && half * 16 < k) {
                const unsigned char* block = w + line * row_bytes + static_cast<size_t>(half / 2) * Format::BYTES;
                fetched[i] = Format::read(block, half % 2);
            }
        }
    }

    __device__ __forceinline__ void store(T* tile) const {
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int unit = threadIdx.x + i * S::THREADS, half = unit % HALVES;
            float values[16];
            Format::unpack(fetched[i], values);
            T* block = tile + unit / HALVES * S::STRIDE + half / 2 * QUANTISED_BLOCK;
            *reinterpret_cast<uint4*>(block + Format::first(half % 2)) = pack_8<T>(values);
            *reinterpret_cast<uint4*>(block + Format::second(half % 2)) = pack_8<T>(values + 8);
        }
    }
};

// What a warp adds up: 16 x 8 outputs each.
template <class S>
struct Sums {
    static constexpr int DOWN = S::WARP_ROWS / 16, ACROSS = S::WARP_COLUMNS / 8;
    float of[DOWN][ACROSS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < DOWN * ACROSS * 4; ++i) {
            of[i / (ACROSS * 4)][i / 4 % ACROSS][i % 4] = 0.0f;
        }
    }
};

// Adds the products of one stage.
template <class S, class T>
__device__ __forceinline__ void multiply(Sums<S>& sums, const T* x, const T* w, int warp_row, int warp_column) {
    const int lane = threadIdx.x % 32;
    const T* x_named = x + (warp_row + lane % 16) * S::STRIDE + lane / 16 * 8;
    const T* w_named = w + (warp_column + lane % 8 + lane / 16 * 8) * S::STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < S::DEPTH; step += 16) {
        unsigned a[Sums<S>::DOWN][4];
#pragma unroll
        for (int i = 0; i < Sums<S>::DOWN; ++i) {
            load_matrices<false>(a[i], x_named + i * 16 * S::STRIDE + step);
        }
#pragma unroll
        for (int pair = 0; pair < Sums<S>::ACROSS / 2; ++pair) {
            unsigned b[4];
            load_matrices<false>(b, w_named + pair * 16 * S::STRIDE + step);
            const unsigned even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
#pragma unroll
            for (int i = 0; i < Sums<S>::DOWN; ++i) {
                mma_16x8x16<T>(sums.of[i][2 * pair], a[i], even);
                mma_16x8x16<T>(sums.of[i][2 * pair + 1], a[i], odd);
            }
        }
    }
}

// Writes a warp's outputs, of which `row` and `column` are the first; `y` has T or, if `wide`, f32.
template <class S, class T>
__device__ __forceinline__ void store(void* y, const Sums<S>& sums, int row, int column, int m, int n, bool wide) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Sums<S>::DOWN * Sums<S>::ACROSS * 4; ++i) {
        const int down = i / (Sums<S>::ACROSS * 4), across = i / 4 % Sums<S>::ACROSS, e = i % 4;
        const int r = row + down * 16 + lane / 4 + e / 2 * 8, c = column + across * 8 + lane % 4 * 2 + e % 2;
        if (r >= m || c >= n) {
            continue;
        }
        const size_t at = static_cast<size_t>(r) * n + c;
        const float value = sums.of[down][across][e];
        if (wide) {
            static_cast<float*>(y)[at] = value;
        } else {
            static_cast<T*>(y)[at] = from_float<T>(value);
        }
    }
}

template <class S, class T, class Weights>
__device__ __forceinline__ void run(void* y, const T* x, const void* w, int m, int n, int k, long long x_stride,
                                    bool wide) {
    KVRELAY_DYNAMIC_SHARED(raw);
    T* stages = reinterpret_cast<T*>(raw);
    const int first_row = blockIdx.y * S::ROWS, first_column = blockIdx.x * S::COLUMNS;
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / S::ACROSS * S::WARP_ROWS, warp_column = warp % S::ACROSS * S::WARP_COLUMNS;
    const int tiles = (k + S::DEPTH - 1) / S::DEPTH;
    Weights weights(w, first_column, n, k);
    const auto fetch = [&](int tile) {
        T* stage = stages + tile % S::STAGES * S::STAGE;
        fetch_tile<S, S::ROWS>(stage, x, x_stride, first_row, m, tile * S::DEPTH, k);
        weights.fetch(stage + S::X_TILE, tile * S::DEPTH);
    };
    const auto unpack = [&](int tile) { weights.store(stages + tile % S::STAGES * S::STAGE + S::X_TILE); };

    for (int tile = 0; tile < S::STAGES - 1; ++tile) {
        if (tile < tiles) {
            fetch(tile);
            unpack(tile);
        }
        copy_commit();
    }
    Sums<S> sums;
    sums.clear();
    for (int tile = 0; tile < tiles; ++tile) {
        // This tile is there, and nobody reads the one before any more: its stage takes the next.
        copy_wait<S::STAGES - 2>();
        __syncthreads();
        const int next = tile + S::STAGES - 1;
        if (next < tiles) {
            fetch(next);
        }
        copy_commit();
        const T* stage = stages + tile % S::STAGES * S::STAGE;
        multiply<S>(sums, stage, stage + S::X_TILE, warp_row, warp_column);
        if (next < tiles) {
            unpack(next);
        }
    }
    store<S, T>(y, sums, first_row + warp_row, first_column + warp_column, m, n, wide);
}

}  // namespace gemm

// Grid: x columns, y rows, in tiles of the shape. Rows of x are `x_stride` elements apart, those of y n.
#define GEMM_KERNEL(NAME, SHAPE, T, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(gemm::SHAPE::THREADS)                                            \
        NAME(void* y, const T* x, const void* w, int m, int n, int k, long long x_stride, int wide) {             \
        gemm::run<gemm::SHAPE, T, __VA_ARGS__>(y, x, w, m, n, k, x_stride, wide != 0);                            \
    }

#define GEMM_PLAIN(T)                                                                                             \
    GEMM_KERNEL(gemm_##T##_few, FewRows, T, gemm::Plain<gemm::FewRows, T>)                                        \
    GEMM_KERNEL(gemm_##T##_many, ManyRows, T, gemm::Plain<gemm::ManyRows, T>)

#define GEMM_QUANTISED(T, FORMAT, NAME)                                                                           \
    GEMM_KERNEL(gemm_##T##_##NAME##_few, FewRows, T, gemm::Quantised<gemm::FewRows, T, FORMAT>)                   \
    GEMM_KERNEL(gemm_##T##_##NAME##_many, ManyRows, T, gemm::Quantised<gemm::ManyRows, T, FORMAT>)
