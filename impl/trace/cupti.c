/* CUPTI's buffer callbacks have no user pointer, so a process can have only one session: `session`. Threads
 * of CUPTI hand over full buffers, which are only put on a list; they are read after the trace has ended.
 * Callbacks call neither CUDA nor CUPTI, except for the function that returns a node's id, and they hold no
 * lock during that call. */
#include "trace/cupti.h"

#include "base/check.h"
#include "base/grow.h"

#include <cupti.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* 13.0 Update 1 fixes a deadlock when kernel records are disabled, and a crash when buffers are flushed. */
enum { OLDEST = 130001 };

/* Buffers of 4 MiB, as in Kineto, hold about 20,000 kernels. Before 13.1 Update 1, CUPTI loses records beyond
 * 2 GB. */
enum { BUFFER_BYTES = 4 << 20, MOST_BUFFERS = 384 };

#define EACH_FUNCTION(f)                                                                                     \
    f(GetVersion) f(GetTimestamp) f(GetResultString) f(Subscribe_v2) f(Unsubscribe) f(EnableCallback)        \
        f(ActivityRegisterCallbacks) f(ActivityEnable) f(ActivityDisable) f(ActivityEnableRuntimeApi)        \
            f(ActivityEnableDriverApi) f(ActivityFlushAll) f(ActivityGetNextRecord)                          \
                f(ActivityGetNumDroppedRecords) f(ActivitySetAttribute) f(SetThreadIdType) f(GetGraphNodeId) \
                    f(GetCallbackName)
#define DECLARE(name) __typeof__(&cupti##name) name;
typedef struct library {
    EACH_FUNCTION(DECLARE)
} library;

typedef struct buffer {
    struct buffer *next;
    size_t valid;
} buffer; /* the records follow this struct */

/** A hash table from keys to ranges. Key 0 marks a free slot; at most half full. */
typedef struct table {
    td_cupti_node *slots;
    size_t capacity, count;
} table;

struct td_cupti {
    library lib;
    int version;
    CUpti_SubscriberHandle subscriber;
    _Atomic(buffer *) full;
    atomic_int buffers; /* number of buffers that CUPTI got */
    atomic_int refused; /* how often CUPTI asked for a buffer and got none */
    atomic_int_fast64_t range;

    pthread_t thread; /* the thread of the ranges */

    pthread_mutex_t lock; /* protects the members below */
    table captured;       /* ranges of captured nodes, by node id */
    table nodes;          /* ranges of nodes that instantiation cloned, by the node id in records */
    table launches;       /* ranges of launches, by correlation id */
    int64_t lost;
};

static _Atomic(td_cupti *) session;

static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET};

/* Calls that launch work. Records of all calls would be many times as many. */
static const CUpti_CallbackId runtime_calls[] = {CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_v13000,
                                                 CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_ptsz_v13000,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_ptsz_v7000,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernelExC_v11060,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaLaunchCooperativeKernel_v9000,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020,
                                                 CUPTI_RUNTIME_TRACE_CBID_cudaMemset_v3020};
static const CUpti_CallbackId driver_calls[] = {CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx_ptsz,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel,
                                                CUPTI_DRIVER_TRACE_CBID_cuLaunchCooperativeKernel_ptsz,
                                                CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch,
                                                CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch_ptsz};

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- the library ---- */

