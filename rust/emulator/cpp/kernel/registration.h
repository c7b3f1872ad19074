// How a library of compiled kernels tells the emulator of them, when it is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "execution.h"

namespace kvrelay_emulated {

// Bytes before and behind the static shared memory of a library.
constexpr size_t SHARED_GUARD = 4096;

struct TargetRegisters {
    int target;
    int registers;
};

// A kernel: how it is called, and what nvcc made of the same source.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    // Bytes of each parameter, as g++ has them.
    const uint32_t* sizes;
    uint32_t num_sizes;
    // As nvcc has them, and their number.
    const uint32_t* ptx_sizes;
    uint32_t num_ptx_sizes;
    // 0 where the source says nothing.
    uint32_t max_threads;
    uint32_t static_shared;
    const TargetRegisters* registers;
    uint32_t num_registers;
};

struct Library {
    const char* source;
    // FNV-1a of the fatbin that the same sources were compiled into; 0 where there is none.
    uint64_t fatbin;
    const Kernel* kernels;
    uint32_t num_kernels;
};

KVRELAY_SHARED void register_library(const Library* library);

template <auto Function>
struct Caller;

template <class... Parameters, void (*Function)(Parameters...)>
struct Caller<Function> {
    static constexpr uint32_t count = sizeof...(Parameters);
    static inline const uint32_t sizes[count + 1] = {sizeof(Parameters)..., 0};

    static void call(void** arguments) { call_with(arguments, std::index_sequence_for<Parameters...>{}); }

    template <size_t... Index>
    static void call_with([[maybe_unused]] void** arguments, std::index_sequence<Index...>) {
        Function(*static_cast<std::remove_cv_t<Parameters>*>(arguments[Index])...);
    }
};

}  // namespace kvrelay_emulated
