// Devices, their contexts, and the door through which every call comes in.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"

namespace kvrelay_emulated {

class Stream;
struct Context;

struct Device {
    int ordinal;
    std::atomic<size_t> used{0};
    std::atomic<bool> lost{false};
    Context* primary = nullptr;
    int primary_users = 0;
};

struct Context {
    Device& device;
    // Fewer than the device's in a green context.
    int multiprocessors;
    // The first error of a kernel: every later call returns it, as on a GPU.
    std::atomic<Result> error{success};
    std::mutex mutex;
    std::set<Stream*> streams;
    // The default stream of all threads, and of those that asked for their own: made when first used.
    Stream* default_stream = nullptr;
    Stream* thread_stream = nullptr;
    std::set<int> peers;

    Context(Device& device, int multiprocessors) : device(device), multiprocessors(multiprocessors) {}
    void fail(Result result, const std::string& why);
    // What a call returns before it does anything.
    Result health() const { return device.lost ? device_unavailable : error.load(); }
};

// A set of handles that are alive: others are refused, not followed.
template <class T>
class Handles {
  public:
    T* add(T* one) {
        std::lock_guard<std::mutex> lock(mutex_);
        alive_.insert(one);
        return one;
    }
    bool has(T* one) {
        std::lock_guard<std::mutex> lock(mutex_);
        return alive_.count(one) > 0;
    }
    bool remove(T* one) {
        std::lock_guard<std::mutex> lock(mutex_);
        return alive_.erase(one) > 0;
    }

  private:
    std::mutex mutex_;
    std::set<T*> alive_;
};

Handles<Context>& contexts();
Device* device_of(DeviceOrdinal ordinal);
int num_devices();

// `cuInit` has been called, and this is no forked child of who called it.
bool initialized();
Context* current_context();
void set_current_context(Context* context);

// Calls what needs a driver that is initialised.
template <class Call>
Result in_driver(Call call) {
    return initialized() ? call() : not_initialized;
}

// Calls what needs a current context, and one that works.
template <class Call>
Result in_context(Call call) {
    if (!initialized()) {
        return not_initialized;
    }
    Context* context = current_context();
    if (context == nullptr) {
        return invalid_context;
    }
    const Result health = context->health();
    return health == success ? call(*context) : health;
}

// For people; every line begins alike.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace kvrelay_emulated
