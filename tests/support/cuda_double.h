/** A double of CUDA's runtime, of our kernels' launchers and of cuBLASLt, which sees what it is asked for. A
 * machine has two GPUs in it. Kernels and GEMMs compute nothing. Copies are done when somebody waits for
 * their stream, so that a wait that is missing shows. A program wraps all of its functions. */
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
    int calls, elsewhere; /* of what needs the device's GPU; with another current */
    const char *where;    /* the last of these with another current */
    cudaError_t probe_says, gpcs_say, flash_says;

    /* Streams are places of this list. CUDA's default stream, NULL, has priority 0. */
    int lowest_first; /* the greatest priority of the GPU, which is its lowest number */
    int priorities[TD_DOUBLE_STREAMS], streams_made;

    struct {
        void *dst;
        const void *src;
        size_t bytes;
        cudaStream_t stream;
    } copies[TD_DOUBLE_COPIES]; /* that wait */
    int copies_made;

    td_update_tensors launched; /* by an update */
    int launched_on;            /* SMs; 0: all */
    td_sm_set launched_wanted;
    bool sms_built;
    int gpcs_asked;

    int handles, descriptions, most_descriptions; /* of cuBLASLt, that live */
    int heuristics, products;                     /* calls */
    int32_t without_below;                        /* with fewer SMs there is no algorithm */
    int32_t target; /* SMs that a product was last described for; 0: none were named */
} td_cuda_double;

extern td_cuda_double td_double;

/** GPCs of 8, 18, 18, 16, 18, 18 and 4 SMs. */
extern const int td_double_gpc_ends[TD_DOUBLE_GPCS];

/** A new stream. */
cudaStream_t td_double_stream(int priority);

#endif
