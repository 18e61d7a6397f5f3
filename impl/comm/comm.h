/** Collectives among ranks: one interface over MPI and Gloo (host memory) and NCCL (GPU memory).
 *
 * A rank is a process with one device. Every rank of a communicator makes the same calls, with the same
 * count, type and reduction, in the same order. Before data moves, ranks compare the number and these
 * arguments of a call. So a call begins when the last rank has made it, on a GPU too. If a rank dies, is
 * late, or makes another call, every other rank gets an error that names it, before the call's deadline. Then
 * every later call of the communicator returns this error (TD_RANK_FAILED), and results of unfinished calls
 * are undefined.
 *
 * Each rank has a thread with a connection to rank 0's thread. The threads tell each other errors, and that
 * they are alive. If a process ends, its connection ends, so other ranks notice it within milliseconds. Ranks
 * of one host write the numbers and arguments of their calls into shared memory. Ranks of several hosts send
 * them over the connections.
 *
 * MPI, Gloo and NCCL are loaded when a communicator first needs them.
 *
 * Only one thread at a time may use a communicator, except that any thread may call td_comm_abort and
 * td_comm_check. */
#ifndef TD_COMM_COMM_H
#define TD_COMM_COMM_H

#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_comm td_comm;

typedef enum td_comm_backend { TD_COMM_MPI = 0, TD_COMM_GLOO, TD_COMM_NCCL } td_comm_backend;

/** "mpi", "gloo", "nccl"; NULL for any other value. */
TD_API const char *td_comm_backend_name(td_comm_backend backend);

/** *out = the backend with this name. TD_BAD_ARGUMENT: out or name is NULL, or the name is unknown; *out is
 * then unchanged. */
TD_API td_status td_comm_backend_parse(const char *name, td_comm_backend *out);

/** TD_UNSUPPORTED, naming the CMake option: this build lacks the backend. TD_BAD_ARGUMENT: not a
 * td_comm_backend. */
TD_API td_status td_comm_backend_check(td_comm_backend backend);

/** The type of elements. The floating-point types have the numbers of td_dtype. */
typedef enum td_comm_type {
    TD_COMM_F64 = 0,
    TD_COMM_F32 = 1,
    TD_COMM_F16 = 2,
    TD_COMM_BF16 = 3,
    TD_COMM_I64 = 4
} td_comm_type;

/** "f64", "f32", "f16", "bf16", "i64"; NULL for any other value. */
TD_API const char *td_comm_type_name(td_comm_type type);

/** The size of an element in bytes; 0 for any other value. */
TD_API size_t td_comm_type_size(td_comm_type type);

/** How elements are combined.
 *
 * TD_AVERAGE is the sum times 1 / ranks. The factor is rounded to f32 (f64: to f64), the result to the type.
 * NCCL's own average multiplies first, by a factor that is rounded to the type: in bf16 with 6 ranks its
 * result is 0.2 % too large. f16 ends at 65504, so the sum could overflow. Therefore each rank's f16 is first
 * divided by the smallest power of two >= ranks, and the sum is multiplied by power / ranks. So an average of
 * finite numbers is finite, but numbers below 2^-14 times that power lose their last bits. i64 has no
 * average.
 *
 * Sums of f16 and bf16 are rounded to the type at every addition; in windows (below) they are rounded once.
 * The library chooses the order of additions, which depends only on the count and the number of ranks. All
 * ranks get the same bits. TD_MAX of a NaN and a number may be either of them. */
typedef enum td_reduction { TD_SUM = 0, TD_AVERAGE, TD_MAX } td_reduction;

/** How the ranks find each other:
 *
 *   address    "host:port" at which rank 0 listens: an IP address means this interface, a host name all
 *              interfaces, "localhost" the loopback. IPv4 is tried before IPv6
 *   directory  rank 0 listens at a free port and writes its address into a file of this directory. All ranks
 *              must see the directory. The file is removed when all ranks are connected
 *   neither    if all ranks are on this host (local_ranks), they meet at an abstract socket with the name
 *              `run`. Otherwise they meet by MPI, whose launcher must have started the ranks
 *
 * Only one of address and directory may be set.
 *
 * Access. A peer must prove to rank 0 that it knows the run's name and a token of 128 bits; the token is not
 * sent. Rank 0 sends every peer a random number, and closes the connections of all that do not prove it;
 * they neither end nor delay a run. Rank 0 proves
 * the same to each rank. With a directory the token is random, in a file that only this user may read. With
 * MPI it is sent with the address. With `run` alone the operating system proves which user owns a process.
 * With an address the caller gives each rank `token`. Without a token, anybody who reaches the port and
 * guesses the run's name can join or end the run: a program should say so. A rank shares memory with rank 0
 * only if the system or a token proves who owns the memory.
 *
 * This protects only the control connections. MPI, Gloo and NCCL use other connections, which are neither
 * encrypted nor protected: use a network that you trust.
 *
 * To start, zero the struct, then set backend, rank and ranks. launch.h reads them from what a launcher set.
 * td_comm_open reads the strings; they may be freed when it returns. */
