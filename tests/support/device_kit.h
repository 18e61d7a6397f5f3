/** Shared by the two files of test_device: a CPU device for a test, and host allocations that fail on
 * demand. */
#ifndef TD_TESTS_DEVICE_KIT_H
#define TD_TESTS_DEVICE_KIT_H

#include "device/device.h"

/* The fail_in-th calloc after this fails; 0: none fails. */
extern int64_t fail_in;

/* Setup and teardown of a test: *state is the device. */
int open_cpu(void **state);
int close_cpu(void **state);

/* The tests of the memory history; returns the number of failed tests. */
int device_history_group(void);

#endif
