// CUDA's built-in variables, barriers and fences.
#pragma once

#include "execution.h"

#define threadIdx (kvrelay_emulated::current->index)
#define blockIdx (kvrelay_emulated::current->block->index)
#define blockDim (kvrelay_emulated::current->block->size)
#define gridDim (kvrelay_emulated::current->block->grid)
#define warpSize 32

#define KVRELAY_HERE (kvrelay_emulated::Place{__FILE__, __LINE__})
#define __syncthreads() ((void)kvrelay_emulated::wait_at_barrier(KVRELAY_HERE, 0))
#define __syncthreads_count(vote) (kvrelay_emulated::wait_at_barrier(KVRELAY_HERE, (vote) != 0))
#define __syncthreads_or(vote) (kvrelay_emulated::wait_at_barrier(KVRELAY_HERE, (vote) != 0) != 0)
#define __syncthreads_and(vote) (kvrelay_emulated::wait_at_barrier(KVRELAY_HERE, (vote) == 0) == 0)

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

[[noreturn]] inline void __trap() { kvrelay_emulated::fail("__trap() was reached"); }

template <class T>
inline T __ldg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcg(const T* from) {
    return *from;
}
template <class T>
inline void __stcg(T* to, T value) {
    *to = value;
}
