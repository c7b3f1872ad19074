// Causal attention of the new tokens of several sequences over the paged KV, which holds what came before them (a
// prefix, earlier chunks) and the new tokens themselves: FlashAttention-2 (Dao, 2023) on tensor cores.
//
// A block takes 64 queries of one head of one sequence, 16 a warp, and walks the keys from position 0 in tiles, of
// which the next is always on its way. What lies behind a row's position changes nothing of the row, not even a bit
// and not even where it is no number, so a row's result depends on its own query and position alone: not on chunks, nor
// on its neighbours.
#include <cfloat>

#include "paged.cuh"

namespace prefill {

constexpr int THREADS = 128;
constexpr int QUERIES = 64;

template <int HEAD>
struct Shape {
    static_assert(HEAD % 16 == 0, "a step of a product goes 16 elements deep");
    // Wide heads take fewer keys at a time, and queries from shared memory instead of registers.
    static constexpr bool WIDE = HEAD > 128;
    static constexpr int KEYS = WIDE ? 32 : 64;
    // Eight elements more than a row, so that the eight rows of a matrix lie in different banks.
    static constexpr int STRIDE = HEAD + 8;
    static constexpr int TILE = KEYS * STRIDE;
    static constexpr int STEPS = HEAD / 16;
    // Of a tile, each thread copies every COPIERS-th 16-byte word of one row.
    static constexpr int COPIERS = THREADS / KEYS;
    static_assert(HEAD / 8 % COPIERS == 0, "the threads of a row share it evenly");
    // Keys and values, twice, and the queries where they stay here.
    static constexpr int SHARED_BYTES = (4 * TILE + (WIDE ? QUERIES * STRIDE : 0)) * 2;
    // How many blocks' registers a multiprocessor must have room for. Left to choose, the compiler spills.
    static constexpr int BLOCKS = HEAD <= 96 ? 3 : 2;
    // What a block may have on every device from compute capability 8.0 on (8.6, 8.9, 12.0: 99 KiB).
    static_assert(SHARED_BYTES <= 99 * 1024, "tiles beyond the shared memory of small devices");
};

// The sequence that a block works on.
struct Sequence {
    const int* table;
    int first_row;   // of the batch's queries
    int num_queries;
    int prefix;      // tokens before its first query
};

template <class T, int HEAD>
struct Tile {
    using S = Shape<HEAD>;

    // Starts copying the keys and values at `first`; zeros from position `end` on.
    static __device__ __forceinline__ void fetch(T* keys, const PagedKv<const T>& kv, const int* table, int kv_head,
                                                 int first, int end) {
        const int row = threadIdx.x / S::COPIERS, part = threadIdx.x % S::COPIERS, token = first + row;
        const bool valid = token < end;
        const T* from = kv.layer;
        if (valid) {
            from = kv.key(table[token / kv.block_size], token % kv.block_size, kv_head);
        }
        const T* values = from + kv.value_offset();
        T* to = keys + row * S::STRIDE;
#pragma unroll
        for (int word = part; word < HEAD / 8; word += S::COPIERS) {
            copy_16(to + word * 8, from + word * 8, valid);
            copy_16(to + S::TILE + word * 8, valid ? values + word * 8 : from, valid);
        }
    }
};

// The queries of a warp: 16 rows as A fragments.
template <class T, int HEAD>
struct Queries {
    using S = Shape<HEAD>;
    unsigned kept[S::WIDE ? 1 : S::STEPS][4];
    const T* shared;

