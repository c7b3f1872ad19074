// The block formats of GGUF files, as ggml lays them out: 32 weights of a row behind an f16 scale d. Q8_0 holds
// signed bytes q (d * q); Q4_0 nibbles (d * (q - 8)); Q4_1 an f16 minimum m as well (d * q + m). Byte j of the
// nibbles holds weight j in its low half and weight j + 16 in its high half.
//
// A thread takes half a block: two runs of eight neighbours, at weights first(half) and second(half).
// Blocks are aligned to 2 bytes only, so that is how they are read.
#pragma once

#include "element.cuh"

constexpr int QUANTISED_BLOCK = 32;

// Half a block as it was read.
struct HalfBlock {
    unsigned short scale, minimum;
    unsigned words[4];
};

__device__ __forceinline__ unsigned two_shorts(const unsigned short* from) {
    return from[0] | static_cast<unsigned>(from[1]) << 16;
}

__device__ __forceinline__ float f16_bits(unsigned short bits) {
    return __half2float(*reinterpret_cast<const f16*>(&bits));
}

struct Q4_0 {
    static constexpr int BYTES = 18;

    static __device__ __forceinline__ int first(int half) { return 8 * half; }
    static __device__ __forceinline__ int second(int half) { return 16 + 8 * half; }

    static __device__ __forceinline__ HalfBlock read(const unsigned char* block, int half) {
        const auto* shorts = reinterpret_cast<const unsigned short*>(block);
        const unsigned short* nibbles = shorts + 1 + 4 * half;
        return {shorts[0], 0, {two_shorts(nibbles), two_shorts(nibbles + 2), 0, 0}};
    }

    static __device__ __forceinline__ void unpack(const HalfBlock& from, float (&to)[16]) {
        const float scale = f16_bits(from.scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned byte = from.words[i / 4] >> (i % 4 * 8) & 0xffu;
            to[i] = scale * (static_cast<float>(byte & 15u) - 8.0f);
            to[i + 8] = scale * (static_cast<float>(byte >> 4) - 8.0f);
        }
    }
};

struct Q4_1 {
    static constexpr int BYTES = 20;

    static __device__ __forceinline__ int first(int half) { return 8 * half; }
    static __device__ __forceinline__ int second(int half) { return 16 + 8 * half; }

    static __device__ __forceinline__ HalfBlock read(const unsigned char* block, int half) {
        const auto* shorts = reinterpret_cast<const unsigned short*>(block);
        const unsigned short* nibbles = shorts + 2 + 4 * half;
        return {shorts[0], shorts[1], {two_shorts(nibbles), two_shorts(nibbles + 2), 0, 0}};
    }

    static __device__ __forceinline__ void unpack(const HalfBlock& from, float (&to)[16]) {
        const float scale = f16_bits(from.scale), minimum = f16_bits(from.minimum);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned byte = from.words[i / 4] >> (i % 4 * 8) & 0xffu;
            to[i] = scale * static_cast<float>(byte & 15u) + minimum;
            to[i + 8] = scale * static_cast<float>(byte >> 4) + minimum;
        }
    }
};

struct Q8_0 {
    static constexpr int BYTES = 34;

    static __device__ __forceinline__ int first(int half) { return 16 * half; }
    static __device__ __forceinline__ int second(int half) { return 16 * half + 8; }

    static __device__ __forceinline__ HalfBlock read(const unsigned char* block, int half) {
        const auto* shorts = reinterpret_cast<const unsigned short*>(block);
        const unsigned short* bytes = shorts + 1 + 8 * half;
        return {shorts[0],
                0,
                {two_shorts(bytes), two_shorts(bytes + 2), two_shorts(bytes + 4), two_shorts(bytes + 6)}};
    }

    static __device__ __forceinline__ void unpack(const HalfBlock& from, float (&to)[16]) {
        const float scale = f16_bits(from.scale);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const auto byte = static_cast<signed char>(from.words[i / 4] >> (i % 4 * 8) & 0xffu);
            to[i] = scale * static_cast<float>(byte);
        }
    }
};
