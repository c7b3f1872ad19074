/* A stand-in for the CUDA driver library, enough of it to be probed. Defines choose what is wrong:
   EMPTY        no function at all
   PARTIAL      starts, and has nothing else
   NAMELESS     no functions that describe errors
   INIT=n       cuInit gives the error n
   COUNT=n      devices (0)
   Like the driver, it finds no device when CUDA_VISIBLE_DEVICES is empty. */
#include <stdio.h>
#include <stdlib.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef COUNT
#define COUNT 0
#endif

#ifndef EMPTY
int cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return flags ? 1 : visible && !*visible ? 100 : INIT;
}

#ifndef NAMELESS
int cuGetErrorName(int error, const char **text) {
    *text = error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return *text ? 0 : 1;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == 100   ? "no CUDA-capable device is detected"
            : error == 803 ? "system has unsupported display driver / cuda driver combination"
                           : 0;
    return *text ? 0 : 1;
}
#endif

#ifndef PARTIAL
int cuDeviceGetCount(int *count) { return *count = COUNT, 0; }

/* The handle of a device is not its ordinal. */
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal + 40, ordinal < COUNT ? 0 : 101; }

int cuDeviceGetName(char *name, int length, int device) {
    return snprintf(name, length, "Stand-in %d", device - 40) < 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    return *bytes = (size_t)(device - 39) * 3 << 29, 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == 75 ? 9 : device - 40, attribute == 75 || attribute == 76 ? 0 : 1;
}

int cuDriverGetVersion(int *version) { return *version = 12080, 0; }
#endif
#endif
