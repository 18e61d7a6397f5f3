/** Internal to impl/comm/cuda*.c: the NCCL state of a communicator. */
#ifndef TD_COMM_CUDA_STATE_H
#define TD_COMM_CUDA_STATE_H

#include "comm/backend.h"
#include "device/cuda.h"

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>

/* Unfinished launches of graphs per GPU. With more, a host could queue work far ahead of its GPU. Other ranks
 * would report it as late while it waits for the GPU. */
enum { TD_NCCL_LAUNCHES = 2 };

#define TD_NCCL_EACH(f)                                                                                      \
    f(GetVersion) f(GetUniqueId) f(GetErrorString) f(GetLastError) f(CommInitRankConfig) f(CommFinalize)     \
        f(CommDestroy) f(CommAbort) f(CommGetAsyncError) f(AllReduce) f(ReduceScatter) f(AllGather)          \
            f(Broadcast) f(RedOpCreatePreMulSum) f(RedOpDestroy)
#define TD_NCCL_DECLARE(name) __typeof__(&nccl##name) name;
typedef struct td_nccl_library {
    TD_NCCL_EACH(TD_NCCL_DECLARE)
    /* Since NCCL 2.27; declared here because the header may be older. NULL: the library is older. */
    ncclResult_t (*CommWindowRegister)(ncclComm_t comm, void *block, size_t bytes, void **window, int flags);
    ncclResult_t (*CommWindowDeregister)(ncclComm_t comm, void *window);
} td_nccl_library;

/** Rank 0 chooses these values for all ranks. */
typedef struct td_nccl_choice {
    ncclUniqueId id;
    int ctas;    /* minimum number of SMs; 0: NCCL's choice */
    bool direct; /* windows are possible: all ranks on one host, with NVLink */
} td_nccl_choice;

typedef struct td_nccl {
    td_nccl_library nc;
    td_cuda *cuda;
    int index, rank, ranks;
    ncclComm_t comm;
    cudaStream_t stream;                    /* the stream of the collectives, with the highest priority */
    cudaEvent_t inputs_ready;               /* recorded on the device's stream; a collective waits for it */
    int64_t ended_ns;                       /* when a collective was last seen to be done */
    cudaEvent_t launches[TD_NCCL_LAUNCHES]; /* recorded after the last graph launches, in turn */
    int64_t launch_count;
    cudaEvent_t *marks; /* before and after each watched call */
    int64_t mark_count, mark_room;
    cudaEvent_t base; /* the zero of their clock, recorded at base_ns */
    int64_t base_ns;
    pthread_mutex_t calls; /* protects calls of NCCL */
    pthread_mutex_t lock;  /* protects the members below */
    pthread_cond_t changed;
    td_nccl_choice choice;
    atomic_bool registering; /* a thread is registering a window */
    bool started, abandoned; /* ncclCommInitRankConfig returned; open_backend no longer waits for it */
    ncclResult_t start;
    bool aborting, aborted;
    int64_t abort_by_ns; /* ABORT_MS after the abort began */
} td_nccl;

/** text = NCCL's description of the result. */
const char *td_nccl_explain(const td_nccl *n, ncclResult_t result, char text[256]);

/** Locks `calls`. False: a rank has failed, and the lock is not held. It tries the lock and looks for a
 * fault in turn, because an abort may hold the lock until this thread destroys its graphs. */
bool td_nccl_take(td_comm *comm);

/** Yields or sleeps between two polls of an event. */
void td_nccl_poll(int64_t begun_ns);

bool td_nccl_done(cudaEvent_t event);

/** Whether collectives are unfinished, queued or in graphs. */
bool td_nccl_busy(const td_nccl *n);

/** Waits until `until_ns` for unfinished collectives, queued or in graphs. False: some are unfinished, or a
 * rank failed. */
bool td_nccl_settle(td_comm *comm, int64_t until_ns);

/** See td_comm_backend_table. */
bool td_nccl_window_fits(td_comm *comm, size_t bytes);
td_status td_nccl_window_open(td_comm *comm, void *block, size_t bytes, void **native);
void td_nccl_window_close(td_comm *comm, void *native);

#endif
