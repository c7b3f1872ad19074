// Attention of single queries over the paged KV, split over the keys (Dao et al., "Flash-Decoding", 2023). A row is one
// query: it sees the first `lengths[row]` tokens of a block table. A block takes up to GROUP query heads that share a
// KV head, and `split_tokens` tokens; what it finds goes to a workspace that attention_decode_combine adds up.
//
// Which tokens belong to a split, and in which order they are added, depends on `split_tokens` and the row's own length
// alone: with a fixed split a row's result is the same, bit for bit, in any batch. So it is with several rows of one
// sequence, which `sequences` allows for: a prompt's rows and decoded ones give the same numbers.
#include <cfloat>

#include "paged.cuh"

namespace decode {

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Stands for minus infinity where the difference of two must be a number; no finite score is below it.
constexpr float LOWEST = -FLT_MAX;

template <int HEAD>
struct Shape {
    static_assert(HEAD % 8 == 0 && HEAD <= 256, "a lane holds eight elements of a head");
    static constexpr int WORDS = HEAD / 8;
    // Lanes that share a token: a power of two, of which those beyond the head's end stay idle.
    static constexpr int LANES = WORDS <= 8 ? 8 : WORDS <= 16 ? 16 : 32;
    static_assert(LANES * 8 >= HEAD, "no element of a head may be left out");
    // Tokens under way at a time.
    static constexpr int PARTS = THREADS / LANES;
};

// What the lanes of a part know of each head: its largest score, the sum of weights, their share of the output.
template <int GROUP>
struct Partial {
    float largest[GROUP], sum[GROUP], out[GROUP][8];
};

// A lane's elements of the queries, as they are stored: as f32 they would take half of a thread's registers.
template <int GROUP>
struct Queries {
    uint4 words[GROUP];

    // `q` is the first head's query; zeros for heads that are not there and lanes that have no elements.
    template <class T>
    __device__ __forceinline__ void load(const T* q, int head_dim, int heads, int element, bool active) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const bool valid = active && g < heads;
            const auto* from = reinterpret_cast<const uint4*>(q + (valid ? g * head_dim + element : 0));
            words[g] = valid ? *from : make_uint4(0, 0, 0, 0);
        }
    }
};

// Adds one token to what a part knows; `valid` is the same in all its lanes.
template <class T, int HEAD, int GROUP>
__device__ __forceinline__ void add_token(Partial<GROUP>& part, const Queries<GROUP>& queries, const uint4& key_word,
                                          const uint4& value_word, bool valid, float scale) {
    float key[8], value[8];
    unpack_8<T>(key_word, key);
    unpack_8<T>(value_word, value);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        float query[8], score = 0.0f;
        unpack_8<T>(queries.words[g], query);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            score += query[i] * key[i];
        }
#pragma unroll
        for (int distance = Shape<HEAD>::LANES / 2; distance > 0; distance /= 2) {
            score += __shfl_xor_sync(FULL_WARP, score, distance);
        }
        score *= scale;
        const float largest = valid ? fmaxf(part.largest[g], score) : part.largest[g];
        const float shrink = exp2_fast(part.largest[g] - largest);
        const float weight = valid ? exp2_fast(score - largest) : 0.0f;
        part.largest[g] = largest;
        part.sum[g] = part.sum[g] * shrink + weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            part.out[g][i] = part.out[g][i] * shrink + weight * value[i];
        }
    }
}

// Where the parts of a block meet, in shared memory.
template <int HEAD, int GROUP>
struct Meeting {
    alignas(16) float out[Shape<HEAD>::PARTS][GROUP][HEAD];
    float largest[Shape<HEAD>::PARTS][GROUP], sum[Shape<HEAD>::PARTS][GROUP];
};

