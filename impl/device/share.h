/** Internal to impl/: how many of a GPU's SMs (streaming multiprocessors) collectives and updates have.
 *
 * Work that overlaps with GEMMs takes SMs from them: collectives, and the optimizer's update. Each owner says
 * how many it has, the counts add up, and GEMMs that are queued from then on are made for the rest
 * (ops/cuda/gemm.c). A count can change the algorithm of a GEMM and so its bits: all ranks set the same
 * counts at the same places of a step. */
#ifndef TD_DEVICE_SHARE_H
#define TD_DEVICE_SHARE_H

#include "device/device.h"

typedef enum td_sm_owner {
    TD_SMS_COLLECTIVES = 0, /* of the links of ddp/ and shard/. Two links on one device share this count: the
                             * last call counts. */
    TD_SMS_UPDATE,
    TD_SM_OWNERS
} td_sm_owner;

/** From here on `owner` has `sms` SMs; 0: none. */
void td_device_share(td_device *dev, td_sm_owner owner, int32_t sms);

/** How many SMs all owners have together. */
int32_t td_device_shared(const td_device *dev);

/** How many SMs the device has; 0 for a CPU. */
int32_t td_device_sms(td_device *dev);

#endif