    // Rows of the sequence from `first`, at `rows`; zeros beyond its last.
    __device__ __forceinline__ void load(const T* rows, long long stride, int first, int num_queries, T* room) {
        const int lane = threadIdx.x % 32;
        if constexpr (S::WIDE) {
            T* mine = room + threadIdx.x / 32 * 16 * S::STRIDE;
            for (int i = lane; i < 16 * (HEAD / 8); i += 32) {
                const int row = i / (HEAD / 8), word = i % (HEAD / 8);
                const bool valid = first + row < num_queries;
                const uint4 zeros = make_uint4(0, 0, 0, 0);
                const auto* from = reinterpret_cast<const uint4*>(rows + (first + row) * stride + word * 8);
                *reinterpret_cast<uint4*>(mine + row * S::STRIDE + word * 8) = valid ? *from : zeros;
            }
            __syncwarp();
            shared = mine + (lane % 16) * S::STRIDE + lane / 16 * 8;
        } else {
#pragma unroll
            for (int step = 0; step < S::STEPS; ++step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = first + lane / 4 + i % 2 * 8, d = step * 16 + lane % 4 * 2 + i / 2 * 8;
                    const auto* from = reinterpret_cast<const unsigned*>(rows + row * stride + d);
                    kept[step][i] = row < num_queries ? *from : 0u;
                }
            }
        }
    }

    __device__ __forceinline__ void fragment(int step, unsigned (&a)[4]) const {
        if constexpr (S::WIDE) {
            load_matrices<false>(a, shared + step * 16);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = kept[step][i];
            }
        }
    }
};

// What a warp knows of its 16 rows: lane 4g + t has the rows g (index 0) and g + 8 (index 1).
template <int HEAD>
struct Rows {
    float out[HEAD / 8][4];
    float largest[2], sum[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HEAD / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                out[i][e] = 0.0f;
            }
        }
        // Not infinite, so that the difference of two is a number; no finite score is below it.
        largest[0] = largest[1] = -FLT_MAX;
        sum[0] = sum[1] = 0.0f;
    }
};

// scores (16 x KEYS) = queries * keys
template <class T, int HEAD>
__device__ __forceinline__ void multiply_keys(float (&scores)[Shape<HEAD>::KEYS / 8][4],
                                              const Queries<T, HEAD>& queries, const T* keys) {
    using S = Shape<HEAD>;
    const int lane = threadIdx.x % 32;
    const T* named = keys + (lane % 8 + lane / 16 * 8) * S::STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < S::KEYS / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            scores[i][e] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < S::STEPS; ++step) {
        unsigned a[4];
        queries.fragment(step, a);
#pragma unroll
        for (int pair = 0; pair < S::KEYS / 16; ++pair) {
            unsigned b[4];
            load_matrices<false>(b, named + pair * 16 * S::STRIDE + step * 16);
            const unsigned even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
            mma_16x8x16<T>(scores[2 * pair], a, even);
            mma_16x8x16<T>(scores[2 * pair + 1], a, odd);
        }
    }
}

// Turns the scores of the keys from `first` on into weights, 2^(scale * score - largest so far), and makes what was
// summed before smaller to match. `position` is that of the lane's first row.
template <int KEYS, int HEAD>
__device__ __forceinline__ void soften(float (&scores)[KEYS / 8][4], Rows<HEAD>& rows, int first, int position,
                                       float scale) {
    const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = rows.largest[h];
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[i][2 * h + e];
                score = column + i * 8 + e <= position + 8 * h ? score * scale : -INFINITY;
                largest = fmaxf(largest, score);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        const float shrink = exp2_fast(rows.largest[h] - largest);
        rows.largest[h] = largest;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[i][2 * h + e];
                score = exp2_fast(score - largest);
                sum += score;
            }
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        rows.sum[h] = rows.sum[h] * shrink + sum;
#pragma unroll
        for (int i = 0; i < HEAD / 8; ++i) {
            rows.out[i][2 * h] *= shrink;
            rows.out[i][2 * h + 1] *= shrink;
        }
    }
}

// out += weights * values for the 16 keys at `values`. If not ALL_FINITE, values that are not finite count as 0; true
// if this lane met one.
template <class T, int HEAD, bool ALL_FINITE>
__device__ __forceinline__ bool multiply_step(Rows<HEAD>& rows, const unsigned (&a)[4], const T* values) {
    const int lane = threadIdx.x % 32;
    const T* named = values + (lane % 16) * Shape<HEAD>::STRIDE + lane / 16 * 8;
    bool met = false;
#pragma unroll
    for (int pair = 0; pair < HEAD / 16; ++pair) {
        unsigned b[4];
        load_matrices<true>(b, named + pair * 16);
        if constexpr (!ALL_FINITE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned mask = finite_mask<T>(b[i]);
                met = met || mask != 0xffffffffu;
                b[i] &= mask;
            }
        }
        const unsigned even[2] = {b[0], b[1]}, odd[2] = {b[2], b[3]};
        mma_16x8x16<T>(rows.out[2 * pair], a, even);
        mma_16x8x16<T>(rows.out[2 * pair + 1], a, odd);
    }
    return met;
}