// Adds the parts of a block in order, and writes the split's output, not yet divided by its sum, and {largest, sum}.
template <int HEAD, int GROUP>
__device__ __forceinline__ void store(float* outputs, float* sums, Meeting<HEAD, GROUP>& meeting,
                                      const Partial<GROUP>& mine, int heads, long long head_stride) {
    using S = Shape<HEAD>;
    const int part = threadIdx.x / S::LANES, word = threadIdx.x % S::LANES;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        if (word == 0) {
            meeting.largest[part][g] = mine.largest[g];
            meeting.sum[part][g] = mine.sum[g];
        }
        if (word < S::WORDS) {
            auto* to = reinterpret_cast<float4*>(&meeting.out[part][g][word * 8]);
            const float(&from)[8] = mine.out[g];
            to[0] = make_float4(from[0], from[1], from[2], from[3]);
            to[1] = make_float4(from[4], from[5], from[6], from[7]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * HEAD; i += THREADS) {
        const int g = i / HEAD, d = i % HEAD;
        float top = LOWEST, weights = 0.0f, output = 0.0f;
        for (int p = 0; p < S::PARTS; ++p) {
            top = fmaxf(top, meeting.largest[p][g]);
        }
        for (int p = 0; p < S::PARTS; ++p) {
            const float shrink = exp2_fast(meeting.largest[p][g] - top);
            weights += meeting.sum[p][g] * shrink;
            output += meeting.out[p][g][d] * shrink;
        }
        outputs[g * head_stride * HEAD + d] = output;
        if (d == 0) {
            sums[g * head_stride * 2] = top;
            sums[g * head_stride * 2 + 1] = weights;
        }
    }
}

// The query, split and tokens that a block works on.
struct Task {
    const int* table;
    int kv_head, first_head, heads;
    int begin, end;
};

template <class T, int HEAD, int GROUP>
__device__ __forceinline__ void attend(float* outputs, float* sums, Meeting<HEAD, GROUP>& meeting, const T* q,
                                       const PagedKv<const T>& kv, const Task& task, long long head_stride,
                                       float scale) {
    using S = Shape<HEAD>;
    const int part = threadIdx.x / S::LANES, word = threadIdx.x % S::LANES;
    const bool active = word < S::WORDS;
    Queries<GROUP> queries;
    queries.load(q, HEAD, task.heads, word * 8, active);
    Partial<GROUP> mine;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        mine.largest[g] = LOWEST;
        mine.sum[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            mine.out[g][i] = 0.0f;
        }
    }
    // The next token is read before this one is worked on. Beyond the end it is zeros: a token that was read before has
    // weight 0 there, and if it were infinite, that would be no number.
    uint4 next_key, next_value;
    const auto read = [&](int token) {
        next_key = next_value = make_uint4(0, 0, 0, 0);
        if (token < task.end && active) {
            const T* key = kv.key(task.table[token / kv.block_size], token % kv.block_size, task.kv_head) + word * 8;
            next_key = *reinterpret_cast<const uint4*>(key);
            next_value = *reinterpret_cast<const uint4*>(key + kv.value_offset());
        }
    };
    read(task.begin + part);
    // Warps stay together: all of a block's threads go round as often. Unrolled, it would not fit into registers.
#pragma unroll 1
    for (int base = task.begin; base < task.end; base += S::PARTS) {
        const uint4 key = next_key, value = next_value;
        read(base + part + S::PARTS);
        add_token<T, HEAD, GROUP>(mine, queries, key, value, base + part < task.end, scale);
    }
    store(outputs, sums, meeting, mine, task.heads, head_stride);
}

}  // namespace decode

// Grid: x rows, y KV heads times chunks of GROUP of their query heads, z splits of the longest row. Row r sees block
// table sequences[r], or r where there are no `sequences`. `outputs` is [row][q_head][max_splits][HEAD], `sums` the
// same with 2 for HEAD. `scale` is the softmax's, times log2(e).
#define ATTENTION_DECODE(T, HEAD, GROUP)                                                                          \
    extern "C" __global__ void __launch_bounds__(decode::THREADS) attention_decode_##T##_hd##HEAD##_g##GROUP(     \
        float* outputs, float* sums, const T* q, const T* layer, const int* lengths, const int* sequences,        \
        const int* tables, long long block_stride, long long q_stride, int block_size, int max_blocks,            \
        int q_heads, int kv_heads, int split_tokens, int max_splits, float scale) {                               \
        const int row = blockIdx.x, split = blockIdx.z, length = lengths[row], begin = split * split_tokens;      \
        if (begin >= length) {                                                                                    \
            return;                                                                                               \
        }                                                                                                         \
        const int group = q_heads / kv_heads, chunks = (group + GROUP - 1) / GROUP;                               \
        const int kv_head = blockIdx.y / chunks, in_group = blockIdx.y % chunks * GROUP;                          \
        const int first_head = kv_head * group + in_group;                                                        \
        const int sequence = sequences != nullptr ? sequences[row] : row;                                         \
        const decode::Task task = {tables + static_cast<size_t>(sequence) * max_blocks, kv_head, first_head,      \
                                   min(GROUP, group - in_group), begin, min(length, begin + split_tokens)};       \
        const PagedKv<const T> kv = {layer, block_stride, block_size, kv_heads, HEAD};                            \
        __shared__ decode::Meeting<HEAD, GROUP> meeting;                                                          \
        const size_t place = (static_cast<size_t>(row) * q_heads + first_head) * max_splits + split;              \
        decode::attend<T, HEAD, GROUP>(outputs + place * HEAD, sums + place * 2, meeting,                         \
                                       q + row * q_stride + first_head * HEAD, kv, task, max_splits, scale);      \
    }

#define ATTENTION_DECODE_GROUPS(T, HEAD)                                                                          \
    ATTENTION_DECODE(T, HEAD, 1)                                                                                  \
    ATTENTION_DECODE(T, HEAD, 2)                                                                                  \
    ATTENTION_DECODE(T, HEAD, 4)                                                                                  \
    ATTENTION_DECODE(T, HEAD, 8)

#define ATTENTION_DECODE_HEADS(T)                                                                                 \
    ATTENTION_DECODE_GROUPS(T, 64)                                                                                \
    ATTENTION_DECODE_GROUPS(T, 80)                                                                                \
    ATTENTION_DECODE_GROUPS(T, 96)                                                                                \
    ATTENTION_DECODE_GROUPS(T, 128)                                                                               \
    ATTENTION_DECODE_GROUPS(T, 256)

ATTENTION_DECODE_HEADS(bf16)
ATTENTION_DECODE_HEADS(f16)
