// A warp's shuffles and votes. A value from a lane that does not take part is poison.
#pragma once

#include "execution.h"

namespace kvrelay_emulated {

template <class T>
inline T from_lane(uint32_t mask, T value, int source) {
    return exchange(mask, value)[source];
}

// The first lane of this lane's segment.
inline int segment(int width) { return lane() & ~(width - 1); }

}  // namespace kvrelay_emulated

inline void __syncwarp(unsigned mask = 0xffffffffu) { (void)kvrelay_emulated::exchange(mask, '\0'); }

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return kvrelay_emulated::from_lane(mask, value, kvrelay_emulated::segment(width) | (source & (width - 1)));
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int me = kvrelay_emulated::lane(), source = me ^ lanes;
    const bool beyond = source >= kvrelay_emulated::segment(width) + width;
    return kvrelay_emulated::from_lane(mask, value, beyond ? me : source);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int me = kvrelay_emulated::lane(), source = me + static_cast<int>(by);
    const bool beyond = source >= kvrelay_emulated::segment(width) + width;
    return kvrelay_emulated::from_lane(mask, value, beyond ? me : source);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int me = kvrelay_emulated::lane(), source = me - static_cast<int>(by);
    return kvrelay_emulated::from_lane(mask, value, source < kvrelay_emulated::segment(width) ? me : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto votes = kvrelay_emulated::exchange<int>(mask, predicate != 0);
    unsigned ballot = 0;
    for (int lane = 0; lane < kvrelay_emulated::LANES; ++lane) {
        if ((votes.lanes() >> lane & 1) && votes[lane] != 0) {
            ballot |= 1u << lane;
        }
    }
    return ballot;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __activemask() {
    kvrelay_emulated::fail("__activemask() has no meaning here, nor a reliable one on a GPU: name the lanes");
}
