/** A double of CUDA's runtime, of our kernels' launchers and of cuBLASLt, which notes its calls. The machine
 * has two GPUs. Kernels and GEMMs compute nothing. A copy is done when a caller waits for its stream, so that
 * a missing wait is found. A program wraps all of these functions. */
#ifndef TD_TESTS_CUDA_DOUBLE_H
#define TD_TESTS_CUDA_DOUBLE_H

#include "kernels/gpcs.h"
#include "ops/ops.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

enum { TD_DOUBLE_CALLERS = 0, TD_DOUBLE_OURS = 1, TD_DOUBLE_NONE = -1 }; /* GPUs */
enum { TD_DOUBLE_STREAMS = 64, TD_DOUBLE_COPIES = 16, TD_DOUBLE_GPCS = 7 };

typedef struct td_cuda_double {
    int current;          /* the thread's GPU */
    int times_set;        /* calls of cudaSetDevice */
    int calls, elsewhere; /* calls that need the device's GPU: all, and those with another GPU current */
    const char *where;    /* the last such call with another GPU current */
    cudaError_t probe_says, gpcs_say, flash_says;

    /* Streams are indices of this list. CUDA's default stream, NULL, has priority 0. */
    int lowest_first; /* the GPU's highest priority, which is the lowest number */
    int priorities[TD_DOUBLE_STREAMS], streams_made;

    struct {
        void *dst;
        const void *src;
        size_t bytes;
        cudaStream_t stream;
    } copies[TD_DOUBLE_COPIES]; /* copies that are not done */
    int copies_made;

    td_update_tensors launched; /* arguments of the last update */
    int launched_on;            /* SMs; 0: all */
    td_sm_set launched_wanted;
    bool sms_built;
    int gpcs_asked;

    const char *card;   /* its name; NULL: "double N" */
    size_t lt_version;  /* of cuBLASLt */
    int lt_refuses;     /* 1: another cluster; 2: an algorithm; 3: accepts it with more work */
    uint64_t algorithm; /* of the last GEMM: tile, custom option and cluster, 16 bits each */
    int handles, descriptions, most_descriptions; /* live objects of cuBLASLt */
    int heuristics, products;                     /* calls */
    int32_t without_below;                        /* with fewer SMs there is no algorithm */
    int32_t target; /* SMs that were named for the last described GEMM; 0: none */
} td_cuda_double;

extern td_cuda_double td_double;

/** GPCs of 8, 18, 18, 16, 18, 18 and 4 SMs. */
extern const int td_double_gpc_ends[TD_DOUBLE_GPCS];

/** A new stream. */
cudaStream_t td_double_stream(int priority);

#endif
