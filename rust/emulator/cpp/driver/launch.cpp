// Launches: held against the limits of the device and the kernel when they are made, and run when their
// stream comes to them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "function.h"
#include "grid.h"
#include "limits.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

std::atomic<uint64_t> num_launches{0};

struct Shape {
    dim3 grid, block;
    unsigned dynamic_shared;

    uint64_t threads() const { return static_cast<uint64_t>(block.x) * block.y * block.z; }
};

Result refuse(const Function& function, const char* what, uint64_t asked, uint64_t most, Result result) {
    say("kernel %s: %s is %llu, and can be 1 to %llu", function.kernel->name, what, static_cast<unsigned long long>(asked),
        static_cast<unsigned long long>(most));
    return result;
}

Result check_dimensions(const Function& function, const Shape& shape) {
    const struct {
        const char* what;
        unsigned asked, most;
    } dimensions[] = {
        {"the grid's x", shape.grid.x, MAX_GRID_X},    {"the grid's y", shape.grid.y, MAX_GRID_YZ},
        {"the grid's z", shape.grid.z, MAX_GRID_YZ},   {"the block's x", shape.block.x, MAX_BLOCK_XY},
        {"the block's y", shape.block.y, MAX_BLOCK_XY}, {"the block's z", shape.block.z, MAX_BLOCK_Z},
    };
    for (const auto& one : dimensions) {
        if (one.asked == 0 || one.asked > one.most) {
            return refuse(function, one.what, one.asked, one.most, invalid_value);
        }
    }
    return success;
}

Result check_resources(const Function& function, const Shape& shape) {
    if (shape.threads() > MAX_BLOCK_THREADS) {
        return refuse(function, "the block's number of threads", shape.threads(), MAX_BLOCK_THREADS, invalid_value);
    }
    if (function.max_threads != 0 && shape.threads() > function.max_threads) {
        return refuse(function, "the block's number of threads, by its launch bounds,", shape.threads(),
                      function.max_threads, launch_out_of_resources);
    }
    if (shape.dynamic_shared > static_cast<unsigned>(std::max(function.max_dynamic_shared, 0))) {
        say("kernel %s: %u bytes of dynamic shared memory; it may have %d beside its %d static ones, and more only after "
            "cuFuncSetAttribute",
            function.kernel->name, shape.dynamic_shared, function.max_dynamic_shared, function.static_shared());
        return invalid_value;
    }
    const uint64_t warps = (shape.threads() + 31) / 32;
    const uint64_t registers = static_cast<uint64_t>(function.registers(settings().capability));
    if (registers * warps * 32 > REGISTERS) {
        return refuse(function, "the block's number of registers", registers * warps * 32, REGISTERS, launch_out_of_resources);
    }
    return success;
}

Arguments copied(const Kernel& kernel, void** arguments) {
    constexpr size_t alignment = 16;
    Arguments copy;
    for (uint32_t i = 0; i < kernel.num_sizes; ++i) {
        const size_t offset = (copy.bytes.size() + alignment - 1) / alignment * alignment;
        copy.bytes.resize(offset + kernel.sizes[i]);
        std::memcpy(copy.bytes.data() + offset, arguments[i], kernel.sizes[i]);
        copy.offsets.push_back(offset);
    }
    return copy;
}

// Faults that were asked for: whether this launch is not to run.
bool inject(Context& context, const Kernel& kernel, uint64_t launch) {
    if (settings().fail_launch != 0 && launch == settings().fail_launch) {
        context.fail(launch_failed, std::string("kernel ") + kernel.name + ", launch " + std::to_string(launch) +
                                        ", fails since KVRELAY_EMU_FAIL_LAUNCH says so");
        return true;
    }
    if (settings().lost_after != 0 && launch > settings().lost_after) {
        if (!context.device.lost.exchange(true)) {
            say("device %d is lost after %llu launches since KVRELAY_EMU_LOST_AFTER says so", context.device.ordinal,
                static_cast<unsigned long long>(settings().lost_after));
        }
        return true;
    }
    return false;
}

