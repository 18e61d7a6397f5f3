/** A GPU and an NCCL of a test's own, which know order, time and who waits for whom, and add up f32 alone.
 * The GPU is a thread with one queue for all of its streams, and td_device_open("cpu", ...) opens it, as a
 * CUDA device. To fill n bytes there writes nothing and takes n milliseconds. Ranks are processes that meet
 * in memory which they share. As NCCL's own, ncclCommAbort and ncclCommDestroy come back once no graph has
 * calls of the communicator. What a test must not ask for aborts it, and so does a library that reads the
 * environment. */
#ifndef TD_TESTS_GPU_H
#define TD_TESTS_GPU_H

#include <stdatomic.h>
#include <stdbool.h>

enum { TD_STAND_IN_RANKS = 4 /* at most */, TD_STAND_IN_ELEMENTS = 100 /* of a call, at most */ };

extern int td_stand_in_ranks;         /* that are started; 2 at first */
extern atomic_int td_stand_in_fills;  /* of this rank, that are over */
extern bool td_stand_in_shared;       /* this rank's GPU is another's as well */
extern bool td_stand_in_nvlink;       /* this rank's host has a second GPU, by NVLink */
extern int td_stand_in_ctas;          /* that NCCL was told to take at the least; 0: not told */
extern bool td_stand_in_maps;         /* this rank's GPU maps large blocks */
extern bool td_stand_in_old;          /* this rank's NCCL is from before windows */
extern int td_stand_in_windows;       /* that this rank's NCCL has; -1: it refuses the next; -2: gives none */
extern int td_stand_in_comes;         /* to its next registration this rank comes; 0: not; -1: it dies */
extern void *td_stand_in_window;      /* the block of its last one */
extern unsigned td_stand_in_enter_ms; /* that td_cuda_enter takes in this rank */

/** The memory of ranks that are forked from here on, of a communicator of theirs; NULL: there is none. */
void *td_stand_in_share(void);
void td_stand_in_unshare(void);

#endif
