/** Collectives among ranks: one interface over MPI and Gloo (the CPU's memory) and NCCL (a GPU's).
 *
 * A rank is a process with one device. Every rank of a communicator makes the same calls, with the same
 * count, type and reduction, in the same order. Ranks compare the number and these arguments of a call before
 * data moves. So a call begins when the last rank has made it, on a GPU too. If a rank died, is late, or
 * makes another call, every other rank gets an error with its name before the call's deadline. After that
 * every call of the communicator returns this error (TD_RANK_FAILED). Results of unfinished calls are
 * undefined.
 *
 * Each rank has a thread that is connected to rank 0's thread. The threads tell each other errors, and that
 * they are alive. The end of a process ends its connection, so other ranks see it in milliseconds. Ranks of
 * one host share a page of memory with the numbers and arguments of their calls. Ranks of several hosts send
 * them over the connections.
 *
 * MPI, Gloo and NCCL are loaded when a communicator first needs them.
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

/** The average is the sum times 1 / ranks. The factor is rounded to f32 (f64: to f64), the product to the
 * type. NCCL's own average multiplies first, by a factor that is rounded to the type: in bf16 with 6 ranks
 * the result is 0.2 % too large. f16 ends at 65504. So each rank's f16 is first divided by the least power
 * of two that is not below ranks, and the sum is multiplied by power / ranks. An average of finite numbers
 * is then finite, but numbers below 2^-14 times that power lose their last bits. i64 has no average.
 *
 * Sums of f16 and bf16 are rounded to the type at every addition, in windows (below) only once. The library
 * chooses the order of additions. It depends only on the count and the number of ranks. All ranks get the
 * same bits. The maximum of a NaN and a number is either of them. */
typedef enum td_reduction { TD_SUM = 0, TD_AVERAGE, TD_MAX } td_reduction;

/** How the ranks find each other:
 *
 *   address    "host:port" at which rank 0 listens: a number means this interface, a host's name all
 *              interfaces, "localhost" the loopback. IPv4 goes before IPv6
 *   directory  rank 0 listens at a free port and writes its address into a file of this directory. All ranks
 *              must see the directory. The file is removed when all have come
 *   neither    if all ranks are on this host, by a socket with the name `run`; else by MPI, whose launcher
 *              must have started the ranks
 *
 * Who may join. Rank 0 answers a peer only if the peer proves that it knows the run's name and a token of 128
 * bits; the token is not sent. Rank 0 drops others without an answer; they neither end nor delay a run. Rank
 * 0 proves the same to each rank. In a directory the token is random, in a file that only this user may read.
 * By MPI it comes with the address. By `run` alone the system tells the user of a process. With an address
 * the caller gives each rank `token`. Without one, anybody who reaches the port and guesses the run's name
 * can join or end the run: a program should say so. A rank shares memory with rank 0 only if the system or a
 * token tells whose memory it is.
 *
 * All this is about the control connections. MPI, Gloo and NCCL use other connections, which are neither
 * encrypted nor protected: use a network that you trust.
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
    int32_t nccl_ctas;     /* of NCCL: least number of SMs for its kernels, up to TD_COMM_MOST_CTAS; 0: NCCL
                            * chooses. Rank 0's value is used on all ranks. It is ignored if ranks are on
                            * several hosts, or if no NVLink joins rank 0's GPU to another that it sees */
    double open_seconds; /* until all ranks have come and the library is ready; rank 0 may take 2 more to say
                          * which rank is missing; 0: 60 */
    double seconds;      /* for a collective, from its call on; 0: 30 */
    /* A call that waits for other ranks calls this on its thread, a few times in a second. It gets how long
     * the call has waited, and for what: "rank 1 has not come". False ends the wait: the call and the other
     * ranks' calls return TD_RANK_FAILED. It is not called while a library moves data, which `seconds` ends.
     * Valid as long as the communicator. NULL: none */
    bool (*waiting)(void *user, double seconds, const char *what);
    void *user; /* waiting's first argument */
} td_comm_options;

