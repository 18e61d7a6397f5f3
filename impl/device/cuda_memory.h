/** Internal to impl/: GPU memory that other processes can map, so that their GPUs can read and write it. */
#ifndef TD_DEVICE_CUDA_MEMORY_H
#define TD_DEVICE_CUDA_MEMORY_H

#include "device/cuda.h"

/** Smallest size of such a block in bytes: CUDA maps at least this much, and smaller blocks would waste
 * it. */
#define TD_CUDA_MAPPED_LEAST ((size_t)2 << 20)

/** Whether the GPU supports such memory: the driver can map it and export it as a file descriptor. The GPU
 * must be current. */
bool td_cuda_maps(int index);

/** Allocates a block on the GPU, which must be current; `bytes` is above 0. TD_NO_MEMORY without a message;
 * TD_LIBRARY_ERROR. */
td_status td_cuda_map(int index, size_t bytes, void **out);

/** Frees a block of td_cuda_map after waiting for all queued work of the GPU, as cudaFree does. */
void td_cuda_unmap(void *block);

#endif
