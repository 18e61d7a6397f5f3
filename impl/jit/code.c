#include "jit/code.h"

#include "base/check.h"
#include "base/clock.h"
#include "device/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Part of every key. Change it if code with the same source is called differently. */
#define GENERATOR "tandem jit 2"

/** The loaded code of one pass for one shape. */
typedef struct entry {
    td_attention_shape shape; /* from zeroed memory, so that memcmp compares it; batch and heads are 0 */
    bool backward;
    void *loaded;
    struct entry *next;
} entry;

/** The jit state of a device. */
typedef struct jit {
    td_device *dev;
    char *compiler, *cache, *scratch;
    td_jit_info info;
    const td_toolchain *toolchain; /* NULL before the first use */
    void *state;
    const char *identity;
    entry *entries; /* the most recently used first */
} jit;

static void jit_destroy(void *state)
{
    jit *const j = state;

    while (j->entries) {
        entry *const first = j->entries;

        j->entries = first->next;
        j->toolchain->unload(j->dev, first->loaded);
        free(first);
    }
    if (j->toolchain)
        j->toolchain->close(j->state);
    free(j->compiler);
    free(j->cache);
    free(j->scratch);
    free(j);
}

static td_status jit_of(td_device *dev, jit **out)
{
    static const char key;
    td_status status = TD_OK;
    jit *j = td_device_state(dev, &key);

    if (!j) {
        j = calloc(1, sizeof *j);
        TD_FAIL_IF(!j, TD_NO_MEMORY, "no memory for compiled code");
        j->dev = dev;
        status = td_device_keep(dev, &key, j, jit_destroy);
        if (status != TD_OK) {
            free(j);
            goto cleanup;
        }
    }
    *out = j;
cleanup:
    return status;
}

td_status td_jit_configure(td_device *dev, const td_jit_options *options)
{
    td_status status = TD_OK;
    char *compiler = NULL, *cache = NULL, *scratch = NULL;
    jit *j = NULL;

    TD_NOT_NULL(dev, options);
    TD_CHECK(!options->compiler || *options->compiler, "compiler is empty, needs a name, or NULL for cc");
    TD_CHECK(!options->cache || *options->cache, "cache is empty, needs a folder, or NULL for none");
    TD_CHECK(!options->scratch || *options->scratch, "scratch is empty, needs a folder, or NULL for /tmp");
    TD_TRY(jit_of(dev, &j));
    TD_FAIL_IF(j->toolchain, TD_BAD_STATE,
               "%s has its compiler already: call td_jit_configure before the first use",
               td_device_name(dev));
    compiler = options->compiler ? strdup(options->compiler) : NULL;
    cache = options->cache ? strdup(options->cache) : NULL;
    scratch = options->scratch ? strdup(options->scratch) : NULL;
    TD_FAIL_IF((options->compiler && !compiler) || (options->cache && !cache) ||
                   (options->scratch && !scratch),
               TD_NO_MEMORY, "no memory for the options of compiled code");
    free(j->compiler);
    free(j->cache);
    free(j->scratch);
    j->compiler = compiler;
    j->cache = cache;
    j->scratch = scratch;
    compiler = cache = scratch = NULL;
cleanup:
    free(compiler);
    free(cache);
    free(scratch);
    return status;
}

td_status td_jit_info_of(td_device *dev, td_jit_info *out)
{
    td_status status = TD_OK;
    jit *j = NULL;

    TD_NOT_NULL(dev, out);
    TD_TRY(jit_of(dev, &j));
    *out = j->info;
cleanup:
    return status;
}

static double ms_since(int64_t start_ns)
{
    return (double)(td_clock_ns() - start_ns) / 1e6;
}

static td_status open_toolchain(jit *j, const td_toolchain *toolchain)
{
    const td_jit_options options = {.compiler = j->compiler, .cache = j->cache, .scratch = j->scratch};
    const int64_t start = td_clock_ns();
    td_status status = TD_OK;

    if (j->toolchain)
        return TD_OK;
    TD_TRY(toolchain->open(j->dev, &options, &j->state, &j->identity, j->info.compiler));
    j->toolchain = toolchain;
    j->info.find_ms = ms_since(start);
cleanup:
    return status;
}

