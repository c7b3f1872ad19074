// Copies and fills, in the order of their streams.
#include <cstring>
#include <memory>
#include <vector>

#include "grid.h"
#include "memory.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

bool is_device(DevicePointer at, size_t bytes) { return find_allocation(at, bytes).has_value(); }
char* bytes_at(DevicePointer at) { return reinterpret_cast<char*>(at); }

// Does it when the stream comes to it, unless the context has failed by then; a fault makes it fail.
void enqueue_access(Stream& stream, const char* what, Work access) {
    Context& context = stream.context;
    stream.enqueue([&context, what, access = std::move(access)] {
        if (context.health() != success) {
            return;
        }
        std::string why;
        const Result result = run_guarded(access, why);
        if (result != success) {
            context.fail(result, std::string(what) + ": " + why);
        }
    });
}

// Pageable memory is read before the call returns, and written before it returns; pinned memory is not.
Result copy_in(Stream& stream, DevicePointer to, const void* from, size_t bytes) {
    if (bytes == 0 || !is_device(to, bytes)) {
        return bytes == 0 ? success : invalid_value;
    }
    if (is_pinned(from) || stream.capturing()) {
        enqueue_access(stream, "a copy to the device", [=] { std::memcpy(bytes_at(to), from, bytes); });
        return success;
    }
    const char* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    enqueue_access(stream, "a copy to the device", [=] { std::memcpy(bytes_at(to), staged->data(), bytes); });
    return success;
}

Result copy_out(Stream& stream, void* to, DevicePointer from, size_t bytes) {
    if (bytes == 0 || !is_device(from, bytes)) {
        return bytes == 0 ? success : invalid_value;
    }
    enqueue_access(stream, "a copy from the device", [=] { std::memcpy(to, bytes_at(from), bytes); });
    if (is_pinned(to) || stream.capturing()) {
        return success;
    }
    stream.wait();
    return stream.context.health();
}

Result copy_within(Stream& stream, DevicePointer to, DevicePointer from, size_t bytes) {
    if (bytes == 0) {
        return success;
    }
    if (!is_device(to, bytes) || !is_device(from, bytes)) {
        return invalid_value;
    }
    enqueue_access(stream, "a copy between devices", [=] { std::memmove(bytes_at(to), bytes_at(from), bytes); });
    return success;
}

// Of memory that is the host's or a device's, as its address says.
Result copy_any(Stream& stream, DevicePointer to, DevicePointer from, size_t bytes) {
    const bool to_device = is_device(to, bytes), from_device = is_device(from, bytes);
    if (to_device && from_device) {
        return copy_within(stream, to, from, bytes);
    }
    if (to_device) {
        return copy_in(stream, to, bytes_at(from), bytes);
    }
    return from_device ? copy_out(stream, bytes_at(to), from, bytes) : invalid_value;
}

template <class T>
Result fill(Stream& stream, DevicePointer to, T value, size_t count) {
    if (count == 0) {
        return success;
    }
    if (count > SIZE_MAX / sizeof(T) || !is_device(to, count * sizeof(T)) || to % sizeof(T) != 0) {
        return invalid_value;
    }
    enqueue_access(stream, "a fill", [=] {
        T* begin = reinterpret_cast<T*>(to);
        std::fill(begin, begin + count, value);
    });
    return success;
}

// The default stream's, and waited for.
template <class Call>
Result at_once(Call call) {
    return on_stream(nullptr, [&](Stream& stream) -> Result {
        if (capture_forbids()) {
            return capture_unsupported;
        }
        const Result result = call(stream);
        if (result != success) {
            return result;
        }
        stream.wait();
        return stream.context.health();
    });
}

}  // namespace
}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

// For the stand-in of cuBLAS: work on memory that the caller named.
CUDA_API Result kvrelay_emulated_enqueue(Stream* handle, const char* what, void (*function)(void*), void* data) {
    return on_stream(handle, [&](Stream& stream) {
        enqueue_access(stream, what, [=] { function(data); });
        return success;
    });
}

CUDA_API Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return copy_in(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return copy_out(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return copy_within(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyAsync(DevicePointer to, DevicePointer from, size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return copy_any(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyPeerAsync(DevicePointer to, Context* to_context, DevicePointer from, Context* from_context,
                                  size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) -> Result {
        if (!contexts().has(to_context) || !contexts().has(from_context)) {
            return invalid_context;
        }
        const auto destination = find_allocation(to, bytes), source = find_allocation(from, bytes);
        const bool right = destination && source && destination->device == &to_context->device &&
                           source->device == &from_context->device;
        return right || bytes == 0 ? copy_within(stream, to, from, bytes) : invalid_value;
    });
}

CUDA_API Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, size_t bytes) {
    return at_once([&](Stream& stream) { return copy_in(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyDtoH_v2(void* to, DevicePointer from, size_t bytes) {
    return at_once([&](Stream& stream) { return copy_out(stream, to, from, bytes); });
}

CUDA_API Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, size_t bytes) {
    return at_once([&](Stream& stream) { return copy_within(stream, to, from, bytes); });
}

// Many copies in one call; all are checked before the first is made. Attributes are hints, and not read.
CUDA_API Result cuMemcpyBatchAsync_v2(DevicePointer* to, DevicePointer* from, size_t* bytes, size_t count, void*, size_t*,
                                      size_t num_attributes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) -> Result {
        if (reinterpret_cast<uintptr_t>(handle) <= 1 || stream.capturing()) {
            return stream.capturing() ? capture_unsupported : invalid_value;
        }
        if (count == 0 || num_attributes == 0) {
            return invalid_value;
        }
        for (size_t i = 0; i < count; ++i) {
            if (bytes[i] == 0 || (!is_device(to[i], bytes[i]) && !is_device(from[i], bytes[i]))) {
                say("copy %zu of %zu in a batch is of %zu bytes, and neither end is a device's", i, count, bytes[i]);
                return invalid_value;
            }
        }
        for (size_t i = 0; i < count; ++i) {
            const Result result = copy_any(stream, to[i], from[i], bytes[i]);
            if (result != success) {
                return result;
            }
        }
        return success;
    });
}

CUDA_API Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t count, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return fill(stream, to, value, count); });
}

CUDA_API Result cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) { return fill(stream, to, value, count); });
}

CUDA_API Result cuMemsetD8_v2(DevicePointer to, unsigned char value, size_t count) {
    return at_once([&](Stream& stream) { return fill(stream, to, value, count); });
}

CUDA_API Result cuMemsetD32_v2(DevicePointer to, unsigned value, size_t count) {
    return at_once([&](Stream& stream) { return fill(stream, to, value, count); });
}