/** Tries a loaded library first (PyTorch brings its own), then the loader's search path, then the toolkit. */
static void *load(void)
{
    static const char soname[] = "libcupti.so.13";
    static const char *const folders[] = {TANDEM_CUPTI_FOLDER, "/usr/local/cuda/extras/CUPTI/lib64",
                                          "/usr/local/cuda/lib64", "/usr/local/cuda/lib"};
    void *loaded = dlopen(soname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

    if (!loaded)
        loaded = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; !loaded && i < COUNT(folders); i++) {
        char path[512];

        snprintf(path, sizeof path, "%s/%s", folders[i], soname);
        if (*folders[i])
            loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return loaded;
}

/** Finds all functions; false: `why` gives the reason. The library is never unloaded, because it has its own
 * threads. */
static bool load_library(library *out, char why[TD_CUPTI_WHY])
{
    void *loaded = load();

    if (!loaded) {
        const char *reason = dlerror();

        snprintf(why, TD_CUPTI_WHY,
                 "CUPTI cannot be loaded: %.160s (it comes with the CUDA toolkit, or with "
                 "PyPI's nvidia-cuda-cupti)",
                 reason ? reason : "no reason given");
        return false;
    }
#define LOAD(function)                                                                                       \
    *(void **)&out->function = dlsym(loaded, "cupti" #function);                                             \
    if (!out->function) {                                                                                    \
        snprintf(why, TD_CUPTI_WHY, "libcupti.so.13 has no cupti" #function);                                \
        return false;                                                                                        \
    }
    EACH_FUNCTION(LOAD)
    return true;
}

static const char *words_for(const library *lib, CUptiResult code)
{
    const char *words = NULL;

    return lib->GetResultString(code, &words) == CUPTI_SUCCESS && words ? words : "an error without a name";
}

/* ---- callbacks ---- */

static void CUPTIAPI give_buffer(uint8_t **out, size_t *size, size_t *most_records)
{
    td_cupti *cupti = atomic_load(&session);
    buffer *made = NULL;

    *out = NULL;
    *size = *most_records = 0;
    if (!cupti)
        return;
    if (atomic_fetch_add(&cupti->buffers, 1) < MOST_BUFFERS)
        made = calloc(1, sizeof *made + BUFFER_BYTES);
    if (!made) {
        atomic_fetch_add(&cupti->refused, 1);
        return;
    }
    *out = (uint8_t *)(made + 1);
    *size = BUFFER_BYTES;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *records, size_t size,
                                 size_t valid)
{
    td_cupti *cupti = atomic_load(&session);

    (void)context;
    (void)stream;
    (void)size;
    if (!records)
        return;
    buffer *full = (buffer *)(void *)records - 1;
    if (!cupti) {
        free(full);
        return;
    }
    full->valid = valid;
    full->next = atomic_load(&cupti->full);
    while (!atomic_compare_exchange_weak(&cupti->full, &full->next, full))
        ;
}

static td_cupti_node *slot_of(const table *t, uint64_t key)
{
    size_t at = (key * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (t->capacity - 1);

    while (t->slots[at].node != 0 && t->slots[at].node != key)
        at = (at + 1) & (t->capacity - 1);
    return &t->slots[at];
}

/** cupti->lock is held. */
static bool look_up(const table *t, uint64_t key, int64_t *range)
{
    const td_cupti_node *slot = t->capacity > 0 ? slot_of(t, key) : NULL;

    if (!slot || slot->node == 0)
        return false;
    *range = slot->range;
    return true;
}

/** cupti->lock is held. */
static void put(td_cupti *cupti, table *t, uint64_t key, int64_t range)
{
    if (2 * (t->count + 1) > t->capacity) {
        table larger = {.capacity = t->capacity > 0 ? 2 * t->capacity : 4096, .count = t->count};

        larger.slots = calloc(larger.capacity, sizeof *larger.slots);
        if (!larger.slots) {
            cupti->lost++;
            return;
        }
        for (size_t i = 0; i < t->capacity; i++)
            if (t->slots[i].node != 0)
                *slot_of(&larger, t->slots[i].node) = t->slots[i];
        free(t->slots);
        *t = larger;
    }
    td_cupti_node *slot = slot_of(t, key);
    t->count += slot->node == 0;
    *slot = (td_cupti_node){key, range};
}

/** Stores the range of a graph's node. A captured node belongs to the current range. A node that
 * instantiation clones belongs to the range of its original. CUPTI reports a clone twice: as a new node,
 * then as a clone. The two reports use different ids, and records contain the second one. If a captured
 * graph lost nodes, the first id of a clone may equal the second id of another clone. Therefore there are
 * two tables. */
static void on_node(td_cupti *cupti, bool cloned, const CUpti_GraphData *graph)
{
    int64_t range = cloned ? -1 : atomic_load(&cupti->range);
    uint64_t node, original;

    if (cupti->lib.GetGraphNodeId(graph->node, &node) != CUPTI_SUCCESS || node == 0)
        return;
    if (cloned &&
        (cupti->lib.GetGraphNodeId(graph->originalNode, &original) != CUPTI_SUCCESS || original == 0))
        return;
    pthread_mutex_lock(&cupti->lock);
    if (cloned && !look_up(&cupti->nodes, original, &range)) /* of a clone, or a captured node */
        (void)look_up(&cupti->captured, original, &range);
    if (range >= 0)
        put(cupti, cloned ? &cupti->nodes : &cupti->captured, node, range);
    pthread_mutex_unlock(&cupti->lock);
}

/** Stores the range of a launch: the current range, if the launch comes from the trace's thread. A runtime
 * call also causes a report of its driver call, with the same or another id. */
static void on_launch(td_cupti *cupti, const CUpti_CallbackData *call)
{
    const int64_t range = atomic_load(&cupti->range);

    if (call->callbackSite != CUPTI_API_ENTER || call->correlationId == 0 || range < 0 ||
        !pthread_equal(pthread_self(), cupti->thread))
        return;
    pthread_mutex_lock(&cupti->lock);
    put(cupti, &cupti->launches, call->correlationId, range);
    pthread_mutex_unlock(&cupti->lock);
}

static void CUPTIAPI on_callback(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                                 const void *data)
{
    if (domain == CUPTI_CB_DOMAIN_RUNTIME_API || domain == CUPTI_CB_DOMAIN_DRIVER_API)
        on_launch(user, data);
    else if (domain == CUPTI_CB_DOMAIN_RESOURCE &&
             (id == CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED || id == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED))
        on_node(user, id == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED,
                ((const CUpti_ResourceData *)data)->resourceDescriptor);
}

/* ---- open and close ---- */

/** Enables records and callbacks of these calls. */
static CUptiResult enable_calls(td_cupti *cupti, CUpti_CallbackDomain domain, const CUpti_CallbackId *calls,
                                size_t count)
{
    const library *lib = &cupti->lib;
    const bool runtime = domain == CUPTI_CB_DOMAIN_RUNTIME_API;
    CUptiResult code = CUPTI_SUCCESS;

    for (size_t i = 0; code == CUPTI_SUCCESS && i < count; i++) {
        code =
            runtime ? lib->ActivityEnableRuntimeApi(calls[i], 1) : lib->ActivityEnableDriverApi(calls[i], 1);
        if (code == CUPTI_SUCCESS)
            code = lib->EnableCallback(1, cupti->subscriber, domain, calls[i]);
    }
    return code;
}

static CUptiResult enable(td_cupti *cupti)
{
    const library *lib = &cupti->lib;
    CUptiResult code = CUPTI_SUCCESS;

    for (size_t i = 0; code == CUPTI_SUCCESS && i < COUNT(kinds); i++)
        code = lib->ActivityEnable(kinds[i]);
    if (code == CUPTI_SUCCESS)
        code = enable_calls(cupti, CUPTI_CB_DOMAIN_RUNTIME_API, runtime_calls, COUNT(runtime_calls));
    if (code == CUPTI_SUCCESS)
        code = enable_calls(cupti, CUPTI_CB_DOMAIN_DRIVER_API, driver_calls, COUNT(driver_calls));
    if (code == CUPTI_SUCCESS)
        code = lib->EnableCallback(1, cupti->subscriber, CUPTI_CB_DOMAIN_RESOURCE,
                                   CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED);
    if (code == CUPTI_SUCCESS)
        code = lib->EnableCallback(1, cupti->subscriber, CUPTI_CB_DOMAIN_RESOURCE,
                                   CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED);
    return code;
}

static void disable(td_cupti *cupti)
{
    const library *lib = &cupti->lib;

    for (size_t i = 0; i < COUNT(kinds); i++)
        (void)lib->ActivityDisable(kinds[i]);
    for (size_t i = 0; i < COUNT(runtime_calls); i++)
        (void)lib->ActivityEnableRuntimeApi(runtime_calls[i], 0);
    for (size_t i = 0; i < COUNT(driver_calls); i++)
        (void)lib->ActivityEnableDriverApi(driver_calls[i], 0);
}

/** Starts CUPTI; false: `why` gives the reason. Subscribes first, because that detects another tool; the
 * later calls would take over that tool's buffers. */
static bool start(td_cupti *cupti, char why[TD_CUPTI_WHY])
{
    const library *lib = &cupti->lib;
    char other[CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN + 1] = "";
    CUpti_SubscriberParams params = {.structSize = CUpti_SubscriberParams_STRUCT_SIZE,
                                     .subscriberName = "tandem",
                                     .oldSubscriberName = other,
                                     .oldSubscriberSize = CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN};
    uint32_t version = 0;
    uint8_t zeroed = 1;
    size_t zeroed_bytes = sizeof zeroed;
    CUptiResult code = lib->GetVersion(&version);

    cupti->version = (int)version;
    if (code == CUPTI_SUCCESS && version < OLDEST) {
        snprintf(why, TD_CUPTI_WHY, "CUPTI is version %u, needs at least %d (CUDA 13.0 Update 1)", version,
                 OLDEST);
        return false;
    }
    if (code == CUPTI_SUCCESS)
        code = lib->Subscribe_v2(&cupti->subscriber, on_callback, cupti, &params);
    if (code == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) {
        snprintf(why, TD_CUPTI_WHY,
                 "another profiler is attached%s%s: it uses CUPTI, which serves one at a time",
                 *other ? ": " : "", other);
        return false;
    }
    if (code != CUPTI_SUCCESS) {
        snprintf(why, TD_CUPTI_WHY, "CUPTI cannot be used here: %.160s (%d)", words_for(lib, code),
                 (int)code);
        return false;
    }
    /* Buffers come from calloc; otherwise CUPTI would clear them again, on the launching thread. */
    (void)lib->ActivitySetAttribute(CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER, &zeroed_bytes, &zeroed);
    (void)lib->SetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM); /* calls get their thread's id */
    code = lib->ActivityRegisterCallbacks(give_buffer, take_buffer);
    if (code == CUPTI_SUCCESS)
        code = enable(cupti);
    if (code != CUPTI_SUCCESS) {
        snprintf(why, TD_CUPTI_WHY, "CUPTI does not record: %.160s (%d)", words_for(lib, code), (int)code);
        disable(cupti);
        (void)lib->Unsubscribe(cupti->subscriber);
        return false;
    }
    return true;
}

static void free_buffers(td_cupti *cupti)
{
    buffer *next, *full = atomic_exchange(&cupti->full, NULL);

    for (; full; full = next) {
        next = full->next;
        free(full);
    }
}

static void destroy(td_cupti *cupti)
{
    free_buffers(cupti);
    pthread_mutex_destroy(&cupti->lock);
    free(cupti->captured.slots);
    free(cupti->nodes.slots);
    free(cupti->launches.slots);
    free(cupti);
}

td_status td_cupti_open(td_cupti **out, char why[TD_CUPTI_WHY])
{
    td_cupti *none = NULL, *cupti = calloc(1, sizeof *cupti);

    *out = NULL;
    *why = '\0';
    if (!cupti)
        return td_fail(TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *cupti);
    (void)pthread_mutex_init(&cupti->lock, NULL);
    atomic_store(&cupti->range, -1);
    cupti->thread = pthread_self();
    if (!load_library(&cupti->lib, why)) {
        destroy(cupti);
        return TD_OK;
    }
    if (!atomic_compare_exchange_strong(&session, &none, cupti)) {
        snprintf(why, TD_CUPTI_WHY, "another trace of this process is running: CUPTI serves one at a time");
        destroy(cupti);
        return TD_OK;
    }
    if (!start(cupti, why)) {
        atomic_store(&session, NULL);
        destroy(cupti);
        return TD_OK;
    }
    *out = cupti;
    return TD_OK;
}

void td_cupti_close(td_cupti *cupti)
{
    if (!cupti)
        return;
    disable(cupti);
    (void)cupti->lib.ActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    (void)cupti->lib.Unsubscribe(cupti->subscriber);
    atomic_store(&session, NULL);
    destroy(cupti);
}

int td_cupti_version(const td_cupti *cupti)
{
    return cupti->version;
}

int64_t td_cupti_now(const td_cupti *cupti)
{
    uint64_t now = 0;

    (void)cupti->lib.GetTimestamp(&now);
    return (int64_t)now;
}

void td_cupti_enter(td_cupti *cupti, int64_t range)
{
    atomic_store(&cupti->range, range);
}

/* ---- records ---- */

/** The log that is being filled, and the capacities of its arrays. */
typedef struct reader {
    td_cupti *cupti;
    td_names *names;
    td_cupti_log *log;
    int64_t activity_room, other_room, call_room;
} reader;

/** Adds an activity and sets its name and times. Times of 0 mean that CUPTI lost them. NULL: it was not
 * added. */
static td_trace_activity *add_activity(reader *r, td_trace_kind kind, const char *name, uint64_t begin,
                                       uint64_t end, uint32_t other)
{
    td_cupti_log *log = r->log;

    if (begin == 0 || end == 0) {
        log->without_times++;
        return NULL;
    }
    const char *kept = td_names_keep(r->names, name ? name : "a kernel without a name");
    if (!kept ||
        !td_grow(&log->activities, log->activity_count, &r->activity_room, 8192, sizeof *log->activities) ||
        !td_grow(&log->others, log->activity_count, &r->other_room, 8192, sizeof *log->others)) {
        log->dropped++;
        return NULL;
    }
    log->others[log->activity_count] = other;
    td_trace_activity *added = &log->activities[log->activity_count++];
    *added = (td_trace_activity){.name = kept,
                                 .kind = kind,
                                 .range = -1,
                                 .step = -1,
                                 .call = -1,
                                 .begin_ns = (int64_t)begin,
                                 .end_ns = (int64_t)end};
    return added;
}

/* All kinds of records have these fields. */
#define TAKE_IDS(added, record)                                                                              \
    ((added)->device = (record)->deviceId, (added)->context = (record)->contextId,                           \
     (added)->stream = (record)->streamId, (added)->correlation = (record)->correlationId,                   \
     (added)->graph = (record)->graphId, (added)->node = (record)->graphNodeId)

static void read_kernel(reader *r, const CUpti_ActivityKernel10 *record)
{
    td_trace_activity *added = add_activity(r, TD_TRACE_KERNEL, record->name, record->start, record->end, 0);

    if (!added)
        return;
    TAKE_IDS(added, record);
    added->grid[0] = record->gridX;
    added->grid[1] = record->gridY;
    added->grid[2] = record->gridZ;
    added->block[0] = record->blockX;
    added->block[1] = record->blockY;
    added->block[2] = record->blockZ;
    added->cluster[0] = (int32_t)record->clusterX;
    added->cluster[1] = (int32_t)record->clusterY;
    added->cluster[2] = (int32_t)record->clusterZ;
    added->registers = record->registersPerThread;
    added->static_shared = record->staticSharedMemory;
    added->dynamic_shared = record->dynamicSharedMemory;
}

/** Names as in Nsight Systems. */
static const char *name_of_copy(uint8_t kind)
{
    switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
        return "[CUDA memcpy Host-to-Device]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
        return "[CUDA memcpy Device-to-Host]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
        return "[CUDA memcpy Device-to-Device]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
        return "[CUDA memcpy Peer-to-Peer]";
    default:
        return "[CUDA memcpy]";
    }
}

static void read_call(reader *r, const CUpti_ActivityAPI *record)
{
    td_cupti_log *log = r->log;
    const CUpti_CallbackDomain domain = record->kind == CUPTI_ACTIVITY_KIND_RUNTIME
                                            ? CUPTI_CB_DOMAIN_RUNTIME_API
                                            : CUPTI_CB_DOMAIN_DRIVER_API;
    const char *name = NULL;

    if (r->cupti->lib.GetCallbackName(domain, record->cbid, &name) != CUPTI_SUCCESS || !name)
        name = "CUDA";
    name = td_names_keep(r->names, name);
    if (!name || !td_grow(&log->calls, log->call_count, &r->call_room, 8192, sizeof *log->calls)) {
        log->dropped++;
        return;
    }
    log->calls[log->call_count++] = (td_trace_call){.name = name,
                                                    .begin_ns = (int64_t)record->start,
                                                    .end_ns = (int64_t)record->end,
                                                    .correlation = record->correlationId,
                                                    .thread = record->threadId};
}

static void read_record(reader *r, const CUpti_Activity *record)
{
    td_trace_activity *added;

    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
    case CUPTI_ACTIVITY_KIND_KERNEL:
        read_kernel(r, (const void *)record);
        break;
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy6 *copy = (const void *)record;
        added = add_activity(r, TD_TRACE_COPY, name_of_copy(copy->copyKind), copy->start, copy->end,
                             copy->runtimeCorrelationId);
        if (added)
            TAKE_IDS(added, copy), added->bytes = (int64_t)copy->bytes;
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
        const CUpti_ActivityMemcpyPtoP4 *copy = (const void *)record;
        added = add_activity(r, TD_TRACE_COPY, "[CUDA memcpy Peer-to-Peer]", copy->start, copy->end, 0);
        if (added)
            TAKE_IDS(added, copy), added->bytes = (int64_t)copy->bytes;
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
        const CUpti_ActivityMemset4 *fill = (const void *)record;
        added = add_activity(r, TD_TRACE_FILL, "[CUDA memset]", fill->start, fill->end, 0);
        if (added)
            TAKE_IDS(added, fill), added->bytes = (int64_t)fill->bytes;
        break;
    }
    case CUPTI_ACTIVITY_KIND_RUNTIME:
    case CUPTI_ACTIVITY_KIND_DRIVER:
        read_call(r, (const void *)record);
        break;
    default: /* a kind that was not enabled */
        break;
    }
}