enum { TD_COMM_MOST_RANKS = 128, TD_COMM_MOST_CTAS = 64, TD_COMM_WINDOW_ALIGNMENT = 16 };

/** Joins the ranks of a run; returns when all have come. dev must stay open as long as the communicator.
 * NCCL needs a CUDA device, the others need the CPU. A communicator of one rank copies, and loads no library.
 * Each of NCCL's ranks needs a GPU of its own. But ranks with different values of NCCL_HOSTID may share one:
 * NCCL then takes them for ranks of different hosts and uses the network. Results are the same, times are
 * not. NCCL reads that variable; this library reads no environment and needs nccl_host. nccl_ctas is for
 * collectives during other work, because NCCL chooses what is fastest alone. NCCL_MIN_CTAS and NCCL_MAX_CTAS
 * go before it.
 *
 * The first communicator of MPI starts MPI, and its close ends it. So a process can have one, unless the
 * program started MPI itself (with MPI_THREAD_MULTIPLE).
 *
 * TD_BAD_ARGUMENT: a NULL, an option out of range, a device of another kind, a token of other digits.
 * TD_UNSUPPORTED: the build lacks the backend. TD_LIBRARY_ERROR: its library cannot be loaded or started.
 * TD_IO_ERROR: the directory or the address cannot be used, or another run uses it. TD_RANK_FAILED: a rank
 * did not come in open_seconds, died, or came with other options; the message names it. TD_NO_MEMORY. After
 * an error *out is NULL, and no thread, file or socket is left. One exception: if a library never returns
 * from its start (MPI_Init, if a rank died inside), its thread stays. */
TD_API td_status td_comm_open(td_device *dev, const td_comm_options *options, td_comm **out);

/** Ends the communicator together with all ranks. It waits for calls and launched graphs, and until every
 * rank closes. Handles (td_work) are no longer valid. After an error it waits for no other rank, but at most
 * until the deadline of a call inside the library. Accepts NULL. TD_RANK_FAILED, TD_LIBRARY_ERROR: it is
 * freed all the same. TD_BAD_STATE, and nothing is done: destroy graphs with its collectives first. */
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
    int32_t nccl_ctas; /* the least number of SMs that NCCL was told; 0: none */
    int32_t windows;   /* blocks of memory that GPUs of other ranks reach directly: td_comm_window_create */
} td_comm_info;

TD_API td_status td_comm_describe(const td_comm *comm, td_comm_info *out);

/* ---- collectives ---- */

/** An unfinished collective. Leave its buffers alone from its call until you have waited for it. At most 1024
 * at a time. */
typedef struct td_work td_work;

/** Waits until the collective is done, then gives the handle back, also after an error. TD_RANK_FAILED,
 * TD_LIBRARY_ERROR. */
TD_API td_status td_work_wait(td_work *work);

/** Work that is queued on the device's current stream from now on waits for the collective; the host does not
 * wait. Gives the handle back. Later calls return the collective's errors. On the CPU as td_work_wait. */
TD_API td_status td_work_queue_wait(td_work *work);

/** *done: whether the collective has ended, with or without an error; the handle stays. With one rank it
 * waits for the collective's copy and for earlier work. */
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
 * If the device captures a graph (td_graph_begin), collectives on a GPU with a handle become part of it. The
 * handle is for td_work_queue_wait within the capture, and the ranks do not meet. Before each launch they
 * meet as in one call: all must launch graphs with the same collectives. A launch waits until at most one
 * earlier launch is unfinished, so that no host runs far ahead of its GPU. td_comm_watch does not see graphs.
 *
 * in is only read, unless it is part of out. Counts are of elements, 0 or more, the same on every rank. The
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

/** Sends a few bytes of host memory from every rank to every rank over the control connections, with any
 * backend: for figures and settings.
 *
 *   mine  [bytes]         in
 *   all   [ranks][bytes]  out
 *
 * A collective: every rank calls it, with the same bytes, 1 to 32768. TD_BAD_ARGUMENT: a NULL, bytes out of
 * range. TD_RANK_FAILED. TD_NO_MEMORY. */
