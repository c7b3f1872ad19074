// Names and words for errors.
#include "abi.h"

using namespace kvrelay_emulated;

namespace {

struct Words {
    int code;
    const char* name;
    const char* meaning;
};

constexpr Words WORDS[] = {
    {success, "CUDA_SUCCESS", "no error"},
    {invalid_value, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {not_initialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {device_unavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is busy or unavailable"},
    {no_device, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {invalid_device, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {invalid_image, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {invalid_context, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {no_binary_for_gpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {peer_access_unsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these devices"},
    {unsupported_ptx_version, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX was compiled with a newer toolchain"},
    {file_not_found, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {invalid_handle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {not_found, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {not_ready, "CUDA_ERROR_NOT_READY", "device not ready"},
    {illegal_address, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {launch_out_of_resources, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {peer_access_already_enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {peer_access_not_enabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {launch_failed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {not_supported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {capture_invalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {capture_unmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {capture_unjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {capture_isolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {graph_update_failure, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "the graph update was not performed"},
};

const Words* words_for(int code) {
    for (const Words& one : WORDS) {
        if (one.code == code) {
            return &one;
        }
    }
    return nullptr;
}

}  // namespace

CUDA_API Result cuGetErrorName(int code, const char** text) {
    const Words* words = words_for(code);
    *text = words != nullptr ? words->name : nullptr;
    return words != nullptr ? success : invalid_value;
}

CUDA_API Result cuGetErrorString(int code, const char** text) {
    const Words* words = words_for(code);
    *text = words != nullptr ? words->meaning : nullptr;
    return words != nullptr ? success : invalid_value;
}
