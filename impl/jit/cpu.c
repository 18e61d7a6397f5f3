#include "attention/shape.h"
#include "base/check.h"
#include "base/file.h"
#include "base/format.h"
#include "device/listen.h"
#include "jit/code.h"
#include "jit/compiler.h"
#include "jit/passes.h"
#include "jit/templates.h"

#include <dlfcn.h>
#include <errno.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* MOST_TILE: most rows of a tile. GROUP: the widest vector, in floats; columns of tiles and rows of a head
 * are padded to it on every processor, so that sizes are known before compilation. MOST_PARTS: most threads
 * per head in backward; each has its own dQ. */
enum { MOST_TILE = 64, GROUP = 16, MOST_HEAD_DIM = 256, MOST_PARTS = 32 };
#define MOST_SEQ ((int64_t)1 << 30)

/** Tile sizes, which become constants of the source, and the sizes that follow from them, in floats. */
typedef struct layout {
    int64_t tile_q, tile_k, depth;
    int64_t query_tiles, key_tiles;
    int64_t rows, prepared;    /* per tile of queries: its dQ; its prepared data for backward */
    int64_t forward, backward; /* scratch per thread */
} layout;

/** One head; the same struct as in templates/cpu.c. */
typedef struct head {
    const void *q, *k, *v, *dout, *o_in;
    void *o, *dq, *dk, *dv;
    long long o_pitch;
    float *max, *inverse, *prepared, *partial;
    long long parts;
} head;

typedef void (*task)(const head *h, long long index, float *scratch);

/** Loaded code: the forward function, or the three functions of backward. */
typedef struct library {
    void *handle;
    int file; /* the loaded file; it stays open, so that no other file gets its name */
    task forward, prepare, backward, finish;
} library;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t parts_of(int64_t whole, int64_t part)
{
    return (whole + part - 1) / part;
}

static int64_t in_groups(int64_t count)
{
    return parts_of(count, GROUP) * GROUP;
}

/* Tiles of equal size, as near to MOST_TILE as the extents allow: 129 keys make three tiles of 43. */
static layout layout_of(const td_attention_shape *s)
{
    layout l = {.depth = in_groups(s->head_dim)};

    l.tile_q = in_groups(parts_of(s->seq, parts_of(s->seq, MOST_TILE)));
    l.tile_k = parts_of(s->seq_k, parts_of(s->seq_k, MOST_TILE));
    l.query_tiles = parts_of(s->seq, l.tile_q);
    l.key_tiles = parts_of(s->seq_k, l.tile_k);
    l.rows = l.depth * l.tile_q;
    l.prepared = 2 * s->head_dim * l.tile_q + 2 * l.rows + 3 * l.tile_q;
    const int64_t scores = l.tile_k * l.tile_q, keys = l.tile_k * l.depth;
    l.forward = 3 * l.tile_q + s->head_dim * l.tile_q + scores + l.rows + 2 * keys;
    l.backward = 2 * scores + 4 * keys;
    if (l.backward < s->head_dim * l.tile_q) /* prepare needs a tile of O */
        l.backward = s->head_dim * l.tile_q;
    return l;
}

/* ---- the source, the compiler, and loading ---- */

static char *write_source(const td_attention_shape *s, bool backward)
{
    const layout l = layout_of(s);

    return td_format("#define SEQ %" PRId64 "\n#define SEQ_K %" PRId64 "\n#define HEAD_DIM %" PRId64
                     "\n#define CAUSAL %d\n#define ADD_1E6 %d\n#define SCALE %a\n#define BF16 %d\n"
                     "#define TILE_Q %" PRId64 "\n#define TILE_K %" PRId64 "\n#define DEPTH %" PRId64
                     "\n#define BACKWARD %d\n#line 1 \"cpu.c\"\n%s",
                     s->seq, s->seq_k, s->head_dim, s->causal, s->mask == TD_MASK_ADD_1E6, (double)s->scale,
                     s->dtype == TD_BF16, l.tile_q, l.tile_k, l.depth, backward, td_jit_template_cpu);
}

static void close_compiler(void *state)
{
    td_compiler_deinit(state);
    free(state);
}

static td_status open_compiler(td_device *dev, const td_jit_options *options, void **state,
                               const char **identity, char description[160])
{
    td_status status = TD_OK;
    td_compiler *compiler = calloc(1, sizeof *compiler);

    (void)dev;
    TD_FAIL_IF(!compiler, TD_NO_MEMORY, "no memory for a compiler");
    TD_TRY(td_compiler_find(options->compiler ? options->compiler : "cc", options->scratch, compiler));
    snprintf(description, 160, "%.90s %.60s", compiler->path, compiler->version);
    *identity = compiler->identity;
    *state = compiler;
    compiler = NULL;
cleanup:
    free(compiler);
    return status;
}

static td_status compile(void *state, const char *source, td_code *out)
{
    return td_compiler_build(state, source, out);
}

static void unload(td_device *dev, void *loaded)
{
    library *const l = loaded;

    (void)dev;
    if (l->handle)
        dlclose(l->handle);
    if (l->file >= 0)
        close(l->file);
    free(l);
}

static td_status find_task(library *l, const char *name, task *out)
{
    *(void **)out = dlsym(l->handle, name);
    return *out ? TD_OK : td_fail(TD_LIBRARY_ERROR, "compiled code has no %s", name);
}

/** Loads the code from a file in memory. The cache file may have changed since it was checked, and a
 * shortened file would crash the program when it is read. */
static td_status load(td_device *dev, const td_code *code, bool backward, void **loaded)
{
    td_status status = TD_OK;
    library *l = calloc(1, sizeof *l);
    char path[48];
    int error;

    TD_FAIL_IF(!l, TD_NO_MEMORY, "no memory for compiled code");
    l->file = memfd_create("tandem-jit", MFD_CLOEXEC);
    error = l->file < 0 ? errno : td_file_write(l->file, (const char *)code->data, code->bytes);
    if (error != 0) {
        status = td_file_error("write", "compiled code to memory", error);
        goto cleanup;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", l->file);
    l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TD_FAIL_IF(!l->handle, TD_LIBRARY_ERROR, "compiled code cannot be loaded: %s", dlerror());
    if (backward) {
        TD_TRY(find_task(l, "td_jit_prepare", &l->prepare));
        TD_TRY(find_task(l, "td_jit_backward", &l->backward));
        TD_TRY(find_task(l, "td_jit_finish", &l->finish));
    } else {
        TD_TRY(find_task(l, "td_jit_forward", &l->forward));
    }
    *loaded = l;
    l = NULL;
cleanup:
    if (l)
        unload(dev, l);
    return status;
}

static const td_toolchain toolchain = {.open = open_compiler,
                                       .close = close_compiler,
                                       .write = write_source,
                                       .compile = compile,
                                       .load = load,
                                       .unload = unload};

/* ---- the passes ---- */

/** How a call is divided: the number of threads that it can use on this machine at any setting, and the
 * number of parts of a head's keys. Sums over parts are added in order, so bits do not depend on the number
 * of threads. */
typedef struct division {
    int64_t heads, threads, parts;
} division;

static division divide(const td_attention_shape *s, const layout *l)
{
    const int64_t processors = omp_get_num_procs();
    division d = {.heads = s->batch * s->heads};

    d.parts = least(least(parts_of(2 * processors, d.heads), l->key_tiles), MOST_PARTS);
    d.threads = processors;
    return d;
}

/** *forward, *backward = bytes of work: scratch of all threads; for backward also prepared data of all
 * queries and partial dQ. */
static td_status work_bytes(const td_attention_shape *s, const layout *l, int64_t *forward, int64_t *backward)
{
    const division d = divide(s, l);
    const int64_t element = (int64_t)sizeof(float);
    td_status status = TD_OK;
    int64_t scratch, prepared, partial;

    TD_TRY(td_product("bytes of forward_work", 3, (int64_t[]){d.threads, l->forward, element}, forward));
    TD_TRY(td_product("bytes of backward_work", 3, (int64_t[]){d.threads, l->backward, element}, &scratch));
    TD_TRY(td_product("bytes of backward_work", 4, (int64_t[]){d.heads, l->query_tiles, l->prepared, element},
                      &prepared));
    TD_TRY(td_product("bytes of backward_work", 5,
                      (int64_t[]){d.heads, d.parts, l->query_tiles, l->rows, element}, &partial));
    TD_CHECK(!__builtin_add_overflow(scratch, prepared, backward) &&
                 !__builtin_add_overflow(*backward, partial, backward),
             "bytes of backward_work are beyond 2^63 - 1");
cleanup:
    return status;
}

static td_status sizes(td_device *dev, const td_attention_shape *s, td_attention_sizes *out)
{
    const layout l = layout_of(s);
    td_status status = TD_OK;
    int64_t forward = 0, backward = 0;

    (void)dev;
    TD_FAIL_IF(s->seq > MOST_SEQ || s->seq_k > MOST_SEQ, TD_UNSUPPORTED,
               "seq is %" PRId64 " and seq_k %" PRId64 ", jit attention on the cpu goes up to 2^30", s->seq,
               s->seq_k);
    TD_FAIL_IF(s->head_dim > MOST_HEAD_DIM, TD_UNSUPPORTED,
               "head_dim is %" PRId64 ", jit attention on the cpu goes up to %d", s->head_dim, MOST_HEAD_DIM);
    TD_TRY(work_bytes(s, &l, &forward, &backward));
    *out = (td_attention_sizes){.saved = (size_t)(s->batch * s->heads * s->seq) * 2 * sizeof(float),
                                .forward_work = (size_t)forward,
                                .backward_work = (size_t)backward};
cleanup:
    return status;
}

/** The arguments of a call; head_of makes each head from them. */
typedef struct call {
    const td_attention_shape *s;
    layout l;
    division d;
    const char *q, *k, *v, *o_in, *dout;
    char *o, *dq, *dk, *dv;
    float *saved, *scratch, *prepared, *partial;
} call;

static head head_of(const call *c, int64_t index)
{
    const td_attention_shape *const s = c->s;
    const size_t element = td_dtype_size(s->dtype);
    const size_t query = (size_t)(index * s->seq * s->head_dim) * element;
    const size_t key = (size_t)(index * s->seq_k * s->head_dim) * element;
    const size_t o = (size_t)td_attention_o_start(s, index) * element;
    const int64_t rows = c->d.heads * s->seq;
    head h = {.q = c->q + query,
              .k = c->k + key,
              .v = c->v + key,
              .o_pitch = td_attention_o_pitch(s),
              .max = c->saved + index * s->seq,
              .inverse = c->saved + rows + index * s->seq};

    if (!c->dout) {
        h.o = c->o + o;
        return h;
    }
    h.o_in = c->o_in + o;
    h.dout = c->dout + o;
    h.dq = c->dq + query;
    h.dk = c->dk + key;
    h.dv = c->dv + key;
    h.parts = c->d.parts;
    h.prepared = c->prepared + index * c->l.query_tiles * c->l.prepared;
    h.partial = c->partial + index * c->d.parts * c->l.query_tiles * c->l.rows;
    return h;
}

/** Runs a task for each of `count` indices of every head. reversed: starts with the last index, because with
 * a causal mask the last tiles of queries have the most keys; short tasks at the end balance the threads. */
static void run(const call *c, task one, int64_t count, int64_t scratch, bool reversed)
{
    const int64_t all = c->d.heads * count;
    const int threads = (int)least(least(td_cpu_threads(), c->d.threads), all);

#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < all; i++) {
        const head h = head_of(c, i / count);

        one(&h, reversed ? count - 1 - i % count : i % count, c->scratch + omp_get_thread_num() * scratch);
    }
}

