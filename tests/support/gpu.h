/** The GPU of a test program that needs one. */
#ifndef TD_TESTS_GPU_H
#define TD_TESTS_GPU_H

#include "device/device.h"

/** Opens "cuda". Without a usable GPU prints the reason and exits: with 77, which CTest shows as skipped, or
 * with 1 if the environment variable TD_REQUIRE_GPU is set. */
td_device *td_gpu_open(void);

/** Whether the environment variable TD_GPU_SMALL is set, as for compute-sanitizer, which makes kernels a
 * hundred times slower. Of shapes that differ only in size one is then enough. */
bool td_gpu_small(void);

/** A block of the GPU between fences, with `bytes` from the host, or poisoned (0xFF) if `data` is NULL. */
void *td_gpu_block(td_device *dev, const void *data, size_t bytes);

/** The block's contents in malloc'ed host memory. Fails the running test if a fence was touched. */
void *td_gpu_read(td_device *dev, const void *block, size_t bytes);

/** Frees such a block. Accepts NULL. */
void td_gpu_free(td_device *dev, void *block);

#endif
