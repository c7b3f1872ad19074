// Modules: images made by nvcc, each kernel of which is run by what g++ made of the same source. The image is
// real, so what only nvcc sees (versions, parameters, limits) is held against it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "context.h"
#include "function.h"
#include "grid.h"
#include "libraries.h"
#include "limits.h"
#include "ptx.h"
#include "settings.h"

namespace kvrelay_emulated {
namespace {

constexpr uint32_t FATBIN_MAGIC = 0xba55ed50u;
// Of any image.
constexpr size_t MOST_BYTES = size_t{1} << 32;

struct FatbinHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

struct Module {
    // One of the two.
    std::optional<Ptx> ptx;
    uint64_t fatbin = 0;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

Handles<Module>& modules() {
    static auto* alive = new Handles<Module>;
    return *alive;
}

Handles<Function>& functions() {
    static auto* alive = new Handles<Function>;
    return *alive;
}

// Reads an image that may end sooner than it says, which is then an error and not the end of the process.
bool try_to_read(const std::function<void()>& work) {
    std::string why;
    if (run_guarded(work, why) == success) {
        return true;
    }
    say("an image ends before it should: %s", why.c_str());
    return false;
}

// `most` bytes are known to be there.
Result load_fatbin(const unsigned char* image, size_t most, Module& module) {
    FatbinHeader header{};
    if (most < sizeof header || !try_to_read([&] { std::memcpy(&header, image, sizeof header); })) {
        return invalid_image;
    }
    if (header.header_bytes < sizeof header || header.bytes > most - std::min<size_t>(most, header.header_bytes)) {
        say("a fatbin says that it has %u + %llu bytes; it has %zu at most", header.header_bytes,
            static_cast<unsigned long long>(header.bytes), most);
        return invalid_image;
    }
    if (!try_to_read([&] { module.fatbin = fnv1a64(image, header.header_bytes + header.bytes); })) {
        return invalid_image;
    }
    for (const LoadedLibrary* one : libraries()) {
        if (one->library->fatbin == module.fatbin) {
            return success;
        }
    }
    say("none of the %zu libraries of kernels was built with the fatbin %016llx: build both again", libraries().size(),
        static_cast<unsigned long long>(module.fatbin));
    return no_binary_for_gpu;
}

Result load_ptx(const char* text, size_t most, Module& module) {
    size_t length = 0;
    if (!try_to_read([&] { length = strnlen(text, most); })) {
        return invalid_image;
    }
    module.ptx = Ptx::read(std::string(text, length));
    if (!module.ptx) {
        say("an image is neither a fatbin nor PTX");
        return invalid_image;
    }
    const int version = module.ptx->version(), newest = settings().newest_ptx;
    if (version > newest) {
        say("PTX of version %d.%d; the driver takes %d.%d at most", version / 10, version % 10, newest / 10, newest % 10);
        return unsupported_ptx_version;
    }
    if (module.ptx->target() > settings().capability) {
        say("PTX for sm_%d; the device is sm_%d", module.ptx->target(), settings().capability);
        return no_binary_for_gpu;
    }
    return success;
}

// What the image says of a kernel; nothing if it has none of that name.
std::optional<PtxEntry> described(const Module& module, const std::string& name, const Kernel* kernel) {
    if (module.ptx) {
        return module.ptx->entry(name);
    }
    if (kernel == nullptr) {
        return std::nullopt;
    }
    return PtxEntry{{kernel->ptx_sizes, kernel->ptx_sizes + kernel->num_ptx_sizes}, kernel->max_threads};
}

// Whether nvcc and g++ agree on a kernel's parameters.
bool same_parameters(const std::string& name, const PtxEntry& entry, const Kernel& kernel) {
    if (entry.sizes.size() != kernel.num_sizes) {
        say("kernel %s has %zu parameters in the image and %u on the CPU", name.c_str(), entry.sizes.size(), kernel.num_sizes);
        return false;
    }
    for (uint32_t i = 0; i < kernel.num_sizes; ++i) {
        if (entry.sizes[i] != kernel.sizes[i]) {
            say("parameter %u of kernel %s has %u bytes in the image and %u on the CPU", i, name.c_str(), entry.sizes[i],
                kernel.sizes[i]);
            return false;
        }
    }
    return true;
}

std::pair<const LoadedLibrary*, const Kernel*> find_kernel(const Module& module, const std::string& name) {
    for (const LoadedLibrary* one : libraries()) {
        const Kernel* kernel = one->find(name);
        if (kernel != nullptr && (module.ptx || one->library->fatbin == module.fatbin)) {
            return {one, kernel};
        }
    }
    return {nullptr, nullptr};
}

Result get_function(Module& module, const std::string& name, Function** function) {
    const auto known = module.functions.find(name);
    if (known != module.functions.end()) {
        *function = known->second.get();
        return success;
    }
    const auto [library, kernel] = find_kernel(module, name);
    const std::optional<PtxEntry> entry = described(module, name, kernel);
    if (!entry) {
        return not_found;
    }
    if (kernel == nullptr) {
        say("kernel %s is in the image, and none of the %zu libraries of kernels has it", name.c_str(), libraries().size());
        return not_found;
    }
    if (!same_parameters(name, *entry, *kernel)) {
        return invalid_image;
    }
    const int dynamic = STATIC_SHARED - static_cast<int>(kernel->static_shared);
    auto made = std::make_unique<Function>(Function{kernel, library, entry->max_threads, dynamic});
    *function = functions().add(made.get());
    module.functions[name] = std::move(made);
    return success;
}

}  // namespace

Function* function_of(Function* handle) { return functions().has(handle) ? handle : nullptr; }

}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

namespace {

Result load(Module** handle, const void* image, size_t most) {
    return in_context([&](Context&) -> Result {
        uint32_t magic = 0;
        if (image == nullptr) {
            return invalid_value;
        }
        if (most < sizeof magic || !try_to_read([&] { std::memcpy(&magic, image, sizeof magic); })) {
            return invalid_image;
        }
        auto module = std::make_unique<Module>();
        const Result result = magic == FATBIN_MAGIC ? load_fatbin(static_cast<const unsigned char*>(image), most, *module)
                                                    : load_ptx(static_cast<const char*>(image), most, *module);
        if (result == success) {
            *handle = modules().add(module.release());
        }
        return result;
    });
}

}  // namespace

// How long the image is only itself says.
CUDA_API Result cuModuleLoadData(Module** handle, const void* image) { return load(handle, image, MOST_BYTES); }

CUDA_API Result cuModuleLoadDataEx(Module** handle, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(handle, image);
}

CUDA_API Result cuModuleLoadFatBinary(Module** handle, const void* image) { return cuModuleLoadData(handle, image); }

CUDA_API Result cuModuleLoad(Module** handle, const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        return file_not_found;
    }
    std::ostringstream contents;
    contents << file.rdbuf();
    const std::string image = contents.str();
    return load(handle, image.data(), image.size());
}

CUDA_API Result cuModuleUnload(Module* module) {
    return in_driver([&] {
        if (!modules().remove(module)) {
            return invalid_handle;
        }
        for (const auto& [name, function] : module->functions) {
            functions().remove(function.get());
        }
        delete module;
        return success;
    });
}

CUDA_API Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
    return in_context([&](Context&) {
        static std::mutex one_at_a_time;
        std::lock_guard<std::mutex> lock(one_at_a_time);
        return modules().has(module) ? get_function(*module, name, function) : invalid_handle;
    });
}

// No kernel here has a variable of its own in device memory.
CUDA_API Result cuModuleGetGlobal_v2(DevicePointer*, size_t*, Module* module, const char*) {
    return in_context([&](Context&) { return modules().has(module) ? not_found : invalid_handle; });
}
