// One block: its fibers take turns until all have ended, or none can go on.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <sys/mman.h>

#include "../kernel/execution.h"
#include "fibers.h"
#include "grid.h"
#include "guards.h"
#include "libraries.h"
#include "random.h"
#include "settings.h"

namespace kvrelay_emulated {

__thread Thread* current __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr int MAX_THREADS = 1024;
constexpr size_t SHARED_ALIGNMENT = 128;

// A block's dynamic shared memory: it ends where a guard begins, up to its alignment, and the bytes before it
// and between the two are looked at after every block.
class DynamicShared {
  public:
    DynamicShared() {
        const size_t whole = MOST + 2 * GUARD;
        void* base = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED || mprotect(static_cast<char*>(base) + GUARD, MOST, PROT_READ | PROT_WRITE) != 0) {
            std::perror("kvrelay-emulator: no memory for shared memory");
            std::abort();
        }
        end_ = static_cast<unsigned char*>(base) + GUARD + MOST;
    }

    // `bytes` of memory that nobody has written.
    unsigned char* poisoned(size_t bytes) {
        bytes_ = bytes;
        begin_ = end_ - (bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
        std::memset(begin_ - BEFORE, POISON, static_cast<size_t>(end_ - begin_) + BEFORE);
        return begin_;
    }

    std::optional<std::string> overrun() const {
        return written_beside(begin_ - BEFORE, begin_, begin_ + bytes_, end_, "the dynamic shared memory");
    }

  private:
    // Costs addresses alone.
    static constexpr size_t GUARD = 16u << 20;
    // Bytes that are looked at; a kernel that writes farther before the beginning is not seen.
    static constexpr size_t BEFORE = 4096;
    static constexpr size_t MOST = (256u << 10) + BEFORE;
    unsigned char *begin_ = nullptr, *end_ = nullptr;
    size_t bytes_ = 0;
};

// What a thread of the operating system needs to run blocks.
struct Worker {
    void* scheduler = nullptr;
    Stacks stacks;
    std::vector<Thread> threads = std::vector<Thread>(MAX_THREADS);
    std::vector<unsigned char*> stack_of = std::vector<unsigned char*>(MAX_THREADS);
    std::vector<int> order;
    std::vector<Warp> warps;
    DynamicShared shared;
    void (*call)(void**) = nullptr;
    void** arguments = nullptr;
    // Where a kernel that cannot go on leaves to.
    sigjmp_buf leave;
    volatile sig_atomic_t in_kernel = 0;
    Result result = success;
    char why[512] = "";
};

__thread Worker* worker __attribute__((tls_model("initial-exec"))) = nullptr;

[[noreturn]] void leave(Result result) {
    worker->result = result;
    siglongjmp(worker->leave, 1);
}

// A thread that ends is waited for no more.
void end_thread(Thread& me) {
    Block& block = *me.block;
    Warp& warp = block.warps[me.warp];
    const uint32_t bit = 1u << me.lane;
    me.state = State::ended;
    block.live -= 1;
    warp.live &= ~bit;
    for (Rendezvous& meeting : warp.rendezvous) {
        if (meeting.arrived == 0 || !(meeting.mask & bit)) {
            continue;
        }
        meeting.mask &= ~bit;
        std::memset(meeting.deposits[meeting.generation & 1][me.lane], POISON, DEPOSIT_BYTES);
        if (meeting.arrived == meeting.mask) {
            meeting.arrived = 0;
            meeting.generation += 1;
        }
    }
    if (block.live > 0 && block.barrier.arrived >= block.live) {
        open_barrier(block);
    }
}

void fiber_main() {
    worker->call(worker->arguments);
    if (current->num_copies > 0) {
        fail("it ends with asynchronous copies that it has not waited for");
    }
    end_thread(*current);
    yield();
    std::abort();
}

bool can_go_on(const Thread& thread, const Block& block) {
    switch (thread.state) {
        case State::ended:
            return false;
        case State::at_barrier:
            return block.barrier.generation != thread.waits_for;
        case State::at_warp:
            return thread.meets->generation != thread.waits_for;
        default:
            return true;
    }
}

void give_turn(Worker& w, int number) {
    Thread& thread = w.threads[number];
    if (thread.state == State::fresh) {
        thread.stack_pointer = w.stacks.fresh(number, fiber_main, &w.stack_of[number]);
    }
    thread.state = State::running;
    current = &thread;
    switch_stack(&w.scheduler, thread.stack_pointer);
    current = nullptr;
    if (thread.state == State::ended) {
        w.stacks.give_back(w.stack_of[number]);
        w.stack_of[number] = nullptr;
    }
}

// One warp at a time, until every lane of it waits: a few stacks stay in the cache. Whether any lane moved.
bool give_turns_to_warp(Worker& w, const Block& block, int first, int last) {
    bool any = false;
    for (bool again = true; again;) {
        again = false;
        for (int i = first; i < last; ++i) {
            const int number = w.order[i];
            if (can_go_on(w.threads[number], block)) {
                give_turn(w, number);
                any = again = true;
            }
        }
    }
    return any;
}

// Lanes within their warp, and warps among each other.
void set_order(Worker& w, int count, Random& random) {
    w.order.resize(count);
    for (int i = 0; i < count; ++i) {
        w.order[i] = settings().order == Order::reverse ? count - 1 - i : i;
    }
    if (settings().order != Order::random) {
        return;
    }
    std::vector<int> warps((count + LANES - 1) / LANES);
    for (size_t i = 0; i < warps.size(); ++i) {
        warps[i] = static_cast<int>(i);
    }
    random.shuffle(warps.begin(), warps.end());
    // The last warp can be short, so the others are counted from where each begins.
    auto to = w.order.begin();
    for (int warp : warps) {
        const auto from = to;
        for (int number = warp * LANES; number < std::min(count, (warp + 1) * LANES); ++number) {
            *to++ = number;
        }
        random.shuffle(from, to);
    }
}

[[noreturn]] void report_deadlock(Worker& w, int count) {
    int at_barrier = 0, at_warp = 0, first = -1;
    for (int i = 0; i < count; ++i) {
        const State state = w.threads[i].state;
        at_barrier += state == State::at_barrier;
        at_warp += state == State::at_warp;
        if (first < 0 && (state == State::at_barrier || state == State::at_warp)) {
            first = i;
        }
    }
    current = &w.threads[first];
    std::snprintf(w.why, sizeof w.why,
                  "no thread can go on: %d wait at __syncthreads, %d in a warp function, %d have ended", at_barrier,
                  at_warp, count - at_barrier - at_warp);
    leave(launch_failed);
}

void prepare(Worker& w, const Grid& grid, uint64_t number, Block& block) {
    const dim3 size = grid.block;
    const int count = static_cast<int>(size.x * size.y * size.z);
    w.warps.resize((count + LANES - 1) / LANES);
    for (Warp& warp : w.warps) {
        warp.live = 0;
        for (Rendezvous& meeting : warp.rendezvous) {
            meeting.mask = meeting.arrived = 0;
        }
    }
    const uint64_t row = number / grid.grid.x;
    block.index = {static_cast<unsigned>(number % grid.grid.x), static_cast<unsigned>(row % grid.grid.y),
                   static_cast<unsigned>(row / grid.grid.y)};
    block.size = size;
    block.grid = grid.grid;
    block.dynamic_shared = w.shared.poisoned(grid.dynamic_shared);
    block.live = count;
    block.warps = w.warps.data();
    for (int i = 0; i < count; ++i) {
        const auto at = static_cast<unsigned>(i);
        Thread& thread = w.threads[i];
        thread.index = {at % size.x, at / size.x % size.y, at / size.x / size.y};
        thread.number = i;
        thread.lane = i % LANES;
        thread.warp = i / LANES;
        thread.block = &block;
        thread.state = State::fresh;
        thread.num_copies = 0;
        thread.copy_group = 0;
        w.stack_of[i] = nullptr;
        w.warps[thread.warp].live |= 1u << thread.lane;
    }
}

// Which thread wrote there is not known by then.
void look_at_guards(Worker& w, const Grid& grid) {
    auto wrong = w.shared.overrun();
    if (!wrong) {
        wrong = grid.library->shared_overrun();
    }
    if (wrong) {
        std::snprintf(w.why, sizeof w.why, "%s", wrong->c_str());
        wrong.reset();
        leave(illegal_address);
    }
}

void run_block(Worker& w, const Grid& grid, uint64_t number) {
    Block block{};
    prepare(w, grid, number, block);
    grid.library->poison_shared();
    const int count = block.live;
    Random random(settings().seed, grid.launch << 20 ^ number);
    set_order(w, count, random);
    while (block.live > 0) {
        bool any = false;
        // A short last warp comes last, or first in reverse: cut where warps of this order begin.
        for (int first = 0; first < count;) {
            const int warp = w.order[first] / LANES;
            int last = first + 1;
            while (last < count && w.order[last] / LANES == warp) {
                last += 1;
            }
            any |= give_turns_to_warp(w, block, first, last);
            first = last;
        }
        if (!any) {
            report_deadlock(w, count);
        }
        if (settings().order == Order::random) {
            set_order(w, count, random);
        }
    }
    look_at_guards(w, grid);
}

void record_error(Worker& w, Grid& grid, uint64_t number) {
    char place[800];
    const uint64_t row = number / grid.grid.x;
    char thread[64] = "one of its threads";
    if (current != nullptr) {
        const uint3 index = current->index;
        std::snprintf(thread, sizeof thread, "thread (%u, %u, %u)", index.x, index.y, index.z);
    }
    std::snprintf(place, sizeof place, "kernel %s (%s), block (%u, %u, %u), %s: %s", grid.kernel->name,
                  grid.library->library->source, static_cast<unsigned>(number % grid.grid.x),
                  static_cast<unsigned>(row % grid.grid.y), static_cast<unsigned>(row / grid.grid.y), thread, w.why);
    current = nullptr;
    for (unsigned char*& stack : w.stack_of) {
        if (stack != nullptr) {
            w.stacks.give_back(stack);
            stack = nullptr;
        }
    }
    std::lock_guard<std::mutex> lock(grid.mutex);
    if (grid.result == success) {
        grid.result = w.result;
        grid.error = place;
    }
    grid.next_block = grid.num_blocks();
}

// Faults are handled on a stack of their own: the fiber's may be what overflowed.
void give_signals_a_stack() {
    constexpr size_t size = 64 << 10;
    stack_t stack{};
    stack.ss_sp = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack.ss_size = size;
    if (stack.ss_sp == MAP_FAILED || sigaltstack(&stack, nullptr) != 0) {
        std::perror("kvrelay-emulator: no stack for signals");
        std::abort();
    }
}

Worker& this_worker() {
    if (worker == nullptr) {
        worker = new Worker;
        give_signals_a_stack();
    }
    return *worker;
}

// What a kernel can do that ends a process.
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction before_fault[std::size(FAULTS)];

void on_fault(int signal, siginfo_t* info, void* context) {
    if (worker != nullptr && worker->in_kernel != 0) {
        if (signal == SIGFPE) {
            std::snprintf(worker->why, sizeof worker->why, "it divides an integer by zero, or the least one by -1");
            leave(launch_failed);
        }
        if (signal == SIGILL) {
            std::snprintf(worker->why, sizeof worker->why, "it comes to where the compiler knows that nobody can come");
            leave(launch_failed);
        }
        std::snprintf(worker->why, sizeof worker->why, "it touches the address %p, which is nobody's", info->si_addr);
        leave(illegal_address);
    }
    const auto number = std::find(std::begin(FAULTS), std::end(FAULTS), signal) - std::begin(FAULTS);
    const struct sigaction& before = before_fault[number];
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        std::signal(signal, SIG_DFL);
    }
}

}  // namespace

