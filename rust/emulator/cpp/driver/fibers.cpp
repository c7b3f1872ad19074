#include "fibers.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "the emulator switches stacks on x86-64 only"
#endif

// Registers that a callee must preserve, then the stack.
asm(R"(
.text
.globl kvrelay_emulated_switch
.hidden kvrelay_emulated_switch
kvrelay_emulated_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void kvrelay_emulated_switch(void** from, void* to);

namespace kvrelay_emulated {
namespace {

constexpr size_t PAGE = 4096;
constexpr int PRESERVED = 6;

unsigned char* map_stack() {
    void* base = mmap(nullptr, PAGE + Stacks::SIZE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, PAGE, PROT_NONE) != 0) {
        std::perror("kvrelay-emulator: no memory for a thread's stack");
        std::abort();
    }
    return static_cast<unsigned char*>(base) + PAGE;
}

}  // namespace

void switch_stack(void** from, void* to) { kvrelay_emulated_switch(from, to); }

void* Stacks::fresh(int colour, void (*entry)(), unsigned char** stack) {
    if (free_.empty()) {
        free_.push_back(map_stack());
    }
    *stack = free_.back();
    free_.pop_back();
    auto* top = reinterpret_cast<uint64_t*>(*stack + SIZE - static_cast<size_t>(colour % 64) * 448);
    // As after a call: a return address, and the stack off by 8 from a multiple of 16.
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < PRESERVED; ++i) {
        *--top = 0;
    }
    return top;
}

}  // namespace kvrelay_emulated
