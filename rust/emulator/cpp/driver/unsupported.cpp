// Calls that are there, since their lack would end a process that looks for them, and that do nothing.
#include "abi.h"

using namespace kvrelay_emulated;

// Arguments are left where the caller put them.
#define NOT_SUPPORTED(NAME) \
    CUDA_API Result NAME() { return not_supported; }

NOT_SUPPORTED(cuMemAllocManaged)
NOT_SUPPORTED(cuMemPrefetchAsync_v2)
NOT_SUPPORTED(cuMemAdvise_v2)
NOT_SUPPORTED(cuStreamAttachMemAsync)
NOT_SUPPORTED(cuMemPoolCreate)
NOT_SUPPORTED(cuMemPoolDestroy)
NOT_SUPPORTED(cuMemPoolTrimTo)
NOT_SUPPORTED(cuMemPoolSetAttribute)
NOT_SUPPORTED(cuMemPoolGetAttribute)
NOT_SUPPORTED(cuMemAllocFromPoolAsync)
NOT_SUPPORTED(cuDeviceSetMemPool)
NOT_SUPPORTED(cuDeviceGetMemPool)
NOT_SUPPORTED(cuDeviceGetDefaultMemPool)
NOT_SUPPORTED(cuImportExternalMemory)
NOT_SUPPORTED(cuDestroyExternalMemory)
NOT_SUPPORTED(cuExternalMemoryGetMappedBuffer)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernelEx)
NOT_SUPPORTED(cuOccupancyMaxPotentialClusterSize)
NOT_SUPPORTED(cuOccupancyMaxActiveClusters)
NOT_SUPPORTED(cuOccupancyMaxPotentialBlockSize)
NOT_SUPPORTED(cuOccupancyMaxPotentialBlockSizeWithFlags)
NOT_SUPPORTED(cuOccupancyAvailableDynamicSMemPerBlock)
NOT_SUPPORTED(cuIpcGetEventHandle)
NOT_SUPPORTED(cuIpcOpenEventHandle)
NOT_SUPPORTED(cuCtxGetLimit)
NOT_SUPPORTED(cuCtxGetCacheConfig)
NOT_SUPPORTED(cuProfilerStart)
NOT_SUPPORTED(cuProfilerStop)
// NVRTC 13 asks the driver for a private table, and takes a refusal as the lack of a driver.
NOT_SUPPORTED(cuGetExportTable)
