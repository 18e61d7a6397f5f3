/* NVML is a library of the driver. It is loaded at each call, because calls are rare. */
#include "device/backend.h"
#include "device/cuda.h"

#include <dlfcn.h>

enum { CLOCK_SM = 1 }; /* nvmlClockType_t */

/* Power cap, hardware slowdown, software and hardware thermal slowdown, power brake
 * (nvmlClocksEventReasons). */
static const unsigned long long SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80;

typedef struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*handle)(const char *pci, void **out);
    int (*clock)(void *handle, int which, unsigned *mhz);
    int (*power)(void *handle, unsigned *milliwatts);
    int (*reasons)(void *handle, unsigned long long *bits);
} nvml;

static bool find(void *library, const char *name, void *function)
{
    *(void **)function = dlsym(library, name);
    return *(void **)function != NULL;
}

static bool find_all(void *library, nvml *out)
{
    return find(library, "nvmlInit_v2", &out->init) && find(library, "nvmlShutdown", &out->shutdown) &&
           find(library, "nvmlDeviceGetHandleByPciBusId_v2", &out->handle) &&
           find(library, "nvmlDeviceGetClockInfo", &out->clock) &&
           find(library, "nvmlDeviceGetPowerUsage", &out->power) &&
           find(library, "nvmlDeviceGetCurrentClocksThrottleReasons", &out->reasons);
}

td_gpu_clock td_cuda_clock(void *context)
{
    td_gpu_clock clock = {0};
    void *handle = NULL, *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    unsigned mhz = 0, milliwatts = 0;
    unsigned long long reasons = 0;
    char pci[32] = "";
    nvml nvml;

    if (!library)
        return clock;
    if (find_all(library, &nvml) && nvml.init() == 0) {
        if (cudaDeviceGetPCIBusId(pci, sizeof pci, ((td_cuda *)context)->index) == cudaSuccess &&
            nvml.handle(pci, &handle) == 0) {
            clock.mhz = nvml.clock(handle, CLOCK_SM, &mhz) == 0 ? (int32_t)mhz : 0;
            clock.watts = nvml.power(handle, &milliwatts) == 0 ? milliwatts / 1e3 : 0;
            clock.slowed = nvml.reasons(handle, &reasons) == 0 && (reasons & SLOWED) != 0;
        }
        (void)nvml.shutdown();
    }
    (void)dlclose(library);
    return clock;
}
