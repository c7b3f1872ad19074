// [guard][pages][guard]; an allocation ends where the second guard begins, up to CUDA's alignment. The bytes of
// its pages before and behind it are looked at after every kernel.
#include "memory.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../kernel/execution.h"
#include "guards.h"
#include "settings.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

constexpr size_t PAGE = 4096;
// Costs addresses alone.
constexpr size_t GUARD = 16u << 20;
constexpr size_t ALIGNMENT = 256;
// More is not written, so that a large pool costs what is used of it.
constexpr size_t MOST_POISONED = 256u << 20;
// More than any machine has.
constexpr size_t MOST_PINNED = size_t{1} << 47;
// Addresses of freed memory that stay nobody's.
constexpr size_t MOST_RETIRED = 4096;

constexpr size_t round_up(size_t count, size_t to) { return (count + to - 1) / to * to; }

struct Table {
    std::mutex mutex;
    std::map<DevicePointer, Allocation> allocations;
    std::map<uintptr_t, size_t> pinned;
    std::deque<std::pair<unsigned char*, size_t>> retired;
};

Table& table() {
    static auto* one = new Table;
    return *one;
}

unsigned char* reserve(size_t mapped) {
    void* base = mmap(nullptr, mapped + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : static_cast<unsigned char*>(base);
}

// Maps a file, or none, between guards; the first guard, or null.
unsigned char* map_guarded(int file, size_t mapped) {
    unsigned char* base = reserve(mapped);
    if (base == nullptr) {
        return nullptr;
    }
    const int flags = MAP_FIXED | (file == NO_FILE ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
    void* pages = mmap(base + GUARD, mapped, PROT_READ | PROT_WRITE, flags, file, 0);
    if (pages == MAP_FAILED) {
        munmap(base, mapped + 2 * GUARD);
        return nullptr;
    }
    return base;
}

// A file that tells by its name which allocation it is: numbers of files are given out again.
int make_file(uint64_t identity, size_t bytes) {
    const int file = static_cast<int>(syscall(SYS_memfd_create, file_name(identity).c_str(), 1u));
    if (file < 0 && (errno == EMFILE || errno == ENFILE)) {
        say("no file is left to this process (ulimit -n): memory of cuMemAlloc takes one each, of cuMemAllocAsync none");
    }
    if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        close(file);
        return NO_FILE;
    }
    return file;
}

uint64_t new_identity() {
    uint64_t identity = 0;
    if (getrandom(&identity, sizeof identity, 0) != static_cast<ssize_t>(sizeof identity)) {
        std::perror("kvrelay-emulator: getrandom");
        std::abort();
    }
    return identity;
}

// Whoever still uses the address faults, until so much has been freed that addresses must come back.
void retire(Table& all, const Allocation& freed) {
    const size_t whole = freed.mapped + 2 * GUARD;
    mmap(freed.base, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    all.retired.emplace_back(freed.base, whole);
    if (all.retired.size() > MOST_RETIRED) {
        munmap(all.retired.front().first, all.retired.front().second);
        all.retired.pop_front();
    }
}

// The first byte, of less than a page, that is no poison any more; null if there is none.
unsigned char* written(unsigned char* begin, unsigned char* end) {
    static const std::vector<unsigned char> poison(PAGE, POISON);
    if (std::memcmp(begin, poison.data(), static_cast<size_t>(end - begin)) == 0) {
        return nullptr;
    }
    return std::find_if(begin, end, [](unsigned char byte) { return byte != POISON; });
}

unsigned char* bytes_at(DevicePointer at) { return reinterpret_cast<unsigned char*>(at); }

}  // namespace

std::string file_name(uint64_t identity) {
    char name[64];
    std::snprintf(name, sizeof name, "kvrelay-emulator-%016llx", static_cast<unsigned long long>(identity));
    return name;
}

Result allocate(Device& device, size_t bytes, bool pooled, DevicePointer* at) {
    if (bytes == 0) {
        return invalid_value;
    }
    // First of all, so that no sum below can wrap.
    if (bytes > settings().memory) {
        return out_of_memory;
    }
    const size_t mapped = round_up(bytes, PAGE);
    if (device.used.fetch_add(bytes) + bytes > settings().memory) {
        device.used -= bytes;
        return out_of_memory;
    }
    // What is from a pool no other process can open, and a process has few files.
    const uint64_t identity = pooled ? 0 : new_identity();
    const int file = pooled ? NO_FILE : make_file(identity, mapped);
    unsigned char* base = pooled || file >= 0 ? map_guarded(file, mapped) : nullptr;
    if (base == nullptr) {
        device.used -= bytes;
        if (file >= 0) {
            close(file);
        }
        say("this machine has no %zu bytes for device %d", bytes, device.ordinal);
        return out_of_memory;
    }
    const size_t offset = mapped - round_up(bytes, ALIGNMENT);
    unsigned char* begin = base + GUARD + offset;
    const size_t whole = mapped - offset;
    std::memset(base + GUARD, POISON, std::min(mapped, MOST_POISONED));
    std::memset(begin + bytes, POISON, whole - bytes);
    *at = reinterpret_cast<DevicePointer>(begin);
    std::lock_guard<std::mutex> lock(table().mutex);
    table().allocations[*at] = {*at, bytes, mapped, offset, file, identity, base, &device, pooled, false};
    return success;
}

Result import(Device& device, int file, size_t mapped, size_t offset, size_t bytes, DevicePointer* at) {
    unsigned char* base = map_guarded(file, mapped);
    if (base == nullptr) {
        close(file);
        return out_of_memory;
    }
    *at = reinterpret_cast<DevicePointer>(base + GUARD + offset);
    std::lock_guard<std::mutex> lock(table().mutex);
    table().allocations[*at] = {*at, bytes, mapped, offset, file, 0, base, &device, false, true};
    return success;
}

Result release(DevicePointer at) {
    std::lock_guard<std::mutex> lock(table().mutex);
    const auto found = table().allocations.find(at);
    if (found == table().allocations.end()) {
        return invalid_value;
    }
    const Allocation freed = found->second;
    table().allocations.erase(found);
    retire(table(), freed);
    if (freed.file != NO_FILE) {
        close(freed.file);
    }
    if (!freed.imported) {
        freed.device->used -= freed.bytes;
    }
    return success;
}

std::optional<Allocation> find_allocation(DevicePointer at, size_t bytes) {
    std::lock_guard<std::mutex> lock(table().mutex);
    auto after = table().allocations.upper_bound(at);
    if (after == table().allocations.begin()) {
        return std::nullopt;
    }
    const Allocation& found = (--after)->second;
    const size_t offset = at - found.at;
    const bool inside = offset <= found.bytes && bytes <= found.bytes - offset;
    return inside ? std::optional(found) : std::nullopt;
}

bool is_pinned(const void* at) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    std::lock_guard<std::mutex> lock(table().mutex);
    auto after = table().pinned.upper_bound(address);
    if (after == table().pinned.begin()) {
        return false;
    }
    --after;
    return address - after->first < after->second;
}

