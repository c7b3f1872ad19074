#include "stream.h"

#include <algorithm>
#include <chrono>
#include <unistd.h>

#include "graph.h"
#include "settings.h"

namespace kvrelay_emulated {
namespace {

constexpr unsigned NON_BLOCKING = 1;
constexpr int GREATEST_PRIORITY = -5;

std::atomic<uint64_t> num_streams{0};

// Handles are unique in the process, so one set is enough; its order is that of creation.
struct Streams {
    std::mutex mutex;
    std::vector<Stream*> alive;
};

Streams& streams() {
    static auto* all = new Streams;
    return *all;
}

// Deferred streams: one operation at a time, of whichever stream the seed picks among those that could go on.
class Deferred {
  public:
    void run_until(const std::function<bool()>& done) {
        std::unique_lock<std::mutex> lock(turn_);
        while (!done()) {
            Stream* next = pick();
            if (next == nullptr) {
                // Another thread is to record what everything waits for.
                changed_.wait_for(lock, std::chrono::milliseconds(1));
                continue;
            }
            next->step();
            changed_.notify_all();
        }
    }

    // Does one operation, if one can be done.
    void step() {
        std::lock_guard<std::mutex> lock(turn_);
        if (Stream* next = pick()) {
            next->step();
            changed_.notify_all();
        }
    }

  private:
    Stream* pick() {
        std::vector<Stream*> able;
        std::lock_guard<std::mutex> lock(streams().mutex);
        std::copy_if(streams().alive.begin(), streams().alive.end(), std::back_inserter(able),
                     [](Stream* one) { return one->can_step(); });
        return able.empty() ? nullptr : able[random_.below(able.size())];
    }

    std::mutex turn_;
    std::condition_variable changed_;
    Random random_{settings().seed, 1};
};

Deferred& deferred() {
    static auto* one = new Deferred;
    return *one;
}

}  // namespace

void Fence::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
}

void Fence::set() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::lock_guard<std::mutex> lock(mutex_);
    time_ = std::chrono::duration<double, std::milli>(now).count();
    done_ = true;
    changed_.notify_all();
}

bool Fence::done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
}

double Fence::time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
}

void wait_for(Fence& fence) {
    if (settings().deferred) {
        deferred().run_until([&] { return fence.done(); });
    } else {
        fence.wait();
    }
}

void make_progress() {
    if (settings().deferred) {
        deferred().step();
    }
}

Stream::Stream(Context& context, int priority, bool with_default)
    : context(context),
      priority(priority),
      with_default(with_default),
      jitter_(settings().seed, 1000 + num_streams++) {
    {
        std::lock_guard<std::mutex> lock(context.mutex);
        context.streams.insert(this);
    }
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().alive.push_back(this);
}

Stream::~Stream() {
    if (const auto spoilt = capture) {
        spoilt->lose(*this);
    }
    wait();
    {
        std::lock_guard<std::mutex> lock(context.mutex);
        context.streams.erase(this);
    }
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        auto& alive = streams().alive;
        alive.erase(std::remove(alive.begin(), alive.end(), this), alive.end());
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
}

std::shared_ptr<Fence> Stream::enqueue(Work work, Fences fences) {
    if (capture != nullptr) {
        capture->record(*this, std::move(work));
        return nullptr;
    }
    if (with_default) {
        // The default stream begins when every other has ended, and they when it has.
        std::lock_guard<std::mutex> lock(context.mutex);
        for (Stream* other : context.streams) {
            const bool either = this == context.default_stream || other == context.default_stream;
            if (other != this && either && other->with_default && !other->idle()) {
                fences.push_back(other->tail());
            }
        }
    }
    auto done = std::make_shared<Fence>();
    push({std::move(work), std::move(fences), done});
    return done;
}

void Stream::push(Operation operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    tail_ = operation.done;
    queue_.push_back(std::move(operation));
    if (!settings().deferred && !thread_.joinable()) {
        thread_ = std::thread([this] { run(); });
    }
    changed_.notify_all();
}

std::shared_ptr<Fence> Stream::tail() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tail_;
}

bool Stream::idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
}

void Stream::wait() {
    if (const auto last = tail()) {
        wait_for(*last);
    }
}