static int by_node(const void *a, const void *b)
{
    const uint64_t x = ((const td_cupti_node *)a)->node, y = ((const td_cupti_node *)b)->node;

    return x < y ? -1 : x > y;
}

static td_status take_table(const table *t, td_cupti_node **out, int64_t *count)
{
    if (t->count == 0)
        return TD_OK;
    *out = calloc(t->count, sizeof **out);
    if (!*out)
        return td_fail(TD_NO_MEMORY, "no host memory for %zu launches", t->count);
    for (size_t i = 0; i < t->capacity; i++)
        if (t->slots[i].node != 0)
            (*out)[(*count)++] = t->slots[i];
    qsort(*out, t->count, sizeof **out, by_node);
    return TD_OK;
}

td_status td_cupti_take(td_cupti *cupti, td_names *names, td_cupti_log *log)
{
    reader r = {.cupti = cupti, .names = names, .log = log};
    const library *lib = &cupti->lib;
    td_status status = TD_OK;
    size_t dropped = 0;

    *log = (td_cupti_log){.activities = NULL};
    CUptiResult code = lib->ActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    for (const buffer *full = atomic_load(&cupti->full); full && code == CUPTI_SUCCESS; full = full->next) {
        CUpti_Activity *record = NULL;

        /* CUPTI only reads the buffer. */
        while ((code = lib->ActivityGetNextRecord((uint8_t *)(uintptr_t)(full + 1), full->valid, &record)) ==
               CUPTI_SUCCESS)
            read_record(&r, record);
        if (code == CUPTI_ERROR_MAX_LIMIT_REACHED) /* the end of the buffer */
            code = CUPTI_SUCCESS;
    }
    if (code == CUPTI_SUCCESS)
        code = lib->ActivityGetNumDroppedRecords(NULL, 0, &dropped);
    TD_FAIL_IF(code != CUPTI_SUCCESS, TD_LIBRARY_ERROR, "CUPTI failed: %s (%d)", words_for(lib, code),
               (int)code);
    log->dropped += (int64_t)dropped + cupti->lost;
    if (atomic_load(&cupti->refused) > 0 &&
        dropped == 0) /* CUPTI got no buffer, and does not report how many records it dropped */
        log->dropped++;
    TD_TRY(take_table(&cupti->nodes, &log->nodes, &log->node_count));
    TD_TRY(take_table(&cupti->launches, &log->launches, &log->launch_count));
cleanup:
    free_buffers(cupti);
    return status;
}