std::optional<std::string> overrun(const Device& device) {
    std::lock_guard<std::mutex> lock(table().mutex);
    for (const auto& [at, one] : table().allocations) {
        unsigned char* begin = bytes_at(at);
        unsigned char* pages = one.base + GUARD;
        if (one.device != &device) {
            continue;
        }
        if (auto wrong = written_beside(pages, begin, begin + one.bytes, pages + one.mapped, "an allocation")) {
            return wrong;
        }
    }
    return std::nullopt;
}

std::optional<std::string> written_beside(unsigned char* guard, unsigned char* begin, unsigned char* end,
                                          unsigned char* limit, const std::string& what) {
    const unsigned char *before = written(guard, begin), *behind = written(end, limit);
    if (before == nullptr && behind == nullptr) {
        return std::nullopt;
    }
    const std::string where = before != nullptr ? std::to_string(begin - before) + " bytes before the beginning"
                                                : std::to_string(behind - end) + " bytes past the end";
    return "something was written " + where + " of " + what + " of " + std::to_string(end - begin) + " bytes";
}

}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuMemGetInfo_v2(size_t* free, size_t* total) {
    return in_context([&](Context& context) {
        *total = settings().memory;
        *free = *total - context.device.used;
        return success;
    });
}

CUDA_API Result cuMemAlloc_v2(DevicePointer* at, size_t bytes) {
    return in_context([&](Context& context) {
        return capture_forbids() ? capture_unsupported : allocate(context.device, bytes, false, at);
    });
}

