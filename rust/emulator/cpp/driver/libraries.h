// Libraries of kernels compiled for the CPU, loaded when the driver starts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernel/registration.h"

namespace kvrelay_emulated {

struct LoadedLibrary {
    const Library* library;
    int number;

    // Makes this thread's static shared memory of the library one that nobody has written.
    void poison_shared() const;
    // What was written beside it since, if anything was.
    std::optional<std::string> shared_overrun() const;
    const Kernel* find(const std::string& name) const;
};

// Loads every library of the folders set, or of `kernels` beside this very library. Says what is wrong.
bool load_libraries();

const std::vector<LoadedLibrary*>& libraries();

// The digest by which a fatbin and the libraries of the same sources know each other.
uint64_t fnv1a64(const unsigned char* bytes, size_t count);

}  // namespace kvrelay_emulated
