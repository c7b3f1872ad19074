// The threads that run a grid's blocks.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "grid.h"
#include "settings.h"

namespace kvrelay_emulated {
namespace {

class Pool {
  public:
    explicit Pool(int helpers) : helpers_(helpers) {
        for (int i = 0; i < helpers; ++i) {
            std::thread([this] { help(); }).detach();
        }
    }

    void run(Grid& grid) {
        std::lock_guard<std::mutex> one_at_a_time(turn_);
        const bool shared = helpers_ > 0 && grid.num_blocks() > 1;
        if (shared) {
            std::lock_guard<std::mutex> lock(mutex_);
            grid_ = &grid;
            epoch_ += 1;
            begun_.notify_all();
        }
        run_blocks(grid);
        if (shared) {
            std::unique_lock<std::mutex> lock(mutex_);
            grid_ = nullptr;
            ended_.wait(lock, [this] { return busy_ == 0; });
        }
    }

  private:
    void help() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            begun_.wait(lock, [&] { return grid_ != nullptr && epoch_ != seen; });
            seen = epoch_;
            Grid& grid = *grid_;
            busy_ += 1;
            lock.unlock();
            run_blocks(grid);
            lock.lock();
            busy_ -= 1;
            ended_.notify_all();
        }
    }

    const int helpers_;
    std::mutex turn_, mutex_;
    std::condition_variable begun_, ended_;
    Grid* grid_ = nullptr;
    uint64_t epoch_ = 0;
    int busy_ = 0;
};

}  // namespace

void run_grid(Grid& grid) {
    // Never destroyed: its threads outlive every destructor.
    static Pool* pool = new Pool(settings().threads - 1);
    pool->run(grid);
}

}  // namespace kvrelay_emulated