void run(Context& context, const Function& function, const Shape& shape, const Arguments& arguments) {
    if (context.health() != success) {
        return;
    }
    const uint64_t launch = ++num_launches;
    if (inject(context, *function.kernel, launch)) {
        return;
    }
    Grid grid{};
    grid.kernel = function.kernel;
    grid.library = function.library;
    grid.grid = shape.grid;
    grid.block = shape.block;
    grid.dynamic_shared = shape.dynamic_shared;
    grid.arguments = arguments;
    grid.launch = launch;
    run_grid(grid);
    if (grid.result != success) {
        context.fail(grid.result, grid.error);
    } else if (const auto wrong = overrun(context.device)) {
        context.fail(illegal_address, std::string("kernel ") + function.kernel->name + ", or one beside it: " + *wrong);
    }
}

}  // namespace
}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuLaunchKernel(Function* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned dynamic_shared, Stream* stream_handle,
                               void** arguments, void** extra) {
    return on_stream(stream_handle, [&](Stream& stream) -> Result {
        const Function* function = function_of(handle);
        if (function == nullptr) {
            return invalid_handle;
        }
        if (extra != nullptr) {
            say("kernel %s: parameters are taken one by one, not in a buffer", function->kernel->name);
            return not_supported;
        }
        const Shape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_shared};
        Result result = check_dimensions(*function, shape);
        if (result == success) {
            result = check_resources(*function, shape);
        }
        if (result != success || (arguments == nullptr && function->kernel->num_sizes > 0)) {
            return result != success ? result : invalid_value;
        }
        Context& context = stream.context;
        // By value: the module may be unloaded, and the caller's arguments gone, before it runs.
        stream.enqueue([&context, function = *function, shape, parameters = copied(*function->kernel, arguments)] {
            run(context, function, shape, parameters);
        });
        return success;
    });
}

CUDA_API Result cuFuncSetAttribute(Function* handle, int attribute, int value) {
    return in_context([&](Context&) {
        Function* function = function_of(handle);
        if (function == nullptr || attribute != function_max_dynamic_shared) {
            return function == nullptr ? invalid_handle : success;
        }
        const int most = shared_optin(settings().capability) - function->static_shared();
        if (value < 0 || value > most) {
            say("kernel %s: %d bytes of dynamic shared memory; beside its %d static ones sm_%d has %d",
                function->kernel->name, value, function->static_shared(), settings().capability, most);
            return invalid_value;
        }
        function->max_dynamic_shared = value;
        return success;
    });
}

CUDA_API Result cuFuncGetAttribute(int* value, int attribute, Function* handle) {
    return in_context([&](Context&) {
        const Function* function = function_of(handle);
        if (function == nullptr) {
            return invalid_handle;
        }
        switch (attribute) {
            case function_max_threads:
                *value = function->max_threads != 0 ? static_cast<int>(function->max_threads) : MAX_BLOCK_THREADS;
                break;
            case function_static_shared: *value = function->static_shared(); break;
            case function_registers: *value = function->registers(settings().capability); break;
            case function_ptx_version: *value = settings().newest_ptx; break;
            case function_binary_version: *value = settings().capability; break;
            case function_max_dynamic_shared: *value = function->max_dynamic_shared; break;
            default: *value = 0;
        }
        return success;
    });
}

CUDA_API Result cuFuncGetParamInfo(Function* handle, size_t index, size_t* offset, size_t* bytes) {
    return in_context([&](Context&) {
        const Function* function = function_of(handle);
        if (function == nullptr || index >= function->kernel->num_sizes) {
            return function == nullptr ? invalid_handle : invalid_value;
        }
        // Scalars and pointers, which are aligned to their size.
        *offset = 0;
        for (size_t i = 0; i <= index; ++i) {
            const size_t size = function->kernel->sizes[i];
            *offset = (*offset + size - 1) / size * size + (i < index ? size : 0);
        }
        if (bytes != nullptr) {
            *bytes = function->kernel->sizes[index];
        }
        return success;
    });
}

CUDA_API Result cuFuncSetCacheConfig(Function* handle, int) {
    return in_context([&](Context&) { return function_of(handle) != nullptr ? success : invalid_handle; });
}

CUDA_API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* handle, int threads, size_t dynamic_shared) {
    return in_context([&](Context&) {
        const Function* function = function_of(handle);
        if (function == nullptr || threads <= 0) {
            return function == nullptr ? invalid_handle : invalid_value;
        }
        constexpr int most_threads = 2048, most_blocks = 32, system_shared = 1 << 10;
        const int capability = settings().capability, warps = (threads + 31) / 32;
        const int shared = function->static_shared() + static_cast<int>(dynamic_shared) + system_shared;
        const int registers = std::max(function->registers(capability), 1) * warps * 32;
        *blocks = std::min({most_threads / (warps * 32), most_blocks, shared_per_multiprocessor(capability) / shared,
                            REGISTERS / registers});
        return success;
    });
}

CUDA_API Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Function* handle, int threads,
                                                                     size_t dynamic_shared, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, threads, dynamic_shared);
}
