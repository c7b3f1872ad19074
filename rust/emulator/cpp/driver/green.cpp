// Green contexts: a part of a device's multiprocessors. The parts are counted, not kept apart.
#include <cstring>

#include "context.h"
#include "settings.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

constexpr int MULTIPROCESSORS = 1;
// Parts are multiples of this many multiprocessors.
constexpr unsigned granularity(int capability) { return capability >= 90 ? 8 : 4; }

// A CUdevResource of CUDA 13.0.
struct Resource {
    int type;
    unsigned char padding[92];
    struct {
        unsigned count, least, alignment;
    } multiprocessors;
    unsigned char rest[36];
};
static_assert(sizeof(Resource) == 144, "CUdevResource has 144 bytes");

struct Description {
    unsigned count;
};

struct GreenContext {
    Context* context;
};

Handles<GreenContext>& green_contexts() {
    static auto* alive = new Handles<GreenContext>;
    return *alive;
}

Resource resource(unsigned count) {
    const unsigned step = granularity(settings().capability);
    Resource made{};
    made.type = MULTIPROCESSORS;
    made.multiprocessors = {count, step, step};
    return made;
}

Result give_resource(Resource* to, int type, int count) {
    *to = resource(static_cast<unsigned>(count));
    return type == MULTIPROCESSORS ? success : invalid_value;
}

}  // namespace
}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuDeviceGetDevResource(DeviceOrdinal device, Resource* to, int type) {
    return in_driver([&] {
        return device_of(device) == nullptr ? invalid_device : give_resource(to, type, settings().multiprocessors);
    });
}

CUDA_API Result cuCtxGetDevResource(Context* context, Resource* to, int type) {
    return in_driver([&] {
        return contexts().has(context) ? give_resource(to, type, context->multiprocessors) : invalid_context;
    });
}

CUDA_API Result cuGreenCtxGetDevResource(GreenContext* green, Resource* to, int type) {
    return in_driver([&] {
        return green_contexts().has(green) ? give_resource(to, type, green->context->multiprocessors) : invalid_context;
    });
}

// `groups` parts of at least `least` multiprocessors; without `parts`, how many there could be.
CUDA_API Result cuDevSmResourceSplitByCount(Resource* parts, unsigned* groups, const Resource* whole, Resource* remaining,
                                            unsigned, unsigned least) {
    return in_driver([&] {
        if (whole->type != MULTIPROCESSORS || least == 0) {
            return invalid_value;
        }
        const unsigned step = granularity(settings().capability);
        const unsigned each = (least + step - 1) / step * step, all = whole->multiprocessors.count;
        const unsigned possible = all / each;
        if (parts == nullptr) {
            *groups = possible;
            return success;
        }
        if (possible == 0) {
            return invalid_value;
        }
        *groups = *groups < possible ? *groups : possible;
        for (unsigned i = 0; i < *groups; ++i) {
            parts[i] = resource(each);
        }
        if (remaining != nullptr) {
            *remaining = resource(all - *groups * each);
        }
        return success;
    });
}

CUDA_API Result cuDevResourceGenerateDesc(Description** description, Resource* resources, unsigned count) {
    return in_driver([&] {
        unsigned sum = 0;
        for (unsigned i = 0; i < count; ++i) {
            if (resources[i].type != MULTIPROCESSORS) {
                return invalid_value;
            }
            sum += resources[i].multiprocessors.count;
        }
        // Nothing ever destroys a description, here or in CUDA.
        *description = new Description{sum};
        return count > 0 ? success : invalid_value;
    });
}

CUDA_API Result cuGreenCtxCreate(GreenContext** green, Description* description, DeviceOrdinal ordinal, unsigned flags) {
    return in_driver([&] {
        constexpr unsigned default_stream = 1;
        Device* device = device_of(ordinal);
        if (device == nullptr || flags != default_stream) {
            return device == nullptr ? invalid_device : invalid_value;
        }
        auto* context = contexts().add(new Context(*device, static_cast<int>(description->count)));
        *green = green_contexts().add(new GreenContext{context});
        return success;
    });
}

CUDA_API Result cuCtxFromGreenCtx(Context** context, GreenContext* green) {
    return in_driver([&] {
        const bool known = green_contexts().has(green);
        *context = known ? green->context : nullptr;
        return known ? success : invalid_context;
    });
}

CUDA_API Result cuGreenCtxStreamCreate(Stream** stream, GreenContext* green, unsigned flags, int priority) {
    return in_driver([&] {
        constexpr unsigned non_blocking = 1;
        if (!green_contexts().has(green) || flags != non_blocking) {
            return flags != non_blocking ? invalid_value : invalid_context;
        }
        *stream = new Stream(*green->context, priority, false);
        return success;
    });
}

CUDA_API Result cuGreenCtxDestroy(GreenContext* green) {
    return in_driver([&]() -> Result {
        if (!green_contexts().remove(green)) {
            return invalid_context;
        }
        const Result result = synchronize_streams(*green->context);
        contexts().remove(green->context);
        return result;
    });
}
