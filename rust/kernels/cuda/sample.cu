// From logits to tokens, one block a row, by the rules of the CPU's sampler: temperature 0 takes the largest logit,
// ties to the lowest id; else weights are exp((logit - largest) / temperature); top_k keeps that many of the largest
// logits (all, if it is not between 1 and the vocabulary); top_p keeps the shortest run of those, largest first, that
// reaches that share of their weight, and one at least (all, if top_p is not below 1); one Philox draw walks what is
// left, largest first, or by id where nothing was cut. A logit that is not finite is told by its token: -1 - id of the
// first such.
//
// Weights are whole numbers here, in units of 2^-44 of the largest, so that they add up to the same in any order and
// threads can share the work as they like. The CPU adds doubles in a fixed order: the two differ only where a draw
// comes within some 1e-11 of the border between two tokens.
#include <cfloat>

#include "philox.cuh"

namespace sampling {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int DIGITS = 256;
// Ids of a piece of the walk by id, and how many pieces there may be.
constexpr int PIECE = 1024;
constexpr int PIECES = 512;
// The largest weight is 2^44, and that many of it still fit 64 bits.
static_assert(static_cast<long long>(PIECE) * PIECES <= 1 << 19, "weights add up to less than 2^64");

using u64 = unsigned long long;

// e^x in units of 2^-44, rounded, for x of at most 0: 0 below -32, where it is less than half a unit. Exact to some
// 1e-15, and in explicit roundings, so that every device has the same weights.
__device__ __forceinline__ u64 exp_units(double x) {
    if (!(x > -32.0)) {
        return 0;
    }
    // Adding and taking away 1.5 * 2^52 rounds to a whole number, which the sum's low bits hold.
    constexpr double ROUND = 6755399441055744.0;
    const double shifted = __fma_rn(x, 1.4426950408889634, ROUND);
    const double n = shifted - ROUND;
    // ln 2 in two parts, of which the first is short, so that its product with n is exact.
    double r = __fma_rn(n, -0.6931471803691238, x);
    r = __fma_rn(n, -1.9082149292705877e-10, r);
    // 1 + r (1 + r/2 (1 + r/3 (...))): |r| is at most ln(2) / 2, where the next term is below 2^-57.
    double mantissa = 1.0;
#pragma unroll
    for (int i = 13; i > 0; --i) {
        mantissa = __fma_rn(__dmul_rn(mantissa, r), 1.0 / i, 1.0);
    }
    const double power = __longlong_as_double((__double_as_longlong(shifted) + 44 + 1023) << 52);
    return static_cast<u64>(__fma_rn(mantissa, power, 0.5));
}

struct Row {
    const float* logits;
    int vocab;
    float largest;
    double inverse_temperature;

    __device__ __forceinline__ u64 weight(float logit) const {
        const double distance = static_cast<double>(logit) - static_cast<double>(largest);
        return exp_units(distance * inverse_temperature);
    }
};

// A number that orders logits as their values (-0 before +0), and those that are equal by id, the lowest on top.
__device__ __forceinline__ u64 rank(float logit, int id) {
    const unsigned bits = __float_as_uint(logit);
    const unsigned ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}

__device__ __forceinline__ int id_of(u64 rank) { return static_cast<int>(0xffffffffu - static_cast<unsigned>(rank)); }

__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(FULL_WARP, value, distance);
    }
    return value;
}

__device__ __forceinline__ u64 warp_largest(u64 value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const u64 other = __shfl_xor_sync(FULL_WARP, value, distance);
        value = other > value ? other : value;
    }
    return value;
}

