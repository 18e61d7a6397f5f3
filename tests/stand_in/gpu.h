/** Doubles of a GPU and of NCCL. They simulate order, time and waits, and only add up f32.
 *
 * The GPU is a thread with one queue for all of its streams. td_device_open("cpu", ...) opens it as a CUDA
 * device. A fill of n bytes writes nothing and takes n milliseconds. Ranks are processes with shared memory.
 * As in NCCL, ncclCommAbort and ncclCommDestroy return when no graph has calls of the communicator. Forbidden
 * calls abort the test, and so does a library that reads the environment. */
#ifndef TD_TESTS_GPU_H
#define TD_TESTS_GPU_H

#include <stdatomic.h>
#include <stdbool.h>

enum {
    TD_STAND_IN_RANKS = 4 /* most ranks of a call */,
    TD_STAND_IN_ELEMENTS = 100 /* the most elements of a call */
};

extern int td_stand_in_ranks;        /* ranks that are started; 2 at first */
extern atomic_int td_stand_in_fills; /* fills of this rank that are complete */
extern bool td_stand_in_shared;      /* another rank uses this rank's GPU too */
extern bool td_stand_in_nvlink;      /* this rank's host has a second GPU, over NVLink */
extern int td_stand_in_ctas;         /* the minimum number of SMs in NCCL's config; 0: none */
extern bool td_stand_in_maps;        /* this rank's GPU maps large blocks */
extern bool td_stand_in_old;         /* this rank's NCCL is older than windows */
extern int td_stand_in_windows; /* windows of this rank's NCCL; -1: it refuses the next; -2: it gives none */
extern int
    td_stand_in_comes; /* 1: this rank takes part in its next registration; 0: it does not; -1: it dies */
extern void *td_stand_in_window;      /* the block of its last window */
extern unsigned td_stand_in_enter_ms; /* ms that td_cuda_enter takes in this rank */

/** Maps memory that the ranks share if they are forked after this call. It serves one communicator. NULL:
 * there is no memory. */
void *td_stand_in_share(void);
void td_stand_in_unshare(void);

#endif
