// What devices of a compute capability offer, from the table "Technical specifications per compute capability"
// of the CUDA C++ programming guide.
#pragma once

namespace kvrelay_emulated {

constexpr int MAX_BLOCK_THREADS = 1024;
constexpr unsigned MAX_BLOCK_XY = 1024, MAX_BLOCK_Z = 64;
constexpr unsigned MAX_GRID_X = 0x7fffffff, MAX_GRID_YZ = 65535;
constexpr int REGISTERS = 65536;
constexpr int STATIC_SHARED = 48 << 10;

// Bytes of shared memory that a block can have when it opts in.
constexpr int shared_optin(int capability) {
    switch (capability) {
        case 80:
        case 87:
            return 163 << 10;
        case 86:
        case 89:
        case 120:
        case 121:
            return 99 << 10;
        default:
            return capability >= 90 ? 227 << 10 : 48 << 10;
    }
}

// A kilobyte of each block's is the system's.
constexpr int shared_per_multiprocessor(int capability) { return shared_optin(capability) + (1 << 10); }

}  // namespace kvrelay_emulated
