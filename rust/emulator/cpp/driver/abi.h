// The part of CUDA's binary interface that this library speaks: errors, handles and limits, numbered as in
// `cuda.h`.
#pragma once

#include <cstddef>
#include <cstdint>

#define CUDA_API extern "C" __attribute__((visibility("default")))

namespace kvrelay_emulated {

enum Result : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    device_unavailable = 46,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    no_binary_for_gpu = 209,
    peer_access_unsupported = 217,
    unsupported_ptx_version = 222,
    file_not_found = 301,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    launch_out_of_resources = 701,
    peer_access_already_enabled = 704,
    peer_access_not_enabled = 705,
    launch_failed = 719,
    not_supported = 801,
    capture_unsupported = 900,
    capture_invalidated = 901,
    capture_unmatched = 903,
    capture_unjoined = 904,
    capture_isolation = 905,
    graph_update_failure = 910,
};

using DeviceOrdinal = int;
using DevicePointer = unsigned long long;

// Of `cuDeviceGetAttribute`.
enum DeviceAttribute : int {
    max_threads_per_block = 1,
    max_block_x = 2,
    max_block_y = 3,
    max_block_z = 4,
    max_grid_x = 5,
    max_grid_y = 6,
    max_grid_z = 7,
    max_shared_per_block = 8,
    total_constant_memory = 9,
    warp_size = 10,
    max_registers_per_block = 12,
    clock_rate = 13,
    multiprocessor_count = 16,
    unified_addressing = 41,
    max_threads_per_multiprocessor = 39,
    compute_capability_major = 75,
    compute_capability_minor = 76,
    max_shared_per_multiprocessor = 81,
    max_registers_per_multiprocessor = 82,
    max_shared_per_block_optin = 97,
    memory_pools_supported = 115,
};

// Of `cuFuncGetAttribute`.
enum FunctionAttribute : int {
    function_max_threads = 0,
    function_static_shared = 1,
    function_constant_bytes = 2,
    function_local_bytes = 3,
    function_registers = 4,
    function_ptx_version = 5,
    function_binary_version = 6,
    function_max_dynamic_shared = 8,
};

}  // namespace kvrelay_emulated
