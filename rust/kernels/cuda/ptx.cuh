// The one file with inline PTX: each wrapper has a body for the GPU, and one for the emulator.
#pragma once

#ifdef KVRELAY_EMULATED
// The block's dynamic shared memory.
#define KVRELAY_DYNAMIC_SHARED(name) unsigned char* name = kvrelay_emulated::dynamic_shared()
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVRELAY_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr unsigned FULL_WARP = 0xffffffffu;

// --- matrix products ------------------------------------------------------------------------------

#ifdef KVRELAY_EMULATED
namespace emulated_mma {

// What a lane brings to mma.m16n8k16: four registers of A, two of B.
struct Fragments {
    unsigned a[4], b[2];
};

// Two neighbours of a register.
template <class T>
struct Pair {
    float low, high;

    explicit Pair(unsigned word) {
        T elements[2];
        std::memcpy(elements, &word, sizeof word);
        low = static_cast<float>(elements[0]);
        high = static_cast<float>(elements[1]);
    }
};

// Lane 4g + t holds of A the rows g and g + 8, of B the column g, of both the depths 2t, 2t + 1, 2t + 8 and 2t + 9;
// of D the columns 2t and 2t + 1 of those rows (PTX ISA, "Matrix Fragments for mma.m16n8k16").
template <class T>
inline void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const auto all = kvrelay_emulated::exchange(FULL_WARP, mine);
    const int row = kvrelay_emulated::lane() / 4, column = kvrelay_emulated::lane() % 4 * 2;
    float sums[4] = {};
    for (int holder = 0; holder < 4; ++holder) {
        const Fragments of_a = all[row * 4 + holder];
        const Fragments of_b[2] = {all[column * 4 + holder], all[column * 4 + 4 + holder]};
        for (int i = 0; i < 4; ++i) {
            for (int upper = 0; upper < 2; ++upper) {
                const Pair<T> x(of_a.a[upper * 2 + i / 2]), y(of_b[i % 2].b[upper]);
                sums[i] += x.low * y.low + x.high * y.high;
            }
        }
    }
    for (int i = 0; i < 4; ++i) {
        d[i] += sums[i];
    }
}

}  // namespace emulated_mma
#endif

// d (16 x 8, f32) += a (16 x 16, by rows) * b (16 x 8, by columns). The whole warp takes part.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef KVRELAY_EMULATED
    emulated_mma::multiply<bf16>(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef KVRELAY_EMULATED
    emulated_mma::multiply<f16>(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, each turned over if TRANSPOSED. Lane 8j + i names
// the 16 bytes of row i of matrix j, which becomes r[j].
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
#ifdef KVRELAY_EMULATED
    const auto all = kvrelay_emulated::exchange(FULL_WARP, static_cast<const unsigned short*>(row));
    const int major = kvrelay_emulated::lane() / 4, minor = kvrelay_emulated::lane() % 4 * 2;
    for (int j = 0; j < 4; ++j) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            const int from = TRANSPOSED ? minor + e : major, column = TRANSPOSED ? major : minor + e;
            pair[e] = all[j * 8 + from][column];
        }
        r[j] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
    }
#else
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// --- copies in the background ---------------------------------------------------------------------

// 16 bytes from global to shared memory, both aligned to 16; zeros, and nothing read, unless `valid`. Belongs to
// the group that the next copy_commit closes.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool valid) {
#ifdef KVRELAY_EMULATED
    kvrelay_emulated::copy_async(to, from, 16, valid ? 0 : 16);
#else
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void copy_commit() {
#ifdef KVRELAY_EMULATED
    kvrelay_emulated::copy_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most PENDING of this thread's groups, the latest, are still on their way.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
#ifdef KVRELAY_EMULATED
    kvrelay_emulated::copy_async_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// --- arithmetic -----------------------------------------------------------------------------------

// 2^x, with a relative error of some 2^-22; 0 for minus infinity.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef KVRELAY_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1 / x within a unit in the last place, for x normal and not so large that it vanishes. Division is a call, for
// which a kernel that is short of registers would have to save some.
__device__ __forceinline__ double reciprocal(double x) {
#ifdef KVRELAY_EMULATED
    return 1.0 / x;
#else
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    // Newton's step doubles the 20 bits that are right, twice.
    for (int step = 0; step < 2; ++step) {
        y = __fma_rn(y, __fma_rn(-x, y, 1.0), y);
    }
    return y;
#endif
}
