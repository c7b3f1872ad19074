// What the environment asks of the emulator, read once, when it starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvrelay_emulated {

enum class Order { forward, reverse, random };

struct Settings {
    // KVRELAY_EMU_DEVICES: how many.
    int devices;
    // KVRELAY_EMU_MEMORY_MB: of each.
    size_t memory;
    // KVRELAY_EMU_CAPABILITY: the compute capability of each, 80 to 120.
    int capability;
    // KVRELAY_EMU_MULTIPROCESSORS: of each.
    int multiprocessors;
    // KVRELAY_EMU_ORDER: in which order fibers get their turn, and a graph's nodes theirs.
    Order order;
    // KVRELAY_EMU_SEED: of everything random.
    uint64_t seed;
    // KVRELAY_EMU_JITTER_US: the longest time that a stream waits before each operation.
    long jitter_us;
    // KVRELAY_EMU_STREAMS: `threads`, or `deferred`: one operation at a time, only when somebody waits, of a
    // stream drawn from the seed, so that a forgotten wait shows in the same runs always.
    bool deferred;
    // KVRELAY_EMU_THREADS: how many run blocks.
    int threads;
    // KVRELAY_EMU_KERNELS: the folders of compiled kernels, parted by colons.
    std::string kernels;
    // KVRELAY_EMU_PTX: the newest PTX that is taken, times ten.
    int newest_ptx;
    // KVRELAY_EMU_PEER: whether devices can reach each other's memory.
    bool peer;
    // KVRELAY_EMU_FAIL_LAUNCH: which launch of the process fails, from 1; 0 for none.
    uint64_t fail_launch;
    // KVRELAY_EMU_LOST_AFTER: after how many launches of the process the device of the last is lost; 0 for never.
    uint64_t lost_after;
};

// Ends the process where a setting is not what it can be, naming it.
const Settings& settings();

}  // namespace kvrelay_emulated
