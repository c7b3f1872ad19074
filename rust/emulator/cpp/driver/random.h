// Small random numbers that depend on nothing but a seed and a stream of their own.
#pragma once

#include <cstdint>

namespace kvrelay_emulated {

// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
  public:
    Random(uint64_t seed, uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15u + stream) { next(); }

    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }

    // From 0 to `bound` - 1; the bias is below 2^-32 for what is drawn here.
    uint64_t below(uint64_t bound) { return next() % bound; }

    template <class Items>
    void shuffle(Items first, Items last) {
        for (auto count = last - first; count > 1; --count) {
            const auto other = static_cast<decltype(count)>(below(static_cast<uint64_t>(count)));
            auto moved = first[count - 1];
            first[count - 1] = first[other];
            first[other] = moved;
        }
    }

  private:
    uint64_t state_;
};

}  // namespace kvrelay_emulated