CUDA_API Result cuMemFree_v2(DevicePointer at) {
    return in_context([&](Context& context) {
        if (at == 0) {
            return success;
        }
        const Result result = synchronize_streams(context);
        return result == success ? release(at) : result;
    });
}

CUDA_API Result cuMemAllocAsync(DevicePointer* at, size_t bytes, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) {
        if (stream.capturing()) {
            return not_supported;
        }
        return allocate(stream.context.device, std::max<size_t>(bytes, 1), true, at);
    });
}

CUDA_API Result cuMemFreeAsync(DevicePointer at, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) {
        if (stream.capturing()) {
            return not_supported;
        }
        if (at != 0 && !find_allocation(at, 1)) {
            return invalid_value;
        }
        stream.enqueue([at] { release(at); });
        return success;
    });
}

CUDA_API Result cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    return in_context([&](Context&) {
        if (bytes == 0) {
            return invalid_value;
        }
        if (bytes > MOST_PINNED || posix_memalign(at, PAGE, round_up(bytes, PAGE)) != 0) {
            return out_of_memory;
        }
        std::memset(*at, POISON, std::min(bytes, MOST_POISONED));
        std::lock_guard<std::mutex> lock(table().mutex);
        table().pinned[reinterpret_cast<uintptr_t>(*at)] = bytes;
        return success;
    });
}

CUDA_API Result cuMemFreeHost(void* at) {
    return in_driver([&] {
        std::lock_guard<std::mutex> lock(table().mutex);
        if (table().pinned.erase(reinterpret_cast<uintptr_t>(at)) == 0) {
            return invalid_value;
        }
        std::free(at);
        return success;
    });
}

CUDA_API Result cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    return in_context([&](Context&) {
        if (bytes == 0 || bytes > MOST_PINNED) {
            return invalid_value;
        }
        std::lock_guard<std::mutex> lock(table().mutex);
        table().pinned[reinterpret_cast<uintptr_t>(at)] = bytes;
        return success;
    });
}

CUDA_API Result cuMemHostUnregister(void* at) {
    return in_driver([&] {
        std::lock_guard<std::mutex> lock(table().mutex);
        return table().pinned.erase(reinterpret_cast<uintptr_t>(at)) > 0 ? success : invalid_value;
    });
}

CUDA_API Result cuMemHostGetDevicePointer_v2(DevicePointer* device, void* host, unsigned) {
    return in_driver([&] {
        *device = reinterpret_cast<DevicePointer>(host);
        return is_pinned(host) ? success : invalid_value;
    });
}

namespace {

enum PointerAttribute : int {
    memory_type = 2,
    device_pointer = 3,
    host_pointer = 4,
    is_managed = 8,
    device_ordinal = 9,
    ipc_capable = 10,
    range_start = 11,
    range_size = 12,
};

constexpr unsigned HOST_MEMORY = 1, DEVICE_MEMORY = 2;

template <class T>
Result give(void* to, T value) {
    std::memcpy(to, &value, sizeof value);
    return success;
}

}  // namespace

CUDA_API Result cuPointerGetAttribute(void* to, int attribute, DevicePointer at) {
    return in_driver([&]() -> Result {
        const auto found = find_allocation(at, 1);
        if (!found && !is_pinned(bytes_at(at))) {
            return invalid_value;
        }
        switch (attribute) {
            case memory_type: return give(to, found ? DEVICE_MEMORY : HOST_MEMORY);
            case device_pointer: return give(to, at);
            case host_pointer: return found ? invalid_value : give(to, at);
            case is_managed: return give(to, 0u);
            case device_ordinal: return give(to, found ? found->device->ordinal : 0);
            case ipc_capable: return give(to, found && !found->pooled && !found->imported ? 1 : 0);
            case range_start: return found ? give(to, found->at) : invalid_value;
            case range_size: return found ? give(to, found->bytes) : invalid_value;
            default: return invalid_value;
        }
    });
}
