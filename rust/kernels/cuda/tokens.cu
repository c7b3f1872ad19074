// Tokens that stay on the device from the step that samples them to the step that runs them. `last` holds one token a
// slot, so that the next step can be enqueued before the host has seen what this one samples.
#include "ptx.cuh"

// ids[t] = sources[t], or where that is below -1 the last token of slot -2 - sources[t]; -1 stays, a padded row.
extern "C" __global__ void feed_tokens(int* ids, const int* sources, const int* last, int count) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < count) {
        ids[t] = sources[t] < -1 ? last[-2 - sources[t]] : sources[t];
    }
}

// last[slots[i]] = tokens[i], but for rows without a slot (-1) and tokens that are none (below 0). Slots differ.
extern "C" __global__ void keep_tokens(int* last, const int* tokens, const int* slots, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && slots[i] >= 0 && tokens[i] >= 0) {
        last[slots[i]] = tokens[i];
    }
}
