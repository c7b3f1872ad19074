#include "libraries.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <sstream>

#include "../kernel/execution.h"
#include "guards.h"
#include "settings.h"

// The loader's own: where a module's thread-local segment begins for this thread, made if need be. What
// `dlpi_tls_data` says is not enough: it knows nothing of a small segment among the static ones.
struct ThreadLocalIndex {
    unsigned long module, offset;
};
extern "C" void* __tls_get_addr(ThreadLocalIndex* index);

namespace kvrelay_emulated {
namespace {

constexpr int MAX_LIBRARIES = 256;

std::vector<LoadedLibrary*>& loaded() {
    static auto* all = new std::vector<LoadedLibrary*>;
    return *all;
}

// [guard][static shared memory][guard]
struct Segment {
    unsigned char* at;
    size_t bytes;
    bool known;

    bool guarded() const { return bytes >= 2 * SHARED_GUARD; }
};

struct Search {
    ElfW(Addr) inside;
    Segment found;
};

// Finds the thread-local segment, of this thread, of the library that an address is in.
int visit(dl_phdr_info* info, size_t, void* data) {
    auto* search = static_cast<Search*>(data);
    bool ours = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& header = info->dlpi_phdr[i];
        const ElfW(Addr) begin = info->dlpi_addr + header.p_vaddr;
        ours |= header.p_type == PT_LOAD && begin <= search->inside && search->inside < begin + header.p_memsz;
        if (header.p_type == PT_TLS) {
            bytes = header.p_memsz;
        }
    }
    if (ours && bytes > 0) {
        ThreadLocalIndex index{info->dlpi_tls_modid, 0};
        search->found = {static_cast<unsigned char*>(__tls_get_addr(&index)), bytes, true};
    }
    return ours;
}

Segment shared_segment(const Library* library) {
    Search search{reinterpret_cast<ElfW(Addr)>(library->kernels), {nullptr, 0, true}};
    dl_iterate_phdr(visit, &search);
    return search.found;
}

std::string beside_this_library() {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&load_libraries), &info);
    const std::string path = info.dli_fname != nullptr ? info.dli_fname : "";
    return path.substr(0, path.find_last_of('/') + 1) + "kernels";
}

std::vector<std::string> libraries_in(const std::string& folder) {
    std::vector<std::string> paths;
    DIR* directory = opendir(folder.c_str());
    if (directory == nullptr) {
        return paths;
    }
    while (const dirent* entry = readdir(directory)) {
        const std::string name = entry->d_name;
        if (name.size() > 3 && name.compare(name.size() - 3, 3, ".so") == 0) {
            paths.push_back(folder + "/" + name);
        }
    }
    closedir(directory);
    std::sort(paths.begin(), paths.end());
    return paths;
}

}  // namespace

void register_library(const Library* library) {
    loaded().push_back(new LoadedLibrary{library, static_cast<int>(loaded().size())});
}

const std::vector<LoadedLibrary*>& libraries() { return loaded(); }

const Kernel* LoadedLibrary::find(const std::string& name) const {
    const Kernel* end = library->kernels + library->num_kernels;
    const Kernel* found = std::find_if(library->kernels, end, [&](const Kernel& one) { return name == one.name; });
    return found == end ? nullptr : found;
}

namespace {

Segment& segment_of(const LoadedLibrary& one) {
    static __thread Segment* segments __attribute__((tls_model("initial-exec"))) = nullptr;
    if (segments == nullptr) {
        segments = new Segment[MAX_LIBRARIES]();
    }
    Segment& segment = segments[one.number];
    if (!segment.known) {
        segment = shared_segment(one.library);
    }
    return segment;
}

}  // namespace

void LoadedLibrary::poison_shared() const {
    const Segment& segment = segment_of(*this);
    if (segment.bytes > 0) {
        std::memset(segment.at, POISON, segment.bytes);
    }
}

std::optional<std::string> LoadedLibrary::shared_overrun() const {
    const Segment& segment = segment_of(*this);
    if (!segment.guarded()) {
        return std::nullopt;
    }
    unsigned char *begin = segment.at + SHARED_GUARD, *end = segment.at + segment.bytes - SHARED_GUARD;
    return written_beside(segment.at, begin, end, end + SHARED_GUARD, "the static shared memory");
}

bool load_libraries() {
    std::istringstream folders(settings().kernels.empty() ? beside_this_library() : settings().kernels);
    for (std::string folder; std::getline(folders, folder, ':');) {
        for (const std::string& path : libraries_in(folder)) {
            if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
                std::fprintf(stderr, "kvrelay-emulator: %s\n", dlerror());
                return false;
            }
        }
    }
    if (loaded().size() > MAX_LIBRARIES) {
        std::fprintf(stderr, "kvrelay-emulator: %zu libraries of kernels; there can be %d\n", loaded().size(),
                     MAX_LIBRARIES);
        return false;
    }
    return true;
}

uint64_t fnv1a64(const unsigned char* bytes, size_t count) {
    uint64_t value = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; ++i) {
        value = (value ^ bytes[i]) * 0x100000001b3u;
    }
    return value;
}

}  // namespace kvrelay_emulated