typedef struct td_comm_options {
    td_comm_backend backend;
    int32_t rank, ranks;   /* 0 <= rank < ranks <= 128 */
    int32_t local_ranks;   /* number of ranks on this host; 0: unknown, all ranks are assumed to be on it */
    const char *run;       /* name of this run: equal on its ranks, different from other runs; NULL: "run" */
    const char *directory; /* NULL: none */
    const char *address;   /* NULL: none */
    const char *token;     /* with address: 32 hexadecimal digits, secret; NULL: none */
    const char *nccl_host; /* NCCL only: the value of NCCL_HOSTID for this process; NULL: not set */
    /* NCCL only: minimum number of SMs for its kernels, up to TD_COMM_MOST_CTAS; 0: NCCL chooses. All
     * ranks use rank 0's value. Ignored if ranks are on several hosts, if rank 0 has nccl_host, or if no
     * NVLink connects rank 0's GPU to another GPU that it sees. */
    int32_t nccl_ctas;
    /* Limits in seconds, up to 1e6. */
    double open_seconds; /* of td_comm_open; other ranks wait 2 s more for rank 0's message; 0: 60 */
    double seconds;      /* of a collective, from its call or the end of the one before; 0: 30 */
    /* A call that waits for other ranks calls this function on its thread, a few times a second. `seconds`
     * is the time that the call has waited. `what` says the reason, such as "rank 1 has not come". If it
     * returns false, the call ends: it and the other ranks' calls return TD_RANK_FAILED. Must be valid
     * until td_comm_close. NULL: none */
    bool (*waiting)(void *user, double seconds, const char *what);
    void *user; /* waiting's first argument */
} td_comm_options;

enum { TD_COMM_MOST_RANKS = 128, TD_COMM_MOST_CTAS = 64, TD_COMM_WINDOW_ALIGNMENT = 16 };

/** Connects the ranks of a run; returns when all have come. dev must stay open until td_comm_close, which
 * frees *out. NCCL needs a CUDA device, the other backends need the CPU. A communicator of one rank copies,
 * and loads no library.
 *
 * NCCL: each rank needs its own GPU, unless the ranks have different values of NCCL_HOSTID. NCCL then treats
 * them as ranks of different hosts and uses the network: results are the same, times are not. NCCL reads that
 * variable; tandem reads no environment variables and needs nccl_host. nccl_ctas is for collectives during
 * other work: NCCL's own choice is the fastest without other work. NCCL_MIN_CTAS and NCCL_MAX_CTAS override
 * nccl_ctas.
 *
 * MPI: the first communicator starts MPI, and its close ends MPI. So a process can have only one MPI
 * communicator, unless the program itself started MPI (with MPI_THREAD_MULTIPLE).
 *
 * TD_BAD_ARGUMENT: a NULL, an option out of range, a device of another kind, an invalid token.
 * TD_UNSUPPORTED: the build lacks the backend. TD_LIBRARY_ERROR: the library cannot be loaded or started.
 * TD_IO_ERROR: the directory or the address cannot be used, or another run uses it. TD_RANK_FAILED: a rank
 * did not come in open_seconds, died, or has other options; the message names it. TD_NO_MEMORY. After an
 * error *out is NULL, and no thread, file or socket is left. One exception: if the library never returns from
 * its start (MPI_Init, if a rank died in it), its thread stays. */
TD_API td_status td_comm_open(td_device *dev, const td_comm_options *options, td_comm **out);

/** Ends the communicator; all ranks call it. It waits for calls and launched graphs, and until every rank
 * closes. Handles (td_work) become invalid. After an error it does not wait for other ranks, but may wait
 * until the deadline of a call inside the library. Accepts NULL. TD_RANK_FAILED, TD_LIBRARY_ERROR: the
 * communicator is freed anyway. TD_BAD_STATE, and nothing is freed: graphs with its collectives still
 * exist, which the caller destroys first; or this process is a child of fork(), where no collective works. */
TD_API td_status td_comm_close(td_comm *comm);

/** Makes the calls of all ranks return TD_RANK_FAILED with `reason` and this rank's number. Any thread may
 * call it. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_comm_abort(td_comm *comm, const char *reason);

/** TD_OK, or the communicator's first error, with its message. Any thread may call it. */
TD_API td_status td_comm_check(const td_comm *comm);

