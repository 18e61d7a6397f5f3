/** Internal to impl/: blocks of a device from outside: where they are, and when they end. */
#ifndef TD_DEVICE_ENDING_H
#define TD_DEVICE_ENDING_H

#include "device/device.h"

/** Who must know that a block ends before its memory goes; whoever waits owns it. */
typedef struct td_ending td_ending;
struct td_ending {
    const void *block;
    void (*ended)(td_ending *ending); /* called once, by td_device_free; it is no longer waited for then */
    td_ending *next;
};

/** The live block that has all of [at, at + bytes); false: there is none. */
bool td_device_block_around(const td_device *dev, const void *at, size_t bytes, void **block,
                            size_t *block_bytes);

/** From here on until it has ended, or is no longer waited for; `block` is live. */
void td_device_await_end(td_device *dev, td_ending *ending);
void td_device_forget_end(td_device *dev, td_ending *ending); /* also where it has ended */

#endif
