// A kernel as a module gives it.
#pragma once

#include "../kernel/registration.h"
#include "libraries.h"

namespace kvrelay_emulated {

struct Function {
    const Kernel* kernel;
    const LoadedLibrary* library;
    // As the module that was loaded has them.
    uint32_t max_threads;
    int max_dynamic_shared;

    int static_shared() const { return static_cast<int>(kernel->static_shared); }
    // On devices of a capability; 0 where nobody knows.
    int registers(int capability) const {
        for (uint32_t i = 0; i < kernel->num_registers; ++i) {
            if (kernel->registers[i].target == capability) {
                return kernel->registers[i].registers;
            }
        }
        return 0;
    }
};

// A function by its handle, or null.
Function* function_of(Function* handle);

}  // namespace kvrelay_emulated
