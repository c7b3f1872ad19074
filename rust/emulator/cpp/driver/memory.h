// Device memory: between guards, poisoned, never given out twice at one address.
#pragma once

#include <optional>
#include <string>

#include "context.h"

namespace kvrelay_emulated {

constexpr int NO_FILE = -1;

struct Allocation {
    DevicePointer at;
    size_t bytes;
    // The pages between the guards, how far into them the allocation begins, the file behind them with what
    // its name tells it by, and the first guard.
    size_t mapped, offset;
    int file;
    uint64_t identity;
    unsigned char* base;
    Device* device;
    // From a pool, which other processes cannot open; or another process's, opened here.
    bool pooled, imported;
};

// `out_of_memory` where the device has no `bytes` left.
Result allocate(Device& device, size_t bytes, bool pooled, DevicePointer* at);
Result release(DevicePointer at);
// Another process's memory; `file` is this process's from now on.
Result import(Device& device, int file, size_t mapped, size_t offset, size_t bytes, DevicePointer* at);

// Of the file behind an allocation.
std::string file_name(uint64_t identity);

// The allocation that all of the range lies in.
std::optional<Allocation> find_allocation(DevicePointer at, size_t bytes);
// Host memory that the driver gave or knows.
bool is_pinned(const void* at);

// What was written beside an allocation of the device, in pages of its own, if anything was.
std::optional<std::string> overrun(const Device& device);

}  // namespace kvrelay_emulated
