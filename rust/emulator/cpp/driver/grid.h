// A kernel's grid, run on the CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../kernel/registration.h"
#include "abi.h"

namespace kvrelay_emulated {

struct LoadedLibrary;

// Parameters by value: a launch reads them when it is made, not when it runs.
struct Arguments {
    std::vector<unsigned char> bytes;
    std::vector<size_t> offsets;
};

struct Grid {
    const Kernel* kernel;
    const LoadedLibrary* library;
    dim3 grid, block;
    size_t dynamic_shared;
    Arguments arguments;
    // Counts launches, and makes orders differ between them.
    uint64_t launch;

    // What went wrong, first of all.
    std::mutex mutex;
    Result result = success;
    std::string error;
    std::atomic<uint64_t> next_block{0};

    uint64_t num_blocks() const { return static_cast<uint64_t>(grid.x) * grid.y * grid.z; }
};

// Runs every block; `grid.result` says how it went. One grid runs at a time, on several threads.
void run_grid(Grid& grid);

// Runs blocks of the grid on this thread until there is none left.
void run_blocks(Grid& grid);

// Does what touches memory that the caller named; a fault is an error, and not the end of the process.
Result run_guarded(const std::function<void()>& work, std::string& why);

// Makes a wrong access of a kernel an error of its launch. Whatever else faults goes where it went before.
void catch_faults();

}  // namespace kvrelay_emulated
