// Devices: initialisation, properties, primary and other contexts.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sstream>

#include "context.h"
#include "grid.h"
#include "libraries.h"
#include "limits.h"
#include "settings.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

std::mutex init_mutex;
std::atomic<bool> started{false}, forked{false};
__thread Context* current_of_thread __attribute__((tls_model("initial-exec"))) = nullptr;

std::vector<Device*>& all_devices() {
    static auto* devices = new std::vector<Device*>;
    return *devices;
}

// Those that CUDA_VISIBLE_DEVICES leaves, up to the first number that is none, as the driver reads it.
std::vector<int> visible(int count) {
    std::vector<int> ordinals;
    const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
    if (value == nullptr) {
        for (int i = 0; i < count; ++i) {
            ordinals.push_back(i);
        }
        return ordinals;
    }
    std::istringstream list(value);
    for (std::string item; std::getline(list, item, ',');) {
        char* end = nullptr;
        const long ordinal = std::strtol(item.c_str(), &end, 10);
        if (item.empty() || *end != '\0' || ordinal < 0 || ordinal >= count) {
            break;
        }
        ordinals.push_back(static_cast<int>(ordinal));
    }
    return ordinals;
}

}  // namespace

void say(const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "kvrelay-emulator: %s\n", line);
}

Handles<Context>& contexts() {
    static auto* alive = new Handles<Context>;
    return *alive;
}

Device* device_of(DeviceOrdinal ordinal) {
    return ordinal >= 0 && ordinal < num_devices() ? all_devices()[ordinal] : nullptr;
}

int num_devices() { return static_cast<int>(all_devices().size()); }
bool initialized() { return started && !forked; }
Context* current_context() { return current_of_thread; }
void set_current_context(Context* context) { current_of_thread = context; }

void Context::fail(Result result, const std::string& why) {
    say("%s -> CUDA error %d on device %d", why.c_str(), result, device.ordinal);
    Result none = success;
    error.compare_exchange_strong(none, result);
}

}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuInit(unsigned flags) {
    std::lock_guard<std::mutex> lock(init_mutex);
    if (flags != 0) {
        return invalid_value;
    }
    if (started) {
        return forked ? not_initialized : success;
    }
    const std::vector<int> ordinals = visible(settings().devices);
    if (ordinals.empty()) {
        return no_device;
    }
    if (!load_libraries()) {
        return invalid_image;
    }
    for (size_t i = 0; i < ordinals.size(); ++i) {
        auto* device = new Device;
        device->ordinal = static_cast<int>(i);
        all_devices().push_back(device);
    }
    catch_faults();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    started = true;
    return success;
}

CUDA_API Result cuDriverGetVersion(int* version) {
    *version = 13000;
    return success;
}

CUDA_API Result cuDeviceGetCount(int* count) {
    return in_driver([&] {
        *count = num_devices();
        return success;
    });
}

CUDA_API Result cuDeviceGet(DeviceOrdinal* device, int ordinal) {
    return in_driver([&] {
        *device = ordinal;
        return device_of(ordinal) != nullptr ? success : invalid_device;
    });
}

CUDA_API Result cuDeviceGetName(char* name, int length, DeviceOrdinal device) {
    return in_driver([&] {
        if (device_of(device) == nullptr) {
            return invalid_device;
        }
        std::snprintf(name, static_cast<size_t>(length), "Emulated device %d", device);
        return success;
    });
}

CUDA_API Result cuDeviceTotalMem_v2(size_t* bytes, DeviceOrdinal device) {
    return in_driver([&] {
        *bytes = settings().memory;
        return device_of(device) != nullptr ? success : invalid_device;
    });
}

CUDA_API Result cuDeviceGetUuid_v2(unsigned char* uuid, DeviceOrdinal device) {
    return in_driver([&] {
        std::memset(uuid, 0xe0, 15);
        uuid[15] = static_cast<unsigned char>(device);
        return device_of(device) != nullptr ? success : invalid_device;
    });
}

CUDA_API Result cuDeviceGetUuid(unsigned char* uuid, DeviceOrdinal device) { return cuDeviceGetUuid_v2(uuid, device); }

