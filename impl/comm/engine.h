/** Internal to impl/comm/: what a library of collectives on the CPU implements.
 *
 * MPI and Gloo are modules of their own, libtandem_mpi.so and libtandem_gloo.so, which libtandem loads when
 * a communicator first needs one. Linked into libtandem instead, libmpi (with hwloc, libevent and PMIx
 * behind it) and libgloo (with hiredis and libibverbs) would be loaded by every program that calls any
 * function of ours, and one built where they are would not start where they are not. A module sees nothing
 * of libtandem, so that it goes with the shared library as with the static one: it answers with 0, or with
 * a text. */
#ifndef TD_COMM_ENGINE_H
#define TD_COMM_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TD_ENGINE_VERSION = 1, TD_ENGINE_TEXT = 320 };

/** By the numbers of td_call_kind, td_comm_type and td_reduction, whose average is no business of an
 * engine's. */
enum { TD_ENGINE_ALL_REDUCE = 1, TD_ENGINE_REDUCE_SCATTER, TD_ENGINE_ALL_GATHER, TD_ENGINE_BROADCAST };
enum { TD_ENGINE_F64 = 0, TD_ENGINE_F32, TD_ENGINE_F16, TD_ENGINE_BF16, TD_ENGINE_I64 };
enum { TD_ENGINE_SUM = 0, TD_ENGINE_MAX = 2 };

typedef struct td_engine_setup {
    int rank, ranks;
    const char *ip; /* by which the other ranks reach this one */
    double seconds; /* for open, and for the slowest call */
    /* Values from rank to rank, by keys that are used once; 0, or -1 when the time is over or a rank failed.
     * get returns how many bytes came. */
    int (*put)(void *user, const char *key, const void *data, size_t bytes);
    int64_t (*get)(void *user, const char *key, void *data, size_t room);
    void *user;
    char *library; /* [96], out: the library's name and version */
} td_engine_setup;

/** As td_comm_all_reduce and so on; count is above 0. */
typedef struct td_engine_call {
    int kind, type, reduction, root;
    const void *in;
    void *out;
    int64_t count;
    int64_t number;
    double seconds;           /* within which it returns, done or not */
    bool (*stop)(void *user); /* whether it is to return at once, as far as the library lets it */
    void *user;
} td_engine_call;

typedef struct td_engine {
    int version;
    /** 0, or -1 with the reason in text [TD_ENGINE_TEXT]. All three are called by one thread. */
    int (*open)(const td_engine_setup *setup, void **state, char *text);
    int (*run)(void *state, const td_engine_call *call, char *text);
    /** Frees the state. Not orderly: calls no function that other ranks have to join. */
    void (*close)(void *state, bool orderly);
} td_engine;

/** The one symbol of a module. */
#define TD_ENGINE_SYMBOL "td_engine_of_module"
const td_engine *td_engine_of_module(void) __attribute__((visibility("default")));

/** out[i] = a[i] combined with b[i], in f32 for f16 and bf16, rounded to the type. out may be a or b. */
void td_engine_combine(int type, int reduction, int64_t count, const void *a, const void *b, void *out);

/** Bytes of an element. */
size_t td_engine_size(int type);

#endif
