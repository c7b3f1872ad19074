// Streams: operations in order, each stream on a thread of its own, or all deferred until somebody waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "context.h"
#include "random.h"

namespace kvrelay_emulated {

struct Capture;

// Whether something has happened, for all who wait for it.
class Fence {
  public:
    void wait();
    void set();
    bool done();
    // When, in milliseconds of no particular beginning.
    double time();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
    double time_ = 0;
};

using Work = std::function<void()>;
using Fences = std::vector<std::shared_ptr<Fence>>;

struct Operation {
    Work work;
    Fences after;
    std::shared_ptr<Fence> done;
};

class Stream {
  public:
    Context& context;
    const int priority;
    // Whether it and the default stream wait for each other.
    const bool with_default;
    // What records it, while it is captured.
    std::shared_ptr<Capture> capture;

    Stream(Context& context, int priority, bool with_default);
    ~Stream();

    // Does `work` after all before it and after `fences`; while capturing, makes it a node of the graph. What
    // is set when it is done; null while capturing.
    std::shared_ptr<Fence> enqueue(Work work, Fences fences = {});
    bool capturing() const { return capture != nullptr; }
    bool idle();
    void wait();
    // Waited for before its memory goes.
    std::shared_ptr<Fence> tail();

    // For the deferred scheduler: whether the next operation can be done, and doing it.
    bool can_step();
    void step();

  private:
    void push(Operation operation);
    Operation pop();
    void run();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Operation> queue_;
    std::shared_ptr<Fence> tail_;
    bool busy_ = false, stopping_ = false;
    std::thread thread_;
    Random jitter_;
};

// A stream by its handle: null and 1 are the default stream, 2 is the per-thread one; null if it is none.
Stream* stream_of(Context& context, Stream* handle);
Result synchronize_streams(Context& context);

// Waits for a fence; where streams are deferred, by doing what is due.
void wait_for(Fence& fence);

// For whoever asks again and again instead of waiting.
void make_progress();

// Whether a capture, of this thread or a global one, forbids calls that it could not record.
bool capture_forbids();

// Calls what needs a working context and a stream of it.
template <class Call>
Result on_stream(Stream* handle, Call call) {
    return in_context([&](Context& context) -> Result {
        Stream* stream = stream_of(context, handle);
        return stream != nullptr ? call(*stream) : invalid_handle;
    });
}

}  // namespace kvrelay_emulated
