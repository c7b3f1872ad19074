// Memory between processes: a handle names a file of its owner's, which the other process maps.
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
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
    // Of the file: its number may be another's by the time that the handle is opened.
    uint64_t identity;
    uint64_t padding;
};
static_assert(sizeof(IpcHandle) == 64, "CUipcMemHandle has 64 bytes");

// Whether a file that was opened is the one that the handle was made for.
bool is_file_of(int file, const IpcHandle& handle) {
    char path[64], name[256];
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(path, name, sizeof name);
    struct stat status {};
    return length > 0 && std::string(name, length) == "/memfd:" + file_name(handle.identity) + " (deleted)" &&
           fstat(file, &status) == 0 && static_cast<uint64_t>(status.st_size) == handle.mapped;
}

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
        *handle = {MAGIC, getpid(), found->file, found->device->ordinal, 0, found->mapped, found->offset, found->bytes,
                   found->identity, 0};
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
        if (file < 0 || !is_file_of(file, handle)) {
            say("process %d, or its memory, is gone", handle.process);
            if (file >= 0) {
                close(file);
            }
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
