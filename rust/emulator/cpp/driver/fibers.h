// Fibers: stacks that a thread of the operating system switches between.
#pragma once

#include <cstddef>
#include <vector>

namespace kvrelay_emulated {

// Saves the stack pointer to `from`, and goes on where `to` was saved.
void switch_stack(void** from, void* to);

// Stacks with a guard page below, kept for the next block.
class Stacks {
  public:
    static constexpr size_t SIZE = 128 << 10;

    // A stack on which `entry` will run; what to switch to. `colour` spreads stacks over the cache's sets.
    void* fresh(int colour, void (*entry)(), unsigned char** stack);
    void give_back(unsigned char* stack) { free_.push_back(stack); }

  private:
    std::vector<unsigned char*> free_;
};

}  // namespace kvrelay_emulated
