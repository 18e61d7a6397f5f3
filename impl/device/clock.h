/** Internal to impl/: the clock and the power of a GPU (NVML API reference, "Device Queries"). */
#ifndef TD_DEVICE_CLOCK_H
#define TD_DEVICE_CLOCK_H

#include "device/device.h"

typedef struct td_gpu_clock {
    int32_t mhz;  /* of the SMs */
    double watts; /* of the board, averaged by the driver */
    bool slowed;  /* the driver holds the clock down: power or temperature is at its limit */
} td_gpu_clock;

/** At this moment. Zeros for a CPU, and for what NVML does not say. A call takes some milliseconds of the
 * host; the GPU's work goes on. */
td_gpu_clock td_device_clock(td_device *dev);

#endif