// Adds the products that multiply_step left out to those rows that see their keys: the lane's first row sees the first
// `seen` of the 16, its second eight more. They are infinite or no numbers, so their order changes no bit.
template <class T, int HEAD>
__device__ __forceinline__ void add_not_finite(Rows<HEAD>& rows, const unsigned (&a)[4], const T* values, int seen) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int key = 0; key < 16; ++key) {
        // Two neighbouring keys' weights of a row lie in one register of one of the four lanes that share the row.
        const int holder = lane / 4 * 4 + key % 8 / 2;
        const float2 upper = unpack<T>(__shfl_sync(FULL_WARP, key < 8 ? a[0] : a[2], holder));
        const float2 lower = unpack<T>(__shfl_sync(FULL_WARP, key < 8 ? a[1] : a[3], holder));
        const float weights[2] = {key % 2 == 0 ? upper.x : upper.y, key % 2 == 0 ? lower.x : lower.y};
        const T* from = values + key * Shape<HEAD>::STRIDE + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < HEAD / 8; ++i) {
            const unsigned word = *reinterpret_cast<const unsigned*>(from + i * 8);
            const float2 value = unpack<T>(word & ~finite_mask<T>(word));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // A zero stands for a finite value, which the product has already.
                if (key < seen + 8 * h) {
                    rows.out[i][2 * h] += value.x != 0.0f ? weights[h] * value.x : 0.0f;
                    rows.out[i][2 * h + 1] += value.y != 0.0f ? weights[h] * value.y : 0.0f;
                }
            }
        }
    }
}

// out += weights * values. The D fragments of the scores are the A fragments of this product. The warp's first row sees
// the first `seen` keys of the tile, each row below it one more. 16 keys that some rows see and others do not are
// looked at more closely: a weight of 0 hides only what is finite.
template <class T, int HEAD>
__device__ __forceinline__ void multiply_values(Rows<HEAD>& rows, const float (&weights)[Shape<HEAD>::KEYS / 8][4],
                                                const T* values, int seen) {
    using S = Shape<HEAD>;
#pragma unroll
    for (int step = 0; step < S::KEYS / 16; ++step) {
        const float(&left)[4] = weights[2 * step];
        const float(&right)[4] = weights[2 * step + 1];
        const unsigned a[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                               pack<T>(right[2], right[3])};
        const T* at = values + step * 16 * S::STRIDE;
        const int seen_here = seen - step * 16;
        if (seen_here >= 16) {
            multiply_step<T, HEAD, true>(rows, a, at);
        } else if (seen_here + 15 > 0) {
            if (__any_sync(FULL_WARP, multiply_step<T, HEAD, false>(rows, a, at))) {
                add_not_finite<T, HEAD>(rows, a, at, seen_here + static_cast<int>(threadIdx.x) % 32 / 4);
            }
        }
    }
}

// Writes the rows of a lane, at `to` for the sequence's first query.
template <class T, int HEAD>
__device__ __forceinline__ void store(T* to, long long stride, const Rows<HEAD>& rows, int first, int num_queries) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = first + lane / 4 + 8 * h;
        if (row >= num_queries) {
            continue;
        }
        const float inverse = 1.0f / rows.sum[h];
        auto* words = reinterpret_cast<unsigned*>(to + row * stride + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < HEAD / 8; ++i) {
            words[i * 4] = pack<T>(rows.out[i][2 * h] * inverse, rows.out[i][2 * h + 1] * inverse);
        }
    }
}

