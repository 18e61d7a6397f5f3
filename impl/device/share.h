/** Internal to impl/: what a device's multiprocessors are shared with. */
#ifndef TD_DEVICE_SHARE_H
#define TD_DEVICE_SHARE_H

#include "device/device.h"

/** What is queued from here on runs beside other work, such as collectives, that takes so many of the
 * device's multiprocessors: matrix products are cut for the rest. 0: beside nothing, or nobody knows beside
 * what. The last call counts: of two that share a device at a time, the first to end takes it back for
 * both, which costs time and nothing else. */
void td_device_share(td_device *dev, int32_t multiprocessors);
int32_t td_device_shared(const td_device *dev);

#endif
