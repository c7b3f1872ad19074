// The one file with inline PTX: each wrapper has a body for the GPU, and one for the emulator.
#pragma once

#ifdef KVRELAY_EMULATED
// The block's dynamic shared memory.
#define KVRELAY_DYNAMIC_SHARED(name) unsigned char* name = kvrelay_emulated::dynamic_shared()
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define KVRELAY_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif
