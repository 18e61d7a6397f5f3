/** Collectives among ranks: one interface over MPI and Gloo (the CPU's memory) and NCCL (a GPU's).
 *
 * A rank is a process with one device. Every rank of a communicator makes the same calls, with the same
 * count, type and reduction, in the same order. Each call carries its number and a signature of these,
 * which are compared among the ranks before the data moves; so a call begins when the last rank has made it,
 * on a GPU too. A rank that died, that is late, or that makes another call is an error with its name on every
 * other rank, within the deadline of the call that needed it, and from then on every call of the communicator
 * returns that error (TD_RANK_FAILED). Nothing may be assumed of the results that were on their way.
 *
 * How that is known. Each rank has a thread that is connected to rank 0's, over which a rank's end, its
 * errors and its being alive are told: the end of a process ends its connection, so its death is seen in
 * milliseconds, on this host as on another. Ranks of one host share a page of memory with the numbers and
 * signatures of their calls; between hosts these go over the connections.
 *
 * The libraries are loaded when a communicator first needs them: a program that opens none has no MPI, no
 * Gloo and no NCCL in its process.
 *
 * A communicator belongs to one thread at a time; td_comm_abort and td_comm_check may be called by any. */
#ifndef TD_COMM_COMM_H
#define TD_COMM_COMM_H

#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_comm td_comm;

typedef enum td_comm_backend { TD_COMM_MPI = 0, TD_COMM_GLOO, TD_COMM_NCCL } td_comm_backend;

/** "mpi", "gloo", "nccl"; NULL for any other value. */
TD_API const char *td_comm_backend_name(td_comm_backend backend);

/** The backend of that name. TD_BAD_ARGUMENT for NULL or another name; *out is untouched. */
TD_API td_status td_comm_backend_parse(const char *name, td_comm_backend *out);

/** TD_UNSUPPORTED, naming the option that brings it, if this build lacks the backend. TD_BAD_ARGUMENT: no
 * backend. */
TD_API td_status td_comm_backend_check(td_comm_backend backend);

/** What elements are. The floating-point types have the numbers of td_dtype. */
typedef enum td_comm_type {
    TD_COMM_F64 = 0,
    TD_COMM_F32 = 1,
    TD_COMM_F16 = 2,
    TD_COMM_BF16 = 3,
    TD_COMM_I64 = 4
} td_comm_type;

/** "f64", "f32", "f16", "bf16", "i64"; NULL for any other value. Bytes of an element; 0 for another value. */
TD_API const char *td_comm_type_name(td_comm_type type);
TD_API size_t td_comm_type_size(td_comm_type type);

/** The average is the sum, multiplied by 1 / ranks: the factor is rounded to f32 (f64: to f64), the product
 * to the type. A library's own average, as NCCL's, multiplies first, by a factor rounded to the type: in bf16
 * among 6 ranks 0.2 % too much. f16 ends at 65504, so each rank's f16 is first divided by the least power of
 * two that is not below ranks, and the sum is multiplied by power / ranks: an average of finite numbers is
 * finite, and numbers below 2^-14 times that power lose their last bits. i64 has no average.
 *
 * Sums of f16 and bf16 are rounded to the type at every addition, on the way from rank to rank, but once in
 * windows (below). The order of additions is the library's; it depends on the count and on the number of
 * ranks alone. All ranks get the same bits. Where a NaN meets a number, max gives either. */
typedef enum td_reduction { TD_SUM = 0, TD_AVERAGE, TD_MAX } td_reduction;

/** How the ranks find each other:
 *
 *   address    "host:port" at which rank 0 listens: at a number there alone, at a name of its host on all
 *              interfaces, at "localhost" on the loopback. IPv4 goes before IPv6
 *   directory  rank 0 listens at a port that is free, and leaves the address in a file of this directory,
 *              which all ranks see, until all have come
 *   neither    by `run` alone if all ranks are on this host (a socket of that name, no file), else by MPI,
 *              under whose launcher they must have been started
 *
 * Who may join. A peer shows that it knows the run's name and a token of 128 bits before rank 0 answers
 * anything; the token itself is not sent. Others are dropped without an answer, and neither end nor delay a
 * run. A rank believes nothing of a rank 0 that does not show the same. In a directory the token is random,
 * in a file that this user alone may read; by MPI it goes with the address; by `run` alone the system says
 * which user a process belongs to. With an address it is `token`, which the caller has to spread. Without
 * one, whoever reaches the port and guesses the run's name can join or end the run: a program should say so.
 * Memory is shared with rank 0 only where the system or a token says whose it is.
 *
 * This is about the control connections. What MPI, Gloo and NCCL send goes over connections of their own,
 * which are neither encrypted nor protected: use a network that you trust.
 *
 * Zeroed memory with rank and ranks set is a good start. */
typedef struct td_comm_options {
    td_comm_backend backend;
    int32_t rank, ranks;   /* 0 <= rank < ranks <= 128 */
    int32_t local_ranks;   /* on this host, as the launcher says; 0: it does not say */
    const char *run;       /* one name for all ranks of this run and no other, of any length; NULL: "run" */
    const char *directory; /* NULL: none */
    const char *address;   /* NULL: none */
    const char *token;     /* with address: 32 hexadecimal digits that strangers do not know; NULL: none */
    const char *nccl_host; /* of NCCL: what NCCL_HOSTID is for this process; NULL: not set */
    int32_t nccl_ctas;     /* of NCCL: multiprocessors for its kernels, at the least, up to TD_COMM_MOST_CTAS;
                            * 0: its choice. Rank 0's go for all, where all are on one host and NVLink joins
                            * rank 0's GPU to another that its process sees; else they are not looked at */
    double open_seconds; /* until all ranks have come and the library is ready, and 2 more at most for rank 0
                            * to say who did not; 0: 60 */
    double seconds;      /* for a collective, from its call on; 0: 30 */
    /* Called by a call that waits for other ranks, on its thread, a few times in a second: for how long it
     * has waited, and for what, as "rank 1 has not come". It may print, or look whether the program is to
     * end. False ends the wait: the call returns TD_RANK_FAILED, and so do the other ranks' calls. Not while
     * a library moves data, which ends by `seconds`. Valid as long as the communicator. NULL: none */
    bool (*waiting)(void *user, double seconds, const char *what);
    void *user; /* waiting's first argument */
} td_comm_options;

enum { TD_COMM_MOST_RANKS = 128, TD_COMM_MOST_CTAS = 64, TD_COMM_WINDOW_ALIGNMENT = 16 };

/** Joins the ranks of a run; returns when all have come. dev stays open for as long as the communicator;
 * NCCL takes a CUDA device, the others the CPU. A communicator of one rank copies, and loads no library.
 * Each of NCCL's ranks has a GPU of its own. Ranks with different values of NCCL_HOSTID may share one: NCCL
 * takes them for ranks of different hosts, and sends by the network. Results are the same, times are not.
 * NCCL reads that variable itself; this library does not read the environment, and is told by nccl_host.
 * NCCL_MIN_CTAS and NCCL_MAX_CTAS go before nccl_ctas, which is for collectives beside other work: NCCL
 * chooses what is fastest alone.
 *
 * MPI is started by the first communicator of MPI and ended by its close: of those there is one in a
 * process, unless the program started MPI itself (with MPI_THREAD_MULTIPLE).
 *
 * TD_BAD_ARGUMENT: a NULL, an option out of range, a device of another kind, a token of other digits.
 * TD_UNSUPPORTED: the build lacks the backend. TD_LIBRARY_ERROR: its library cannot be loaded or started.
 * TD_IO_ERROR: the directory or the address cannot be used, or another run uses it. TD_RANK_FAILED: a rank
 * did not come in open_seconds, died, or came with other options; the message names it. TD_NO_MEMORY. After
 * any of them *out is NULL, and no thread, file or socket is left; but where a library did not come back
 * from its start (MPI_Init, when a rank died inside) its thread stays, with what it uses. */
TD_API td_status td_comm_open(td_device *dev, const td_comm_options *options, td_comm **out);

/** Ends the communicator together with all ranks: waits for what is on its way, calls as well as graphs that
 * were launched, and until every rank has come so far. Unfinished td_work is gone. After an error it waits
 * for no other rank, but at most for the deadline of what is on its way inside the library. Accepts NULL.
 * Errors: TD_RANK_FAILED, TD_LIBRARY_ERROR, and it is freed all the same. TD_BAD_STATE, and nothing is done:
 * graphs with its collectives are to be destroyed first, for NCCL would wait for that. */
TD_API td_status td_comm_close(td_comm *comm);

/** Tells all ranks that this one gives up, so that their calls return with `reason` and this rank's name. May
 * be called by any thread. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_comm_abort(td_comm *comm, const char *reason);

/** TD_OK, or the error that the communicator has met, with its message. May be called by any thread. */
TD_API td_status td_comm_check(const td_comm *comm);

typedef struct td_comm_info {
    td_comm_backend backend;
    int32_t rank, ranks;
    int32_t local_rank, local_ranks; /* among the ranks of this host, in their order */
    int32_t hosts;
    char library[96];  /* "Open MPI 4.1.4", "NCCL 2.28.9"; "" among one rank */
    int32_t nccl_ctas; /* that NCCL was told to take at the least; 0: it was told nothing */
    int32_t windows;   /* blocks of memory that ranks' GPUs reach directly: td_comm_window_create */
} td_comm_info;

TD_API td_status td_comm_describe(const td_comm *comm, td_comm_info *out);

/* ---- collectives ---- */

/** A collective on its way. From its call until it was waited for, its buffers are left alone. At most 1024
 * at a time. */
typedef struct td_work td_work;

/** Waits until the collective is done, then gives the handle back, also after an error. TD_RANK_FAILED,
 * TD_LIBRARY_ERROR. */
TD_API td_status td_work_wait(td_work *work);

/** What is queued on the device's current stream from here on waits for the collective; the host does not.
 * Gives the handle back. Errors of the collective are returned by later calls. On the CPU as td_work_wait. */
TD_API td_status td_work_queue_wait(td_work *work);

/** *done: whether the collective is done, well or not; the handle stays. Of one rank it waits for
 * the copy that the collective may be, and for what is queued ahead of it. */
TD_API td_status td_work_test(td_work *work, bool *done);

/** The collectives. `work` NULL: the call returns when the collective is done. Else it returns at once, and
 * *work is a handle to wait on, or NULL after an error; handles may be waited for in any order. On a GPU the
 * collective begins when what is queued on the device's current stream is done.
 *
 * all_reduce      in [count], out [count]: out[i] of every rank = the reduction of all in[i]; out may be in
 * reduce_scatter  in [ranks][count], out [count]: out of rank r = the reduction of all in[r]; out may be
 *                 in[rank], and the rest of in is then undefined
 * all_gather      in [count], out [ranks][count]: out[r] = in of rank r; in may be out[rank]
 * broadcast       buffer [count]: that of every rank = that of root
 * barrier         returns when every rank has called it
 *
 * Where the device captures a graph (td_graph_begin), collectives on a GPU that have a handle become part of
 * it, the handle is for td_work_queue_wait within the capture, and the ranks do not meet. They meet ahead of
 * every launch of the graph, as in one call: all must launch graphs with the same collectives. A launch waits
 * until at most one of those before it is on its way, so that no rank's host is far ahead of its GPU. What
 * runs in graphs is not watched (td_comm_watch).
 *
 * in is only read where it is not part of out. Counts are of elements, from 0 on, on every rank the same; the
 * memory is dev's, with the alignment of its elements.
 *
 * TD_BAD_ARGUMENT: a NULL (for count above 0), a count below 0 or whose bytes are beyond 2^63 - 1, a value
 * that is none of its enum, buffers that overlap in another way, a root that is no rank, an average of i64,
 * parts in a window that begin at no multiple of 16 bytes. TD_BAD_STATE: 1024 handles were not waited for; a
 * capture, and no handle. TD_RANK_FAILED, TD_LIBRARY_ERROR. */
TD_API td_status td_comm_all_reduce(td_comm *comm, const void *in, void *out, int64_t count,
                                    td_comm_type type, td_reduction reduction, td_work **work);
TD_API td_status td_comm_reduce_scatter(td_comm *comm, const void *in, void *out, int64_t count,
                                        td_comm_type type, td_reduction reduction, td_work **work);
TD_API td_status td_comm_all_gather(td_comm *comm, const void *in, void *out, int64_t count,
                                    td_comm_type type, td_work **work);
TD_API td_status td_comm_broadcast(td_comm *comm, void *buffer, int64_t count, td_comm_type type,
                                   int32_t root, td_work **work);
TD_API td_status td_comm_barrier(td_comm *comm);

/** A few bytes of host memory from every rank to every rank, over the connections of the control threads: for
 * figures and settings, whatever the backend.
 *
 *   mine  [bytes]         in
 *   all   [ranks][bytes]  out
 *
 * A collective: every rank calls it, with the same bytes, 1 to 32768. TD_BAD_ARGUMENT: a NULL, bytes out of
 * range. TD_RANK_FAILED. TD_NO_MEMORY. */
TD_API td_status td_comm_exchange(td_comm *comm, const void *mine, size_t bytes, void *all);

/** The next call of this communicator carries `state`, and ranks compare it as they compare counts, without
 * another message: a hash of what must be the same on every rank when a step begins. A call has 0 unless
 * told. A call that becomes part of a graph carries nothing, and leaves `state` to the next call, as the
 * launch of that graph is one.
 *
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_comm_carry(td_comm *comm, uint64_t state);

/* ---- memory that they reach directly ---- */

/** Memory whose collectives go straight from GPU to GPU. */
typedef struct td_comm_window td_comm_window;

/** Lets NCCL read and write memory of the other ranks where it lies: by NVLink, without copies in between.
 * Its all-reduce, reduce-scatter and all-gather then take far fewer multiprocessors. Sums of 16 bits are
 * added up in f32 and rounded once.
 *
 *   memory  [bytes]  of comm's device; the whole block of td_device_alloc around it becomes the window.
 *                    NULL: this rank has none, and so has nobody
 *
 * A collective: every rank calls it. From then on calls with memory of the block are made so:
 *
 *   - what other ranks read or write (in and out of all_reduce, in of reduce_scatter, out of all_gather) lies
 *     on every rank at the same place of the same window, or on none in one: ranks compare that, as they do
 *     counts
 *   - in, out and each rank's part begin at multiples of 16 bytes of the block, for NCCL 2.28 is wrong about
 *     others
 *
 * Where it cannot be, *out is a window that changes nothing: on the CPU, of one rank, without NVLink between
 * the GPUs of one host, with NCCL before 2.27, for memory that is no part of a block of td_device_alloc of
 * 2 MiB or more, or that lies elsewhere in its block on another rank. td_comm_describe counts those that do,
 * and those that NCCL keeps without using them, where its environment says so (NCCL_CUMEM_ENABLE=0).
 *
 * A window ends with its block, or with the communicator; what is left of it is destroyed later.
 *
 * TD_BAD_ARGUMENT: comm or out is NULL, no bytes. TD_BAD_STATE: a graph is captured. TD_RANK_FAILED,
 * TD_LIBRARY_ERROR, TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_comm_window_create(td_comm *comm, const void *memory, size_t bytes, td_comm_window **out);

/** Waits for the collectives that are on their way on this rank. All ranks destroy it, or free its block,
 * ahead of the next call with that memory, for which it is then none; the memory is given back when all have.
 * A graph with calls in it can no longer be launched (TD_BAD_STATE). Of windows of one block the last to go
 * ends it. While a graph is captured it stays until the communicator's end. Accepts NULL. */
TD_API void td_comm_window_destroy(td_comm_window *window);

/* ---- when they ran ---- */

/** A collective that was watched. */
typedef struct td_comm_span {
    const char *call; /* "all_reduce", "reduce_scatter", "all_gather" or "broadcast" */
    int64_t bytes;    /* of `count` elements; of reduce_scatter and all_gather the parts of all ranks */
    int64_t begin_ns,
        end_ns; /* td_clock_ns(). On a CPU from when all ranks have come to it; on a GPU from when
                               * its kernel may run, so that it may wait for the other ranks' */
} td_comm_span;

/** From here on the first `capacity` collectives with elements are watched; spans of a watch before are
 * forgotten. 0: none. TD_BAD_ARGUMENT: a NULL, a capacity below 0. TD_BAD_STATE: a collective is on its way.
 * TD_NO_MEMORY, TD_LIBRARY_ERROR: nothing is watched then. */
TD_API td_status td_comm_watch(td_comm *comm, int64_t capacity);

/** What was watched so far, in the order of the calls. The spans are valid until the next td_comm_watch.
 * TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: a collective is on its way; there were more than were to be watched.
 * TD_LIBRARY_ERROR. */
TD_API td_status td_comm_watched(td_comm *comm, const td_comm_span **spans, int64_t *count);

TD_END_DECLS

#endif
