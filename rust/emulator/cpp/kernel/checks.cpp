// What g++'s sanitizers call in the kernels of a library: an error of the launch, which says where.
#include <cstdio>

#include "execution.h"

namespace {

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};

struct Checked {
    SourceLocation location;
};

struct TypeMismatch {
    SourceLocation location;
    const void* type;
    unsigned char log_alignment, kind;
};

[[noreturn]] void fail_at(const SourceLocation& location, const char* what) {
    const char* slash = std::strrchr(location.file, '/');
    char why[400];
    std::snprintf(why, sizeof why, "%s:%u: %s", slash != nullptr ? slash + 1 : location.file, location.line, what);
    kvrelay_emulated::fail(why);
}

}  // namespace

extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, uintptr_t at) {
    char what[160];
    std::snprintf(what, sizeof what, "it touches the address %p, which is no multiple of %llu",
                  reinterpret_cast<void*>(at), 1ull << data->log_alignment);
    fail_at(data->location, what);
}

extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const Checked* data, uintptr_t index) {
    char what[160];
    std::snprintf(what, sizeof what, "it takes element %lld of an array that has none", static_cast<long long>(index));
    fail_at(data->location, what);
}
