// In which order threads get their turn.

// turns[i] = how many threads of the block had theirs before thread i.
extern "C" __global__ void take_turns(int* turns, int* taken) { turns[threadIdx.x] = atomicAdd(taken, 1); }
