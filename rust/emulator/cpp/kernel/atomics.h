// CUDA's atomics, between all blocks and streams, sequentially consistent.
#pragma once

#include "types.h"

namespace kvrelay_emulated {

// Replaces *at by change(*at) at once; what was there before. T has 4 or 8 bytes.
template <class T, class Change>
inline T replace(T* at, Change change) {
    T before;
    __atomic_load(at, &before, __ATOMIC_SEQ_CST);
    for (;;) {
        T after = change(before);
        if (__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            return before;
        }
    }
}

}  // namespace kvrelay_emulated

template <class T>
inline T atomicAdd(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return static_cast<T>(before + value); });
}
template <class T>
inline T atomicSub(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return static_cast<T>(before - value); });
}
template <class T>
inline T atomicMax(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return before < value ? value : before; });
}
template <class T>
inline T atomicMin(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return value < before ? value : before; });
}
template <class T>
inline T atomicExch(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T) { return value; });
}
template <class T>
inline T atomicCAS(T* at, T compare, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return before == compare ? value : before; });
}
template <class T>
inline T atomicOr(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return static_cast<T>(before | value); });
}
template <class T>
inline T atomicAnd(T* at, T value) {
    return kvrelay_emulated::replace(at, [&](T before) { return static_cast<T>(before & value); });
}
