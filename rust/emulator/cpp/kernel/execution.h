// A block in execution: what kernels and the emulator share. Barriers and rendezvous are inline here, since
// kernels do little else; the emulator only gives the turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "types.h"

// What kernels take from the emulator's library.
#define KVRELAY_SHARED __attribute__((visibility("default")))

namespace kvrelay_emulated {

constexpr int LANES = 32;
constexpr size_t DEPOSIT_BYTES = 64;
constexpr int ASYNC_COPIES = 256;
// Memory that nobody has written: not a number in every float format, and far out of range as an index.
constexpr unsigned char POISON = 0xff;

// Where lanes of a mask meet. Two generations, since a fast lane deposits anew while a slow one still reads.
struct Rendezvous {
    uint32_t mask = 0, arrived = 0;
    uint64_t generation = 0;
    alignas(16) unsigned char deposits[2][LANES][DEPOSIT_BYTES];
};

struct Warp {
    uint32_t live = 0;
    // One for each mask in flight.
    Rendezvous rendezvous[4];
};

// Where `__syncthreads` is written.
struct Place {
    const char* file;
    int line;
};

struct Barrier {
    int arrived = 0;
    uint64_t generation = 0;
    // Where the first thread of this generation waits, and which thread that is.
    Place place{};
    int first = 0;
    // Gathered over the threads, and what the last generation gathered.
    int votes = 0, result = 0;
};

struct Block {
    uint3 index;
    dim3 size, grid;
    unsigned char* dynamic_shared;
    int live;
    Barrier barrier;
    Warp* warps;
};

// A copy that is under way until it is waited for.
struct AsyncCopy {
    void* to;
    const void* from;
    unsigned bytes, zeros;
    unsigned group;
};

enum class State : uint8_t { fresh, running, at_barrier, at_warp, ended };

struct Thread {
    uint3 index;
    int number, lane, warp;
    Block* block;
    void* stack_pointer;
    State state;
    // The generation that the thread waits to see over, and where.
    uint64_t waits_for;
    Rendezvous* meets;
    // Room for ASYNC_COPIES, made by the first thread of this number that copies, and kept.
    AsyncCopy* copies = nullptr;
    int num_copies;
    unsigned copy_group;
};

// The thread that has its turn on this thread of the operating system.
extern KVRELAY_SHARED __thread Thread* current __attribute__((tls_model("initial-exec")));

// Gives the turn back; returns when the thread has it again.
KVRELAY_SHARED void yield();

// Ends the kernel: an error of the launch that names kernel, block and thread.
[[noreturn]] KVRELAY_SHARED void fail(const char* why);
[[noreturn]] KVRELAY_SHARED void fail_at_barrier(Place here);

inline void open_barrier(Block& block) {
    Barrier& barrier = block.barrier;
    barrier.arrived = 0;
    barrier.generation += 1;
    barrier.result = barrier.votes;
    barrier.votes = 0;
}

// Waits for every thread of the block that has not ended; the sum of their votes.
inline int wait_at_barrier(Place here, int vote) {
    Thread* me = current;
    Block& block = *me->block;
    Barrier& barrier = block.barrier;
    if (barrier.arrived == 0) {
        barrier.place = here;
        barrier.first = me->number;
    } else if (barrier.place.line != here.line || std::strcmp(barrier.place.file, here.file) != 0) {
        fail_at_barrier(here);
    }
    const uint64_t generation = barrier.generation;
    barrier.votes += vote;
    barrier.arrived += 1;
    if (barrier.arrived >= block.live) {
        open_barrier(block);
        return barrier.result;
    }
    me->state = State::at_barrier;
    me->waits_for = generation;
    yield();
    return barrier.result;
}

// What the lanes of a rendezvous deposited.
template <class T>
class Deposits {
  public:
    Deposits(const unsigned char (*slots)[DEPOSIT_BYTES], uint32_t lanes) : slots_(slots), lanes_(lanes) {}

    uint32_t lanes() const { return lanes_; }

    // Poison for a lane that deposited nothing.
    T operator[](int lane) const {
        T value;
        if (lanes_ >> lane & 1) {
            std::memcpy(&value, slots_[lane], sizeof value);
        } else {
            std::memset(&value, POISON, sizeof value);
        }
        return value;
    }

  private:
    const unsigned char (*slots_)[DEPOSIT_BYTES];
    uint32_t lanes_;
};

inline Rendezvous& rendezvous_for(Warp& warp, uint32_t mask) {
    Rendezvous* free = nullptr;
    for (Rendezvous& one : warp.rendezvous) {
        if (one.mask == mask) {
            return one;
        }
        if (one.arrived == 0 && free == nullptr) {
            free = &one;
        }
    }
    if (free == nullptr) {
        fail("lanes of one warp wait in more than 4 different masks");
    }
    free->mask = mask;
    return *free;
}

// Deposits a value and waits for every lane of the mask that has not ended; what all of them deposited.
template <class T>
inline Deposits<T> exchange(uint32_t mask, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= DEPOSIT_BYTES, "a deposit is some plain bytes");
    Thread* me = current;
    Warp& warp = me->block->warps[me->warp];
    if (!(mask >> me->lane & 1)) {
        fail("a lane calls a warp function with a mask that it is not in");
    }
    mask &= warp.live;
    Rendezvous& meeting = rendezvous_for(warp, mask);
    const uint64_t generation = meeting.generation;
    unsigned char(*slots)[DEPOSIT_BYTES] = meeting.deposits[generation & 1];
    std::memcpy(slots[me->lane], &value, sizeof value);
    meeting.arrived |= 1u << me->lane;
    if (meeting.arrived == mask) {
        meeting.arrived = 0;
        meeting.generation += 1;
    } else {
        me->state = State::at_warp;
        me->waits_for = generation;
        me->meets = &meeting;
        yield();
    }
    return {slots, mask};
}

inline unsigned char* dynamic_shared() { return current->block->dynamic_shared; }
inline int lane() { return current->lane; }

// Begins a copy of `bytes`, of which the last `zeros` are zeros and not read. What is there before it is
// waited for is poison.
inline void copy_async(void* to, const void* from, unsigned bytes, unsigned zeros) {
    Thread* me = current;
    if (me->copies == nullptr) {
        me->copies = new AsyncCopy[ASYNC_COPIES];
    }
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes != 0) {
        fail("an asynchronous copy is from or to an address that is no multiple of its bytes");
    }
    if (me->num_copies == ASYNC_COPIES) {
        fail("a thread has more than 256 asynchronous copies under way");
    }
    std::memset(to, POISON, bytes);
    me->copies[me->num_copies++] = {to, from, bytes, zeros, me->copy_group};
}

inline void copy_async_commit() { current->copy_group += 1; }

// Waits until at most the last `groups` committed groups are under way.
inline void copy_async_wait(unsigned groups) {
    Thread* me = current;
    int kept = 0;
    for (int i = 0; i < me->num_copies; ++i) {
        const AsyncCopy& copy = me->copies[i];
        if (copy.group + groups >= me->copy_group) {
            me->copies[kept++] = copy;
            continue;
        }
        const unsigned read = copy.bytes - copy.zeros;
        std::memcpy(copy.to, copy.from, read);
        std::memset(static_cast<char*>(copy.to) + read, 0, copy.zeros);
    }
    me->num_copies = kept;
}

}  // namespace kvrelay_emulated
