/** Internal to impl/: what the CUDA files of other modules need of a CUDA device. */
#ifndef TD_DEVICE_CUDA_H
#define TD_DEVICE_CUDA_H

#include "device/clock.h"
#include "device/device.h"

#include <cuda_runtime_api.h>

typedef struct td_cuda {
    int index;  /* of the device, as CUDA counts */
    int caller; /* between enter and leave: the GPU that is the thread's current one outside; -1: none */
    int multiprocessors;
    int capability;      /* 10 major + minor */
    bool maps;           /* large blocks are mapped: device/cuda_memory.h */
    char model[256];     /* its name */
    cudaStream_t stream; /* to queue on */
    cudaStream_t own;    /* the context's own stream */
    cudaStream_t origin; /* on which a capture began */
} td_cuda;

/** dev is a device of kind TD_DEVICE_CUDA. */
td_cuda *td_device_cuda(td_device *dev);

/** Makes the GPU the calling thread's current one, for what is called and launched there; leave gives the
 * thread back the one that it had. A GPU is current by thread, and a device may pass from thread to thread.
 * The two do not nest. */
cudaError_t td_cuda_enter(td_cuda *cuda);
void td_cuda_leave(td_cuda *cuda);

/** td_device_clock, by NVML. */
td_gpu_clock td_cuda_clock(void *context);

/** TD_OK for cudaSuccess; TD_NO_MEMORY, or TD_LIBRARY_ERROR with CUDA's own text, naming what was tried. */
td_status td_cuda_status(cudaError_t code, const char *what);

#endif