CUDA_API Result cuDeviceGetAttribute(int* value, int attribute, DeviceOrdinal device) {
    if (!initialized()) {
        return not_initialized;
    }
    if (device_of(device) == nullptr) {
        return invalid_device;
    }
    const int capability = settings().capability;
    switch (attribute) {
        case max_threads_per_block: *value = MAX_BLOCK_THREADS; break;
        case max_block_x:
        case max_block_y: *value = MAX_BLOCK_XY; break;
        case max_block_z: *value = MAX_BLOCK_Z; break;
        case max_grid_x: *value = MAX_GRID_X; break;
        case max_grid_y:
        case max_grid_z: *value = MAX_GRID_YZ; break;
        case max_shared_per_block: *value = STATIC_SHARED; break;
        case total_constant_memory: *value = 64 << 10; break;
        case warp_size: *value = 32; break;
        case max_registers_per_block:
        case max_registers_per_multiprocessor: *value = REGISTERS; break;
        case multiprocessor_count: *value = settings().multiprocessors; break;
        case max_threads_per_multiprocessor: *value = 2048; break;
        case unified_addressing:
        case memory_pools_supported: *value = 1; break;
        case compute_capability_major: *value = capability / 10; break;
        case compute_capability_minor: *value = capability % 10; break;
        case max_shared_per_multiprocessor: *value = shared_per_multiprocessor(capability); break;
        case max_shared_per_block_optin: *value = shared_optin(capability); break;
        default: *value = 0;
    }
    return success;
}

CUDA_API Result cuDevicePrimaryCtxRetain(Context** context, DeviceOrdinal ordinal) {
    return in_driver([&] {
        Device* device = device_of(ordinal);
        if (device == nullptr) {
            return invalid_device;
        }
        if (device->lost) {
            return device_unavailable;
        }
        std::lock_guard<std::mutex> lock(init_mutex);
        if (device->primary == nullptr) {
            device->primary = contexts().add(new Context(*device, settings().multiprocessors));
        }
        device->primary_users += 1;
        *context = device->primary;
        return success;
    });
}

// The context stays, with its memory, for who retains it next; a GPU would free both at the last release.
CUDA_API Result cuDevicePrimaryCtxRelease_v2(DeviceOrdinal ordinal) {
    return in_driver([&] {
        Device* device = device_of(ordinal);
        std::lock_guard<std::mutex> lock(init_mutex);
        if (device == nullptr || device->primary_users == 0) {
            return device == nullptr ? invalid_device : invalid_context;
        }
        device->primary_users -= 1;
        return success;
    });
}

CUDA_API Result cuCtxCreate_v4(Context** context, void*, unsigned, DeviceOrdinal ordinal) {
    return in_driver([&] {
        Device* device = device_of(ordinal);
        if (device == nullptr) {
            return invalid_device;
        }
        *context = contexts().add(new Context(*device, settings().multiprocessors));
        set_current_context(*context);
        return success;
    });
}

CUDA_API Result cuCtxDestroy_v2(Context* context) {
    return in_driver([&] {
        if (!contexts().has(context) || context == context->device.primary) {
            return invalid_context;
        }
        synchronize_streams(*context);
        contexts().remove(context);
        if (current_context() == context) {
            set_current_context(nullptr);
        }
        return success;
    });
}

CUDA_API Result cuCtxSetCurrent(Context* context) {
    return in_driver([&] {
        if (context != nullptr && !contexts().has(context)) {
            return invalid_context;
        }
        set_current_context(context);
        return success;
    });
}

CUDA_API Result cuCtxGetCurrent(Context** context) {
    return in_driver([&] {
        *context = current_context();
        return success;
    });
}

CUDA_API Result cuCtxGetDevice(DeviceOrdinal* device) {
    return in_context([&](Context& context) {
        *device = context.device.ordinal;
        return success;
    });
}

CUDA_API Result cuCtxSynchronize() {
    return in_context([&](Context& context) {
        const Result result = synchronize_streams(context);
        return result == success ? context.health() : result;
    });
}

CUDA_API Result cuCtxSetFlags(unsigned) { return success; }
CUDA_API Result cuCtxSetCacheConfig(int) { return success; }
CUDA_API Result cuCtxSetLimit(int, size_t) { return success; }