typedef struct td_comm_info {
    td_comm_backend backend;
    int32_t rank, ranks;
    int32_t local_rank, local_ranks; /* this rank's index among the ranks of this host; their number */
    int32_t hosts;
    char library[96];  /* "Open MPI v4.1.4", "NCCL 2.28.9"; "" with one rank */
    int32_t nccl_ctas; /* minimum number of SMs that NCCL was given; 0: none */
    int32_t windows;   /* number of windows with effect: td_comm_window_create */
} td_comm_info;

TD_API td_status td_comm_describe(const td_comm *comm, td_comm_info *out);

/* ---- collectives ---- */

/** A handle of an unfinished collective. Do not use its buffers until you have waited for it. At most 1024 at
 * a time. */
typedef struct td_work td_work;

/** Waits until the collective is done, then frees the handle, also after an error. TD_BAD_ARGUMENT: a NULL.
 * TD_BAD_STATE: the collective is part of a graph. TD_RANK_FAILED, TD_LIBRARY_ERROR. */
TD_API td_status td_work_wait(td_work *work);

/** Makes later work on the device's current stream wait for the collective; the host does not wait. Frees the
 * handle. Later calls return errors of the collective. On the CPU it is td_work_wait. */
TD_API td_status td_work_queue_wait(td_work *work);

/** *done = whether the collective has ended, with or without an error. The handle stays valid. With one rank
 * it waits for the collective's copy and for earlier work. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: the
 * collective is part of a graph. */
TD_API td_status td_work_test(td_work *work, bool *done);

/** The collectives.
 *
 *   all_reduce      in [count]         out [count]         out[i] of every rank = the reduction of all in[i]
 *   reduce_scatter  in [ranks][count]  out [count]         out of rank r = the reduction of all in[r]
 *   all_gather      in [count]         out [ranks][count]  out[r] of every rank = in of rank r
 *   broadcast       buffer [count]                         every rank gets root's buffer
 *   barrier                                                returns when every rank has called it
 *
 * In place: out may equal in (all_reduce) or in[rank] (reduce_scatter; the rest of in is then undefined). in
 * may equal out[rank] (all_gather).
 *
 * If work is NULL, the call returns when the collective is done. Otherwise it returns at once (with NCCL,
 * when every rank has made the call), and *work is a handle (NULL after an error), which td_work_wait or
 * td_work_queue_wait frees. You may wait for handles in any order. On a GPU the collective begins after
 * all earlier work on the device's current stream.
 *
 * If the device captures a graph (td_graph_begin), collectives on a GPU with a handle become part of it. Such
 * a handle is only for td_work_queue_wait during the capture, and the ranks are not compared then. They are
 * compared before each launch, as in one call: all ranks must launch graphs with the same collectives. A
 * launch waits until at most one earlier launch is unfinished, so the host queues at most two launches.
 * td_comm_watch does not see graphs.
 *
 * `in` is only read, unless it overlaps out. `count` is a number of elements, at least 0, and equal on every
 * rank. The memory is on the communicator's device, aligned to its elements.
 *
 * TD_BAD_ARGUMENT: a NULL with count above 0; a count below 0 or with more than 2^63 - 1 bytes; an invalid
 * enum value; buffers that overlap in another way than above; a root that is not a rank; an average of i64;
 * parts in a window that are not aligned to 16 bytes. TD_BAD_STATE: 1024 handles are unfinished; a call
 * without a handle during a capture; a graph would have calls in more than 64 windows.
 * TD_RANK_FAILED, TD_LIBRARY_ERROR. */
TD_API td_status td_comm_all_reduce(td_comm *comm, const void *in, void *out, int64_t count,
                                    td_comm_type type, td_reduction reduction, td_work **work);
TD_API td_status td_comm_reduce_scatter(td_comm *comm, const void *in, void *out, int64_t count,
                                        td_comm_type type, td_reduction reduction, td_work **work);
TD_API td_status td_comm_all_gather(td_comm *comm, const void *in, void *out, int64_t count,
                                    td_comm_type type, td_work **work);
TD_API td_status td_comm_broadcast(td_comm *comm, void *buffer, int64_t count, td_comm_type type,
                                   int32_t root, td_work **work);
TD_API td_status td_comm_barrier(td_comm *comm);

/** Sends up to 32768 bytes of host memory from every rank to every rank over the control connections, with
 * any backend. For settings and measured values.
 *
 *   mine  [bytes]         in
 *   all   [ranks][bytes]  out
 *
 * A collective: every rank calls it with the same `bytes`, 1 to 32768. TD_BAD_ARGUMENT: a NULL, bytes out of
 * range. TD_RANK_FAILED. TD_NO_MEMORY. */
TD_API td_status td_comm_exchange(td_comm *comm, const void *mine, size_t bytes, void *all);