// The largest of a block's values, for all threads.
__device__ __forceinline__ u64 block_largest(u64 value) {
    __shared__ u64 of_warps[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    value = warp_largest(value);
    if (lane == 0) {
        of_warps[warp] = value;
    }
    __syncthreads();
    value = warp_largest(of_warps[lane % WARPS]);
    __syncthreads();
    return value;
}

// The id of the largest logit, by `>` alone (-0 and +0 are equal); or, as -1 - id, the first logit that is not finite.
__device__ __forceinline__ int largest_or_wrong(const float* logits, int vocab) {
    u64 best = 0, wrong = 0;
    for (int id = threadIdx.x; id < vocab; id += THREADS) {
        const float logit = logits[id];
        // Adding 0 turns -0 into +0 and changes nothing else.
        const u64 mine = rank(logit + 0.0f, id);
        best = mine > best ? mine : best;
        if (!(fabsf(logit) < INFINITY)) {
            const u64 first = 0xffffffffu - static_cast<unsigned>(id);
            wrong = first > wrong ? first : wrong;
        }
    }
    wrong = block_largest(wrong);
    best = block_largest(best);
    return wrong != 0 ? -1 - id_of(wrong) : id_of(best);
}

// floor(share * total / 2^53), for a draw of 53 bits.
__device__ __forceinline__ u64 share_of(u64 total, u64 draw) {
    return __umul64hi(total, draw) << 11 | (total * draw) >> 53;
}

// What a descent through the ranks looks for: the first candidate, largest first, at which the running count or weight
// is above `target`.
enum class Measure { COUNT, WEIGHT };

// How a descent stands: ranks that begin with the digits found so far, and what lies above them.
struct Descent {
    u64 prefix, above;
    int bits;  // of the prefix
};

// The sum of a measure over each next digit, of the candidates (ranks of at least `lowest`) below the prefix.
template <Measure MEASURE>
__device__ __forceinline__ void count_digits(u64* sums, const Row& row, const Descent& at, u64 lowest) {
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
        sums[digit] = 0;
    }
    __syncthreads();
    for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
        const float logit = row.logits[id];
        const u64 mine = rank(logit, id);
        const bool below = at.bits == 0 || mine >> (64 - at.bits) == at.prefix;
        if (mine >= lowest && below) {
            const u64 amount = MEASURE == Measure::COUNT ? 1 : row.weight(logit);
            atomicAdd(&sums[mine >> (56 - at.bits) & (DIGITS - 1)], amount);
        }
    }
    __syncthreads();
}

// Finds the rank of the candidate at which the running sum, largest first, exceeds `target`; the last candidate with
// any weight if the sum never does. Eight digits of eight bits: each one a pass over the row.
template <Measure MEASURE>
__device__ __forceinline__ u64 find_rank(const Row& row, u64 lowest, u64 target) {
    __shared__ u64 sums[DIGITS];
    __shared__ Descent shared;
    Descent at = {0, 0, 0};
    while (at.bits < 64) {
        count_digits<MEASURE>(sums, row, at, lowest);
        if (threadIdx.x == 0) {
            int digit = DIGITS - 1, last = 0;
            u64 above = at.above, above_last = at.above;
            for (; digit >= 0; --digit) {
                if (sums[digit] != 0) {
                    last = digit;
                    above_last = above;
                }
                if (above + sums[digit] > target) {
                    break;
                }
                above += sums[digit];
            }
            shared = {at.prefix << 8 | static_cast<unsigned>(last), above_last, at.bits + 8};
        }
        __syncthreads();
        at = shared;
        __syncthreads();
    }
    return at.prefix;
}

// The weight of all candidates.
__device__ __forceinline__ u64 weight_above(const Row& row, u64 lowest) {
    __shared__ u64 of_warps[WARPS];
    u64 sum = 0;
    for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
        const float logit = row.logits[id];
        sum += rank(logit, id) >= lowest ? row.weight(logit) : 0;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
        sum += of_warps[warp];
    }
    __syncthreads();
    return sum;
}