void yield() { switch_stack(&current->stack_pointer, worker->scheduler); }

void fail(const char* why) {
    std::snprintf(worker->why, sizeof worker->why, "%s", why);
    leave(launch_failed);
}

void fail_at_barrier(Place here) {
    const Barrier& barrier = current->block->barrier;
    std::snprintf(worker->why, sizeof worker->why,
                  "the block diverges: it comes to the __syncthreads of %s:%d while thread number %d waits at that of %s:%d",
                  here.file, here.line, barrier.first, barrier.place.file, barrier.place.line);
    leave(launch_failed);
}

void catch_faults() {
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (size_t i = 0; i < std::size(FAULTS); ++i) {
        sigaction(FAULTS[i], &action, &before_fault[i]);
    }
}

Result run_guarded(const std::function<void()>& work, std::string& why) {
    Worker& w = this_worker();
    if (sigsetjmp(w.leave, 1) != 0) {
        w.in_kernel = 0;
        why = w.why;
        return w.result;
    }
    w.in_kernel = 1;
    work();
    w.in_kernel = 0;
    return success;
}

void run_blocks(Grid& grid) {
    Worker& w = this_worker();
    // Parameters are a thread's own: a kernel may change them.
    std::vector<unsigned char> bytes = grid.arguments.bytes;
    std::vector<void*> arguments;
    for (size_t offset : grid.arguments.offsets) {
        arguments.push_back(bytes.data() + offset);
    }
    w.call = grid.kernel->call;
    w.arguments = arguments.data();
    w.result = success;
    volatile uint64_t number = 0;
    if (sigsetjmp(w.leave, 1) == 0) {
        w.in_kernel = 1;
        while ((number = grid.next_block++) < grid.num_blocks()) {
            run_block(w, grid, number);
        }
        w.in_kernel = 0;
    } else {
        w.in_kernel = 0;
        record_error(w, grid, number);
    }
}

}  // namespace kvrelay_emulated
