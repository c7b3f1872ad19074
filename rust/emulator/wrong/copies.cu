// Copies in the background, with the wait for them forgotten, or the barrier after it.

#ifdef KVRELAY_EMULATED
inline void begin_copy(float* to, const float* from) { kvrelay_emulated::copy_async(to, from, 16, 0); }
inline void end_copies() {
    kvrelay_emulated::copy_async_commit();
    kvrelay_emulated::copy_async_wait(0);
}
#else
__device__ __forceinline__ void begin_copy(float* to, const float* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// One warp: out[i] = x[i] of four floats a thread, by way of shared memory.
template <bool WAIT>
__device__ __forceinline__ void copy_through(float* out, const float* x) {
    __shared__ __align__(16) float staged[128];
    const int at = 4 * threadIdx.x;
    begin_copy(staged + at, x + at);
    if (WAIT) {
        end_copies();
    }
    for (int i = 0; i < 4; ++i) {
        out[at + i] = staged[at + i];
    }
}

extern "C" __global__ void copy_and_wait(float* out, const float* x) { copy_through<true>(out, x); }

// Reads too early, and waits only then.
extern "C" __global__ void copy_and_wait_too_late(float* out, const float* x) {
    copy_through<false>(out, x);
    end_copies();
}

extern "C" __global__ void copy_and_never_wait(float* out, const float* x) { copy_through<false>(out, x); }

// Sixteen bytes at once, from wherever the pointer is.
extern "C" __global__ void copy_from(float* out, const float* x, int from) {
    __shared__ __align__(16) float staged[4];
    begin_copy(staged, x + from);
    end_copies();
    out[0] = staged[0];
}
