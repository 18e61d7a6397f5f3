/** Internal to impl/: the CUDA state of a device, for the CUDA files of other modules. */
#ifndef TD_DEVICE_CUDA_H
#define TD_DEVICE_CUDA_H

#include "device/clock.h"
#include "device/device.h"

#include <cuda_runtime_api.h>

/** A graph has memory for the counters of its GEMMs: each takes the next TD_CUDA_COUNTER bytes. One kernel
 * clears all of them when a launch begins. */
enum { TD_CUDA_COUNTER = 256, TD_CUDA_COUNTERS = 512 };
typedef struct td_cuda_graph {
    cudaGraphExec_t exec;
    void *counters; /* [TD_CUDA_COUNTERS * TD_CUDA_COUNTER] bytes */
    int used;       /* counters */
} td_cuda_graph;

typedef struct td_cuda {
    int index;  /* CUDA's index of the device */
    int caller; /* between enter and leave: the thread's current GPU before enter; -1: not known */
    int multiprocessors;
    int capability;         /* 10 major + minor */
    bool maps;              /* large blocks use td_cuda_map of device/cuda_memory.h */
    char model[256];        /* the name of the GPU */
    cudaStream_t stream;    /* the current stream */
    cudaStream_t own;       /* the context's own stream */
    cudaStream_t origin;    /* the stream on which the capture began */
    td_cuda_graph *capture; /* the graph that is captured; NULL: none */
} td_cuda;

/** dev is a device of kind TD_DEVICE_CUDA. */
td_cuda *td_device_cuda(td_device *dev);

/** enter makes the GPU the calling thread's current GPU, for calls and launches; leave restores the previous
 * one. CUDA's current GPU is per thread, and a device may be used by one thread after another. enter and
 * leave do not nest. */
cudaError_t td_cuda_enter(td_cuda *cuda);
void td_cuda_leave(td_cuda *cuda);

/** td_device_clock, by NVML. */
td_gpu_clock td_cuda_clock(void *context);

/** TD_OK for cudaSuccess; otherwise TD_NO_MEMORY or TD_LIBRARY_ERROR. The message is `what` (what was
 * attempted) and CUDA's text. */
td_status td_cuda_status(cudaError_t code, const char *what);

#endif
