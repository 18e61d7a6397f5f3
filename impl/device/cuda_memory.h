/** Internal to impl/: memory of a GPU that other processes can map, for their GPUs to read and write. */
#ifndef TD_DEVICE_CUDA_MEMORY_H
#define TD_DEVICE_CUDA_MEMORY_H

#include "device/cuda.h"

/** Bytes from which on a block is one of these: less would waste what CUDA maps at least. */
#define TD_CUDA_MAPPED_LEAST ((size_t)2 << 20)

/** Whether the GPU, which is current, has such memory: the driver maps, and hands over by file descriptor. */
bool td_cuda_maps(int index);

/** A block of the GPU, which is current; `bytes` is above 0. TD_NO_MEMORY without a message;
 * TD_LIBRARY_ERROR. */
td_status td_cuda_map(int index, size_t bytes, void **out);

/** Gives a block of td_cuda_map back, once the GPU has done what was queued, as cudaFree does. */
void td_cuda_unmap(void *block);

#endif
