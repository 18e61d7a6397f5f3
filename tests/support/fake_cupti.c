#include "support/fake_cupti.h"

#include <stdlib.h>
#include <string.h>

static fake_cupti fake;
static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static CUpti_CallbackFunc hear;
static void *hearer;
static uint8_t *buffer;
static size_t room, used;

#define EXPORT __attribute__((visibility("default")))

static void give_back(void)
{
    if (buffer)
        complete(NULL, 0, buffer, room, used);
    buffer = NULL;
    room = used = 0;
}

static bool put(const void *record, size_t bytes)
{
    size_t most;

    if (buffer && used + bytes > room)
        give_back();
    if (!buffer)
        request(&buffer, &room, &most);
    if (!buffer)
        return false;
    memcpy(buffer + used, record, bytes);
    used += bytes;
    return true;
}

static void node(uint64_t id, uint64_t original)
{
    const CUpti_GraphData graph = {.node = (CUgraphNode)(uintptr_t)id,
                                   .originalNode = (CUgraphNode)(uintptr_t)original};
    const CUpti_ResourceData resource = {.resourceDescriptor = (void *)&graph};

    hear(hearer, CUPTI_CB_DOMAIN_RESOURCE,
         original ? CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED : CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, &resource);
}

static void launch(CUpti_CallbackId id, uint32_t correlation)
{
    CUpti_CallbackData call = {.callbackSite = CUPTI_API_ENTER, .correlationId = correlation};

    hear(hearer, CUPTI_CB_DOMAIN_RUNTIME_API, id, &call);
    call.callbackSite = CUPTI_API_EXIT;
    hear(hearer, CUPTI_CB_DOMAIN_RUNTIME_API, id, &call);
}

EXPORT fake_cupti *fake_cupti_reset(void)
{
    fake = (fake_cupti){.version = 130001, .now = 1000, .put = put, .node = node, .launch = launch};
    return &fake;
}

/* ---- CUPTI ---- */

EXPORT CUptiResult cuptiGetVersion(uint32_t *version)
{
    *version = fake.version;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetTimestamp(uint64_t *timestamp)
{
    *timestamp = fake.now++;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetResultString(CUptiResult result, const char **str)
{
    *str = "CUPTI_ERROR_OF_THE_FAKE";
    return result == CUPTI_ERROR_UNKNOWN ? CUPTI_ERROR_INVALID_PARAMETER : CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc callback,
                                     void *userdata, CUpti_SubscriberParams *params)
{
    if (fake.subscribes != CUPTI_SUCCESS) {
        if (fake.other && params && params->oldSubscriberName)
            strncpy(params->oldSubscriberName, fake.other, params->oldSubscriberSize);
        return fake.subscribes;
    }
    fake.subscriptions++;
    hear = callback;
    hearer = userdata;
    *subscriber = (CUpti_SubscriberHandle)&fake;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle subscriber)
{
    (void)subscriber;
    fake.subscriptions--;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle subscriber,
                                       CUpti_CallbackDomain domain, CUpti_CallbackId cbid)
{
    (void)subscriber;
    (void)cbid;
    fake.callbacks += enable && domain != CUPTI_CB_DOMAIN_RESOURCE;
    return fake.enables_callback;
}

EXPORT CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc funcBufferRequested,
                                                  CUpti_BuffersCallbackCompleteFunc funcBufferCompleted)
{
    request = funcBufferRequested;
    complete = funcBufferCompleted;
    return fake.registers;
}

EXPORT CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind)
{
    (void)kind;
    fake.enabled += fake.enables == CUPTI_SUCCESS;
    return fake.enables;
}

EXPORT CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind)
{
    (void)kind;
    fake.enabled--;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId cbid, uint8_t enable)
{
    (void)cbid;
    fake.enabled += enable ? 1 : -1;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId cbid, uint8_t enable)
{
    (void)cbid;
    fake.enabled += enable ? 1 : -1;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute attribute, size_t *size, void *value)
{
    fake.zeroed |=
        attribute == CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER && *size == 1 && *(uint8_t *)value == 1;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiSetThreadIdType(CUpti_ActivityThreadIdType type)
{
    fake.system_threads = type == CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityFlushAll(uint32_t flag)
{
    (void)flag;
    give_back();
    return fake.flushes;
}

static size_t size_of(CUpti_ActivityKind kind)
{
    switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        return sizeof(CUpti_ActivityKernel10);
    case CUPTI_ACTIVITY_KIND_MEMCPY:
        return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMCPY2:
        return sizeof(CUpti_ActivityMemcpyPtoP4);
    case CUPTI_ACTIVITY_KIND_MEMSET:
        return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION:
        return sizeof(CUpti_ActivitySynchronization2);
    default:
        return sizeof(CUpti_ActivityAPI);
    }
}

EXPORT CUptiResult cuptiActivityGetNextRecord(uint8_t *from, size_t valid, CUpti_Activity **record)
{
    uint8_t *next = *record ? (uint8_t *)*record + size_of((*record)->kind) : from;

    if (next >= from + valid)
        return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = (CUpti_Activity *)(void *)next;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t streamId, size_t *dropped)
{
    (void)context;
    (void)streamId;
    *dropped = fake.dropped;
    return CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetGraphNodeId(CUgraphNode of, uint64_t *id)
{
    *id = (uintptr_t)of;
    return *id == UINT64_MAX ? CUPTI_ERROR_INVALID_PARAMETER : CUPTI_SUCCESS;
}

EXPORT CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t cbid, const char **name)
{
    if (fake.no_names)
        return CUPTI_ERROR_INVALID_PARAMETER;
    if (domain == CUPTI_CB_DOMAIN_DRIVER_API)
        *name =
            cbid == CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz ? "cuLaunchKernel_ptsz" : "cuLaunchKernel";
    else
        *name = cbid == CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000 ? "cudaGraphLaunch_v10000"
                                                                        : "__cudaLaunchKernel_v13000";
    return CUPTI_SUCCESS;
}
