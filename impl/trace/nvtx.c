/* NVTX consists of headers only; without a profiler a range costs about a nanosecond. Names are registered,
 * so that a profiler can select ranges by name (nsys profile --capture-range=nvtx). */
#include "trace/nvtx.h"

#include "base/check.h"
#include "base/grow.h"
#include "trace/names.h"

#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>

struct td_nvtx {
    td_listener listener;
    td_device *dev;
    nvtxDomainHandle_t domain;
    td_names names;

    /* NVTX handles by the address of the stored name. */
    struct registered {
        const char *name;
        nvtxStringHandle_t handle;
    } * registered;
    int64_t count, capacity;
};

/** The NVTX handle of a label; NULL: no memory. */
static nvtxStringHandle_t handle_of(td_nvtx *nvtx, const char *label)
{
    const char *name = td_names_keep(&nvtx->names, label);

    if (!name)
        return NULL;
    for (int64_t i = 0; i < nvtx->count; i++)
        if (nvtx->registered[i].name == name)
            return nvtx->registered[i].handle;
    if (!td_grow(&nvtx->registered, nvtx->count, &nvtx->capacity, 64, sizeof *nvtx->registered))
        return NULL;
    nvtx->registered[nvtx->count] = (struct registered){name, nvtxDomainRegisterStringA(nvtx->domain, name)};
    return nvtx->registered[nvtx->count++].handle;
}

static void begin(td_listener *listener, const char *label, const td_operation *operation)
{
    td_nvtx *nvtx = (td_nvtx *)listener;
    const nvtxStringHandle_t handle = handle_of(nvtx, label);
    nvtxEventAttributes_t attributes = {.version = NVTX_VERSION, .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE};

    (void)operation;
    attributes.messageType = handle ? NVTX_MESSAGE_TYPE_REGISTERED : NVTX_MESSAGE_TYPE_ASCII;
    if (handle)
        attributes.message.registered = handle;
    else
        attributes.message.ascii = label;
    (void)nvtxDomainRangePushEx(nvtx->domain, &attributes);
}

static void end(td_listener *listener)
{
    (void)nvtxDomainRangePop(((td_nvtx *)listener)->domain);
}

td_status td_nvtx_open(td_device *dev, td_nvtx **out, const char **why)
{
    td_nvtx *nvtx = calloc(1, sizeof *nvtx);

    *out = nvtx;
    *why = "";
    if (!nvtx)
        return td_fail(TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *nvtx);
    nvtx->listener = (td_listener){.begin = begin, .end = end};
    nvtx->dev = dev;
    nvtx->domain = nvtxDomainCreateA("tandem");
    td_device_listen(dev, &nvtx->listener);
    return TD_OK;
}

void td_nvtx_close(td_nvtx *nvtx)
{
    if (!nvtx)
        return;
    td_device_unlisten(nvtx->dev, &nvtx->listener);
    nvtxDomainDestroy(nvtx->domain);
    td_names_deinit(&nvtx->names);
    free(nvtx->registered);
    free(nvtx);
}
