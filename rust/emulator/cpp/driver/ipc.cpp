// Memory between processes: a handle names a file of its owner's, which the other process maps.
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "memory.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

constexpr uint64_t MAGIC = 0x6b7672656c617921u;

// The 64 bytes of a CUipcMemHandle.
struct IpcHandle {
    uint64_t magic;
    int32_t process, file, device, unused;
    uint64_t mapped, offset, bytes;
    uint64_t padding[2];
};
static_assert(sizeof(IpcHandle) == 64, "CUipcMemHandle has 64 bytes");

}  // namespace
}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuIpcGetMemHandle(IpcHandle* handle, DevicePointer at) {
    return in_context([&](Context&) {
        const auto found = find_allocation(at, 1);
        // Pools are not exported by handle, and what was imported is not passed on.
        if (!found || found->pooled || found->imported) {
            return invalid_value;
        }
        *handle = {MAGIC, getpid(), found->file, found->device->ordinal, 0, found->mapped, found->offset, found->bytes, {}};
        return success;
    });
}

CUDA_API Result cuIpcOpenMemHandle_v2(DevicePointer* at, IpcHandle handle, unsigned) {
    return in_context([&](Context&) -> Result {
        Device* device = device_of(handle.device);
        if (handle.magic != MAGIC || device == nullptr) {
            return invalid_value;
        }
        if (handle.process == getpid()) {
            return invalid_context;
        }
        char path[64];
        std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
        const int file = open(path, O_RDWR | O_CLOEXEC);
        if (file < 0) {
            say("process %d, or its memory, is gone", handle.process);
            return invalid_value;
        }
        return import(*device, file, handle.mapped, handle.offset, handle.bytes, at);
    });
}

CUDA_API Result cuIpcCloseMemHandle(DevicePointer at) {
    return in_context([&](Context& context) -> Result {
        const auto found = find_allocation(at, 1);
        if (!found || !found->imported || found->at != at) {
            return invalid_value;
        }
        const Result result = synchronize_streams(context);
        return result == success ? release(at) : result;
    });
}