/** Stores the last error, and what is done instead, in info.note. */
static void note(jit *j, const char *instead)
{
    snprintf(j->info.note, sizeof j->info.note, "%.200s; %s", td_last_error(), instead);
}

/** Loads an entry of the folder; false: there is none, or it cannot be used. */
static bool load_entry(jit *j, const char *key, bool backward, void **loaded)
{
    const int64_t start = td_clock_ns();
    td_code code = {NULL, 0};
    td_found found = td_store_read(j->cache, key, &code);

    if (found == TD_FOUND && j->toolchain->load(j->dev, &code, backward, loaded) != TD_OK)
        found = TD_FOUND_BAD;
    td_code_free(&code);
    if (found == TD_FOUND_BAD) {
        j->info.rejected++;
        note(j, "it is compiled again");
    }
    j->info.load_ms += ms_since(start);
    j->info.loaded += found == TD_FOUND;
    return found == TD_FOUND;
}

static td_status compile(jit *j, const char *key, const char *source, bool backward, void **loaded)
{
    const int64_t start = td_clock_ns();
    td_status status = TD_OK;
    td_code code = {NULL, 0};

    TD_TRY(j->toolchain->compile(j->state, source, &code));
    TD_TRY(j->toolchain->load(j->dev, &code, backward, loaded));
    j->info.compile_ms += ms_since(start);
    j->info.compiled++;
    if (j->cache && td_store_write(j->cache, key, &code) != TD_OK)
        note(j, "the code is only in memory");
cleanup:
    td_code_free(&code);
    return status;
}

static td_status make(jit *j, const char *source, bool backward, void **loaded)
{
    td_status status = TD_OK;
    char *key = NULL;

    if (asprintf(&key, GENERATOR "\n%s\n%s", j->identity, source) < 0) {
        key = NULL;
        status = td_fail(TD_NO_MEMORY, "no memory for the key of compiled code");
        goto cleanup;
    }
    if (!j->cache || !load_entry(j, key, backward, loaded))
        TD_TRY(compile(j, key, source, backward, loaded));
cleanup:
    free(key);
    return status;
}

/** Copies field by field into zeroed memory, so that padding bytes do not make equal shapes differ. */
static td_attention_shape constants_of(const td_attention_shape *shape)
{
    td_attention_shape s;

    memset(&s, 0, sizeof s);
    s.seq = shape->seq, s.seq_k = shape->seq_k, s.head_dim = shape->head_dim;
    s.dtype = shape->dtype, s.causal = shape->causal, s.tf32 = shape->tf32;
    s.mask = shape->causal ? shape->mask : TD_MASK_INF;
    s.scale = shape->scale;
    s.o_bshd = shape->o_bshd;
    return s;
}

td_status td_code_of(td_device *dev, const td_toolchain *toolchain, const td_attention_shape *shape,
                     bool backward, void **loaded)
{
    const td_attention_shape constants = constants_of(shape);
    td_status status = TD_OK;
    entry **link, *found = NULL;
    char *source = NULL;
    jit *j = NULL;

    TD_TRY(jit_of(dev, &j));
    for (link = &j->entries; *link; link = &(*link)->next)
        if ((*link)->backward == backward && memcmp(&(*link)->shape, &constants, sizeof constants) == 0)
            break;
    if (*link) {
        found = *link;
        *link = found->next;
    } else {
        TD_TRY(open_toolchain(j, toolchain));
        found = calloc(1, sizeof *found);
        source = toolchain->write(&constants, backward);
        TD_FAIL_IF(!found || !source, TD_NO_MEMORY, "no memory for the source of compiled code");
        found->shape = constants;
        found->backward = backward;
        TD_TRY(make(j, source, backward, &found->loaded));
    }
    found->next = j->entries;
    j->entries = found;
    *loaded = found->loaded;
    found = NULL;
cleanup:
    free(found);
    free(source);
    return status;
}
