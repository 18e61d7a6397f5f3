/** Internal to impl/comm/cuda*.c: a communicator of NCCL. */
#ifndef TD_COMM_CUDA_STATE_H
#define TD_COMM_CUDA_STATE_H

#include "comm/backend.h"
#include "device/cuda.h"

#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>

/* Of graphs: so many are on the GPU at a time. A rank whose host were further ahead would be late in the eyes
 * of others for as long as it then waits for its GPU. */
enum { TD_NCCL_LAUNCHES = 2 };

#define TD_NCCL_EACH(f)                                                                                      \
    f(GetVersion) f(GetUniqueId) f(GetErrorString) f(GetLastError) f(CommInitRankConfig) f(CommFinalize)     \
        f(CommDestroy) f(CommAbort) f(CommGetAsyncError) f(AllReduce) f(ReduceScatter) f(AllGather)          \
            f(Broadcast) f(RedOpCreatePreMulSum) f(RedOpDestroy)
#define TD_NCCL_DECLARE(name) __typeof__(&nccl##name) name;
typedef struct td_nccl_library {
    TD_NCCL_EACH(TD_NCCL_DECLARE)
    /* As of 2.27, whose header need not be there; NULL: the library is older. */
    ncclResult_t (*CommWindowRegister)(ncclComm_t comm, void *block, size_t bytes, void **window, int flags);
    ncclResult_t (*CommWindowDeregister)(ncclComm_t comm, void *window);
} td_nccl_library;

/** What rank 0 chooses for all. */
typedef struct td_nccl_choice {
    ncclUniqueId id;
    int ctas;    /* multiprocessors at the least; 0: NCCL's choice */
    bool direct; /* by NVLink, within a host */
} td_nccl_choice;

typedef struct td_nccl {
    td_nccl_library nc;
    td_cuda *cuda;
    int index, rank, ranks;
    ncclComm_t comm;
    cudaStream_t stream;                    /* that of the collectives, highest priority */
    cudaEvent_t behind;                     /* what a collective begins behind on the device's stream */
    int64_t ended_ns;                       /* when the last one was seen to be done */
    cudaEvent_t launches[TD_NCCL_LAUNCHES]; /* behind the graphs that were launched last, in turn */
    int64_t launch_count;
    cudaEvent_t *marks; /* [mark_count] around calls that are watched */
    int64_t mark_count, mark_room;
    cudaEvent_t base; /* the begin of their time, which was at base_ns */
    int64_t base_ns;
    pthread_mutex_t calls; /* one thread inside NCCL at a time */
    pthread_mutex_t lock;  /* of what follows */
    pthread_cond_t changed;
    td_nccl_choice choice;
    atomic_bool registering; /* a window is made */
    bool started, abandoned; /* the thread of the start came back; nobody waits for it */
    ncclResult_t start;
    bool aborting, aborted;
    int64_t abort_by_ns; /* ABORT_MS behind its begin */
} td_nccl;

/** What NCCL says of it. */
const char *td_nccl_explain(const td_nccl *n, ncclResult_t result, char text[256]);

/** Takes NCCL (`calls`) for this thread; false: a rank has failed. The abort may hold it until this thread's
 * graphs are destroyed, so that nobody waits for it. */
bool td_nccl_take(td_comm *comm);

/** Waits until then for the collectives that are on their way, queued or in graphs. False: they still are, or
 * a rank failed meanwhile. */
bool td_nccl_settle(td_comm *comm, int64_t until_ns);

/** Windows, as td_comm_backend_table has them. */
bool td_nccl_window_fits(td_comm *comm, size_t bytes);
td_status td_nccl_window_open(td_comm *comm, void *block, size_t bytes, void **native);
void td_nccl_window_close(td_comm *comm, void *native);

#endif
