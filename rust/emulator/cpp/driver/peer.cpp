// Access to other devices' memory. Kernels can reach all memory here, enabled or not; the calls answer as a
// GPU's would.
#include "context.h"
#include "settings.h"

using namespace kvrelay_emulated;

CUDA_API Result cuDeviceCanAccessPeer(int* can, DeviceOrdinal device, DeviceOrdinal peer) {
    return in_driver([&] {
        *can = settings().peer && device != peer;
        return device_of(device) != nullptr && device_of(peer) != nullptr ? success : invalid_device;
    });
}

CUDA_API Result cuDeviceGetP2PAttribute(int* value, int, DeviceOrdinal device, DeviceOrdinal peer) {
    if (device == peer) {
        return invalid_device;
    }
    return cuDeviceCanAccessPeer(value, device, peer);
}

CUDA_API Result cuCtxEnablePeerAccess(Context* peer, unsigned flags) {
    return in_context([&](Context& context) -> Result {
        if (!contexts().has(peer) || flags != 0) {
            return flags != 0 ? invalid_value : invalid_context;
        }
        if (&peer->device == &context.device) {
            return invalid_device;
        }
        if (!settings().peer) {
            return peer_access_unsupported;
        }
        std::lock_guard<std::mutex> lock(context.mutex);
        return context.peers.insert(peer->device.ordinal).second ? success : peer_access_already_enabled;
    });
}

CUDA_API Result cuCtxDisablePeerAccess(Context* peer) {
    return in_context([&](Context& context) -> Result {
        if (!contexts().has(peer)) {
            return invalid_context;
        }
        std::lock_guard<std::mutex> lock(context.mutex);
        return context.peers.erase(peer->device.ordinal) > 0 ? success : peer_access_not_enabled;
    });
}
