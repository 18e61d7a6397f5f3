/** Internal to impl/: state that modules store with a device, such as library handles or compiled code. A
 * module creates it at first use; td_device_close destroys it.
 *
 * Each module uses its own key: the address of one of its static variables. */
#ifndef TD_DEVICE_STATE_H
#define TD_DEVICE_STATE_H

#include "device/device.h"

/** The state stored under `key`; NULL: none. */
void *td_device_state(const td_device *dev, const void *key);

/** Stores `state` under `key`, which must be unused, until dev is closed. td_device_close then calls
 * destroy(state): the newest state first, and all before the device's memory and streams are freed.
 * TD_NO_MEMORY: it was not stored. */
td_status td_device_keep(td_device *dev, const void *key, void *state, void (*destroy)(void *state));

#endif
