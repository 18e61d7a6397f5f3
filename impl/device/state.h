/** Internal to impl/: what modules keep with a device, such as the handles of a library or compiled code. It
 * is made when it is first needed and goes with the device.
 *
 * Each user has a key of its own, the address of something that it alone has, so that none has to know the
 * others. */
#ifndef TD_DEVICE_STATE_H
#define TD_DEVICE_STATE_H

#include "device/device.h"

/** What is kept under `key`; NULL: nothing. */
void *td_device_state(const td_device *dev, const void *key);

/** Keeps `state` under `key`, where nothing is kept yet, until dev is closed: destroy is then called, in the
 * opposite order of keeping, and before the device's memory and streams go. TD_NO_MEMORY: it is not kept. */
td_status td_device_keep(td_device *dev, const void *key, void *state, void (*destroy)(void *state));

#endif