// The token where the walk, largest first, over what top_k and top_p keep ends.
__device__ __forceinline__ int walk_ranks(const Row& row, int top_k, float top_p, u64 draw) {
    u64 lowest = 0;
    if (top_k > 0 && top_k < row.vocab) {
        lowest = find_rank<Measure::COUNT>(row, lowest, static_cast<u64>(top_k) - 1);
    }
    if (top_p < 1.0f) {
        // The run ends where the sum reaches the bound, which is where it exceeds the bound less one.
        const double share = static_cast<double>(fmaxf(top_p, 0.0f));
        const u64 bound = static_cast<u64>(ceil(share * static_cast<double>(weight_above(row, lowest))));
        lowest = find_rank<Measure::WEIGHT>(row, lowest, bound - (bound > 0 ? 1 : 0));
    }
    return id_of(find_rank<Measure::WEIGHT>(row, lowest, share_of(weight_above(row, lowest), draw)));
}

// The weight of each piece of PIECE ids, a warp a piece.
__device__ __forceinline__ void weigh_pieces(u64* pieces, const Row& row) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int piece = warp; piece * PIECE < row.vocab; piece += WARPS) {
        u64 sum = 0;
        for (int id = piece * PIECE + lane; id < min((piece + 1) * PIECE, row.vocab); id += 32) {
            sum += row.weight(row.logits[id]);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            pieces[piece] = sum;
        }
    }
    __syncthreads();
}

// The token where the walk by id over the whole vocabulary ends.
__device__ __forceinline__ int walk_ids(const Row& row, u64 draw) {
    __shared__ u64 pieces[PIECES];
    __shared__ int token;
    weigh_pieces(pieces, row);
    const int lane = threadIdx.x % 32, num_pieces = (row.vocab + PIECE - 1) / PIECE;
    u64 total = 0;
    for (int piece = 0; piece < num_pieces; ++piece) {
        total += pieces[piece];
    }
    const u64 target = share_of(total, draw);
    if (threadIdx.x < 32) {
        int piece = 0;
        u64 before = 0;
        // The total exceeds the target, so some piece takes the sum beyond it.
        for (; before + pieces[piece] <= target; ++piece) {
            before += pieces[piece];
        }
        for (int base = piece * PIECE; base < (piece + 1) * PIECE; base += 32) {
            const int id = base + lane;
            u64 running = id < row.vocab ? row.weight(row.logits[id]) : 0;
            for (int distance = 1; distance < 32; distance *= 2) {
                const u64 lower = __shfl_up_sync(FULL_WARP, running, distance);
                running += lane >= distance ? lower : 0;
            }
            const unsigned beyond = __ballot_sync(FULL_WARP, before + running > target);
            if (beyond != 0) {
                if (lane == 0) {
                    token = base + __ffs(static_cast<int>(beyond)) - 1;
                }
                break;
            }
            before += __shfl_sync(FULL_WARP, running, 31);
        }
    }
    __syncthreads();
    return token;
}

}  // namespace sampling

// Rows of `logits` are `stride` apart. `top_k` and the like have one number a row; `positions` counts the tokens before
// the one to be sampled. A temperature that is not above 0 is 0; an infinite one is the largest that is finite.
//
// Four blocks a multiprocessor are enough: for more the compiler would spill.
extern "C" __global__ void __launch_bounds__(sampling::THREADS, 4)
    sample(int* tokens, const float* logits, const float* temperatures, const int* top_ks, const float* top_ps,
           const unsigned long long* seeds, const unsigned long long* positions, long long stride, int vocab) {
    const int r = blockIdx.x;
    const float* row_logits = logits + r * stride;
    int token = sampling::largest_or_wrong(row_logits, vocab);
    if (token >= 0 && temperatures[r] > 0.0f) {
        const sampling::Row row = {row_logits, vocab, row_logits[token],
                                   reciprocal(static_cast<double>(fminf(temperatures[r], FLT_MAX)))};
        const unsigned long long draw = philox_draw(seeds[r], positions[r]);
        const bool cut = (top_ks[r] > 0 && top_ks[r] < vocab) || top_ps[r] < 1.0f;
        token = cut ? sampling::walk_ranks(row, top_ks[r], top_ps[r], draw) : sampling::walk_ids(row, draw);
    }
    if (threadIdx.x == 0) {
        tokens[r] = token;
    }
}
