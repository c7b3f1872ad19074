// Linked before and after the kernels of a library, whose static shared memory is thread-local: the bytes
// beside it, which the emulator looks at after every block.
#include "registration.h"

namespace {

// Aligned to nothing, so that it begins where the memory before it ends.
__attribute__((used, aligned(1))) thread_local unsigned char guard[kvrelay_emulated::SHARED_GUARD];

}  // namespace
