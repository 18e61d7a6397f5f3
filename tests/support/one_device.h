/** A device from a group's setup to its teardown, which fails if the device has memory or a listener left.
 * TEST_DEVICE names it. */
#ifndef TD_TESTS_ONE_DEVICE_H
#define TD_TESTS_ONE_DEVICE_H

#include "device/listen.h"
#include "support/compare.h"
#include "support/test.h"

static td_device *dev;

static int open_device(void **unused)
{
    (void)unused;
    return td_device_open(TEST_DEVICE, &dev) == TD_OK ? 0 : -1;
}

static int close_device(void **unused)
{
    td_memory_stats memory = {.live_blocks = -1};

    (void)unused;
    td_assert_ok(td_device_memory(dev, &memory));
    assert_true((memory.live_blocks == 0 && !td_device_listened(dev)) || td_broken_off());
    td_device_close(dev);
    return 0;
}

#endif