bool Stream::can_step() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || busy_) {
        return false;
    }
    const Fences& after = queue_.front().after;
    return std::all_of(after.begin(), after.end(), [](const auto& fence) { return fence->done(); });
}

void Stream::step() {
    Operation next = pop();
    next.work();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        busy_ = false;
    }
    next.done->set();
}

Operation Stream::pop() {
    std::lock_guard<std::mutex> lock(mutex_);
    Operation next = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    return next;
}

void Stream::run() {
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (queue_.empty()) {
                return;
            }
        }
        Fences after;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            after = queue_.front().after;
        }
        for (const auto& fence : after) {
            fence->wait();
        }
        if (settings().jitter_us > 0) {
            usleep(static_cast<useconds_t>(jitter_.below(static_cast<uint64_t>(settings().jitter_us) + 1)));
        }
        step();
    }
}

Stream* stream_of(Context& context, Stream* handle) {
    const auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= 2) {
        Stream*& one = number == 2 ? context.thread_stream : context.default_stream;
        static std::mutex making;
        std::lock_guard<std::mutex> lock(making);
        if (one == nullptr) {
            one = new Stream(context, 0, true);
        }
        return one;
    }
    std::lock_guard<std::mutex> lock(streams().mutex);
    const auto& alive = streams().alive;
    return std::find(alive.begin(), alive.end(), handle) != alive.end() ? handle : nullptr;
}

Result synchronize_streams(Context& context) {
    if (capture_forbids()) {
        return capture_unsupported;
    }
    Fences tails;
    {
        std::lock_guard<std::mutex> lock(context.mutex);
        for (Stream* stream : context.streams) {
            if (auto tail = stream->tail()) {
                tails.push_back(std::move(tail));
            }
        }
    }
    for (const auto& tail : tails) {
        wait_for(*tail);
    }
    return success;
}

}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    return in_context([&](Context& context) {
        *stream = new Stream(context, std::clamp(priority, GREATEST_PRIORITY, 0), (flags & NON_BLOCKING) == 0);
        return success;
    });
}

CUDA_API Result cuStreamCreate(Stream** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUDA_API Result cuStreamDestroy_v2(Stream* handle) {
    return in_driver([&]() -> Result {
        Context* context = current_context();
        if (context == nullptr || reinterpret_cast<uintptr_t>(handle) <= 2) {
            return context == nullptr ? invalid_context : invalid_handle;
        }
        if (stream_of(*context, handle) == nullptr) {
            return invalid_handle;
        }
        delete handle;
        return success;
    });
}

CUDA_API Result cuStreamSynchronize(Stream* handle) {
    return on_stream(handle, [](Stream& stream) -> Result {
        if (stream.capturing()) {
            stream.capture->invalid = true;
            return capture_unsupported;
        }
        stream.wait();
        return stream.context.health();
    });
}

CUDA_API Result cuStreamQuery(Stream* handle) {
    return on_stream(handle, [](Stream& stream) -> Result {
        if (stream.capturing()) {
            stream.capture->invalid = true;
            return capture_unsupported;
        }
        make_progress();
        return stream.idle() ? success : not_ready;
    });
}

CUDA_API Result cuStreamGetPriority(Stream* handle, int* priority) {
    return on_stream(handle, [&](Stream& stream) {
        *priority = stream.priority;
        return success;
    });
}

CUDA_API Result cuStreamGetCtx(Stream* handle, Context** context) {
    return on_stream(handle, [&](Stream& stream) {
        *context = &stream.context;
        return success;
    });
}

CUDA_API Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return in_context([&](Context&) {
        if (least != nullptr) {
            *least = 0;
        }
        if (greatest != nullptr) {
            *greatest = GREATEST_PRIORITY;
        }
        return success;
    });
}

CUDA_API Result cuLaunchHostFunc(Stream* handle, void (*function)(void*), void* data) {
    return on_stream(handle, [&](Stream& stream) {
        // As on a GPU, the host is not called once the context has failed.
        Context& context = stream.context;
        stream.enqueue([&context, function, data] {
            if (context.health() == success) {
                function(data);
            }
        });
        return success;
    });
}
