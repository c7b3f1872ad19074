#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace kvrelay_emulated {
namespace {

[[noreturn]] void refuse(const char* name, const char* value, const char* expected) {
    std::fprintf(stderr, "kvrelay-emulator: %s is \"%s\"; it must be %s\n", name, value, expected);
    std::abort();
}

const char* text(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : nullptr;
}

long number(const char* name, long otherwise, long least, long most) {
    const char* value = text(name);
    if (value == nullptr) {
        return otherwise;
    }
    char* end = nullptr;
    const long parsed = std::strtol(value, &end, 10);
    if (*end != '\0' || parsed < least || parsed > most) {
        const std::string expected = "a number from " + std::to_string(least) + " to " + std::to_string(most);
        refuse(name, value, expected.c_str());
    }
    return parsed;
}

Order order() {
    const char* name = "KVRELAY_EMU_ORDER";
    const char* value = text(name);
    if (value == nullptr || std::strcmp(value, "forward") == 0) {
        return Order::forward;
    }
    if (std::strcmp(value, "reverse") == 0) {
        return Order::reverse;
    }
    if (std::strcmp(value, "random") != 0) {
        refuse(name, value, "forward, reverse or random");
    }
    return Order::random;
}

bool deferred() {
    const char* name = "KVRELAY_EMU_STREAMS";
    const char* value = text(name);
    if (value != nullptr && std::strcmp(value, "threads") != 0 && std::strcmp(value, "deferred") != 0) {
        refuse(name, value, "threads or deferred");
    }
    return value != nullptr && *value == 'd';
}

Settings from_environment() {
    constexpr long many = 1'000'000'000;
    const long cores = std::clamp<long>(std::thread::hardware_concurrency(), 1, 64);
    Settings read{};
    read.devices = static_cast<int>(number("KVRELAY_EMU_DEVICES", 1, 0, 64));
    read.memory = static_cast<size_t>(number("KVRELAY_EMU_MEMORY_MB", 2048, 1, 1 << 20)) << 20;
    read.capability = static_cast<int>(number("KVRELAY_EMU_CAPABILITY", 90, 50, 999));
    read.multiprocessors = static_cast<int>(number("KVRELAY_EMU_MULTIPROCESSORS", 132, 1, 1024));
    read.order = order();
    read.seed = static_cast<uint64_t>(number("KVRELAY_EMU_SEED", 0, 0, many));
    read.jitter_us = number("KVRELAY_EMU_JITTER_US", 0, 0, many);
    read.deferred = deferred();
    read.threads = static_cast<int>(number("KVRELAY_EMU_THREADS", cores, 1, 64));
    read.kernels = text("KVRELAY_EMU_KERNELS") ? text("KVRELAY_EMU_KERNELS") : "";
    read.newest_ptx = static_cast<int>(number("KVRELAY_EMU_PTX", 90, 10, 999));
    read.peer = number("KVRELAY_EMU_PEER", 1, 0, 1) == 1;
    read.fail_launch = static_cast<uint64_t>(number("KVRELAY_EMU_FAIL_LAUNCH", 0, 0, many));
    read.lost_after = static_cast<uint64_t>(number("KVRELAY_EMU_LOST_AFTER", 0, 0, many));
    return read;
}

}  // namespace

const Settings& settings() {
    static const Settings read = from_environment();
    return read;
}

}  // namespace kvrelay_emulated