TD_API td_status td_comm_exchange(td_comm *comm, const void *mine, size_t bytes, void *all);

/** The next call carries `state`, and ranks compare it as they compare counts, without another message. Use a
 * hash of all that must be the same on every rank when a step begins. Other calls carry 0. A call in a graph
 * carries nothing and leaves `state` to the next call; a launch of the graph is such a call.
 *
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_comm_carry(td_comm *comm, uint64_t state);

/* ---- windows: memory that GPUs of other ranks reach directly ---- */

/** Memory for collectives that go from GPU to GPU without copies. */
typedef struct td_comm_window td_comm_window;

/** Lets NCCL read and write memory of other ranks by NVLink, without copies. Its all-reduce, reduce-scatter
 * and all-gather then need far fewer SMs. Sums of 16-bit types are added in f32 and rounded once.
 *
 *   memory  [bytes]  of comm's device; the whole block of td_device_alloc around it becomes the window.
 *                    NULL: this rank has none, and then no rank has one
 *
 * A collective: every rank calls it. From then on, in calls with memory of the block:
 *
 *   - memory that other ranks read or write (in and out of all_reduce, in of reduce_scatter, out of
 *     all_gather) must lie at the same place of the same window on every rank, or in no window on any. Ranks
 *     compare this as they compare counts
 *   - in, out and each rank's part must begin at multiples of 16 bytes of the block, because NCCL 2.28 gives
 *     wrong results otherwise
 *
 * If direct access is impossible, *out is a window without effect. That is so on the CPU, with one rank,
 * without NVLink between the GPUs of one host, with NCCL before 2.27, for memory outside of blocks of
 * td_device_alloc of 2 MiB or more, and for memory at another place in the block of another rank.
 * td_comm_describe counts windows with effect. It also counts windows that NCCL does not use because of its
 * environment (NCCL_CUMEM_ENABLE=0).
 *
 * A window ends with its block or with the communicator. The handle is destroyed later.
 *
 * TD_BAD_ARGUMENT: comm or out is NULL, no bytes. TD_BAD_STATE: a graph is captured. TD_RANK_FAILED,
 * TD_LIBRARY_ERROR, TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_comm_window_create(td_comm *comm, const void *memory, size_t bytes, td_comm_window **out);

/** Waits for this rank's unfinished collectives. All ranks must destroy the window, or free its block, before
 * the next call with that memory. The memory is given back when all have done so. A graph with calls in the
 * window can no longer be launched (TD_BAD_STATE). If a block has several windows, the last one ends it.
 * During a capture the window stays until the communicator ends. Accepts NULL. */
TD_API void td_comm_window_destroy(td_comm_window *window);

/* ---- when they ran ---- */

/** A collective that was watched. */
typedef struct td_comm_span {
    const char *call; /* "all_reduce", "reduce_scatter", "all_gather" or "broadcast" */
    int64_t bytes;    /* of `count` elements; of reduce_scatter and all_gather the parts of all ranks */
    int64_t begin_ns, end_ns; /* td_clock_ns(). On a CPU it begins when all ranks have called; on a GPU when
                               * its kernel may run, which may then wait for the other ranks */
} td_comm_span;

/** Watches the first `capacity` collectives with elements from now on, and forgets earlier spans. 0: none.
 * TD_BAD_ARGUMENT: a NULL, a capacity below 0. TD_BAD_STATE: a collective is unfinished. TD_NO_MEMORY,
 * TD_LIBRARY_ERROR: nothing is watched then. */
TD_API td_status td_comm_watch(td_comm *comm, int64_t capacity);

/** The watched collectives in the order of the calls. The spans are valid until the next td_comm_watch.
 * TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: a collective is unfinished, or there were more than `capacity`.
 * TD_LIBRARY_ERROR. */
TD_API td_status td_comm_watched(td_comm *comm, const td_comm_span **spans, int64_t *count);

TD_END_DECLS

#endif