/** What td_comm_carry compares. The message about a difference names the part. */
typedef enum td_comm_part {
    TD_COMM_LR = 0,
    TD_COMM_HYPERPARAMETERS, /* others, and what they are of */
    TD_COMM_GAIN,
    TD_COMM_BATCH,  /* batch and seq */
    TD_COMM_PAST,   /* seeds, restored files, earlier steps */
    TD_COMM_ORDER,  /* of parameters or modules */
    TD_COMM_PASSES, /* how many there were */
    TD_COMM_PARTS
} td_comm_part;

/** Attaches a state to the next call; ranks compare it together with the call's arguments, without another
 * message. A call in a graph does not use it up; the launch of the graph does.
 *
 *   parts  [TD_COMM_PARTS]  in  hashes of what must be equal on every rank when a step begins; 0: of nothing
 *
 * TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_comm_carry(td_comm *comm, const uint64_t *parts);

/* ---- windows: memory that GPUs of other ranks access directly ---- */

/** Memory for collectives that move data from GPU to GPU without copies. */
typedef struct td_comm_window td_comm_window;

/** Registers memory, so that NCCL reads and writes it by NVLink from other ranks, without copies. All-reduce,
 * reduce-scatter and all-gather then need far fewer SMs, and sums of 16-bit types are added in f32 and
 * rounded once.
 *
 *   memory  [bytes]  on comm's device; the whole block of td_device_alloc around it becomes the window.
 *                    NULL: this rank has no memory, and then no rank gets a window
 *
 *   td_comm_window_create(comm, gradients, bytes, &window);         on every rank
 *   td_comm_all_reduce(comm, gradients, gradients, ...);            uses the window, if it has effect
 *   td_comm_window_destroy(window);                                 on every rank
 *
 * A collective: every rank calls it. Later calls with memory of the block must follow two rules:
 *
 * - Other ranks access in and out of all_reduce, in of reduce_scatter, and out of all_gather. On every rank
 *   this memory must be at the same offset of the same window, or on every rank outside of windows. Ranks
 *   compare this together with the arguments.
 * - in, out and each rank's part must start at multiples of 16 bytes of the block, because NCCL 2.28 gives
 *   wrong results otherwise.
 *
 * If direct access is impossible, *out is a window without effect. Reasons: the CPU; one rank; no NVLink
 * between the GPUs of one host; NCCL before 2.27; memory outside of blocks of td_device_alloc of 2 MiB or
 * more; memory at another offset of its block on another rank. td_comm_describe counts the windows with
 * effect. It also counts windows that NCCL does not use because of its environment (NCCL_CUMEM_ENABLE=0).
 *
 * A window ends with its block or with the communicator; the handle must still be destroyed.
 *
 * TD_BAD_ARGUMENT: comm or out is NULL, bytes is 0. TD_BAD_STATE: a graph is being captured. TD_RANK_FAILED,
 * TD_LIBRARY_ERROR, TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_comm_window_create(td_comm *comm, const void *memory, size_t bytes, td_comm_window **out);

/** Waits for this rank's unfinished collectives and ends the window. All ranks must destroy it, or free its
 * block, before the next call with that memory. NCCL releases the memory when all ranks have done so. A
 * graph with calls in the window can no longer be launched (TD_BAD_STATE). If a block has several windows,
 * destroying the last one ends it. During a capture the window stays until
 * its block is freed, or until td_comm_close. Accepts NULL. */
TD_API void td_comm_window_destroy(td_comm_window *window);

/* ---- when collectives ran ---- */

/** One watched collective. */
typedef struct td_comm_span {
    const char *call;         /* "all_reduce", "reduce_scatter", "all_gather" or "broadcast" */
    int64_t bytes;            /* of `count` elements; reduce_scatter and all_gather: of all ranks' parts */
    int64_t begin_ns, end_ns; /* td_clock_ns(). On a CPU it begins when all ranks have called; on a GPU when
                               * its kernel may run, which may then wait for the other ranks */
} td_comm_span;

/** Records the times of the next `capacity` collectives with elements, and discards earlier ones. 0: records
 * none. TD_BAD_ARGUMENT: comm is NULL, capacity is below 0 or above 2^31 - 1. TD_BAD_STATE: a collective is
 * unfinished. TD_NO_MEMORY, TD_LIBRARY_ERROR: nothing is recorded then. */
TD_API td_status td_comm_watch(td_comm *comm, int64_t capacity);

/** *spans = the watched collectives in the order of their calls, valid until the next td_comm_watch; *count =
 * their number. TD_BAD_ARGUMENT: a NULL. TD_BAD_STATE: a collective is unfinished, or there were more than
 * `capacity`. TD_LIBRARY_ERROR. */
TD_API td_status td_comm_watched(td_comm *comm, const td_comm_span **spans, int64_t *count);

TD_END_DECLS

#endif
