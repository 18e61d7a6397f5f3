/** Internal to impl/comm/: the functions of a collectives library on the CPU.
 *
 * MPI and Gloo are modules of their own, libtandem_mpi.so and libtandem_gloo.so. libtandem loads a module
 * when a communicator first needs it. If they were linked into libtandem, every program would load libmpi
 * (with hwloc, libevent and PMIx) and libgloo (with hiredis and libibverbs), and would not start on machines
 * without them. A module uses no symbol of libtandem, so it works with the shared and with the static
 * library. Its functions return 0, or -1 with a text. */
#ifndef TD_COMM_ENGINE_H
#define TD_COMM_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TD_ENGINE_VERSION = 1, TD_ENGINE_TEXT = 320 };

/** The numbers of td_call_kind, td_comm_type and td_reduction. An engine gets no averages: host.c scales
 * sums. */
enum { TD_ENGINE_ALL_REDUCE = 1, TD_ENGINE_REDUCE_SCATTER, TD_ENGINE_ALL_GATHER, TD_ENGINE_BROADCAST };
enum { TD_ENGINE_F64 = 0, TD_ENGINE_F32, TD_ENGINE_F16, TD_ENGINE_BF16, TD_ENGINE_I64 };
enum { TD_ENGINE_SUM = 0, TD_ENGINE_MAX = 2 };

typedef struct td_engine_setup {
    int rank, ranks;
    const char *ip; /* this rank's IP address for the other ranks */
    double seconds; /* limit for open */
    /* Send values to other ranks and receive them; each key is used once. put: 0, or -1 after an error. get:
     * the number of bytes, or -1 if the time is over or a rank failed. */
    int (*put)(void *user, const char *key, const void *data, size_t bytes);
    int64_t (*get)(void *user, const char *key, void *data, size_t room);
    void *user;
    char *library; /* out [96]: the library's name and version */
} td_engine_setup;

/** As td_comm_all_reduce and so on; count is above 0. */
typedef struct td_engine_call {
    int kind, type, reduction, root;
    const void *in;
    void *out;
    int64_t count;
    int64_t number;
    double seconds;           /* the call returns within this time, done or not */
    bool (*stop)(void *user); /* true: return as soon as the library allows */
    void *user;
} td_engine_call;

typedef struct td_engine {
    int version;
    /** All three are called by one thread. 0, or -1 with the reason in text [TD_ENGINE_TEXT]. */
    int (*open)(const td_engine_setup *setup, void **state, char *text);
    int (*run)(void *state, const td_engine_call *call, char *text);
    /** Frees the state. orderly false: calls no function that needs the other ranks. */
    void (*close)(void *state, bool orderly);
} td_engine;

/** The only exported symbol of a module. */
#define TD_ENGINE_SYMBOL "td_engine_of_module"
const td_engine *td_engine_of_module(void) __attribute__((visibility("default")));

/** out[i] = a[i] combined with b[i], in f32 for f16 and bf16, rounded to the type. out may be a or b. */
void td_engine_combine(int type, int reduction, int64_t count, const void *a, const void *b, void *out);

/** Bytes of an element. */
size_t td_engine_size(int type);

#endif
