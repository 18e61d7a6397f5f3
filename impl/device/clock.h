/** Internal to impl/: the clock and the power of a GPU (NVML API reference, "Device Queries"). */
#ifndef TD_DEVICE_CLOCK_H
#define TD_DEVICE_CLOCK_H

#include "device/device.h"

typedef struct td_gpu_clock {
    int32_t mhz;  /* clock of the SMs */
    double watts; /* power of the board, averaged by the driver */
    bool slowed;  /* the driver reduces the clock: power or temperature is at its limit */
} td_gpu_clock;

/** The values now. 0 for a CPU and for values that NVML does not give. A call takes some milliseconds on the
 * host; the GPU's work continues. */
td_gpu_clock td_device_clock(td_device *dev);

#endif