static td_status forward(td_device *dev, const td_attention_shape *s, void *code, const void *q,
                         const void *k, const void *v, void *o, void *saved, void *work)
{
    call c = {.s = s, .l = layout_of(s), .q = q, .k = k, .v = v, .o = o, .saved = saved, .scratch = work};
    td_status status = TD_OK;
    const library *const l = code;

    c.d = divide(s, &c.l);
    TD_TRY(td_attention_begin(dev, "jit_forward", s, false));
    run(&c, l->forward, c.l.query_tiles, c.l.forward, true);
    td_device_end_operation(dev);
cleanup:
    return status;
}

static td_status backward(td_device *dev, const td_attention_shape *s, void *code, const void *q,
                          const void *k, const void *v, const void *o, const void *dout, const void *saved,
                          void *dq, void *dk, void *dv, void *work)
{
    call c = {.s = s,
              .l = layout_of(s),
              .q = q,
              .k = k,
              .v = v,
              .o_in = o,
              .dout = dout,
              .dq = dq,
              .dk = dk,
              .dv = dv,
              .saved = (float *)(uintptr_t)saved,
              .scratch = work};
    td_status status = TD_OK;
    const library *const l = code;

    c.d = divide(s, &c.l);
    c.prepared = c.scratch + c.d.threads * c.l.backward;
    c.partial = c.prepared + c.d.heads * c.l.query_tiles * c.l.prepared;
    TD_TRY(td_attention_begin(dev, "jit_backward", s, true));
    run(&c, l->prepare, c.l.query_tiles, c.l.backward, false);
    run(&c, l->backward, c.d.parts, c.l.backward, false);
    run(&c, l->finish, c.l.query_tiles, c.l.backward, false);
    td_device_end_operation(dev);
cleanup:
    return status;
}

const td_jit_passes td_jit_cpu = {.traits = {.saved = "max_sum",
                                             .saved_floats = 2,
                                             .skips_masked = true,
                                             .rebuilds_scores = true,
                                             .dtypes = 1 << TD_F32 | 1 << TD_BF16},
                                  .device = "the cpu",
                                  .dtypes = "f32 and bf16",
                                  .sizes = sizes,
                                  .toolchain = &toolchain,
                                  .forward = forward,
                                  .backward = backward};
