// Events: marks in a stream that other streams and the host wait for.
#include <memory>

#include "graph.h"
#include "stream.h"

namespace kvrelay_emulated {
namespace {

constexpr unsigned DISABLE_TIMING = 2, INTERPROCESS = 4;

struct Event {
    Context& context;
    const bool timed;
    std::mutex mutex;
    // When it was last recorded; null before.
    std::shared_ptr<Fence> fence;
    // Where it was recorded in a capture instead.
    std::weak_ptr<Capture> capture;
    std::vector<int> nodes;
};

Handles<Event>& events() {
    static auto* alive = new Handles<Event>;
    return *alive;
}

template <class Call>
Result on_event(Event* event, Call call) {
    return in_driver([&]() -> Result {
        if (!events().has(event)) {
            return invalid_handle;
        }
        const Result health = event->context.health();
        return health == success ? call(*event) : health;
    });
}

std::shared_ptr<Fence> fence_of(Event& event) {
    std::lock_guard<std::mutex> lock(event.mutex);
    return event.fence;
}

Result wait_in_capture(Stream& stream, Event& event, const std::shared_ptr<Capture>& recorded) {
    if (recorded != nullptr && (!stream.capturing() || stream.capture == recorded)) {
        join_capture(recorded, stream, event.nodes);
        return success;
    }
    if (recorded == nullptr && (event.fence == nullptr || event.fence->done())) {
        return success;
    }
    stream.capture->invalid = true;
    return capture_isolation;
}

}  // namespace
}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuEventCreate(Event** event, unsigned flags) {
    return in_context([&](Context& context) {
        if (flags & INTERPROCESS) {
            return not_supported;
        }
        *event = events().add(new Event{context, (flags & DISABLE_TIMING) == 0, {}, nullptr, {}, {}});
        return success;
    });
}

CUDA_API Result cuEventDestroy_v2(Event* event) {
    return in_driver([&] {
        const bool known = events().remove(event);
        delete (known ? event : nullptr);
        return known ? success : invalid_handle;
    });
}

CUDA_API Result cuEventRecord(Event* handle, Stream* stream_handle) {
    return on_stream(stream_handle, [&](Stream& stream) {
        return on_event(handle, [&](Event& event) {
            if (&stream.context != &event.context) {
                return invalid_handle;
            }
            std::lock_guard<std::mutex> lock(event.mutex);
            event.capture = stream.capture;
            if (stream.capturing()) {
                event.nodes = stream.capture->tails[&stream];
            } else {
                event.fence = stream.enqueue([] {});
            }
            return success;
        });
    });
}

CUDA_API Result cuStreamWaitEvent(Stream* stream_handle, Event* handle, unsigned) {
    return on_stream(stream_handle, [&](Stream& stream) {
        return on_event(handle, [&](Event& event) -> Result {
            std::lock_guard<std::mutex> lock(event.mutex);
            const std::shared_ptr<Capture> recorded = event.capture.lock();
            if (stream.capturing() || recorded != nullptr) {
                return wait_in_capture(stream, event, recorded);
            }
            if (event.fence != nullptr) {
                stream.enqueue([] {}, {event.fence});
            }
            return success;
        });
    });
}

CUDA_API Result cuEventQuery(Event* handle) {
    return on_event(handle, [](Event& event) {
        make_progress();
        const auto fence = fence_of(event);
        return fence == nullptr || fence->done() ? success : not_ready;
    });
}

CUDA_API Result cuEventSynchronize(Event* handle) {
    return on_event(handle, [](Event& event) {
        if (const auto fence = fence_of(event)) {
            wait_for(*fence);
        }
        return event.context.health();
    });
}

CUDA_API Result cuEventElapsedTime_v2(float* milliseconds, Event* first, Event* second) {
    return on_event(first, [&](Event& from) {
        return on_event(second, [&](Event& to) {
            const auto begin = fence_of(from), end = fence_of(to);
            if (!from.timed || !to.timed || begin == nullptr || end == nullptr) {
                return invalid_handle;
            }
            if (!begin->done() || !end->done()) {
                return not_ready;
            }
            *milliseconds = static_cast<float>(end->time() - begin->time());
            return success;
        });
    });
}

CUDA_API Result cuEventElapsedTime(float* milliseconds, Event* first, Event* second) {
    return cuEventElapsedTime_v2(milliseconds, first, second);
}
