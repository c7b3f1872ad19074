// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11), as the CPU's sampler draws:
// key = seed, counter = position, low words first, the upper two words of the counter zero.
#pragma once

#include "ptx.cuh"

// The draw of `seed` for the token at `position`: 53 bits, so that draw / 2^53 is uniform in [0, 1).
__device__ __forceinline__ unsigned long long philox_draw(unsigned long long seed, unsigned long long position) {
    unsigned key[2] = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
    unsigned x[4] = {static_cast<unsigned>(position), static_cast<unsigned>(position >> 32), 0, 0};
    for (int round = 0; round < 10; ++round) {
        const unsigned long long left = 0xD2511F53ull * x[0], right = 0xCD9E8D57ull * x[2];
        const unsigned next[4] = {static_cast<unsigned>(right >> 32) ^ x[1] ^ key[0], static_cast<unsigned>(right),
                                  static_cast<unsigned>(left >> 32) ^ x[3] ^ key[1], static_cast<unsigned>(left)};
        for (int i = 0; i < 4; ++i) {
            x[i] = next[i];
        }
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return (static_cast<unsigned long long>(x[1]) << 32 | x[0]) >> 11;
}