template <class T, int HEAD>
__device__ __forceinline__ void attend(T* out, const T* q, const PagedKv<const T>& kv, const Sequence& sequence,
                                       int q_heads, long long q_stride, float scale) {
    using S = Shape<HEAD>;
    KVRELAY_DYNAMIC_SHARED(raw);
    T* tiles = reinterpret_cast<T*>(raw);
    // The last queries have most to do, so they start first.
    const int tile_first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * QUERIES;
    if (tile_first >= sequence.num_queries) {
        return;
    }
    const int head = blockIdx.y, kv_head = head / (q_heads / kv.kv_heads), lane = threadIdx.x % 32;
    const int first = tile_first + static_cast<int>(threadIdx.x) / 32 * 16;
    const int end = sequence.prefix + min(tile_first + QUERIES, sequence.num_queries);
    const int num_tiles = (end + S::KEYS - 1) / S::KEYS;

    Tile<T, HEAD>::fetch(tiles, kv, sequence.table, kv_head, 0, end);
    copy_commit();
    Queries<T, HEAD> queries;
    queries.load(q + sequence.first_row * q_stride + head * HEAD, q_stride, first, sequence.num_queries,
                 tiles + 4 * S::TILE);
    Rows<HEAD> rows;
    rows.clear();
    for (int tile = 0; tile < num_tiles; ++tile) {
        const T* keys = tiles + tile % 2 * 2 * S::TILE;
        if (tile + 1 < num_tiles) {
            T* next = tiles + (tile + 1) % 2 * 2 * S::TILE;
            Tile<T, HEAD>::fetch(next, kv, sequence.table, kv_head, (tile + 1) * S::KEYS, end);
        }
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        // How many keys of the tile the warp's first row sees.
        const int seen = sequence.prefix + first + 1 - tile * S::KEYS;
        if (seen + 15 > 0) {
            float scores[S::KEYS / 8][4];
            multiply_keys(scores, queries, keys);
            soften<S::KEYS>(scores, rows, tile * S::KEYS, sequence.prefix + first + lane / 4, scale);
            multiply_values(rows, scores, keys + S::TILE, seen);
        }
        // Nobody may overwrite this tile before all have read it.
        __syncthreads();
    }
    const long long out_stride = static_cast<long long>(q_heads) * HEAD;
    store(out + sequence.first_row * out_stride + head * HEAD, out_stride, rows, first, sequence.num_queries);
}

}  // namespace prefill

// Grid: x tiles of 64 queries of the longest sequence, y query heads, z sequences. `first_rows` has one number a
// sequence and one more: where its queries begin in `q` and `out`. `contexts` counts a sequence's tokens, the new ones
// included. `scale` is the softmax's, times log2(e).
#define ATTENTION_PREFILL(T, HEAD)                                                                                \
    extern "C" __global__ void __launch_bounds__(prefill::THREADS, prefill::Shape<HEAD>::BLOCKS)                  \
        attention_prefill_##T##_hd##HEAD(                                                                         \
        T* out, const T* q, const T* layer, const int* first_rows, const int* contexts, const int* tables,        \
        long long block_stride, long long q_stride, int block_size, int max_blocks, int q_heads, int kv_heads,    \
        float scale) {                                                                                            \
        const int z = blockIdx.z, first_row = first_rows[z], num_queries = first_rows[z + 1] - first_row;         \
        const prefill::Sequence sequence = {tables + static_cast<size_t>(z) * max_blocks, first_row, num_queries, \
                                            contexts[z] - num_queries};                                           \
        const PagedKv<const T> kv = {layer, block_stride, block_size, kv_heads, HEAD};                            \
        prefill::attend<T, HEAD>(out, q, kv, sequence, q_heads, q_stride, scale);                                 \
    }

#define ATTENTION_PREFILL_HEADS(T)                                                                                \
    ATTENTION_PREFILL(T, 64)                                                                                      \
    ATTENTION_PREFILL(T, 80)                                                                                      \
    ATTENTION_PREFILL(T, 96)                                                                                      \
    ATTENTION_PREFILL(T, 128)                                                                                     \
    ATTENTION_PREFILL(T, 256)

ATTENTION_PREFILL_HEADS(bf16)
ATTENTION_PREFILL_HEADS(f16)
