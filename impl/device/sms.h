/** Internal to impl/: how many of a GPU's SMs (streaming multiprocessors) are reserved for collectives and
 * updates.
 *
 * Collectives and the optimizer's update run at the same time as GEMMs and take SMs from them. Each owner
 * sets the number of its SMs, and the counts add up. GEMMs that are queued later use the remaining SMs
 * (ops/cuda/gemm.c). A count can change the algorithm of a GEMM and so its bits: all ranks must set the same
 * counts at the same points of a step. */
#ifndef TD_DEVICE_SMS_H
#define TD_DEVICE_SMS_H

#include "device/device.h"

typedef enum td_sm_owner {
    TD_SMS_COLLECTIVES =
        0, /* collectives of ddp/ and shard/. If two links use one device, the last call counts. */
    TD_SMS_UPDATE,
    TD_SM_OWNERS
} td_sm_owner;

/** Reserves `sms` SMs for `owner`, instead of its earlier number; 0: none. No effect on work that is already
 * queued. */
void td_device_reserve_sms(td_device *dev, td_sm_owner owner, int32_t sms);

/** The number of SMs that all owners have reserved. */
int32_t td_device_reserved_sms(const td_device *dev);

/** The number of SMs of the device; 0 for a CPU. */
int32_t td_device_sms(td_device *dev);

#endif
