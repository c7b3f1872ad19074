// What lets g++ compile the CUDA kernels for the CPU; included before every kernel source.
//
// A block runs on one thread of the operating system, and each of its CUDA threads is a fiber there. A fiber
// runs until it waits: at a barrier, at a warp's rendezvous, or at its end. The order in which fibers are
// given their turn is the emulator's to choose.
#pragma once

#define KVRELAY_EMULATED 1

#include "kernel/qualifiers.h"
#include "kernel/types.h"
#include "kernel/execution.h"
#include "kernel/builtins.h"
#include "kernel/warp.h"
#include "kernel/atomics.h"
#include "kernel/math.h"
#include "kernel/registration.h"
